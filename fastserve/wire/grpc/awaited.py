"""An exchange that a coroutine waits for: `await exchange.answer()`, once."""

from __future__ import annotations

from asyncio import CancelledError, Future, get_running_loop
from collections.abc import Callable, Sequence
from time import monotonic_ns

from fastserve.errors import ServeError


class Awaiting:
    """What is common to those: a subclass has the fields."""

    __slots__ = ()

    on_gone: Callable[[], object] | None
    _answer: Future[bytes]

    def reply(self, message: bytes | Sequence[bytes]) -> None:
        """Answer with a message, in one part or several."""
        if not self._answer.done():  # it is when the call was cancelled in the turn its answer came
            self._answer.set_result(message if isinstance(message, bytes) else b"".join(message))

    def fail(self, error: BaseException) -> None:
        """Answer with an error; the RPC's transport says what a client is told of it."""
        if not self._answer.done():
            self._answer.set_exception(error)

    def refuse(self, fault: ServeError) -> None:
        """Answer with an error the client may read."""
        self.fail(fault)

    async def answer(self) -> bytes:
        """The message. Raises what the exchange failed with; who is cancelled leaves."""
        try:
            return await self._answer
        except CancelledError:
            gone, self.on_gone = self.on_gone, None  # type: ignore[misc]  # a slot of the subclass
            if gone is not None:
                gone()
            raise
        finally:
            del self._answer  # with it the circle of an error, the frames in its traceback and the future


class Awaited(Awaiting):
    """That of an RPC whose method is a coroutine."""

    __slots__ = ("_answer", "on_gone", "received_ns")

    def __init__(self, received_ns: int = 0) -> None:
        self.received_ns = received_ns or monotonic_ns()
        self.on_gone: Callable[[], object] | None = None
        self._answer: Future[bytes] = get_running_loop().create_future()
