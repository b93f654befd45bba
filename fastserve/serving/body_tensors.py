"""Tensors that lie behind one another in a body, taken in order, with the words of Triton's APIs for what is
missing and for what is left over."""

from __future__ import annotations

from fastserve.errors import invalid

Memory = bytes | bytearray | memoryview


class BodyTensors:
    """What is left of a body. `more` is what a dialect calls the bytes that are missing."""

    def __init__(self, body: Memory, model: str, more: str = "bytes") -> None:
        self._body, self._model, self._more = memoryview(body), model, more
        self._at = 0

    def take(self, name: str, nbytes: int) -> memoryview:
        """The bytes of the next tensor. Raises ServeError."""
        start, self._at = self._at, self._at + nbytes
        missing = self._at - len(self._body)
        if missing > 0:
            raise invalid(
                f"unexpected size for input '{name}', expecting {missing} {self._more} "
                f"for model '{self._model}'"
            )
        return self._body[start : self._at]

    def finish(self) -> None:
        """Raises ServeError when bytes are left over."""
        if self._at != len(self._body):
            raise invalid(f"unexpected additional input data for model '{self._model}'")
