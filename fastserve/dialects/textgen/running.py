"""Requests under way: how many, and by the ids of their clients, so that these can stop them (spec 2.5)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fastserve.errors import Kind, ServeError
from fastserve.serving.text import TextStream


@dataclass(slots=True, eq=False)
class Held:
    """One request. `stopped`: its client wants what there is, and no more."""

    stream: TextStream
    stopped: bool = False


class Running:
    """Those of one front process."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, model: str, request_id: str, stream: TextStream) -> Iterator[Held]:
        """It is under way; "" is no id. Raises ServeError for an id that is in use."""
        if request_id in self._held:
            raise ServeError(Kind.ALREADY_EXISTS, "Duplicate request id")
        held = Held(stream)
        self._counts[model] += 1
        if request_id:
            self._held[request_id] = held
        try:
            yield held
        finally:
            self._held.pop(request_id, None)
            self._counts[model] -= 1
            if not self._counts[model]:
                del self._counts[model]

    def count(self, model: str) -> int:
        """Requests of a model."""
        return self._counts[model]

    def stop(self, request_id: str) -> bool:
        """End a request with what it has; False when there is none of that id."""
        held = self._held.get(request_id)
        if held is None:
            return False
        held.stopped = True
        held.stream.cancel()
        return True
