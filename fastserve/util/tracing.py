"""Following one request: its id and its trace context.

No OpenTelemetry here, only what W3C Trace Context needs on the way in and out. Log lines that carry
the id are made in `logs`.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass

REQUEST_ID_MAX = 128  # characters

_SANE_ID = re.compile(rb"[A-Za-z0-9_.:/+=@-]{1,%d}" % REQUEST_ID_MAX)

# https://www.w3.org/TR/trace-context/#traceparent-header: later versions may append fields
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Trace:
    """Position of a request in a distributed trace: hexadecimal ids as in W3C Trace Context."""

    trace_id: str
    span_id: str  # the caller's span
    flags: int = 0

    @property
    def sampled(self) -> bool:
        return bool(self.flags & 1)

    def next_hop(self) -> bytes:
        """Return the traceparent to send on: same trace, a new span id."""
        return b"00-%b-%b-%02x" % (self.trace_id.encode(), os.urandom(8).hex().encode(), self.flags & 1)


def parse_traceparent(header: bytes) -> Trace | None:
    """Return the trace of a traceparent header; None when it is absent or malformed."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or len(header) > 512:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return Trace(trace_id.decode(), span_id.decode(), int(flags, 16))


def choose_request_id(given: bytes = b"", traceparent: bytes = b"") -> str:
    """Return the client's X-Request-Id if it is short and plain, else its trace id, else a new id."""
    if given and _SANE_ID.fullmatch(given):
        return given.decode()
    trace = parse_traceparent(traceparent) if traceparent else None
    return trace.trace_id if trace else make_request_id()


_prefix = os.urandom(6).hex()

_numbers = itertools.count(1)


def make_request_id() -> str:
    """Return an id unique across processes and restarts: a random prefix and a count. About 150 ns."""
    return f"{_prefix}-{next(_numbers):x}"


def _renew_prefix() -> None:
    global _prefix
    _prefix = os.urandom(6).hex()


os.register_at_fork(after_in_child=_renew_prefix)
