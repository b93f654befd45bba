"""The fast path of POST .../infer: frames, requests that are as one before but for their values.

    {"id":"7","inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,2,3,4,5,6]}]}
          ^ id                               ^ rows                        ^ data

A frame is made of a request that the general path has answered: what its text means was found out there.
Every byte but the id, the number of rows and the values is part of the frame, so requests that fit it mean
the same, and nothing has to be checked again; `_ext.infer_frame` holds them together. Strings have no fixed
size, and no frames. For whatever has none, errors included, `FastHttp.start` returns False having left no
trace, and the general path reads the body again; it hands what it has answered to `learn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from fastserve._ext.infer_frame import InferFrame, find_holes
from fastserve._ext.infer_json import InferInput, read_infer
from fastserve._ext.infer_reply import InferWriter, UnwritableOutput
from fastserve.apart import APART_BYTES
from fastserve.dialects.kserve_v2.answers import BINARY, in_words, send, send_apart, write_answer
from fastserve.dialects.kserve_v2.request import Asked
from fastserve.dialects.kserve_v2.service import JSON, Service
from fastserve.engine import BatchQueue
from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.fast_path import FastPath
from fastserve.serving.learned_frames import LearnedFrames
from fastserve.serving.model_view import ModelView
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import Described, Later, Memory, PreparedRequest, ordinary_inputs
from fastserve.serving.rooms import Rooms
from fastserve.serving.shared_memory import LARGE_BYTES, Range, hold_files
from fastserve.tensor import Tensor
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call

MOST_TEXT_BYTES = 65536  # of a frame
MOST_FRAMES = 32


@dataclass(frozen=True, slots=True)
class Source:
    """An input in client memory: which target it is for, and where it lies."""

    target: int
    region: str
    offset: int
    row_bytes: int


@dataclass(slots=True)
class Parts:
    """A header taken apart, as InferFrame takes it. `rows` 0: the text says."""

    header: bytes
    targets: list[int]
    rows: int
    holes: list[tuple[str, int, int, int, int, int]] = field(default_factory=list)
    blobs: list[tuple[int, int]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


class Writer(InferWriter):
    """Writes replies whose outputs are `described` so."""

    def __init__(
        self, view: ModelView, outputs: Sequence[tuple[str, int, tuple[int, ...], str]], described: Described
    ) -> None:
        super().__init__(view.model, str(view.version.number), outputs)
        self.described = described
        sizes = [prod(shape) * dtype.item_bytes for _, dtype, shape in described]
        # Of all outputs together. None: nobody knows before how long strings are.
        self.nbytes = sum(sizes) if all(dtype.item_bytes for _, dtype, _ in described) else None


class Frame(InferFrame, PreparedRequest):
    """One text with holes, prepared."""

    def __init__(
        self,
        view: ModelView,
        queue: BatchQueue,
        service: Service,
        request: InferRequest,
        asked: Asked,
        parts: Parts,
    ) -> None:
        """`request` has the inputs' types and shapes, in the model's order, without their data."""
        super().__init__(
            parts.header, parts.holes, parts.blobs, parts.targets, parts.rows, request.request_id
        )
        self.lay_out_like(queue, request, batching=view.batching)
        self.outside = bool(parts.sources or asked.ranges)
        self._view, self._asked, self._sources = view, asked, parts.sources
        self._blobs = [target for target, _ in parts.blobs]
        self.all_behind = len(parts.blobs) == len(parts.targets)  # no input is in the JSON, or elsewhere
        self._regions, self._apart = service.regions, service.apart

    def fill(self, source: tuple[Memory | Arrived, int], memory: list[memoryview]) -> bool:
        """`source`: the body, and how much of it is JSON. What is much to copy is the general path's."""
        if self._sources and sum(self.rows * given.row_bytes for given in self._sources) >= LARGE_BYTES:
            return False
        body, header_bytes = source
        if isinstance(body, Arrived):
            return body.read_into([memory[target] for target in self._blobs], header_bytes)
        if not self.read_into(body, header_bytes, memory):
            return False
        for given in self._sources:
            range = Range(given.region, given.offset, self.rows * given.row_bytes)
            self._regions.read_into(range, memory[given.target])
        return True

    def hold(self) -> Rooms | None:
        return hold_files(self._regions, self._asked.ranges) if self._asked.ranges else None

    def make_writer(self, described: Described) -> Writer | None:
        view = self._view
        try:
            outputs = [
                (name, dtype.code, view.client_shape(name, shape), self._asked.form(name))
                for name, dtype, shape in described
            ]
            if len({output[0] for output in outputs}) < len(outputs):
                return None
            return Writer(view, outputs, described)
        except (UnwritableOutput, ValueError, LookupError):
            return None

    def write(
        self, exchange: Call, writer: Writer, memory: Sequence[Memory], request_id: str, held: Rooms | None
    ) -> Later | None:
        nbytes = writer.nbytes
        if nbytes is None:
            nbytes = sum(map(len, memory))
        if nbytes >= APART_BYTES:
            return self._write_apart(exchange, writer, memory, nbytes, request_id, held)
        if held:
            self._put_outside(writer, memory, held)
        packs = exchange.head.memo.packs
        head = b"" if packs else exchange.raw_head(BINARY if writer.binary else JSON)
        try:
            if head:
                exchange.reply_raw(writer.write(memory, request_id, head))
            else:
                json_bytes, text = writer.write_body(memory, request_id)
                send(exchange, json_bytes if writer.binary else 0, text)
        except UnwritableOutput as fault:
            raise in_words(fault) from None
        return None

    async def _write_apart(
        self,
        exchange: Call,
        writer: Writer,
        memory: Sequence[Memory],
        nbytes: int,
        request_id: str,
        held: Rooms | None,
    ) -> None:
        apart, own = self._apart, self.make_writer(writer.described)
        assert own is not None
        try:
            if held:
                await apart(nbytes, self._put_outside, own, memory, held)
            json_bytes, text = await apart(nbytes, own.write_body, memory, request_id)
        except UnwritableOutput as fault:
            raise in_words(fault) from None
        await send_apart(apart, exchange, json_bytes if own.binary else 0, text)

    def _put_outside(self, writer: Writer, memory: Sequence[Memory], held: Rooms) -> None:
        for (name, _, _), view in zip(writer.described, memory, strict=True):
            if name in held:
                held[name].put(name, view)

    def write_response(
        self, exchange: Call, response: InferResponse, request_id: str, held: Rooms | None
    ) -> None:
        send(exchange, *write_answer(self._view, self._asked, response, request_id, held or Rooms()))


