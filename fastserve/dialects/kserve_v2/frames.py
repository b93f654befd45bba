"""Frames: requests that are as one before, but for their values (`_ext.infer_frame` holds them together).

    {"id":"7","inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,2,3,4,5,6]}]}
          ^ id                               ^ rows                        ^ data

A frame is made of a request that the general door has answered: what its text means was found out there.
Every byte but the id, the number of rows and the values is part of the frame, so requests that fit it mean
the same, and nothing has to be checked again. Strings have no fixed size, and no frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from fastserve._ext.infer_frame import InferFrame, find_holes
from fastserve._ext.infer_json import InferInput, read_infer
from fastserve._ext.infer_reply import InferWriter, UnwritableOutput
from fastserve.dialects.kserve_v2.answers import Asked, client_shape
from fastserve.dialects.kserve_v2.body import InferBody
from fastserve.dialects.kserve_v2.plans import Plan
from fastserve.engine.cache import Sort
from fastserve.engine.direct import open_intake, open_outlet
from fastserve.engine.forms import note_of
from fastserve.engine.lane import Lane
from fastserve.request import InferRequest
from fastserve.tensor import Tensor

MOST_TEXT_BYTES = 65536  # of a frame
MOST_WRITERS = 64


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


class Frame(InferFrame):
    """One text with holes, and what requests of it need: a way in, a way out, writers of replies."""

    def __init__(self, plan: Plan, lane: Lane, request: InferRequest, asked: Asked, parts: Parts) -> None:
        """`request` has the inputs' types and shapes, in the model's order, without their data."""
        super().__init__(
            parts.header, parts.holes, parts.blobs, parts.targets, parts.rows, request.request_id
        )
        self.asked = asked
        self.sources = parts.sources
        self.outside = bool(parts.sources or asked.ranges)  # something of it is in client memory
        self.wanted = request.outputs
        self.intake = open_intake(lane, request.inputs, batching=plan.max_batch_size > 0)
        self.outlet = open_outlet(lane, request.outputs or list(lane.outputs))
        self.noted = lane.requests
        self._note = note_of(request, []) if lane.requests else b""
        self._request = request
        self._plan = plan
        self.writers: dict[object, InferWriter] = {}

    def sorts(self, rows: int) -> tuple[Sort, ...]:
        """Name, dtype code, shape and bytes of each input of a request of so many rows."""
        lead = (rows,) if self._plan.max_batch_size else ()
        found = []
        for name, tensor in self._request.inputs.items():
            shape = (*lead, *tensor.shape[len(lead) :])
            found.append((name, tensor.dtype.code, shape, prod(shape) * tensor.dtype.item_bytes))
        return tuple(found)

    def note(self) -> bytes:
        """What the model is told besides the tensors, of the request that was found; where it is `noted`."""
        if self.id != self._request.request_id:
            self._request.request_id = self.id
            self._note = note_of(self._request, [])
        return self._note

    def add_writer(self, form: object) -> InferWriter | None:
        """The writer of replies whose outputs have this form, from now on in `writers`; None when there
        can be none."""
        if len(self.writers) >= MOST_WRITERS:
            self.writers.clear()
        writer = self._make_writer(form)
        if writer is not None:
            self.writers[form] = writer
        return writer

    def _make_writer(self, form: object) -> InferWriter | None:
        plan = self._plan
        try:
            outputs = [
                (name, dtype.code, client_shape(plan, name, shape), self.asked.form(name))
                for name, dtype, shape in self.outlet.describe(form)
            ]
            if len({output[0] for output in outputs}) < len(outputs):
                return None
            return InferWriter(plan.model, str(plan.version.number), outputs)
        except (UnwritableOutput, ValueError, LookupError):
            return None


def learn(plan: Plan, lane: Lane, header: bytes, body: InferBody, request: InferRequest) -> Frame | None:
    """The frame of a request that was answered; None for one that has none. `header` is b"" for a raw one."""
    asked = Asked.of(body)
    batching = plan.max_batch_size > 0
    # Columns are all filled; the order is the model's, which may look at it.
    inputs = {name: request.inputs[name] for name in lane.inputs if name in request.inputs}
    all_given = len(inputs) == len(request.inputs) and (not lane.dense or len(inputs) == len(lane.inputs))
    if asked.classifies or not inputs or not all_given:
        return None
    rows = next(iter(inputs.values())).shape[0] if batching else 1
    if not 0 < rows <= lane.max_rows or any(_row_bytes(tensor, rows) < 1 for tensor in inputs.values()):
        return None
    bare = {name: Tensor(tensor.dtype, tensor.shape, b"") for name, tensor in inputs.items()}
    try:
        parts = _take_apart(header, inputs, rows, batching=batching)
        return None if parts is None else Frame(plan, lane, replace(request, inputs=bare), asked, parts)
    except ValueError:  # more tensors or larger rows than a frame has
        return None


def _row_bytes(tensor: Tensor, rows: int) -> int:
    return prod(tensor.shape) * tensor.dtype.item_bytes // max(rows, 1)


def _take_apart(header: bytes, inputs: dict[str, Tensor], rows: int, *, batching: bool) -> Parts | None:
    parts = Parts(header, [_row_bytes(tensor, rows) for tensor in inputs.values()], rows)
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
