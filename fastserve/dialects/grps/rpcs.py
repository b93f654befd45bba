"""The RPCs of grps.protos.v1.GrpsService (spec 1). A failure is a message too: gRPC's status is OK.

    model, gtensors{ tensors{ name, dtype, shape: |rows|, flat_float32: |values| } }

The fast path of Predict takes messages like an earlier one but for their rows and numbers. Packed floats are
copied into the batch, whole numbers of 32 and 64 bits are read into it. Smaller ones and halves travel as
wider ones; the general path checks their range.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from fastserve._ext.message_skeleton import DATA, LEADS, Scheme
from fastserve.dialects.grps.inference import WORK, GrpsCall, GrpsPredict, read_answer, stream_answers
from fastserve.dialects.grps.messages import (
    BY_DTYPE,
    FIELDS,
    GTENSORS,
    SHAPE,
    TENSORS,
    GrpsField,
    field_of,
    read_message,
    read_sent,
    write_heads,
    write_outputs,
)
from fastserve.dialects.grps.routes import RPCS, SERVICE
from fastserve.dialects.grps.service import (
    GrpsService,
    NotReady,
    code_of,
    describe_model,
    describe_server,
    failure_message,
    ok_message,
    speaks_messages,
)
from fastserve.errors import ServeError, invalid
from fastserve.net.grpc import AwaitedExchange, GrpcExchange, Method, Rpc
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange, deadline_of, internal_error
from fastserve.serving.fast_path import Outcome
from fastserve.serving.prepared_requests import Described, Later, Memory
from fastserve.serving.request_templates import FieldSource, MessageTemplate, MessageTemplates
from fastserve.serving.rpc import answer_rpc
from fastserve.tensor import DType
from fastserve.util.offload import OFFLOAD_BYTES

RAW = ("float32", "float64")  # travel as they lie in memory
KEPT = (*RAW, "int32", "int64")  # with nothing lost, whatever they are

# GrpsMessage: of each tensor its shape, and its values.
_VALUES = {field.tag: DATA for field in FIELDS if field.wire != "bytes"}
SCHEME = Scheme({GTENSORS: {TENSORS: {SHAPE: LEADS, **_VALUES}}})


def outcome_of(service: GrpsService, version: Version) -> Outcome:
    """Return how RPCs of one version end."""

    def refused(exchange: RpcExchange, prepared: object, request_id: object, fault: ServeError) -> None:
        exchange.reply(failure_of(service, exchange, fault, version.model))

    return Outcome(refused, service.answered)


def failure_of(service: GrpsService, exchange: object, fault: ServeError, model: str) -> bytes:
    """The message a client gets in place of an error of gRPC's own (spec 5); counted."""
    service.count_fault(model, fault, exchange)
    return failure_message(code_of(fault, service.options), fault.message)


class GrpsTemplate(MessageTemplate):
    """Messages with one head."""

    def __init__(self, service: GrpsService, model: str) -> None:
        """`model` is as the message names it."""
        self._offload = service.offload
        self.find_version = partial(service.look_up, model)

    def make_writer(self, described: Described) -> list[bytes] | None:
        """Return the bytes before each output's values."""
        if not described or any(dtype.name not in RAW or not prod(shape) for _, dtype, shape in described):
            return None
        heads = [_head(name, dtype, shape) for name, dtype, shape in described]
        return write_heads(heads, ok_message())

    def write(
        self, exchange: RpcExchange, writer: list[bytes], memory: Sequence[Memory], request_id: Any, held: Any
    ) -> None:
        pieces: list[Memory] = []
        for head, data in zip(writer, memory, strict=True):
            pieces += (head, data)
        exchange.reply(b"".join(pieces))

    def write_response(
        self, exchange: RpcExchange, response: InferResponse, request_id: Any, held: Any
    ) -> Later | None:
        if WORK * response.nbytes >= OFFLOAD_BYTES:
            return self._write_offloaded(exchange, response)
        exchange.reply(write_answer(response))
        return None

    async def _write_offloaded(self, exchange: RpcExchange, response: InferResponse) -> None:
        exchange.reply(await self._offload(WORK * response.nbytes, write_answer, response))


def write_answer(response: InferResponse) -> bytes:
    """Tensors as a serialized message with its status. Raises ServeError."""
    message = write_outputs(load("grps").GrpsMessage(gtensors={}), response.outputs)
    return ok_message() + bytes(message.SerializeToString())


class GrpsPredictRpc:
    """The RPC Predict of one front process: the fast path, by templates of messages, then the general one."""

    def __init__(self, service: GrpsService) -> None:
        self._service = service
        self._known: MessageTemplates[GrpsTemplate] = MessageTemplates(service, SCHEME)

    async def __call__(self, data: bytes, rpc: Rpc) -> bytes:
        """A serialized message, whatever happens."""
        return await answer_rpc(rpc.received_ns, partial(GrpcPredict, self._service, data, rpc, self))

    def start(self, data: bytes, exchange: GrpcExchange) -> bool:
        """Take a message that is known, or return False, without a trace, to leave it to the coroutine."""
        skeleton = self._known.read(data)
        if skeleton is None:
            return False
        deadline_ns = self._service.deadline_ns(exchange.received_ns, exchange.deadline_ns)
        return self._known.start(skeleton, exchange, deadline_ns)

    def take(self, exchange: GrpcExchange, body: ArrivedBody) -> bool:
        """Take a message whose last numbers are still in the socket, or return False."""
        skeleton = self._known.read_arrived(body)
        if skeleton is None:
            return False
        deadline_ns = self._service.deadline_ns(exchange.received_ns, exchange.deadline_ns)
        return self._known.start(skeleton, exchange, deadline_ns)

    def cache_template(self, data: bytes, message: Any, request: InferRequest, version: Version) -> None:
        """Remember a message that the general path has answered."""
        if message.WhichOneof("data_oneof") != "gtensors" or speaks_messages(version):
            return
        service, skeleton = self._service, self._known.read(data)
        # A tensor that was answered has values; with as many placeholders as tensors, each has one.
        fields = [BY_DTYPE[tensor.dtype.name].tag for tensor in request.inputs.values()]
        if skeleton is None or [field for _, field in skeleton.fields] != fields:
            return
        dtypes = {name: tensor.dtype for name, tensor in request.inputs.items()}
        if any(dtype.name not in KEPT for dtype in dtypes.values()):
            return
        sources = {
            name: FieldSource.of(placeholder, dtype, varints=dtype.name not in RAW)
            for placeholder, (name, dtype) in enumerate(dtypes.items())
        }

        def prepare() -> tuple[GrpsTemplate, dict[str, FieldSource]]:
            return GrpsTemplate(service, message.model), sources

        self._known.cache_template(skeleton, version, request, outcome_of(service, version), prepare)


