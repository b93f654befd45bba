"""Following one request: its id, and its trace context as W3C Trace Context has it.

No OpenTelemetry here: no part of a server but the exporter's process imports it. Log lines that carry the id
are made in `logs`.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from math import log1p

import msgspec

REQUEST_ID_MAX = 128  # characters
STATE_MAX = 512  # characters of a tracestate; a longer one is not passed on

_SANE_ID = re.compile(rb"[A-Za-z0-9_.:/+=@-]{1,%d}" % REQUEST_ID_MAX)

# https://www.w3.org/TR/trace-context/#traceparent-header: later versions may append fields
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_TRACESTATE = re.compile(rb"[\x20-\x7e]{1,%d}" % STATE_MAX)


class TraceContext(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One span as others name it: ids in lower-case hex, and the tracestate that came with the trace."""

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header that names this span as the parent of another."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def read_trace_context(traceparent: bytes, tracestate: bytes = b"") -> TraceContext | None:
    """Return the span that a client named as the parent of its request; None where the header is absent or
    malformed. A malformed or overlong tracestate is left out."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or len(traceparent) > 512:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    state = tracestate.decode() if _TRACESTATE.fullmatch(tracestate) else ""
    return TraceContext(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1), state)


def read_trace_id(header: bytes) -> str:
    """Return the trace id of a traceparent header; "" when it is absent or malformed."""
    found = read_trace_context(header)
    return "" if found is None else found.trace_id


_random = random.Random()
_draw_bits = _random.getrandbits


def make_span_id() -> str:
    """Return a new span id, which is not zero."""
    return (_draw_bits(64) or 1).to_bytes(8, "big").hex()


def make_trace_id(bound: int) -> str:
    """Return a new trace id, whose last 64 bits are below `bound`: other samplers of that share choose it
    too."""
    low = int(_random.random() * bound) or 1
    return (_draw_bits(64) << 64 | low).to_bytes(16, "big").hex()


def draw_gap(ratio: float) -> int:
    """Return how many requests come up to the next one that is chosen, itself included, where each is with
    this probability: of a geometric distribution."""
    return 1 + int(log1p(-_random.random()) / log1p(-ratio))


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
    _random.seed()


os.register_at_fork(after_in_child=_renew_prefix)
