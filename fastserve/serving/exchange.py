"""One request as any transport brings it, with the one answer it gets.

    exchange.on_gone = cancel        called once when the client leaves before the answer was handed over
    exchange.reply(...)              a transport's own: an HTTP reply has a head, an RPC's is a message
    exchange.fail(error)             an unexpected error: it is logged, the client gets a generic message

HTTP calls (`net.Call`) are exchanges; RPCs whose method is a coroutine use `net.grpc.AwaitedExchange`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from fastserve.errors import ServeError, internal
from fastserve.net.deadlines import GRACE_NS
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
_limited_log = RateLimitedLog(log)

INTERNAL_ERROR = "Internal error"


class Exchange(Protocol):
    """One request besides its body, as the paths see it: no task, no future."""

    received_ns: int
    """When it came, as time.monotonic_ns counts."""
    on_gone: Callable[[], object] | None

    def fail(self, error: BaseException) -> None:
        """End it with an internal error."""


class RpcExchange(Exchange, Protocol):
    """Exchange of an RPC, whose answer is one message."""

    def reply(self, message: bytes) -> None:
        """Answer with a message."""

    def refuse(self, fault: ServeError) -> None:
        """Answer with an error the client may read."""


class Timed(Protocol):
    """An RPC whose client may have said how long it waits."""

    def seconds_left(self) -> float | None: ...


def deadline_of(rpc: Timed) -> int:
    """Until when the engine may work for a client, as time.monotonic_ns counts; 0 for ever."""
    left_s = rpc.seconds_left()
    return 0 if left_s is None else monotonic_ns() + int(left_s * 1e9) + GRACE_NS


def internal_error(exchange: object, error: Exception) -> ServeError:
    """Log an unexpected exception and return the generic internal error for the client."""
    more = {"request_id": getattr(exchange, "request_id", "")}
    held = _limited_log.few(type(error).__name__)
    if held is not None:
        log.error("a request failed%s", held, exc_info=error, extra=more)
    return internal(INTERNAL_ERROR)
