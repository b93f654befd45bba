"""One request as any transport brings it, with the one answer it gets.

    exchange.on_gone = cancel        called once when the client leaves before the answer was handed over
    exchange.reply(...)              a transport's own: an HTTP reply has a head, an RPC's is a message
    exchange.fail(error)             what nobody foresaw: it is logged, and the client learns only that

HTTP calls (`wire.call.Call`) are exchanges. An RPC whose method is a coroutine waits for an `Awaited`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from fastserve.errors import Kind, ServeError

log = logging.getLogger(__name__)

INTERNAL_ERROR = "Internal error"


class Exchange(Protocol):
    """What the paths need of a request besides its body: no task, no future."""

    received_ns: int
    """When it came, as time.monotonic_ns counts."""
    on_gone: Callable[[], object] | None

    def fail(self, error: BaseException) -> None:
        """End it with an internal error."""


class RpcExchange(Exchange, Protocol):
    """That of an RPC, whose answer is one message."""

    def reply(self, message: bytes) -> None:
        """Answer with a message."""

    def refuse(self, fault: ServeError) -> None:
        """Answer with an error the client may read."""


class Timed(Protocol):
    """An RPC whose client may have said how long it waits."""

    def seconds_left(self) -> float | None: ...


def deadline_of(rpc: Timed) -> int:
    """When the client's time is up, as time.monotonic_ns counts; 0 for never."""
    left_s = rpc.seconds_left()
    return 0 if left_s is None else monotonic_ns() + int(left_s * 1e9)


def unforeseen(exchange: object, error: Exception) -> ServeError:
    """What a client is told of an error that is nobody's business; it is logged."""
    more = {"request_id": getattr(exchange, "request_id", "")}
    log.error("a request failed", exc_info=error, extra=more)
    return ServeError(Kind.INTERNAL, INTERNAL_ERROR)


class Awaited:
    """The exchange of an RPC that a coroutine answers: `await exchange.answer()`, once."""

    __slots__ = ("_answer", "on_gone", "received_ns")

    def __init__(self, received_ns: int = 0) -> None:
        self.received_ns = received_ns or monotonic_ns()
        self.on_gone: Callable[[], object] | None = None
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def reply(self, message: bytes) -> None:
        """Answer with a message."""
        if not self._answer.done():  # it is when the call was cancelled in the turn its answer came
            self._answer.set_result(message)

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
        except asyncio.CancelledError:
            gone, self.on_gone = self.on_gone, None
            if gone is not None:
                gone()
            raise
        finally:
            del self._answer  # with it the circle of an error, the frames in its traceback and the future
