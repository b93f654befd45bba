"""RPCs some of whose calls are traced: in front of every method that infers, where tracing is on.

A call that is not traced goes on at once. A traced one takes the same way, and gets the same answer: see
net/traced_endpoints.py.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from fastserve._ext.fast_path import FastSpan, sample_start
from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.grpc.method import Method
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.traced_endpoints import Tracer
from fastserve.util.spans import FAST, RequestSpan, RpcFacts, enter_span
from fastserve.util.tracing import TraceContext

Start = Callable[[bytes, Any], bool]


def trace_method(tracer: Tracer | None, method: Method) -> Method:
    """Return the RPC, some of whose calls are traced if it infers and there is a tracer."""
    traced = tracer is not None and method.scope is Scope.INFER
    return TracedRpc(tracer, method).method if tracer is not None and traced else method


class TracedRpc:
    """An RPC some of whose calls are traced; `method` is it for the transport."""

    def __init__(self, tracer: Tracer, method: Method) -> None:
        self._tracer, self._method = tracer, method
        starts = method.start is not None
        if method.start is not None:
            self._start: Start = method.start
            self._sampled: Start = sample_start(tracer.sampler, method.start, self._take_turn)
        self.method = replace(
            method,
            run=self._run_many if method.gives_stream else self._run,
            start=self._sampled if starts else None,
            start_below=self._start_below if starts else None,
            take=None if method.take is None else self._take,
        )

    def _take_turn(self, message: bytes, rpc: Any) -> bool:
        sampler = self._tracer.sampler
        context = sampler.take()
        if context is None:
            return self._start(message, rpc)
        taken = self._start_traced(message, rpc, context, None)
        if not taken:  # it is the turn of `run`
            sampler.left = 1
        return taken

    def _start_below(self, message: bytes, rpc: Any) -> bool:
        parent = rpc.parent
        if parent is None:  # malformed
            return self._sampled(message, rpc)
        context = self._tracer.sampler.follow(parent)
        if context is None:
            return self._start(message, rpc)
        return self._start_traced(message, rpc, context, parent)

    def _start_traced(
        self, message: bytes, rpc: Any, context: TraceContext, parent: TraceContext | None
    ) -> bool:
        span = self._begin(rpc, context, parent)
        fast = FastSpan(span, rpc, self._end_fast, FAST)
        try:
            taken = self._start(message, rpc)
        finally:
            if not fast.under_way:
                FAST.pop(rpc, None)
        if taken and not fast.under_way and not span.ended_ns:  # an answer of the cache
            self._end(span, None)
        return taken

    def _take(self, rpc: Any, body: ArrivedBody) -> bool:
        parent, sampler = rpc.parent, self._tracer.sampler
        if parent is not None or sampler.left <= 1:
            return False
        assert self._method.take is not None
        taken = self._method.take(rpc, body)
        sampler.left -= taken
        return taken

    def _end_fast(self, rpc: Any, span: RequestSpan, error: BaseException | None) -> None:
        self._end(span, error)

    def _choose(self, rpc: Any) -> RequestSpan | None:
        parent, sampler = rpc.parent, self._tracer.sampler
        if parent is None:
            sampler.left -= 1
            context = None if sampler.left > 0 else sampler.take()
        else:
            context = sampler.follow(parent)
        return None if context is None else self._begin(rpc, context, parent)

    def _begin(self, rpc: Any, context: TraceContext, parent: TraceContext | None) -> RequestSpan:
        rpc.follow_trace(context.trace_id)
        facts = RpcFacts(self._method.path, rpc.address, rpc.request_id)
        return RequestSpan(context, "" if parent is None else parent.span_id, facts, rpc.received_ns)

    async def _run(self, request: Any, rpc: Any) -> Any:
        span = self._choose(rpc)
        if span is None:
            return await self._method.run(request, rpc)
        enter_span(span)
        try:
            answer = await self._method.run(request, rpc)
        except BaseException as error:
            self._end(span, error)
            raise
        self._end(span, None)
        return answer

    async def _run_many(self, request: Any, rpc: Any) -> AsyncIterator[Any]:
        span = self._choose(rpc)
        if span is not None:
            enter_span(span)
        pieces, ended = self._method.run(request, rpc), None
        try:
            async for piece in pieces:
                yield piece
        except BaseException as error:
            ended = error
            raise
        finally:
            try:
                await pieces.aclose()
            finally:
                if span is not None:
                    self._end(span, ended)
                del ended  # its traceback holds this frame

    def _end(self, span: RequestSpan, error: BaseException | None) -> None:
        if isinstance(error, ServeError):
            span.fail(error.message)
        span.end(0 if error is None else _kind_of(error).value)
        self._tracer.send(span)


def _kind_of(error: BaseException) -> Kind:
    if isinstance(error, ServeError):
        return error.kind
    return Kind.CANCELLED if isinstance(error, (CancelledError, GeneratorExit)) else Kind.INTERNAL
