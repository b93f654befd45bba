"""The guard of connections' callbacks, so that no exception reaches the event loop, and the identity of the
client.

    class Connection:                                         def data_received(self, data):
        @guarded                                                  try: ...
        def eof_received(self): ...                               except Exception as error:
                                                                      self.callback_failed(error)

An unforeseen exception is counted under `internal_error`, is one line of the log, with a traceback the first
time, and ends its connection: over HTTP/2 with GOAWAY INTERNAL_ERROR. Callbacks of every read have the `try`
in themselves, where it costs nothing; `guarded` is for the others.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from fastserve.util.rate_limited_log import RateLimitedLog

if TYPE_CHECKING:
    from collections import Counter


INTERNAL_ERROR = "internal_error"  # the cause under which they are counted
P = ParamSpec("P")
R = TypeVar("R")


class Guarded(Protocol):
    """A connection, or its handshake."""

    def callback_failed(self, error: Exception) -> None:
        """Count and log the exception of a callback, and end the connection."""


C = TypeVar("C", bound=Guarded)


def guarded(callback: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R | None]:
    """Wrap a callback so that it never raises. It adds a Python call, so callbacks of every read do
    without."""

    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return callback(self, *args, **kwargs)
        except Exception as error:
            self.callback_failed(error)
            return None

    functools.update_wrapper(run, callback)
    return run


def report(connection: Guarded, error: Exception) -> None:
    """Call `callback_failed` of a connection; for `run_all` over many connections."""
    connection.callback_failed(error)


class Guard:
    """Count and log the unforeseen exceptions of a listener's connections."""

    __slots__ = ("_limited_log", "_refusals")

    def __init__(self, refusals: Counter[str], limited_log: RateLimitedLog) -> None:
        self._refusals = refusals
        self._limited_log = limited_log

    def note(self, error: Exception) -> None:
        """Count and log an unforeseen exception."""
        self._refusals[INTERNAL_ERROR] += 1
        self._limited_log.error("a connection ended by an error of the server's own", error)

    def end(self, error: Exception, end: Callable[[], object], abort: Callable[[], object]) -> None:
        """Note the exception and `end` the connection, or `abort` it where that fails too."""
        self.note(error)
        try:
            end()
        except Exception as second:
            self.note(second)
            abort()


SUBJECT = "client_subject"  # what transports that encrypt are asked for by get_extra_info


class Peered:
    """A protocol that knows its transport."""

    __slots__ = ()  # those of a protocol have "_address"

    _address: str
    _transport: asyncio.Transport

    @property
    def client(self) -> str:
        """Return the subject of the client's certificate, "" without one."""
        return str(self._transport.get_extra_info(SUBJECT, ""))

    @property
    def address(self) -> str:
        """Return the client's address: HOST:PORT, "unix" of a socket file."""
        try:
            return self._address
        except AttributeError:
            found = address_of(self._transport.get_extra_info("peername"))
            self._address = found  # type: ignore[misc]
            return found


def address_of(peername: object) -> str:
    """Return a transport's peername as text."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        host, port = str(peername[0]), peername[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "unix"
