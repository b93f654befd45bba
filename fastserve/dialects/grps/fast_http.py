"""The fast path of predict over HTTP: gtensors as JSON that differ from a request before in their numbers
alone, and bodies that are nothing but the numbers of the model's one input.

A frame is the text of a request that the general path has answered, with holes for the number of rows and the
values (`_ext.infer_frame`). Anything else, errors included, is left without a trace to the general path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fastserve._ext.infer_frame import InferFrame
from fastserve.apart import APART_BYTES
from fastserve.dialects.grps.codec_http import find_arrays
from fastserve.dialects.grps.errors import OK_JSON
from fastserve.dialects.grps.heads import BIN, content_kind
from fastserve.dialects.grps.replies import tensor_head, write_json, write_numbers
from fastserve.dialects.grps.service import BYTES, Answered, Service, speaks_messages
from fastserve.dialects.grps.tensors import BY_DTYPE, field_of, raw_rows, write_outputs
from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.fast_path import FastPath
from fastserve.serving.learned_frames import LearnedFrames
from fastserve.serving.paths import LastPath, open_path
from fastserve.serving.prepared import Described, Later, Memory, PreparedRequest, ordinary_inputs, put_bytes
from fastserve.tensor import Tensor
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call

if TYPE_CHECKING:
    from fastserve.dialects.grps.asking import Asked

MOST_FRAMES = 64  # of all models of a path
MOST_TEXT_BYTES = 65536  # of a frame
MOST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read apart from the event loop
_SHAPE = re.compile(rb'"shape"\s*:\s*\[\s*([0-9]+)')
FRAMED = ("float32", "float64", "int64")  # of the others V2 takes numbers that have no room, and wraps them
Hole = tuple[str, int, int, int, int, int]


class Outcome(Answered):
    """How requests of one version end."""

    def refused(self, exchange: Call, prepared: Any, request_id: Any, fault: ServeError) -> None:
        self.service.refuse(exchange, fault, self.model)


class Frame(InferFrame, PreparedRequest):
    """One text with holes, for one version."""

    def __init__(
        self, service: Service, path: FastPath, inputs: dict[str, Tensor], parts: Parts, model: str
    ) -> None:
        targets = [prod(t.shape) * t.dtype.item_bytes // parts.first_rows for t in inputs.values()]
        super().__init__(parts.text, parts.holes, [], targets, parts.rows)
        self.lay_out(path.queue, inputs, (), batching=path.version.batching)
        self.path, self.model, self._service = path, model, service

    def fill(self, source: Memory, memory: list[memoryview]) -> bool:
        return self.read_into(source, len(source), memory)

    def make_writer(self, described: Described) -> Writer | None:
        return Writer.of(self._service, described)

    def write(
        self, exchange: Call, writer: Writer, memory: Sequence[Memory], request_id: Any, held: Any
    ) -> Later | None:
        if (nbytes := sum(map(len, memory))) >= APART_BYTES:
            return self._write_apart(exchange, writer, memory, nbytes)
        self._service.answer(exchange, writer.write(memory))
        return None

    async def _write_apart(
        self, exchange: Call, writer: Writer, memory: Sequence[Memory], nbytes: int
    ) -> None:
        self._service.answer(exchange, await self._service.apart(nbytes, writer.write, memory))

    def write_response(self, exchange: Call, response: InferResponse, request_id: Any, held: Any) -> None:
        message = write_outputs(load("grps").GrpsMessage(gtensors={}), response.outputs)
        self._service.answer(exchange, write_json(message, self._service.options, OK_JSON))


class Writer:
    """Writes answers whose outputs are `described` so."""

    def __init__(self, service: Service, described: Described) -> None:
        self._options = service.options
        self._parts = []
        before = OK_JSON + b',"gtensors":{"tensors":['
        for name, dtype, shape in described:
            field = field_of(name, dtype)
            head = before + tensor_head(name, field.number, shape)
            count = prod(shape)
            self._parts.append((head + b',"%b":' % field.name.encode() if count else head, dtype.name, count))
            before = b"},"

    @classmethod
    def of(cls, service: Service, described: Described) -> Writer | None:
        """None for outputs that the general path has to look at."""
        if (
            any(dtype.name == "bytes" or dtype.name not in BY_DTYPE for _, dtype, _ in described)
            or not described
        ):
            return None
        return cls(service, described)

    def write(self, memory: Sequence[Memory]) -> bytes:
        pieces = []
        for (head, dtype, count), data in zip(self._parts, memory, strict=True):
            pieces.append(head)
            if count:
                pieces.append(write_numbers(data, dtype, count, self._options))
        pieces.append(b"}]}}")
        return b"".join(pieces)


class RawRows(PreparedRequest):
    """Bodies that are the little-endian rows of a model's one input; the answer is its one output, so."""

    def __init__(self, service: Service, version: Version, path: FastPath) -> None:
        self.version, self._path, self._service = version, path, service
        ((name, self.spec),) = version.inputs.items()
        shape = self.spec.shape or ()
        inputs = {name: Tensor(self.spec.dtype, (1, *shape) if version.batching else shape, b"")}
        self.lay_out(path.queue, inputs, (), batching=version.batching)

    @classmethod
    def open(cls, service: Service, version: Version) -> RawRows | None:
        """That of a version; None for one with other tensors, or without a fast path."""
        if len(version.inputs) != 1 or len(version.outputs) != 1:
            return None
        specs = (*version.inputs.values(), *version.outputs.values())
        if not all(spec.row_bytes for spec in specs) or speaks_messages(version):
            return None
        path = open_path(version, service.traffic, Outcome(service, version))
        return None if path is None else cls(service, version, path)

    def start(self, call: Call, body: Memory | Arrived) -> bool:
        """Take the call, or return False: nothing has happened then."""
        shape = raw_rows(self.version, self.spec, len(body))
        if shape is None:
            return False
        self.rows = shape[0] if self.version.batching else 1
        deadline_ns = self._service.deadline_ns(call.received_ns)
        return self.rows <= self._path.queue.max_rows and self._path.start(
            call, self, body, None, deadline_ns
        )

    def take(self, call: Call, body: Arrived) -> bool:
        """The same of rows that are still in the socket."""
        return self._path.takes_arrived(self) and self.start(call, body)

    def fill(self, source: Memory | Arrived, memory: list[memoryview]) -> bool:
        return put_bytes(source, memory)

    def make_writer(self, described: Described) -> bool:
        return True

    def write(
        self, exchange: Call, writer: bool, memory: Sequence[Memory], request_id: Any, held: Any
    ) -> None:
        exchange.reply(200, bytes(memory[0]), BYTES)

    def write_response(self, exchange: Call, response: InferResponse, request_id: Any, held: Any) -> None:
        ((_, tensor),) = response.outputs.items()
        exchange.reply(200, bytes(tensor.data), BYTES)


