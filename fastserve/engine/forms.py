"""The two forms of an arena, as the engine writes and reads them: columns, and slabs.

whole     for models that see requests: slabs, and what else the request says in a note
columns   every row has a known size: inputs are copied once, into the rows reserved for them
slabs     strings, free axes, no batch axis: inputs are copied once, into a slab of their own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from fastserve.codec.notes import RequestNote, read_answer_note, write_note
from fastserve.codec.slab_tensors import measure_tensors, read_note, read_tensors, write_tensors
from fastserve.engine.lane import Lane
from fastserve.errors import Kind, ModelError, ServeError
from fastserve.request import InferRequest
from fastserve.tensor import Tensor

NONE: Mapping[str, object] = MappingProxyType({})
UNREADABLE = "the worker's answer cannot be read"


class Form(Protocol):
    """How tensors get into a place and out of it."""

    def write_inputs(
        self,
        lane: Lane,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> None:
        """Fill a reserved place; `request` is whose inputs they are. Raises ServeError without room."""

    def read_outputs(self, lane: Lane, place: int, rows: int) -> dict[str, Tensor]:
        """The outputs of an answered place, as views. Raises ServeError when it failed by itself."""

    def read_parameters(self, lane: Lane, place: int) -> dict[str, object]:
        """What came with the outputs of a place that did not fail."""


class Columns:
    """Fixed-size rows."""

    def write_inputs(
        self,
        lane: Lane,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> None:
        for column, name in enumerate(lane.inputs):
            lane.ring.input_rows(place, rows, column)[:] = memoryview(inputs[name].data).cast("B")

    def read_outputs(self, lane: Lane, place: int, rows: int) -> dict[str, Tensor]:
        return {
            name: Tensor(spec.dtype, (rows, *(spec.shape or ())), lane.ring.output_rows(place, rows, column))
            for column, (name, spec) in enumerate(lane.outputs.items())
        }

    def read_parameters(self, lane: Lane, place: int) -> dict[str, object]:
        return {}


class Slabs:
    """Tensors of any shape."""

    def write_inputs(
        self,
        lane: Lane,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> None:
        self._write(lane, place, [(number, inputs[name]) for number, name in enumerate(lane.inputs)], b"")

    def _write(self, lane: Lane, place: int, tensors: list[tuple[int, Tensor]], note: bytes) -> None:
        size = measure_tensors(tensors, note)
        offset = lane.ring.lease(size)
        if offset == 0:
            lane.meters.rejected("queue_bytes")
            raise ServeError(
                Kind.UNAVAILABLE,
                f"no room for {size} bytes of inputs (max_queue_bytes)",
                retry_after_s=lane.meters.seconds_for(lane.ring.queued()),
            )
        try:
            write_tensors(lane.ring.slab(offset, size, True), tensors, note)
        except ValueError as error:
            lane.ring.return_lease(offset)
            raise ServeError(Kind.INVALID_ARGUMENT, str(error)) from None
        lane.ring.attach_slab(place, offset, size)

    def read_outputs(self, lane: Lane, place: int, rows: int) -> dict[str, Tensor]:
        offset, size = lane.ring.answer_slab(place)
        status = lane.ring.place_status(place)
        if offset == 0:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, "no room for the outputs (max_queue_bytes)")
        try:
            tensors = read_tensors(lane.ring.slab(offset, size))
            if status:
                raise ModelError(Kind(status), bytes(tensors[0][1].data).decode("utf-8", "replace"))
            names = list(lane.outputs)
            return {names[number]: tensor for number, tensor in tensors}
        except (ValueError, IndexError):
            raise ServeError(Kind.INTERNAL, UNREADABLE) from None

    def read_parameters(self, lane: Lane, place: int) -> dict[str, object]:
        return {}


class Whole(Slabs):
    """A request as its model sees it: optional inputs may be missing, a scheduler may have added some."""

    def write_inputs(
        self,
        lane: Lane,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> None:
        tensors = [(i, inputs[name]) for i, name in enumerate(lane.inputs) if name in inputs]
        extra = [name for name in inputs if name not in lane.inputs]
        tensors += [(len(lane.inputs) + i, inputs[name]) for i, name in enumerate(extra)]
        try:
            note = _write_note(request or InferRequest({}), extra)
        except (TypeError, ValueError):
            raise ServeError(Kind.INVALID_ARGUMENT, "parameters are strings, numbers and bools") from None
        self._write(lane, place, tensors, note)

    def read_outputs(self, lane: Lane, place: int, rows: int) -> dict[str, Tensor]:
        offset, size = lane.ring.answer_slab(place)
        if offset == 0:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, "no room for the outputs (max_queue_bytes)")
        outputs, _, error = read_answer(lane, offset, size)
        if error is not None:
            raise error
        return outputs

    def read_parameters(self, lane: Lane, place: int) -> dict[str, object]:
        return dict(read_answer(lane, *lane.ring.answer_slab(place))[1])


def read_answer(
    lane: Lane, offset: int, size: int
) -> tuple[dict[str, Tensor], Mapping[str, object], ServeError | None]:
    """Outputs as views of a slab, their parameters, or the error in their place. Raises ServeError when
    they cannot be read."""
    try:
        slab = lane.ring.slab(offset, size)
        tensors, note = read_tensors(slab), read_answer_note(read_note(slab))
        if note.kind:
            return {}, NONE, ModelError(Kind(note.kind), note.message)
        names = [*lane.outputs, *note.extra]
        return {names[number]: tensor for number, tensor in tensors}, note.parameters, None
    except (ValueError, IndexError):
        raise ServeError(Kind.INTERNAL, UNREADABLE) from None


COLUMNS, SLABS, WHOLE = Columns(), Slabs(), Whole()


def _write_note(request: InferRequest, extra: list[str]) -> bytes:
    said = request.request_id or request.parameters or request.outputs or request.sequence_id or extra
    flags = request.sequence_start | request.sequence_end << 1
    if not (said or flags or request.timeout_us or request.priority):
        return b""
    note = RequestNote(
        request_id=request.request_id,
        sequence_id=request.sequence_id,
        flags=flags,
        timeout_us=request.timeout_us,
        priority=request.priority,
        parameters=request.parameters,  # type: ignore[arg-type]
        outputs=list(request.outputs),
        extra=extra,
    )
    return write_note(note)


def form_of(lane: Lane) -> Form:
    """The form of the lane's arena."""
    return COLUMNS if lane.dense else WHOLE if lane.requests else SLABS


def join_parts(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The answers of a split request, in order, as one."""
    joined = {}
    for name, first in parts[0].items():
        pieces = [part[name] for part in parts]
        if any(piece.shape[1:] != first.shape[1:] for piece in pieces):
            raise ServeError(Kind.INTERNAL, f"output {name!r}: the pieces of a split request differ in shape")
        shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
        joined[name] = Tensor(first.dtype, shape, b"".join(piece.data for piece in pieces))
    return joined
