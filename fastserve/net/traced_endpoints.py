"""Endpoints some of whose calls are traced: in front of every route that infers, where tracing is on.

A call that is not traced goes on at once: compiled code subtracts one, and its head was looked at before. A
traced one takes the same way: on the general path the stages find its span as that of their task, on the fast
path by its exchange (`FAST`). Spans begin behind the checks of scopes and API keys: what these refuse has
none. RPCs have net/grpc/traced_methods.py.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from typing import Any

from fastserve._ext.fast_path import FastSpan, SampleCountdown, sample_endpoint
from fastserve.errors import ServeError
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.request import GONE, Call, Endpoint
from fastserve.util.spans import FAST, HttpFacts, RequestSpan, enter_span, leave_span
from fastserve.util.tracing import TraceContext, draw_gap, make_span_id, make_trace_id

ALWAYS = 1.0
MOST_LEFT = (1 << 62) - 1


class TraceSampler(SampleCountdown):
    """Decide which requests are traced: by their parent where they have one and `parent_based` is set, else a
    share `ratio` of them, at random.

    The caller counts `left` down for each request without a parent and calls `take` at zero: a request that
    is not traced costs one subtraction, in compiled code on the fast paths."""

    __slots__ = ("_bound", "_parent_based", "_ratio")

    def __init__(self, ratio: float, *, parent_based: bool = True) -> None:
        self._ratio, self._parent_based, self._bound = ratio, parent_based, int(ratio * (1 << 64))
        self._draw()

    def take(self) -> TraceContext | None:
        """Return the context of the span of the request whose turn has come, and draw the next one; None
        where none is ever traced."""
        self._draw()
        return TraceContext(make_trace_id(self._bound), make_span_id()) if self._ratio > 0 else None

    def follow(self, parent: TraceContext) -> TraceContext | None:
        """Return the context of a request's span below `parent`, None where it is not sampled."""
        sampled = parent.sampled if self._parent_based else self._covers(parent.trace_id)
        return TraceContext(parent.trace_id, make_span_id(), True, parent.state) if sampled else None

    def _draw(self) -> None:
        """Draw how many requests come up to the next one that is traced, itself included."""
        if self._ratio >= ALWAYS:
            self.left = 1
        elif self._ratio <= 0:
            self.left = MOST_LEFT
        else:
            self.left = min(draw_gap(self._ratio), MOST_LEFT)

    def _covers(self, trace_id: str) -> bool:
        """Whether OpenTelemetry's TraceIdRatioBased samples a trace: by the last 64 bits of its id."""
        return int(trace_id[16:], 16) < self._bound


SendSpan = Callable[[RequestSpan], None]


class Tracer:
    """The spans of one front process's requests: begun here, and given to `send` once they have ended."""

    def __init__(self, sampler: TraceSampler, send: SendSpan) -> None:
        self.sampler, self.send = sampler, send

    def trace_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Return an HTTP endpoint some of whose calls are traced."""
        made = TakingTracedEndpoint if hasattr(endpoint, "take") else TracedEndpoint
        return made(self, endpoint)


class TracedEndpoint:
    """An HTTP endpoint some of whose calls are traced. A head without a parent is looked at once: its calls
    are only counted then."""

    __slots__ = ("_counted", "_endpoint", "_tracer")

    def __init__(self, tracer: Tracer, endpoint: Endpoint) -> None:
        self._tracer, self._endpoint = tracer, endpoint
        self._counted: Endpoint = sample_endpoint(tracer.sampler, endpoint, self._take_turn)

    def _take_turn(self, call: Call) -> Coroutine[Any, Any, None] | None:
        context = self._tracer.sampler.take()
        return self._endpoint(call) if context is None else self._trace(call, context, None)

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        head = call.head
        parent = head.read_parent()
        if parent is None:
            if head.endpoint is self:
                head.endpoint = self._counted
            return self._counted(call)
        context = self._tracer.sampler.follow(parent)
        return self._endpoint(call) if context is None else self._trace(call, context, parent)

    def _trace(
        self, call: Call, context: TraceContext, parent: TraceContext | None
    ) -> Coroutine[Any, Any, None] | None:
        call.follow_trace(context.trace_id)
        head = call.head
        agent = head.find(b"user-agent") or b""
        facts = HttpFacts(head.method, head.target, call.address, agent, call.request_id)
        parent_id = "" if parent is None else parent.span_id
        span = RequestSpan(context, parent_id, facts, call.received_ns)
        fast = FastSpan(span, call, self._end, FAST)
        token = enter_span(span)
        try:
            work = self._endpoint(call)
        except BaseException:
            del FAST[call]
            raise
        finally:
            leave_span(token)
        if fast.under_way:
            return None
        FAST.pop(call, None)
        if work is None:
            if not span.ended_ns:
                self._end(call, span, None)
            return None
        return self._follow(call, span, work)

    async def _follow(self, call: Call, span: RequestSpan, work: Coroutine[Any, Any, None]) -> None:
        enter_span(span)  # this task is the call's own
        ended: BaseException | None = None
        try:
            await work
        except BaseException as error:  # the caller logs it, and answers 500
            ended = error
            raise
        finally:
            self._end(call, span, ended)
            del ended  # its traceback holds this frame

    def _end(self, call: Call, span: RequestSpan, error: BaseException | None) -> None:
        status = call.status
        if call.gone:
            status = GONE
        elif error is not None:
            if isinstance(error, ServeError):
                span.fail(error.message)
            elif not isinstance(error, CancelledError):
                status = 500
        span.end(status)
        self._tracer.send(span)


class TakingTracedEndpoint(TracedEndpoint):
    """A TracedEndpoint of an endpoint that reads large bodies out of the socket itself."""

    __slots__ = ()

    def __init__(self, tracer: Tracer, endpoint: Endpoint) -> None:
        super().__init__(tracer, endpoint)
        self._counted.take = self.take  # type: ignore[attr-defined]

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Offer the body to the endpoint; False for a call that may be traced, which gets its whole body."""
        sampler = self._tracer.sampler
        if sampler.left <= 1 or call.head.read_parent() is not None:
            return False
        taken: bool = self._endpoint.take(call, body)  # type: ignore[attr-defined]
        sampler.left -= taken
        return taken
