"""The RPCs of nvidia.inferenceserver.GRPCService (spec 8). The gRPC status is always OK: what went wrong
is in each response's `request_status`, and clients look nowhere else.

Raw inputs stay where they were received until the engine writes them into the batch; raw outputs are
copied once, into the reply.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic_ns
from typing import Any

from google.protobuf.message import DecodeError

from fastserve._ext.proto_wire import WireFault
from fastserve._ext.proto_wire_v1 import V1InferMessage, read_v1_request
from fastserve.dialects.triton_v1.general import GeneralRequest
from fastserve.dialects.triton_v1.grpc_fast import FastGrpc
from fastserve.dialects.triton_v1.header import read_message
from fastserve.dialects.triton_v1.inputs import Buffer, Entries, invalid
from fastserve.dialects.triton_v1.names import CODE_OF, SUCCESS
from fastserve.dialects.triton_v1.pages import write_index
from fastserve.dialects.triton_v1.replies import RpcReplies
from fastserve.dialects.triton_v1.routes import RPCS, SERVICE
from fastserve.dialects.triton_v1.service import Service
from fastserve.dialects.triton_v1.shared_memory import list_regions, register_cuda
from fastserve.dialects.triton_v1.status import write_status
from fastserve.dialects.triton_v1.streams import run_ahead
from fastserve.engine import Took
from fastserve.errors import Kind, ServeError
from fastserve.protos import load
from fastserve.serving.exchange import Awaited
from fastserve.serving.slow_path import answer_slowly
from fastserve.wire.grpc import Exchange, Method, Rpc

Run = Callable[[Any, Rpc], Awaitable[Any]]
AHEAD = 16  # requests of one stream that are under way at once


def make_methods(service: Service) -> list[Method]:
    """Every RPC, over bytes."""
    rpcs, counts = Rpcs(service), service.statistics
    plain = {
        "Status": _timed(rpcs.status, counts.status),
        "Health": _timed(rpcs.health, counts.health),
        "ModelControl": _timed(rpcs.control, counts.control),
        "SharedMemoryControl": rpcs.shared_memory,
        "Repository": _timed(rpcs.repository, counts.repository),
    }
    methods = [
        _method(name, partial(read_message_of, f"{name}Request"), run, _serialize)
        for name, run in plain.items()
    ]
    methods.append(replace(_method("Infer", read_sent, rpcs.infer, bytes), start=rpcs.start))
    methods.append(_method("StreamInfer", read_sent, rpcs.stream, bytes, streams=True))
    return methods


def _method(
    name: str,
    read: Callable[[bytes], Any],
    run: Callable[[Any, Any], Any],
    write: Callable[[Any], bytes],
    streams: bool = False,
) -> Method:
    path = SERVICE + name
    return Method(path, read, run, write, streams, streams, scope=RPCS[path])


def _timed(run: Run, took: Took) -> Run:
    """`run`, counted where it succeeds."""

    async def timed(request: Any, rpc: Rpc) -> Any:
        began_ns = monotonic_ns()
        response = await run(request, rpc)
        if response.request_status.code == CODE_OF[SUCCESS]:
            took.add(monotonic_ns() - began_ns)
        return response

    return timed


def read_message_of(name: str, data: bytes) -> Any:
    """A request message. Raises ServeError: bytes that are none never reach the protocol above."""
    try:
        return getattr(load("triton_v1"), name).FromString(data)
    except DecodeError:
        raise ServeError(Kind.INTERNAL, f"malformed {name}") from None


@dataclass(slots=True)
class Sent:
    """An InferRequest as received: the parsed message, and the bytes its raw tensors lie in."""

    message: V1InferMessage
    data: memoryview

    def raws(self) -> list[Buffer]:
        """The raw_input entries, where they were received."""
        spans = map(self.message.raw, range(self.message.raw_count))
        return [self.data[offset : offset + size] for offset, size in spans]


def read_sent(data: bytes) -> Sent:
    """A serialized InferRequest. Raises ServeError."""
    try:
        return Sent(read_v1_request(data), memoryview(data))
    except WireFault as fault:
        raise ServeError(Kind.INTERNAL, f"malformed InferRequest: {fault}") from None


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


class Rpcs:
    """The functions behind the RPCs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._messages = load("triton_v1")
        self._replies = RpcReplies(service)
        self._fast = FastGrpc(service, self._replies)

    # --- inference --------------------------------------------------------------------------------

    def start(self, data: bytes, exchange: Exchange) -> bool:
        """Take a request that the fast path knows, or leave it to the coroutine below."""
        try:
            message = read_sent(data).message
            header = read_message(message)
        except ServeError:
            return False
        return self._fast.start(exchange, message, header)

    async def infer(self, request: Sent, rpc: Rpc) -> bytes:
        """InferRequest -> serialized InferResponse."""
        message, header, exchange = request.message, read_message(request.message), Awaited()
        if not self._fast.start(exchange, message, header):
            model, number = message.model_name, message.model_version
            make_data = partial(Entries, request.raws())
            general = GeneralRequest(self._service, self._replies, exchange, model, number, header, make_data)
            await answer_slowly(exchange, general, self._service.traffic)
        return await exchange.answer()

    async def stream(self, requests: AsyncIterator[Sent], rpc: Rpc) -> AsyncIterator[bytes]:
        """One response for each request, in order; an error is a response like any other. Requests begin in
        order too, and do not wait for the responses before them."""
        running = run_ahead(requests, lambda one: self.infer(one, rpc), AHEAD)
        async with contextlib.aclosing(running) as answers:
            async for answer in answers:
                yield answer

    # --- the rest -----------------------------------------------------------------------------------

    async def status(self, request: Any, rpc: Rpc) -> Any:
        response = self._messages.StatusResponse()
        return self._fill(response, lambda: self._fill_status(response, request.model_name))

    def _fill_status(self, response: Any, model: str) -> None:
        response.server_status.CopyFrom(write_status(self._service, model))

    async def health(self, request: Any, rpc: Rpc) -> Any:
        response = self._messages.HealthResponse()
        return self._fill(response, lambda: self._fill_health(response, request.mode))

    def _fill_health(self, response: Any, mode: str) -> None:
        if mode not in ("live", "ready"):
            raise ServeError(Kind.UNKNOWN, f"unknown health mode '{mode}'")
        response.health = mode == "live" or self._service.readiness.ready

    async def control(self, request: Any, rpc: Rpc) -> Any:
        """Loads when told LOAD; anything else unloads, since UNLOAD is 0."""
        response, fault = self._messages.ModelControlResponse(), None
        control = self._service.control
        loads = request.type == self._messages.ModelControlRequest.LOAD
        try:
            await (control.load if loads else control.unload)(request.model_name)
        except ServeError as error:
            fault = error
        return self._finish(response, fault)

    async def shared_memory(self, request: Any, rpc: Rpc) -> Any:
        response = self._messages.SharedMemoryControlResponse()
        return self._fill(response, lambda: self._share(request, response))

    def _share(self, request: Any, response: Any) -> None:
        shared, asked = self._service.shared, request.WhichOneof("shared_memory_control")
        if asked == "register":
            self._register(request.register)
        elif asked == "unregister":
            shared.unregister(request.unregister.name)
        elif asked == "unregister_all":
            shared.unregister_all()
        elif asked == "status":
            _fill_regions(
                response.shared_memory_status, list_regions(shared, self._messages.SharedMemoryStatus())
            )
        else:
            raise ServeError(Kind.UNKNOWN, "unknown sharedmemorycontrol request type")

    def _register(self, asked: Any) -> None:
        kind = asked.WhichOneof("shared_memory_types")
        if kind == "cuda_shared_memory":
            register_cuda(asked.name, asked.cuda_shared_memory.raw_handle)
        elif kind is None:
            text = f"failed to register shared memory region: '{asked.name}', improperly formed request."
            raise invalid(text)
        else:
            place = asked.system_shared_memory
            self._service.shared.register(asked.name, place.shared_memory_key, place.offset, asked.byte_size)

    async def repository(self, request: Any, rpc: Rpc) -> Any:
        response = self._messages.RepositoryResponse()
        if request.WhichOneof("request_type") != "index":
            return self._finish(response, ServeError(Kind.UNKNOWN, "request type is not specified"))
        response.index.CopyFrom(await write_index(self._service))
        return self._finish(response, None)

    def _fill(self, response: Any, work: Callable[[], None]) -> Any:
        """The response after `work`, whose fault becomes its status."""
        fault = None
        try:
            work()
        except ServeError as error:
            fault = error
        return self._finish(response, fault)

    def _finish(self, response: Any, fault: ServeError | None) -> Any:
        response.request_status.ParseFromString(self._service.status_bytes(fault))
        return response


def _fill_regions(target: Any, status: Any) -> None:
    """Regions as the declared field 1 and, as the official client reads them, as field 2 (spec 6)."""
    target.shared_memory_region.extend(status.shared_memory_region)
    target.MergeFromString(status.SerializeToString())
