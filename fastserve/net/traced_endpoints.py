"""Endpoints some of whose calls are traced: in front of every route that infers, where tracing is on.

A call that is not traced goes on at once: a subtraction, and a look at its head. A traced one takes the same
way: on the general path the stages find its span as that of their task, on the fast path by its exchange
(`FAST`). Spans begin behind the checks of scopes and API keys: what these refuse has none. RPCs have
net/grpc/traced_methods.py.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from typing import Any

from fastserve.errors import ServeError
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.request import GONE, Call, Endpoint
from fastserve.util.spans import FAST, FastSpan, HttpFacts, RequestSpan, enter_span, in_span
from fastserve.util.tracing import TraceContext, TraceSampler

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
        self._counted = self._count(endpoint)

    def _count(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint of calls without a parent. It runs for every request: a closure costs half of a
        method."""
        sampler, trace = self._tracer.sampler, self._trace

        def counted(call: Call) -> Coroutine[Any, Any, None] | None:
            sampler.left -= 1
            if sampler.left > 0:
                return endpoint(call)
            context = sampler.take()
            return endpoint(call) if context is None else trace(call, context, None)

        return counted

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
        facts = HttpFacts(call.method, call.target, call.address, call.header(b"user-agent"), call.request_id)
        parent_id = "" if parent is None else parent.span_id
        span = RequestSpan(context, parent_id, facts, call.received_ns)
        fast = FAST[call] = FastSpan(span, call, self._end)
        try:
            with in_span(span):
                work = self._endpoint(call)
        except BaseException:
            del FAST[call]
            raise
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
