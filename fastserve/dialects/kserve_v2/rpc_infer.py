"""ModelInfer and ModelStreamInfer: the fast path first, and the general path's gRPC half (spec 11).

Of a stream's requests, any number at once,

    ordinary models    are answered one by one, in the order asked
    decoupled models   are answered as they answer, beside one another

Faults of one request are told in its response, and the stream goes on unless the client has asked otherwise.
A client that leaves cancels everything of its stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastserve._ext.proto_outline import Outline
from fastserve._ext.proto_wire import write_stream_response
from fastserve.dialects.kserve_v2.errors import tell
from fastserve.dialects.kserve_v2.heads import SCHEME, Head, Outcome, StreamHead, find_sources
from fastserve.dialects.kserve_v2.inference import Inference
from fastserve.dialects.kserve_v2.messages import FINAL, Sent, read_message, read_sent, write_message
from fastserve.dialects.kserve_v2.operations import SERVICE, STREAM
from fastserve.dialects.kserve_v2.request import InferBody
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange, deadline_of, unforeseen
from fastserve.serving.generate import generate
from fastserve.serving.known_messages import KnownMessages, Source
from fastserve.serving.model_view import ModelView
from fastserve.serving.rpc import answer_rpc
from fastserve.serving.slow_path import answer_slowly
from fastserve.serving.streams import Turn, answer_stream
from fastserve.wire.grpc import Exchange, Method, Rpc
from fastserve.wire.scope import Scope


def make_infer(service: Service) -> Method:
    """ModelInfer."""
    infer = Infer(service)
    return Method(SERVICE + "ModelInfer", bytes, infer, bytes, scope=Scope.INFER, start=infer.start)


class Infer:
    """The RPC."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fast: KnownMessages[Head] = KnownMessages(service, SCHEME)

    def start(self, data: bytes, exchange: Exchange) -> bool:
        """Take a request that the fast path knows, or leave it to the coroutine below."""
        service = self._service
        if service.traces.on or service.forward_grpc:  # as in outline_of: each has to be looked at
            return False
        outline = self._fast.read(data)
        return outline is not None and self._fast.start(outline, exchange, exchange.deadline_ns)

    async def __call__(self, data: bytes, rpc: Rpc) -> bytes:
        """A serialized ModelInferResponse. Raises ServeError."""
        service = self._service
        sent = await service.apart(len(data), read_sent, data)
        known = outline_of(service, data), self._fast
        return await answer_rpc(
            rpc.received_ns, partial(RpcInference, service, sent, rpc, deadline_of(rpc), *known)
        )


def outline_of(service: Service, data: bytes) -> Outline | None:
    """What a message may be known by; None where each has to be looked at."""
    return None if service.traces.on or service.forward_grpc else SCHEME.read(data)


class RpcInference(Inference):
    """A request as the general path answers it, for `fast` to learn."""

    refusal = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    head = Head
    streams = False

    def __init__(
        self,
        service: Service,
        sent: Sent,
        rpc: Rpc,
        deadline_ns: int,
        outline: Outline | None,
        fast: KnownMessages[Head],
        exchange: RpcExchange,
    ) -> None:
        super().__init__(service, service.forward_grpc)
        self.exchange, self.message, self.deadline_ns = exchange, sent.message, deadline_ns
        self._sent, self._rpc = sent, rpc
        self._outline, self._fast = outline, fast

    def find(self) -> ModelView:
        return self.service.find(self.message.model_name, self.message.model_version)

    async def read_body(self, view: ModelView) -> InferBody:
        regions = self.service.regions
        return await self.service.apart(regions.largest_bytes, read_message, view, self._sent, regions)

    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        return self._rpc.metadata

    async def prepare(self, view: ModelView) -> InferRequest:
        request = await super().prepare(view)
        traces = self.service.traces
        self.traced = traces.sample(view.model) if traces.on else None
        return request

    def encode(self, view: ModelView, response: InferResponse) -> bytes:
        if self.traced is not None:
            self.traced.stamp("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", ns=self.exchange.received_ns)
            self.traced.stamp("GRPC_SEND_START", "GRPC_SEND_END")
        return write_message(
            view, self.asked, response, self.body.request_id, self.rooms, streams=self.streams
        )

    async def send(self) -> None:
        self.exchange.reply(self.reply)

    def close(self) -> None:
        super().close()
        if self.traced is not None:
            self.traced.end()

    def answered(self, took_ns: int) -> None:
        outline, view, request, asked = self._outline, self.view, self.request, self.asked
        if outline is None or view is None or request is None or asked.ranges or asked.classifies:
            return

        def prepare() -> tuple[Head, dict[str, Source]] | None:
            sources = find_sources(outline, self.message, request)
            return None if sources is None else (self.head(view, self.message, asked), sources)

        outcome, patience_ns = Outcome(self.service, self.version.model), self._rpc.patience_ns
        self._fast.learn(outline, self.version, request, outcome, prepare, patience_ns)

    def refused(self, fault: ServeError) -> None:
        told = tell(fault, self.message.id)
        self.service.traffic.refused(self.message.model_name, fault.kind.name)
        self.exchange.refuse(told)


