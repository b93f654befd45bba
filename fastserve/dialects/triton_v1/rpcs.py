"""The RPCs of nvidia.inferenceserver.GRPCService (spec 8).

The gRPC status is always OK: clients look at each response's `request_status` only. Raw inputs stay where
they were received until the engine writes them into the batch; raw outputs are copied once, into the reply.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastserve._ext.proto_wire import WireFault
from fastserve._ext.proto_wire_v1 import V1InferMessage, read_v1_request
from fastserve.dialects.triton_v1.calls import V1Calls
from fastserve.dialects.triton_v1.infer import RpcHeaderCache, V1InferRequest
from fastserve.dialects.triton_v1.request import Buffer, RawEntries, RequestHeader, read_message
from fastserve.dialects.triton_v1.routes import RPCS, SERVICE
from fastserve.dialects.triton_v1.service import RpcReplies, StreamReplies, V1Service
from fastserve.errors import Kind, Reason, ServeError, internal, invalid
from fastserve.net.grpc import GrpcExchange, Method, Rpc
from fastserve.protos import load
from fastserve.serving.exchange import RpcExchange, deadline_of
from fastserve.serving.fast_path import PerVersion
from fastserve.serving.rpc import answer_rpc, parse_message, serialize
from fastserve.serving.slow_path import answer_slowly
from fastserve.serving.streams import Turn, answer_stream

Fill = Callable[[Any, Any], Awaitable[None]]
AHEAD = 16  # requests of one stream that are under way at once
LATEST = -1


@dataclass(slots=True)
class V1ReceivedRequest:
    """An InferRequest as received: the parsed message and the bytes its raw tensors lie in."""

    message: V1InferMessage
    data: memoryview

    @property
    def number(self) -> int | None:
        """The number of the version, None for the highest."""
        number = self.message.model_version
        return None if number == LATEST else number

    def raws(self) -> list[Buffer]:
        """Return the raw_input entries as views of the received bytes."""
        spans = map(self.message.raw, range(self.message.raw_count))
        return [self.data[offset : offset + size] for offset, size in spans]


def read_v1_message(data: bytes) -> V1ReceivedRequest:
    """Read a serialized InferRequest. Raises ServeError."""
    try:
        return V1ReceivedRequest(read_v1_request(data), memoryview(data))
    except WireFault as fault:
        raise internal(f"malformed InferRequest: {fault}") from None


class V1Rpcs:
    """The functions behind the RPCs."""

    def __init__(self, service: V1Service, calls: V1Calls) -> None:
        self._service, self._calls = service, calls
        self._messages = load("triton_v1")
        self._replies, self._stream_replies = RpcReplies(service), StreamReplies(service)
        self._fast: PerVersion[RpcHeaderCache | None] = PerVersion(
            service.keepers, partial(RpcHeaderCache.open, service, self._replies)
        )

    def methods(self) -> list[Method]:
        """Return every RPC, over bytes."""
        plain = {
            "Status": self.status,
            "Health": self.health,
            "ModelControl": self.control,
            "SharedMemoryControl": self.shared_memory,
            "Repository": self.repository,
        }
        infer, stream = SERVICE + "Infer", SERVICE + "StreamInfer"
        return [
            *(self._plain(name, fill) for name, fill in plain.items()),
            Method(infer, read_v1_message, self.infer, bytes, scope=RPCS[infer], start=self.start),
            Method(stream, read_v1_message, self.stream, bytes, True, True, scope=RPCS[stream]),
        ]

    def _plain(self, name: str, fill: Fill) -> Method:
        asked = getattr(self._messages, f"{name}Request")
        answered = getattr(self._messages, f"{name}Response")
        # Malformed bytes are an error of gRPC.
        read = partial(parse_message, asked, internal)

        async def answer(request: Any, rpc: Rpc) -> bytes:
            response = answered()
            try:
                await fill(request, response)
            except ServeError as fault:
                if fault.reason is Reason.API_KEY:
                    raise
                self._set_status(response, fault)
            else:
                self._set_status(response, None)
            return serialize(response)

        return Method(SERVICE + name, read, answer, bytes, scope=RPCS[SERVICE + name])

    def _set_status(self, response: Any, fault: ServeError | None) -> None:
        told = response.request_status
        told.code, told.msg, told.server_id, told.request_id = self._service.status(fault)

    # --- inference --------------------------------------------------------------------------------

    def start(self, data: bytes, exchange: GrpcExchange) -> bool:
        """Start a request with a known header.

        Returns False, without a trace, to leave it to the coroutine.
        """
        try:
            sent = read_v1_message(data)
        except ServeError:
            return False
        return self._start(exchange, sent, read_message(sent.message), exchange.deadline_ns)

    def _start(
        self, exchange: RpcExchange, sent: V1ReceivedRequest, header: RequestHeader, deadline_ns: int
    ) -> bool:
        version = self._service.catalog.available(sent.message.model_name, sent.number)
        fast = None if version is None else self._fast.of(version)
        return fast is not None and fast.start(exchange, sent.message, header, deadline_ns)

    async def infer(self, sent: V1ReceivedRequest, rpc: Rpc) -> bytes:
        """Return a serialized InferResponse, on the general path: `start` returned False."""
        general = partial(self._general, self._replies, deadline_of(rpc), sent)
        return await answer_rpc(rpc.received_ns, general)

    def _general(
        self, replies: RpcReplies, deadline_ns: int, sent: V1ReceivedRequest, exchange: RpcExchange
    ) -> V1InferRequest:
        message, make_data = sent.message, partial(RawEntries, sent.raws())
        given = message.model_name, sent.number, read_message(message), make_data, deadline_ns
        return V1InferRequest(self._service, replies, exchange, *given)

    def _begin(
        self, deadline_ns: int, sent: V1ReceivedRequest, turn: Turn
    ) -> Coroutine[Any, Any, None] | None:
        """Start a request of a stream and return None, or return the coroutine that answers it."""
        if self._start(turn, sent, read_message(sent.message), deadline_ns):
            return None
        return answer_slowly(turn, self._general(self._stream_replies, deadline_ns, sent, turn))

    def stream(self, requests: AsyncIterator[V1ReceivedRequest], rpc: Rpc) -> AsyncIterator[bytes]:
        """Yield one response for each request, in order; an error is a response.

        Requests begin in order too, without waiting for the responses before them.
        """
        begin = partial(self._begin, deadline_of(rpc))
        return answer_stream(requests, begin, AHEAD, want=self._service.repository.want)

    # --- the rest: each fills its response; what it raises becomes the response's status -------------

    async def status(self, request: Any, response: Any) -> None:
        response.server_status.CopyFrom(self._calls.status(request.model_name))

    async def health(self, request: Any, response: Any) -> None:
        response.health = self._calls.health(request.mode)

    async def control(self, request: Any, response: Any) -> None:
        """Load a model for LOAD, else unload it: UNLOAD is 0."""
        load = request.type == self._messages.ModelControlRequest.LOAD
        await self._calls.control(request.model_name, load=load)

    async def repository(self, request: Any, response: Any) -> None:
        if request.WhichOneof("request_type") != "index":
            raise ServeError(Kind.UNKNOWN, "request type is not specified")
        response.index.CopyFrom(await self._calls.index())

    async def shared_memory(self, request: Any, response: Any) -> None:
        shared, asked = self._service.regions, request.WhichOneof("shared_memory_control")
        if asked == "register":
            await self._register(request.register)
        elif asked in ("unregister", "unregister_all"):
            one = asked == "unregister"
            closing = shared.unregister(request.unregister.name) if one else shared.unregister_all()
            if closing is not None:
                await closing
        elif asked == "status":
            # Regions as the declared field 1 and, as the official client reads them, as field 2 (spec 6).
            regions, target = self._calls.regions(), response.shared_memory_status
            target.shared_memory_region.extend(regions.shared_memory_region)
            target.MergeFromString(regions.SerializeToString())
        else:
            raise ServeError(Kind.UNKNOWN, "unknown sharedmemorycontrol request type")

    async def _register(self, asked: Any) -> None:
        kind = asked.WhichOneof("shared_memory_types")
        if kind == "cuda_shared_memory":
            given = asked.cuda_shared_memory
            await self._calls.register_cuda(asked.name, given.raw_handle, given.device_id, asked.byte_size)
        elif kind is None:
            text = f"failed to register shared memory region: '{asked.name}', improperly formed request."
            raise invalid(text)
        else:
            place = asked.system_shared_memory
            opened = self._service.regions.register(
                asked.name, place.shared_memory_key, place.offset, asked.byte_size
            )
            if opened is not None:
                await opened
