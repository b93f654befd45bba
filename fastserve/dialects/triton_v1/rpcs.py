"""The RPCs of nvidia.inferenceserver.GRPCService (spec 8). The gRPC status is always OK: what went wrong
is in each response's `request_status`, and clients look nowhere else.

Raw inputs stay where they were received until the engine writes them into the batch; raw outputs are
copied once, into the reply.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastserve._ext.proto_wire import WireFault
from fastserve._ext.proto_wire_v1 import V1InferMessage, read_v1_request
from fastserve.dialects.triton_v1.calls import Calls
from fastserve.dialects.triton_v1.fast import FastRpc
from fastserve.dialects.triton_v1.header import RequestHeader, read_message
from fastserve.dialects.triton_v1.infer import GeneralRequest
from fastserve.dialects.triton_v1.inputs import Buffer, Entries
from fastserve.dialects.triton_v1.replies import RpcReplies
from fastserve.dialects.triton_v1.routes import RPCS, SERVICE
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import Kind, ServeError, internal, invalid
from fastserve.protos import load
from fastserve.serving.exchange import RpcExchange, deadline_of
from fastserve.serving.paths import Kept
from fastserve.serving.rpc import answer_rpc, parse_message, serialize
from fastserve.serving.slow_path import answer_slowly
from fastserve.serving.streams import answer_stream
from fastserve.wire.grpc import Exchange, Method, Rpc

Fill = Callable[[Any, Any], Awaitable[None]]
AHEAD = 16  # requests of one stream that are under way at once
LATEST = -1


@dataclass(slots=True)
class Sent:
    """An InferRequest as received: the parsed message, and the bytes its raw tensors lie in."""

    message: V1InferMessage
    data: memoryview

    @property
    def number(self) -> int | None:
        """The version that is asked for, None for the highest."""
        number = self.message.model_version
        return None if number == LATEST else number

    def raws(self) -> list[Buffer]:
        """The raw_input entries, where they were received."""
        spans = map(self.message.raw, range(self.message.raw_count))
        return [self.data[offset : offset + size] for offset, size in spans]


def read_sent(data: bytes) -> Sent:
    """A serialized InferRequest. Raises ServeError."""
    try:
        return Sent(read_v1_request(data), memoryview(data))
    except WireFault as fault:
        raise internal(f"malformed InferRequest: {fault}") from None


class Rpcs:
    """The functions behind the RPCs."""

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service, self._calls = service, calls
        self._messages = load("triton_v1")
        self._replies = RpcReplies(service)
        self._fast: Kept[FastRpc | None] = Kept(
            service.keepers, partial(FastRpc.open, service, self._replies)
        )

    def methods(self) -> list[Method]:
        """Every RPC, over bytes."""
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
            Method(infer, read_sent, self.infer, bytes, scope=RPCS[infer], start=self.start),
            Method(stream, read_sent, self.stream, bytes, True, True, scope=RPCS[stream]),
        ]

    def _plain(self, name: str, fill: Fill) -> Method:
        asked = getattr(self._messages, f"{name}Request")
        answered = getattr(self._messages, f"{name}Response")
        # Bytes that are no message never reach the protocol above.
        read = partial(parse_message, asked, internal)

        async def answer(request: Any, rpc: Rpc) -> bytes:
            response = answered()
            try:
                await fill(request, response)
            except ServeError as fault:
                self._set_status(response, fault)
            else:
                self._set_status(response, None)
            return serialize(response)

        return Method(SERVICE + name, read, answer, bytes, scope=RPCS[SERVICE + name])

    def _set_status(self, response: Any, fault: ServeError | None) -> None:
        told = response.request_status
        told.code, told.msg, told.server_id, told.request_id = self._service.status(fault)

    # --- inference --------------------------------------------------------------------------------

    def start(self, data: bytes, exchange: Exchange) -> bool:
        """Take a request that the fast path knows, or leave it to the coroutine below."""
        try:
            sent = read_sent(data)
        except ServeError:
            return False
        return self._start(exchange, sent, read_message(sent.message), exchange.deadline_ns)

    def _start(self, exchange: RpcExchange, sent: Sent, header: RequestHeader, deadline_ns: int) -> bool:
        version = self._service.catalog.available(sent.message.model_name, sent.number)
        fast = None if version is None else self._fast.of(version)
        return fast is not None and fast.start(exchange, sent.message, header, deadline_ns)

    async def infer(self, sent: Sent, rpc: Rpc) -> bytes:
        """InferRequest -> serialized InferResponse, by the general path: `start` has been asked."""
        return await answer_rpc(rpc.received_ns, partial(self._general, deadline_of(rpc), sent))

    def _general(self, deadline_ns: int, sent: Sent, exchange: RpcExchange) -> GeneralRequest:
        message, make_data = sent.message, partial(Entries, sent.raws())
        given = message.model_name, sent.number, read_message(message), make_data, deadline_ns
        return GeneralRequest(self._service, self._replies, exchange, *given)

    def _begin(self, deadline_ns: int, sent: Sent, turn: RpcExchange) -> Coroutine[Any, Any, None] | None:
        """Take a request of a stream, or give what will answer it."""
        if self._start(turn, sent, read_message(sent.message), deadline_ns):
            return None
        return answer_slowly(turn, self._general(deadline_ns, sent, turn))

    def stream(self, requests: AsyncIterator[Sent], rpc: Rpc) -> AsyncIterator[bytes]:
        """One response for each request, in order; an error is a response like any other. Requests begin in
        order too, and do not wait for the responses before them."""
        return answer_stream(requests, partial(self._begin, deadline_of(rpc)), AHEAD)

    # --- the rest: each fills its response, and what it raises becomes the response's status ---------

    async def status(self, request: Any, response: Any) -> None:
        response.server_status.CopyFrom(self._calls.status(request.model_name))

    async def health(self, request: Any, response: Any) -> None:
        response.health = self._calls.health(request.mode)

    async def control(self, request: Any, response: Any) -> None:
        """Loads when told LOAD; anything else unloads, since UNLOAD is 0."""
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
            self._service.regions.register(asked.name, place.shared_memory_key, place.offset, asked.byte_size)