class Outcome:
    """How requests of this target end."""

    answered = None

    def __init__(self, service: Service, version: Version) -> None:
        self._service, self._version = service, version

    def refused(self, exchange: Call, prepared: Frame, request_id: str, fault: ServeError) -> None:
        self._service.refuse(exchange, fault, self._version.model, version=self._version)


class FastHttp:
    """The frames of one version, for one target, before its fast path."""

    def __init__(self, path: FastPath, view: ModelView, service: Service) -> None:
        self.version = path.version
        self._path, self._view, self._service = path, view, service
        self._max_rows = path.queue.max_rows
        self._frames = LearnedFrames(MOST_FRAMES)

    @classmethod
    def open(cls, service: Service, version: Version) -> FastHttp | None:
        """That of a version; None for one that does more with a request than run or keep it."""
        view = service.views.of(version)
        if view.decoupled or service.forward_http:
            return None
        path = open_path(version, service.traffic, Outcome(service, version))
        return None if path is None else cls(path, view, service)

    def start(self, call: Call, header_bytes: int) -> bool:
        """Take the call, whose JSON has so many bytes, or return False: nothing has happened then."""
        frame: Frame | None = self._frames.find(call.body, header_bytes)  # type: ignore[assignment]
        if frame is None or frame.rows > self._max_rows:
            return False
        return self._path.start(call, frame, (call.body, header_bytes), frame.id)

    def take(self, call: Call, header_bytes: int, body: Arrived) -> bool:
        """The same of a body that is still in the socket, but for its JSON."""
        if header_bytes > len(body.begin):
            return False
        frame: Frame | None = self._frames.find(body.begin, header_bytes, len(body))  # type: ignore[assignment]
        if frame is None or frame.rows > self._max_rows or not frame.all_behind:
            return False
        if not self._path.takes_arrived(frame):
            return False
        return self._path.start(call, frame, (body, header_bytes), frame.id)

    def learn(self, data: Memory, header_bytes: int, asked: Asked, request: InferRequest) -> None:
        """Remember the frame of a request that `start` did not take and the general path has answered."""
        self._frames.learn(partial(self._make, data, header_bytes, asked, request))

    def _make(self, data: Memory, header_bytes: int, asked: Asked, request: InferRequest) -> Frame | None:
        """The frame of a request; None for one that has none."""
        queue, batching = self._path.queue, self._view.batching
        found = None if asked.classifies else ordinary_inputs(queue, request, batching=batching)
        if found is None:
            return None
        try:
            parts = _take_apart(bytes(memoryview(data)[:header_bytes]), found[1], found[0], batching=batching)
            bare = replace(request, inputs=found[1])
            return None if parts is None else Frame(self._view, queue, self._service, bare, asked, parts)
        except ValueError:  # more tensors or larger rows than a frame has
            return None


