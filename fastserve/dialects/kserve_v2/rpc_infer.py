"""ModelInfer: the fast path first, and the general path's gRPC half for what it does not take (spec 11)."""

from __future__ import annotations

from collections.abc import Iterable

from fastserve._ext.proto_outline import Outline
from fastserve.dialects.kserve_v2.errors import tell
from fastserve.dialects.kserve_v2.heads import SCHEME, FastGrpc
from fastserve.dialects.kserve_v2.inference import Inference
from fastserve.dialects.kserve_v2.messages import Sent, read_message, read_sent, write_message
from fastserve.dialects.kserve_v2.operations import SERVICE
from fastserve.dialects.kserve_v2.request import InferBody
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange, deadline_of
from fastserve.serving.model_view import ModelView
from fastserve.serving.slow_path import answer_slowly
from fastserve.wire.grpc import Awaited, Exchange, Method, Rpc
from fastserve.wire.scope import Scope


def make_infer(service: Service) -> Method:
    """ModelInfer."""
    infer = Infer(service)
    return Method(SERVICE + "ModelInfer", bytes, infer, bytes, scope=Scope.INFER, start=infer.start)


class Infer:
    """The RPC."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fast = FastGrpc(service)

    def start(self, data: bytes, exchange: Exchange) -> bool:
        """Take a request that the fast path knows, or leave it to the coroutine below."""
        outline = outline_of(self._service, data)
        return outline is not None and self._fast.start(outline, exchange, exchange.deadline_ns)

    async def __call__(self, data: bytes, rpc: Rpc) -> bytes:
        """A serialized ModelInferResponse. Raises ServeError."""
        service, exchange = self._service, Awaited(rpc.received_ns)
        sent = await service.apart(len(data), read_sent, data)
        outline = outline_of(service, data)
        request = RpcInference(service, exchange, sent, rpc, deadline_of(rpc), outline, self._fast)
        await answer_slowly(exchange, request, service.traffic)
        return await exchange.answer()


def outline_of(service: Service, data: bytes) -> Outline | None:
    """What a message may be known by; None where each has to be looked at."""
    return None if service.traces.on or service.forward_grpc else SCHEME.read(data)


class RpcInference(Inference):
    """A request as the general path answers it, for `fast` to learn."""

    refusal = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    streams = False

    def __init__(
        self,
        service: Service,
        exchange: RpcExchange,
        sent: Sent,
        rpc: Rpc,
        deadline_ns: int,
        outline: Outline | None,
        fast: FastGrpc,
    ) -> None:
        super().__init__(service, service.forward_grpc)
        self.exchange, self.message, self.deadline_ns = exchange, sent.message, deadline_ns
        self._sent, self._rpc = sent, rpc
        self._outline, self._fast = outline, fast

    def find(self) -> ModelView:
        return self.service.find(self.message.model_name, self.message.model_version)

    async def read_body(self, view: ModelView) -> InferBody:
        return read_message(view, self._sent, self.service.regions)

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
        if self._outline is not None and self.view is not None and self.request is not None:
            patience_ns = self._rpc.patience_ns
            self._fast.learn(self._outline, self.view, self.message, self.asked, self.request, patience_ns)

    def refused(self, fault: ServeError) -> None:
        told = tell(fault, self.message.id)
        self.service.traffic.refused(self.message.model_name, fault.kind.name)
        self.exchange.refuse(told)
