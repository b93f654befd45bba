"""The span of one traced request, as its front process fills it and sends it to the exporter's process.

    span = RequestSpan(context, parent_id, facts, received_ns)
    enter_span(span)                              code below finds it with `current_span()`
    run = span.begin_run(model, version)          the engine runs the request: `run.batches` is filled
    span.end(status)

Only what is known there is noted, in the form that costs least: server/span_records.py makes spans, names and
attributes of it, in the exporter. Times are nanoseconds of time.monotonic_ns(). A request that is not traced
has no span, and nothing here is called for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.util.tracing import TraceContext, make_span_id

if TYPE_CHECKING:
    from fastserve._ext.fast_path import FastSpan

AttributeValue = str | int | float | bool | list[str]
Attributes = dict[str, AttributeValue]
MOST_RUNS = 256  # of one request, such as the messages of a stream; later ones have no spans
TEXT_MAX = 512  # characters of an attribute that a client or a model wrote
Moment = tuple[str, int]
"""An event and its time."""
Child = tuple[str, int, int, Attributes, Sequence[Moment]]
"""Name, start, end, attributes, and what happened meanwhile."""


class BatchTimes(msgspec.Struct, array_like=True, gc=False):
    """A batch that rows of a request were in: `arena`, `slot` and `seq` name it, in every process alike."""

    arena: str
    slot: int
    seq: int
    written_ns: int
    """When the request's rows were in the batch."""
    rows: int
    """Of the request."""
    times_ns: tuple[int, ...]
    """First row, taken, run started, run ended, done. 0: not reached."""


class RunTrace(msgspec.Struct, array_like=True, gc=False):
    """One run of a traced request on a model, as the engine fills it in. `context` is what the model's own
    spans are to have as their parent."""

    context: TraceContext
    model: str
    version: int
    begun_ns: int
    ended_ns: int = 0
    batches: list[BatchTimes] = []
    error: str | None = None
    above_id: str = ""
    """Of the run that this one is a step of; "" for none."""

    def end(self, error: str | None = None) -> None:
        """The run has ended; `error` is what it ended with."""
        self.ended_ns, self.error = time.monotonic_ns(), error

    def fail(self, error: BaseException) -> None:
        """Note what the run ended with."""
        self.error = str(error)[:TEXT_MAX]


class HttpFacts(msgspec.Struct, array_like=True, gc=False, tag="http"):
    """The facts of a call over HTTP."""

    method: str
    target: str
    address: str
    agent: bytes
    request_id: str


class RpcFacts(msgspec.Struct, array_like=True, gc=False, tag="grpc"):
    """The facts of a call over gRPC."""

    path: str
    address: str
    request_id: str


class CallFacts(msgspec.Struct, array_like=True, gc=False, tag="model"):
    """The facts of a model's call to another one."""

    model: str
    request_id: str


class RequestSpan(msgspec.Struct, array_like=True):
    """The server's span of one request, and what is below it. `status` is HTTP's, else gRPC's. Without
    `facts` it is what the owner has run of another front's request, below that one's run: no span itself."""

    context: TraceContext
    parent_id: str
    facts: HttpFacts | RpcFacts | CallFacts | None
    started_ns: int
    status: int = 0
    ended_ns: int = 0
    shift_ns: int = 0
    """From its times to Unix nanoseconds."""
    runs: list[RunTrace] = []
    children: list[Child] = []
    attributes: Attributes = {}
    error: str = ""
    """The text of the error that it was answered with."""

    def add(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        moments: Sequence[Moment] = (),
    ) -> None:
        """Add a child that has ended, with what happened meanwhile. One too many is left out."""
        if len(self.children) < MOST_RUNS:
            self.children.append((name, start_ns, end_ns, attributes or {}, moments))

    def begin_run(self, model: str, version: int, above: RunTrace | None = None) -> RunTrace | None:
        """The request is about to run on a model, as a step of `above`; None where it has had too many
        runs."""
        if len(self.runs) >= MOST_RUNS:
            return None
        own = self.context
        context = TraceContext(own.trace_id, make_span_id(), own.sampled, own.state)
        run = RunTrace(context, model, version, time.monotonic_ns())
        if above is not None:
            run.above_id = above.context.span_id
        self.runs.append(run)
        return run

    def fail(self, error: str) -> None:
        """Note the error of the request; the first one stays."""
        self.error = self.error or error[:TEXT_MAX]

    def end(self, status: int) -> None:
        """The request was answered, or its client is gone."""
        self.status, self.ended_ns = status, time.monotonic_ns()
        self.shift_ns = time.time_ns() - self.ended_ns


def count_spans(span: RequestSpan) -> int:
    """Return how many spans of the request the exporter makes, without those of its batches."""
    return 1 + len(span.children) + sum(1 + 2 * len(run.batches) for run in span.runs)


FAST: dict[Any, FastSpan] = {}
"""Spans of exchanges that the fast path may take or has taken; empty most of the time."""

_current: ContextVar[RequestSpan | None] = ContextVar("span of the request", default=None)

current_span: Callable[[], RequestSpan | None] = _current.get
"""Return the span of the request that this task answers; None for one that is not traced."""


enter_span = _current.set
"""Have `current_span` return this span from now on in this task; returns what `leave_span` takes."""

leave_span = _current.reset
"""Have `current_span` return what it did before: for who enters a span in a task that goes on without it."""