class FastHttp:
    """What is known of the requests of one target."""

    def __init__(self, service: Service, model: str) -> None:
        self._service, self._model = service, model
        self._frames = LearnedFrames(MOST_FRAMES)
        self._raw: LastPath[RawRows] = LastPath(
            service.keepers, lambda version: RawRows.open(service, version)
        )
        self._learned: LastPath[FastPath] = LastPath(service.keepers, self._open)
        service.keepers.add(self)

    def start(self, call: Call) -> bool:
        """Take the call, or return False: nothing has happened then."""
        if len(call.body) > MOST_BYTES:
            return False
        service, kind = self._service, self._kind(call)
        if not kind:
            return False
        if kind == BIN:
            raw = self._raw.find(service.look_up(self._model))
            return raw is not None and raw.start(call, call.body)
        frame: Frame | None = self._frames.find(call.body, len(call.body))  # type: ignore[assignment]
        if frame is None or frame.rows > frame.path.queue.max_rows:
            return False
        if service.look_up(frame.model) is not frame.path.version:
            return False
        return frame.path.start(call, frame, call.body, None, service.deadline_ns(call.received_ns))

    def take(self, call: Call, body: Arrived) -> bool:
        """The same of rows that are still in the socket; of anything else the whole body is looked at."""
        if len(body) > MOST_BYTES or self._kind(call) != BIN:
            return False
        raw = self._raw.path
        return raw is not None and raw.version is self._service.look_up(self._model) and raw.take(call, body)

    def _kind(self, call: Call) -> str:
        """That of the body; "" for one that the general path refuses."""
        try:
            return call.head.memo or content_kind(call, self._service.options)
        except ServeError:
            return ""

    def learn(self, call: Call, asked: Asked, request: InferRequest) -> None:
        """Remember the frame of a request that `start` did not take and the general path has answered."""
        if asked.message.WhichOneof("data_oneof") != "gtensors" or speaks_messages(asked.version):
            return
        path = self._learned.find(asked.version)
        if path is None:
            return
        self._frames.learn(partial(self._make, bytes(call.body), asked, path, request))

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        self._frames = LearnedFrames(MOST_FRAMES)

    def _open(self, version: Version) -> FastPath | None:
        return open_path(version, self._service.traffic, Outcome(self._service, version))

    def _make(self, text: bytes, asked: Asked, path: FastPath, request: InferRequest) -> Frame | None:
        version = asked.version
        found = ordinary_inputs(path.queue, request, batching=version.batching)
        if found is None:
            return None
        inputs = found[1]
        parts = Parts.of(text, list(request.inputs.items()), list(inputs), version)
        if parts is None:
            return None
        try:
            return Frame(self._service, path, inputs, parts, asked.message.model or self._model)
        except ValueError:  # more tensors or larger rows than a frame has
            return None


@dataclass(frozen=True, slots=True)
class Parts:
    """A text taken apart, as InferFrame takes it. `rows` 0: the text says; `first_rows` are its own."""

    text: bytes
    holes: list[Hole]
    rows: int
    first_rows: int

    @classmethod
    def of(
        cls, text: bytes, given: list[tuple[str, Tensor]], order: list[str], version: Version
    ) -> Parts | None:
        """`given`: the tensors in the order of the text; `order`: of the model. None for a hole in doubt."""
        arrays = list(find_arrays(text))
        shapes = list(_SHAPE.finditer(text))
        values = sum(last - first for _, first, last, _ in arrays)
        if len(arrays) != len(given) or len(text) - values > MOST_TEXT_BYTES or b"\\" in text:
            return None
        if any(tensor.dtype.name not in FRAMED for _, tensor in given):
            return None
        first_rows = given[0][1].shape[0] if version.batching and given[0][1].shape else 1
        if not first_rows:
            return None
        counted = version.batching and len(shapes) == len(given)
        counted = counted and all(s.start() < a[0] for s, a in zip(shapes, arrays, strict=True))
        holes: list[Hole] = []
        for number, (name, tensor) in enumerate(given):
            if counted:
                holes.append(("rows", *shapes[number].span(1), 1, 0, 0))
            _, first, last, _ = arrays[number]
            unit = prod(tensor.shape) // first_rows
            holes.append(("data", first, last, unit, order.index(name), tensor.dtype.code))
        return cls(text, sorted(holes, key=itemgetter(1)), 0 if counted else first_rows, first_rows)
