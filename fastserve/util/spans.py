"""The span of one traced request, as its front process fills it and sends it to the exporter's process.

    span = RequestSpan(context, parent_id, facts, received_ns)
    with in_span(span): ...                       code below finds it with `current_span()`
    run = span.begin_run(model, version)          the engine runs the request: `run.batches` is filled
    span.end(status)

Only what is known there is noted, in the form that costs least: server/span_records.py makes spans, names and
attributes of it, in the exporter. Times are nanoseconds of time.monotonic_ns(). A request that is not traced
has no span, and nothing here is called for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import msgspec

from fastserve.util.tracing import TraceContext, make_span_id

AttributeValue = str | int | float | bool | list[str]
Attributes = dict[str, AttributeValue]
MOST_RUNS = 256  # of one request, such as the messages of a stream; later ones have no spans
TEXT_MAX = 512  # characters of an attribute that a client or a model wrote
Moment = tuple[str, int]
"""An event and its time."""
Child = tuple[str, int, int, Attributes, Sequence[Moment]]
"""Name, start, end, attributes, and what happened meanwhile."""


class BatchTimes(NamedTuple):
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

    def end(self, error: str | None = None) -> None:
        """The run has ended; `error` is what it ended with."""
        self.ended_ns, self.error = time.monotonic_ns(), error


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


class RequestSpan(msgspec.Struct, array_like=True):
    """The server's span of one request, and what is below it. `status` is HTTP's or gRPC's."""

    context: TraceContext
    parent_id: str
    facts: HttpFacts | RpcFacts | None
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

    def begin_run(self, model: str, version: int) -> RunTrace | None:
        """The request is about to run on a model; None where it has had too many runs."""
        if len(self.runs) >= MOST_RUNS:
            return None
        trace_id, _, sampled, state = self.context
        context = TraceContext(trace_id, make_span_id(), sampled, state)
        run = RunTrace(context, model, version, time.monotonic_ns())
        self.runs.append(run)
        return run

    def replace_run(self, run: RunTrace, runs: Sequence[RunTrace]) -> None:
        """Put the runs that another process has made of one in its place."""
        if run in self.runs and runs:
            at = self.runs.index(run)
            self.runs[at : at + 1] = runs

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


class TracedPath(Protocol):
    """The fast path that a traced request has taken."""

    @property
    def version(self) -> Any: ...

    @property
    def queue(self) -> Any: ...


class FastSpan:
    """The span of a request while the compiled fast path has it (ext/fast_path.pyx): it is in FAST until
    then, and `end(exchange, span, error)` is called once."""

    __slots__ = ("_answered_ns", "_batch_ended", "_end", "_exchange", "_leave", "_run", "span")

    def __init__(
        self, span: RequestSpan, exchange: Any, end: Callable[[Any, RequestSpan, BaseException | None], None]
    ) -> None:
        self.span, self._exchange, self._end = span, exchange, end
        self._answered_ns = 0
        self._leave: Callable[[], object] | None = None
        self._batch_ended: Callable[[], None] | None = None
        self._run: RunTrace | None = None

    @property
    def under_way(self) -> bool:
        """Whether the fast path has taken the request."""
        return self._leave is not None

    def submitted(self, path: TracedPath, lease: int, rows: int) -> None:
        """The rows are in a batch, which no worker sees yet."""
        version = path.version
        run = self._run = self.span.begin_run(version.model, version.number)
        if run is not None:
            self._batch_ended = path.queue.trace_lease(run, lease, rows)

    def leaving(self, on_gone: Callable[[], object]) -> Callable[[], object]:
        """Return what is called instead of `on_gone` when the client leaves."""
        self._leave = on_gone
        return self._gone

    def answered(self) -> None:
        """The batch has ended, and its slot is still held."""
        self._answered_ns = time.monotonic_ns()
        if self._batch_ended is not None:
            self._batch_ended()

    def ended(self, exchange: Any, error: BaseException | None) -> None:
        """The request was answered."""
        if FAST.pop(exchange, None) is None:
            return
        span, run = self.span, self._run
        if run is not None:
            run.ended_ns = self._answered_ns
            span.children.append(("decode", span.started_ns, run.begun_ns, {}, ()))
            if error is not None:
                run.error = str(error)[:TEXT_MAX]
        if error is None:
            span.children.append(("encode", self._answered_ns, time.monotonic_ns(), {}, ()))
        self._end(exchange, span, error)

    def _gone(self) -> None:
        leave, exchange = self._leave, self._exchange
        if leave is not None:
            leave()
        from asyncio import CancelledError  # workers import this file, and no asyncio with it

        self.ended(exchange, CancelledError())


FAST: dict[Any, FastSpan] = {}
"""Spans of exchanges that the fast path may take or has taken; empty most of the time."""

_current: ContextVar[RequestSpan | None] = ContextVar("span of the request", default=None)

current_span: Callable[[], RequestSpan | None] = _current.get
"""Return the span of the request that this task answers; None for one that is not traced."""


def enter_span(span: RequestSpan) -> None:
    """Have `current_span` return this span from now on in this task, which answers no other request."""
    _current.set(span)


@contextmanager
def in_span(span: RequestSpan) -> Iterator[None]:
    """Have `current_span` return this span within the block, and in tasks that are begun there."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)
