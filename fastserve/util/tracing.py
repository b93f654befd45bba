"""Following one request: its id and its trace context.

No OpenTelemetry here, only what W3C Trace Context needs on the way in. Log lines that carry
the id are made in `logs`.
"""

from __future__ import annotations

import itertools
import os
import re

REQUEST_ID_MAX = 128  # characters

_SANE_ID = re.compile(rb"[A-Za-z0-9_.:/+=@-]{1,%d}" % REQUEST_ID_MAX)

# https://www.w3.org/TR/trace-context/#traceparent-header: later versions may append fields
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


def read_trace_id(header: bytes) -> str:
    """Return the trace id of a traceparent header; "" when it is absent or malformed."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or len(header) > 512:
        return ""
    version, trace_id, span_id, _, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return ""
    return str(trace_id.decode())


def choose_request_id(given: bytes = b"", traceparent: bytes = b"") -> str:
    """Return the client's X-Request-Id if it is short and plain, else its trace id, else a new id."""
    if given and _SANE_ID.fullmatch(given):
        return given.decode()
    return (read_trace_id(traceparent) if traceparent else "") or make_request_id()


_prefix = os.urandom(6).hex()

_numbers = itertools.count(1)


def make_request_id() -> str:
    """Return an id unique across processes and restarts: a random prefix and a count. About 150 ns."""
    return f"{_prefix}-{next(_numbers):x}"


def _renew_prefix() -> None:
    global _prefix
    _prefix = os.urandom(6).hex()


os.register_at_fork(after_in_child=_renew_prefix)