MOST_AT_ONCE = 256
"""Requests of one stream that may be under way; the stream is read no further until one has ended."""
ERROR_MODE = ("triton_grpc_error", "true")


def make_stream(service: Service) -> Method:
    """ModelStreamInfer."""
    fast: KnownMessages[Head] = KnownMessages(service, SCHEME)

    def run(requests: AsyncIterator[bytes], rpc: Rpc) -> AsyncGenerator[bytes, None]:
        stream = Stream(service, fast, rpc)
        return answer_stream(requests, stream.begin, MOST_AT_ONCE, stream)

    return Method(SERVICE + STREAM, bytes, run, bytes, True, True, scope=Scope.INFER)


class Stream:
    """One stream."""

    def __init__(self, service: Service, fast: KnownMessages[Head], rpc: Rpc) -> None:
        self._service, self._fast, self._rpc = service, fast, rpc
        self._ends_on_fault = ERROR_MODE in rpc.metadata
        self._deadline_ns = deadline_of(rpc)

    def begin(self, data: bytes, turn: Turn) -> Coroutine[Any, Any, None] | None:
        """Take a request that the fast path knows, or say how it is answered."""
        outline = outline_of(self._service, data)
        if outline is not None and self._fast.start(outline, turn, self._deadline_ns):
            return None
        return self._answer(data, outline, turn)

    async def _answer(self, data: bytes, outline: Outline | None, turn: Turn) -> None:
        service = self._service
        sent = await service.apart(len(data), read_sent, data)
        request = StreamInference(service, sent, self._rpc, self._deadline_ns, outline, self._fast, turn)
        view = request.look()
        if view is None or not view.decoupled:
            await answer_slowly(turn, request)
            return
        try:
            await self._answer_many(turn, request, view)
        except ServeError as fault:
            request.refused(fault)
        except Exception as error:
            request.refused(unforeseen(turn, error))
        finally:
            request.close()

    async def _answer_many(self, turn: Turn, request: StreamInference, view: ModelView) -> None:
        """A decoupled model's responses as they come. Raises ServeError for what never reached it."""
        service, message = self._service, request.message
        asked = await request.prepare(view)
        turn.step_out()
        ended, well = False, True
        start = partial((request.traced or service.engine).stream, view.version, asked)
        async with aclosing(generate(start, partial(request.encode, view), service.apart)) as events:
            async for event in events:
                ended, well = event.final, well and event.fault is None
                if event.fault is None:
                    await request.rooms.flush()
                    await turn.say(event.text)
                elif not await self._say_fault(turn, request, event.fault, final=ended):
                    return
        if request.body.parameters.empty_final and not ended:
            name, version = message.model_name, message.model_version
            await turn.say(write_stream_response("", name, version, message.id, {FINAL: True}))
        turn.leave()
        if well:
            service.traffic.answered(view.model, view.version.number, turn.received_ns)

    async def _say_fault(
        self, turn: Turn, request: StreamInference, fault: ServeError, *, final: bool
    ) -> bool:
        """Whether the stream goes on."""
        told, message = tell(fault, request.message.id), request.message
        self._service.traffic.refused(message.model_name, fault.kind.name)
        if self._ends_on_fault:
            turn.fail(told)
        else:
            await turn.say(_write_fault(told, message.model_name, message.model_version, message.id, final))
        return not self._ends_on_fault

    def refuse(self, turn: Turn, told: ServeError, model: str, version: str, request_id: str) -> None:
        """Answer with what went wrong with a request that passed its checks, or end the stream with it."""
        if self._ends_on_fault:
            turn.fail(told)
        else:
            turn.reply(_write_fault(told, model, version, request_id, final=True))


def _write_fault(told: ServeError, model: str, version: str, request_id: str, final: bool) -> bytes:
    return write_stream_response(told.message, model, version, request_id, {FINAL: final})


class StreamInference(RpcInference):
    """A request of a stream as the general path answers it."""

    exchange: Turn
    head = StreamHead
    streams = True

    def look(self) -> ModelView | None:
        """The version it is for; None when there is none, which `read` finds again and tells."""
        try:
            return self.find()
        except ServeError:
            return None

    def refused(self, fault: ServeError) -> None:
        turn, message, told = self.exchange, self.message, tell(fault, self.message.id)
        self.service.traffic.refused(message.model_name, fault.kind.name)
        if self.request is None:  # what never reached a model ends no stream
            turn.reply(write_stream_response(told.message, id=message.id))
        else:
            turn.stream.refuse(turn, told, message.model_name, message.model_version, message.id)
