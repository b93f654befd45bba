"""One request as any transport brings it, with the one answer it gets.

    exchange.on_gone = cancel        called once when the client leaves before the answer was handed over
    exchange.reply(...)              a transport's own: an HTTP reply has a head, an RPC's is a message
    exchange.fail(error)             what nobody foresaw: it is logged, and the client learns only that

HTTP calls (`wire.call.Call`) are exchanges; RPCs whose method is a coroutine wait for a `wire.grpc.Awaited`.
"""

from __future__ import annotations

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
