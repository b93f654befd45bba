"""The fast path of Predict over gRPC: messages as long as one before that differ in their floats alone.

    model, gtensors{ tensors{ name, dtype, shape, flat_float32: |raw| } }

Packed floats lie in a message as they do in memory. What stands between them is compared, and they go into
the batch as they are. Numbers of other types are varints, of no fixed length: those take the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from fastserve._ext.proto_outline import MOST_HEAD_BYTES
from fastserve.dialects.grps.codec_grpc import find_raws, write_heads
from fastserve.dialects.grps.errors import code_of, failure_message, ok_message
from fastserve.dialects.grps.service import Service, speaks_messages
from fastserve.dialects.grps.tensors import Field, field_of, write_outputs
from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.fast_path import FastPath
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import Described, Memory, PreparedRequest
from fastserve.tensor import DType, Tensor

MOST_SIZES, MOST_OF_A_SIZE = 128, 8
RAW = ("float32", "float64")  # travel as they lie in memory


class Outcome:
    """How RPCs of one version end."""

    def __init__(self, service: Service, version: Version) -> None:
        self._service, self._model = service, version.model

    def answered(self, prepared: Any, took_ns: int, ran_ns: int) -> None:
        self._service.monitor.took(took_ns)

    def refused(self, exchange: RpcExchange, prepared: Any, request_id: Any, fault: ServeError) -> None:
        exchange.reply(failure_of(self._service, fault, self._model))


def failure_of(service: Service, fault: ServeError, model: str) -> bytes:
    """The message a client gets in place of an error of gRPC's own (spec 5); counted."""
    service.traffic.refused(model, fault.kind.name)
    return failure_message(code_of(fault, service.options), fault.message)


class Outline(PreparedRequest):
    """One message, but for its floats."""

    def __init__(
        self, path: FastPath, model: str, data: bytes, raws: Sequence[tuple[int, int]], request: InferRequest
    ) -> None:
        version, given = path.version, list(request.inputs)
        inputs = {name: request.inputs[name] for name in path.queue.inputs if name in request.inputs}
        bare = {name: Tensor(tensor.dtype, tensor.shape, b"") for name, tensor in inputs.items()}
        self.rows = next(iter(inputs.values())).shape[0] if version.batching else 1
        self.lay_out(path.queue, bare, (), batching=version.batching)
        self.path, self.model = path, model
        self._raws = [raws[given.index(name)] for name in inputs]
        edges = [0, *(edge for span in raws for edge in span), len(data)]
        self._literals = [(a, b, data[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def fits(self, data: bytes) -> bool:
        """Whether a message as long as this differs in its floats alone."""
        return all(data[first:last] == text for first, last, text in self._literals)

    def fill(self, source: bytes, memory: list[memoryview]) -> bool:
        view = memoryview(source)
        for (first, last), target in zip(self._raws, memory, strict=True):
            target[:] = view[first:last]
        return True

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
    """What is known of messages, by their length. One per front process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[int, list[Outline]] = {}
        service.keepers.add(self)

    def start(self, data: bytes, exchange: Any) -> bool:
        """Take a message, or return False: nothing has happened then."""
        for outline in self._known.get(len(data), ()):
            if outline.fits(data):
                if self._service.look_up(outline.model) is not outline.path.version:
                    return False
                deadline_ns = self._service.deadline_ns(exchange.received_ns)
                if exchange.deadline_ns and (not deadline_ns or exchange.deadline_ns < deadline_ns):
                    deadline_ns = exchange.deadline_ns
                return outline.path.start(exchange, outline, data, None, deadline_ns)
        return False

    def learn(
        self, data: bytes, message: Any, request: InferRequest, version: Version, patience_ns: int
    ) -> None:
        """Remember a message that the general path has answered."""
        if message.WhichOneof("data_oneof") != "gtensors" or speaks_messages(version):
            return
        if any(tensor.dtype.name not in RAW for tensor in request.inputs.values()):
            return
        raws = find_raws(data)
        sizes = [len(tensor.data) for tensor in request.inputs.values()]
        if [last - first for first, last in raws] != sizes:  # unpacked, in pieces, or in another field too
            return
        if len(data) - sum(sizes) > MOST_HEAD_BYTES:  # which is kept: fields nobody knows may be of any size
            return
        path = open_path(version, self._service.traffic, Outcome(self._service, version), patience_ns)
        if path is None or not _is_whole(path, request):
            return
        outline = Outline(path, message.model, data, raws, request)
        if not 0 < outline.rows <= path.queue.max_rows:
            return
        if len(self._known) >= MOST_SIZES:
            self._known.clear()
        self._known[len(data)] = [outline, *self._known.get(len(data), ())][:MOST_OF_A_SIZE]

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        self._known = {
            size: kept
            for size, known in self._known.items()
            if (kept := [outline for outline in known if outline.path.version is not version])
        }


def _is_whole(path: FastPath, request: InferRequest) -> bool:
    """Whether the queue is given what it needs."""
    names = set(path.queue.inputs)
    return set(request.inputs) <= names and (path.queue.requests or len(request.inputs) == len(names))


def _head(name: str, dtype: DType, shape: Sequence[int]) -> tuple[bytes, int, int]:
    field: Field = field_of(name, dtype)
    tensor = load("grps").GenericTensor(name=name, dtype=field.number, shape=shape)
    return tensor.SerializeToString(), field.tag, prod(shape) * dtype.item_bytes
