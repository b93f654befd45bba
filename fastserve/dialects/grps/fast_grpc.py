"""The fast path of Predict over gRPC: messages like one before but for their rows and numbers.

    model, gtensors{ tensors{ name, dtype, shape: |rows|, flat_float32: |values| } }

Packed floats lie in a message as they do in memory, and go into the batch as they are; whole numbers of 32
and 64 bits are read into it. Smaller ones and halves travel as wider ones: whether their values have room is
for the general path to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from fastserve._ext.proto_outline import DATA, LEADS, Scheme
from fastserve.dialects.grps.codec_grpc import GTENSORS, SHAPE, TENSORS, write_heads
from fastserve.dialects.grps.errors import code_of, failure_message, ok_message
from fastserve.dialects.grps.service import Answered, Service, speaks_messages
from fastserve.dialects.grps.tensors import BY_DTYPE, FIELDS, Field, field_of, write_outputs
from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.known_messages import KnownMessage, KnownMessages, Source
from fastserve.serving.prepared import Described, Memory
from fastserve.tensor import DType
from fastserve.wire.grpc import Exchange

RAW = ("float32", "float64")  # travel as they lie in memory
KEPT = (*RAW, "int32", "int64")  # with nothing lost, whatever they are
# GrpsMessage: of each tensor its shape, and its values.
_VALUES = {field.tag: DATA for field in FIELDS if field.wire != "bytes"}
SCHEME = Scheme({GTENSORS: {TENSORS: {SHAPE: LEADS, **_VALUES}}})


class Outcome(Answered):
    """How RPCs of one version end."""

    def refused(self, exchange: RpcExchange, prepared: Any, request_id: Any, fault: ServeError) -> None:
        exchange.reply(failure_of(self.service, fault, self.model))


def failure_of(service: Service, fault: ServeError, model: str) -> bytes:
    """The message a client gets in place of an error of gRPC's own (spec 5); counted."""
    service.traffic.refused(model, fault.kind.name)
    return failure_message(code_of(fault, service.options), fault.message)


class Head(KnownMessage):
    """Messages with one head."""

    def __init__(self, service: Service, model: str) -> None:
        """`model` is as the message names it."""
        self.find_version = partial(service.look_up, model)

    def make_writer(self, described: Described) -> list[bytes] | None:
        """What stands before each output's values."""
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
    ) -> None:
        message = write_outputs(load("grps").GrpsMessage(gtensors={}), response.outputs)
        exchange.reply(ok_message() + message.SerializeToString())


class FastGrpc:
    """What is known of heads. One per front process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: KnownMessages[Head] = KnownMessages(service, SCHEME)

    def start(self, data: bytes, exchange: Exchange) -> bool:
        """Take a message, or return False: nothing has happened then."""
        outline = self._known.read(data)
        if outline is None:
            return False
        deadline_ns = self._service.sooner_ns(exchange.received_ns, exchange.deadline_ns)
        return self._known.start(outline, exchange, deadline_ns)

    def learn(
        self, data: bytes, message: Any, request: InferRequest, version: Version, patience_ns: int
    ) -> None:
        """Remember a message that the general path has answered."""
        if message.WhichOneof("data_oneof") != "gtensors" or speaks_messages(version):
            return
        service, outline = self._service, self._known.read(data)
        # A tensor that was answered has values; where there are as many holes as tensors, each has one.
        fields = [BY_DTYPE[tensor.dtype.name].tag for tensor in request.inputs.values()]
        if outline is None or [field for _, field in outline.fields] != fields:
            return
        dtypes = {name: tensor.dtype for name, tensor in request.inputs.items()}
        if any(dtype.name not in KEPT for dtype in dtypes.values()):
            return
        sources = {
            name: Source.of(hole, dtype, varints=dtype.name not in RAW)
            for hole, (name, dtype) in enumerate(dtypes.items())
        }

        def prepare() -> tuple[Head, dict[str, Source]]:
            return Head(service, message.model), sources

        self._known.learn(outline, version, request, Outcome(service, version), prepare, patience_ns)


def _head(name: str, dtype: DType, shape: Sequence[int]) -> tuple[bytes, int, int]:
    field: Field = field_of(name, dtype)
    tensor = load("grps").GenericTensor(name=name, dtype=field.number, shape=shape)
    return tensor.SerializeToString(), field.tag, prod(shape) * dtype.item_bytes
