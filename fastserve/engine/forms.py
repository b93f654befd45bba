"""The two forms of an arena, as the engine writes and reads them: columns, and slabs.

columns   every row has a known size: inputs are copied once, into the rows reserved for them
slabs     strings, free axes, no batch axis: inputs are copied once, into a slab of their own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fastserve.codec.slab_tensors import measure_tensors, read_tensors, write_tensors
from fastserve.engine.lane import Lane
from fastserve.errors import Kind, ServeError
from fastserve.tensor import Tensor


class Form(Protocol):
    """How tensors get into a place and out of it."""

    def write_inputs(self, lane: Lane, place: int, rows: int, inputs: Mapping[str, Tensor]) -> None:
        """Fill a reserved place. Raises ServeError when there is no room."""

    def read_outputs(self, lane: Lane, place: int, rows: int) -> dict[str, Tensor]:
        """The outputs of an answered place, as views. Raises ServeError when it failed by itself."""


class Columns:
    """Fixed-size rows."""

    def write_inputs(self, lane: Lane, place: int, rows: int, inputs: Mapping[str, Tensor]) -> None:
        for column, name in enumerate(lane.inputs):
            lane.ring.input_rows(place, rows, column)[:] = memoryview(inputs[name].data).cast("B")

    def read_outputs(self, lane: Lane, place: int, rows: int) -> dict[str, Tensor]:
        return {
            name: Tensor(spec.dtype, (rows, *(spec.shape or ())), lane.ring.output_rows(place, rows, column))
            for column, (name, spec) in enumerate(lane.outputs.items())
        }


class Slabs:
    """Tensors of any shape."""

    def write_inputs(self, lane: Lane, place: int, rows: int, inputs: Mapping[str, Tensor]) -> None:
        tensors = [(number, inputs[name]) for number, name in enumerate(lane.inputs)]
        size = measure_tensors(tensors)
        offset = lane.ring.lease(size)
        if offset == 0:
            lane.meters.rejected("queue_bytes")
            raise ServeError(
                Kind.UNAVAILABLE,
                f"no room for {size} bytes of inputs (max_queue_bytes)",
                retry_after_s=lane.meters.seconds_for(lane.ring.queued()),
            )
        try:
            write_tensors(lane.ring.slab(offset, size, True), tensors)
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
                raise ServeError(Kind(status), bytes(tensors[0][1].data).decode("utf-8", "replace"))
            names = list(lane.outputs)
            return {names[number]: tensor for number, tensor in tensors}
        except (ValueError, IndexError):
            raise ServeError(Kind.INTERNAL, "the worker's answer cannot be read") from None


COLUMNS, SLABS = Columns(), Slabs()


def form_of(lane: Lane) -> Form:
    """The form of the lane's arena."""
    return COLUMNS if lane.dense else SLABS


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
