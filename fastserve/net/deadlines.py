"""The time that a request may take: what its client says, what the server's limits add, and who is late.

    X-Request-Timeout: 2.5                     seconds; also 2.5s and 800ms
    x-envoy-expected-rq-timeout-ms: 800        what Envoy tells the server behind it
    grpc-timeout: 800m                         gRPC's own (grpc.metadata)

They are read once for each head. Of several the shortest counts, also of several headers of one name. A call
whose time is up is answered here, whatever its endpoint does. The endpoint sees a client that has left.
The engine has the same time, and drops what waits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from operator import methodcaller
from time import monotonic_ns
from typing import Protocol

from fastserve.errors import DeadlineError, Kind, Reason, ServeError
from fastserve.settings import Limits
from fastserve.util.rate_limited_log import run_all

TIMEOUT, ENVOY_TIMEOUT = b"x-request-timeout", b"x-envoy-expected-rq-timeout-ms"
SETTING, MOST_SETTING = "limits.request_timeout_s", "limits.most_request_timeout_s"
UNBOUNDED = -1
"""The time of a request that has all the time it takes."""
GRACE_NS = 100_000_000
"""The engine has this much more time than a call, so that it is the call that is answered, in the same words
wherever its request is, also by a loop that was late. Answers in parts that have begun have it too."""
NEVER_NS = 1 << 62  # 146 years; a clock's time and this fit into 64 bits

_NUMBER = re.compile(rb"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})[ \t]*(s|ms)?")
_WHOLE = re.compile(rb"[0-9]{1,12}")
_SHOWN_BYTES = 32


def read_timeout_headers(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the shortest time of a request's headers in nanoseconds, UNBOUNDED without one; names are in
    lower case. Raises ServeError INVALID_ARGUMENT."""
    shortest = UNBOUNDED
    for name, value in headers:
        if name == TIMEOUT:
            match = _NUMBER.fullmatch(value.strip(b" \t"))
            if match is None:
                raise _malformed("X-Request-Timeout", value, "seconds, such as 2.5, 2.5s or 800ms")
            found = int(float(match[1]) * (1e6 if match[2] == b"ms" else 1e9))
        elif name == ENVOY_TIMEOUT:
            if _WHOLE.fullmatch(value) is None:
                raise _malformed(ENVOY_TIMEOUT.decode(), value, "milliseconds, a whole number")
            found = int(value) * 1_000_000
        else:
            continue
        shortest = found if shortest < 0 else min(found, shortest)
    return shortest


def _malformed(name: str, value: bytes, allowed: str) -> ServeError:
    shown = value[:_SHOWN_BYTES].decode("latin-1")
    text = f"{name}: given {shown!r}, allowed: {allowed}"
    return ServeError(Kind.INVALID_ARGUMENT, text, reason=Reason.REQUEST_TIMEOUT)


def bound_timeout(asked_ns: int, limits: Limits) -> int:
    """Return the time of a request whose client asks for `asked_ns`, or UNBOUNDED, under the limits."""
    default_s, most_s = limits.request_timeout_s, limits.most_request_timeout_s
    if asked_ns < 0 and default_s:
        asked_ns = int(default_s * 1e9)
    if most_s:
        most_ns = int(most_s * 1e9)
        return most_ns if asked_ns < 0 else min(asked_ns, most_ns)
    return asked_ns


def time_is_up(timeout_ns: int) -> DeadlineError:
    """Return the error of a request that has taken its whole time."""
    return DeadlineError(
        f"the time of this request, {timeout_ns / 1e9:g} s, is up "
        f"(X-Request-Timeout, {SETTING}, {MOST_SETTING})",
        queued=False,
        reason=Reason.REQUEST_TIMEOUT,
    )


class TimedCall(Protocol):
    """A call with a deadline."""

    def expire(self) -> None:
        """End it: its time is up."""


SHORTEST_S = 0.001  # between two looks, however many deadlines there are


class CallDeadlines:
    """Expire the calls of a listener with one timer, set for the first deadline. A call that is answered
    in time costs an entry in a dict."""

    __slots__ = ("_calls", "_next_ns", "_timer")

    def __init__(self) -> None:
        self._calls: dict[TimedCall, int] = {}
        self._next_ns = NEVER_NS
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: TimedCall, at_ns: int) -> None:
        """Have a call expire then, as time.monotonic_ns counts."""
        self._calls[call] = at_ns
        if at_ns < self._next_ns:
            self._arm(at_ns)

    def remove(self, call: TimedCall) -> None:
        self._calls.pop(call, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next_ns = None, NEVER_NS

    def _arm(self, at_ns: int) -> None:
        self.close()
        self._next_ns = at_ns
        left_s = max(SHORTEST_S, (at_ns - monotonic_ns()) / 1e9)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def _look(self) -> None:
        self.close()
        now = monotonic_ns()
        late = [call for call, at_ns in self._calls.items() if at_ns <= now]
        for call in late:
            self.remove(call)
        if self._calls:
            self._arm(min(self._calls.values()))
        run_all(late, methodcaller("expire"))