def _head(name: str, dtype: DType, shape: Sequence[int]) -> tuple[bytes, int, int]:
    field: GrpsField = field_of(name, dtype)
    tensor = load("grps").GenericTensor(name=name, dtype=field.number, shape=shape)
    return tensor.SerializeToString(), field.tag, prod(shape) * dtype.item_bytes


GRPC = "grpc"
NO_NAME = "The model name is empty."


def make_methods(service: GrpsService) -> list[Method]:
    """Every RPC, over bytes."""
    plain: dict[str, Callable[[GrpsService, bytes], bytes]] = {
        "Online": partial(_switch, online=True),
        "Offline": partial(_switch, online=False),
        "CheckLiveness": lambda service, data: ok_message(),
        "CheckReadiness": _check_ready,
        "ServerMetadata": lambda service, data: _text(describe_server(service)),
        "ModelMetadata": _describe_model,
    }
    methods = [_method(name, partial(_answer, service, run)) for name, run in plain.items()]
    predict = GrpsPredictRpc(service)
    methods.append(replace(_method("Predict", predict), start=predict.start, take=predict.take))
    methods.append(_method("PredictStreaming", partial(stream, service), gives_stream=True))
    return methods


def _method(name: str, run: Callable[[bytes, Any], Any], *, gives_stream: bool = False) -> Method:
    path = SERVICE + name
    return Method(path, bytes, run, bytes, gives_stream=gives_stream, scope=RPCS[path])


async def _answer(
    service: GrpsService, run: Callable[[GrpsService, bytes], bytes], data: bytes, rpc: Rpc
) -> bytes:
    try:
        return run(service, data)
    except ServeError as fault:
        return failure_of(service, rpc, fault, "")


def _switch(service: GrpsService, data: bytes, *, online: bool) -> bytes:
    service.online.set(GRPC, online)
    return ok_message()


def _check_ready(service: GrpsService, data: bytes) -> bytes:
    if service.online.is_ready(GRPC):
        return ok_message()
    return failure_message(service.options.grpc_not_ready_code, NotReady().message)


def _describe_model(service: GrpsService, data: bytes) -> bytes:
    name = read_message(data).str_data
    if not name:
        raise invalid(NO_NAME)
    return _text(describe_model(service, name))


def _text(text: str) -> bytes:
    return ok_message() + bytes(load("grps").GrpsMessage(str_data=text).SerializeToString())


class GrpcPredict(GrpsPredict):
    """One RPC."""

    def __init__(
        self, service: GrpsService, data: bytes, rpc: Rpc, fast: GrpsPredictRpc, exchange: AwaitedExchange
    ) -> None:
        self.service, self._exchange, self._data, self._rpc, self._fast = service, exchange, data, rpc, fast

    async def ask(self) -> tuple[GrpsCall, int]:
        asked = await read_asked(self.service, self._data, streaming=False)
        return asked, self.service.deadline_ns(self._rpc.received_ns, deadline_of(self._rpc))

    async def write(self, response: InferResponse) -> None:
        reply = await self.service.offload(WORK * response.nbytes, self._encode, response)
        self._exchange.reply(reply)

    def _encode(self, response: InferResponse) -> bytes:
        return _part(read_answer(self.asked, response))

    def cache_template(self) -> None:
        self._fast.cache_template(self._data, self.asked.message, self.request, self.version)

    def refused(self, fault: ServeError) -> None:
        self._exchange.reply(failure_of(self.service, self._exchange, fault, self.model))


async def read_asked(service: GrpsService, data: bytes, *, streaming: bool) -> GrpsCall:
    """A predict's message. Raises ServeError."""
    sent = await service.offload(WORK * len(data), read_sent, data)
    told: dict[str, object] = {"streaming": True} if streaming else {}
    return GrpsCall(service.find(sent.message.model), sent, told, WORK * len(data))


async def stream(service: GrpsService, data: bytes, rpc: Rpc) -> AsyncIterator[bytes]:
    """A message for each part, as it comes. What goes wrong is one more, and the last."""
    version = None
    try:
        asked = await read_asked(service, data, streaming=True)
        version = asked.version
        deadline_ns = service.deadline_ns(rpc.received_ns, deadline_of(rpc))
        events = await stream_answers(service, asked, deadline_ns, _part)
        async with aclosing(events):
            async for event in events:
                if event.fault is not None:
                    raise event.fault
                yield event.text
    except ServeError as fault:
        yield failure_of(service, rpc, fault, version.model if version else "")
    except Exception as error:
        yield failure_of(service, rpc, internal_error(rpc, error), version.model if version else "")
    else:
        service.count(version, rpc.received_ns)


def _part(message: Any) -> bytes:
    return ok_message() + bytes(message.SerializeToString())