def _take_apart(header: bytes, inputs: dict[str, Tensor], rows: int, *, batching: bool) -> Parts | None:
    """`header` is b"" for a raw request."""
    row_bytes = [prod(tensor.shape) * tensor.dtype.item_bytes // rows for tensor in inputs.values()]
    parts = Parts(header, row_bytes, rows)
    if not header:
        parts.blobs = [(0, parts.targets[0])]
        return parts
    given = read_infer(header).inputs
    found = find_holes(header)
    if len(header) - sum(end - start for kind, start, end, _ in found if kind == "data") > MOST_TEXT_BYTES:
        return None
    targets = {name: target for target, name in enumerate(inputs)}
    has = {(kind, number) for kind, _, _, number in found}
    for number, part in enumerate(given):
        target = targets[part.name]
        if part.data_present:
            if ("data", number) not in has:
                return None
        elif "binary_data_size" in part.parameters:
            parts.blobs.append((target, parts.targets[target]))
        else:
            parts.sources.append(_find_source(part, target, parts.targets[target]))
    if batching and _says_rows(found, given):
        parts.rows = 0
    for kind, start, end, number in found:
        if parts.rows and kind in ("rows", "size"):
            continue
        if kind == "id" and any(hole[0] == "data" for hole in parts.holes):  # one id is a frame of its own
            continue
        name = given[number].name if number >= 0 else ""
        unit = _unit_of(kind, parts.targets, targets.get(name, 0), inputs.get(name))
        code = inputs[name].dtype.code if name else 0
        parts.holes.append(("rows" if kind == "size" else kind, start, end, unit, targets.get(name, 0), code))
    return parts


def _unit_of(kind: str, row_bytes: list[int], target: int, tensor: Tensor | None) -> int:
    """What one row counts for in a hole."""
    if tensor is None or kind == "rows":
        return 1
    return row_bytes[target] if kind == "size" else row_bytes[target] // tensor.dtype.item_bytes


def _says_rows(found: list[tuple[str, int, int, int]], given: list[InferInput]) -> bool:
    """Whether every number that goes with the rows was found, one of them before all data."""
    has = {(kind, number) for kind, _, _, number in found}
    numbers = [kind for kind, _, _, _ in found if kind in ("rows", "size", "data")]
    return numbers[:1] != ["data"] and all(
        ("rows", number) in has and (part.data_present or ("size", number) in has)
        for number, part in enumerate(given)
    )


def _find_source(part: InferInput, target: int, row_bytes: int) -> Source:
    offset = part.parameters.get("shared_memory_offset", 0)
    assert isinstance(offset, int)
    return Source(target, str(part.parameters["shared_memory_region"]), offset, row_bytes)
