"""Straight into a place: memory for inputs whose rows are known, and views of what was answered.

    layout = lay_out_inputs(queue, request.inputs)          after one request of this form was checked
    reservation = layout.reserve(rows)                      None: there is no room
    place, memory, slab = reservation
    ...every byte of memory is written...
    layout.settle(reservation); queue.submit(place, rows, ...)          or: layout.abandon(reservation, rows)

    found = lay_out_outputs(queue, names).read(place, rows)             (form, views) of an answered place

For the fast path: nothing is checked again, nothing copied. `forms` does the same for tensors of any form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

from fastserve._ext import slab_tensors
from fastserve._ext.fast_path import Columns, Pending
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.forms import choose, form_of
from fastserve.request import InferResponse
from fastserve.tensor import DTYPE_BY_CODE, DType, Tensor

MOST_LAYOUTS = 64
Described = list[tuple[str, DType, tuple[int, ...]]]
Found = tuple[Any, list[memoryview]]
# A reserved place, memory for the rows of each input in the layout's order, and its slab's (offset, bytes).
# Plain tuples: a request costs few microseconds, and an object with names is a third of one.
Reservation = tuple[int, list[memoryview], tuple[int, int]]
NO_SLAB = (0, 0)
# The bytes of a slab before the first tensor, where each tensor lies, and its size without a note.
Layout = tuple[bytes, list[tuple[int, int]], int]


class InputLayout(Protocol):
    """The way in for requests with the same inputs."""

    def reserve(self, rows: int, note: bytes = b"") -> Reservation | None:
        """A place, or None when there is no room. End it with settle or abandon."""

    def settle(self, reservation: Reservation) -> None:
        """The memory is written: the place can be submitted."""

    def abandon(self, reservation: Reservation, rows: int) -> None:
        """It will not be submitted, settled or not."""


class ColumnInputs(Columns):
    """Rows of fixed size, in the columns of a batch."""

    def __init__(self, queue: BatchQueue, names: Sequence[str]) -> None:
        columns = list(queue.inputs)
        super().__init__(queue.ring, [columns.index(name) for name in names])
        self._queue = queue

    def settle(self, reservation: Reservation) -> None:
        pass

    def abandon(self, reservation: Reservation, rows: int) -> None:
        self._queue.abandon(reservation[0], rows)


class SlabInputs:
    """Tensors of shapes that differ only in their rows, each request in a slab of its own."""

    def __init__(self, queue: BatchQueue, inputs: Mapping[str, Tensor], *, batching: bool) -> None:
        assert queue.desk is not None
        numbers = {name: number for number, name in enumerate(queue.inputs)}
        self._queue, self._desk = queue, queue.desk
        self._batching = batching
        self._tensors = [(numbers[name], tensor.dtype, tensor.shape) for name, tensor in inputs.items()]
        self._layouts: dict[tuple[int, bool], Layout] = {}

    def reserve(self, rows: int, note: bytes = b"") -> Reservation | None:
        queue = self._queue
        head, spans, size = self._layouts.get((rows, bool(note))) or self._lay_out(rows, noted=bool(note))
        place = queue.ring.reserve(rows)
        if place < 0:
            return None
        try:
            offset, size, memory = self._desk.lay(head, spans, size, note)
        except BaseException:
            queue.abandon(place, rows)
            raise
        if not offset:
            queue.abandon(place, rows)
            return None
        return place, memory, (offset, size)

    def settle(self, reservation: Reservation) -> None:
        place, _, (offset, size) = reservation
        self._queue.ring.attach_slab(place, offset, size)

    def abandon(self, reservation: Reservation, rows: int) -> None:
        place, _, (offset, _) = reservation
        self._queue.ring.return_lease(offset)
        self._queue.abandon(place, rows)

    def _lay_out(self, rows: int, *, noted: bool) -> Layout:
        described = []
        for number, dtype, shape in self._tensors:
            shape = (rows, *shape[1:]) if self._batching else shape
            described.append((number, dtype.code, shape, prod(shape) * dtype.item_bytes))
        head, starts, size = slab_tensors.lay_out(described, noted)
        spans = [(at, one[3]) for at, one in zip(starts, described, strict=True)]
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()
        found = self._layouts[rows, noted] = head, spans, size
        return found


def lay_out_inputs(queue: BatchQueue, inputs: Mapping[str, Tensor], *, batching: bool) -> InputLayout:
    """The way in for requests with such inputs. A queue of columns must be given all of the model's."""
    return ColumnInputs(queue, list(inputs)) if queue.dense else SlabInputs(queue, inputs, batching=batching)


class OutputLayout(Protocol):
    """The way out."""

    def read(self, place: int, rows: int) -> Found | None:
        """What tells answers of one form from others, and views of their outputs; None for an answer that
        `forms` has to read: errors, and what comes with more than tensors."""

    def describe(self, form: Any) -> Described:
        """The outputs of answers of this form, in the order of the views."""


class ColumnOutputs(Columns):
    """Rows of fixed size. `names` are the outputs wanted."""

    def __init__(self, queue: BatchQueue, names: Sequence[str]) -> None:
        columns = list(queue.outputs)
        super().__init__(queue.ring, [columns.index(name) for name in names])
        self._queue, self._names = queue, names

    def describe(self, form: Any) -> Described:
        specs = [self._queue.outputs[name] for name in self._names]
        return [(spec.name, spec.dtype, (form, *(spec.shape or ()))) for spec in specs]


class SlabOutputs:
    """Outputs as they came, or those of `names` where the queue does not leave the choice to the model."""

    def __init__(self, queue: BatchQueue, names: Sequence[str]) -> None:
        assert queue.desk is not None
        self._ring, self._desk = queue.ring, queue.desk
        self._names = list(queue.outputs)
        self._wanted = None if queue.requests else [self._names.index(name) for name in names]

    def read(self, place: int, rows: int) -> Found | None:
        offset, size = self._ring.answer_slab(place)
        if not offset or self._ring.place_status(place):
            return None
        found = self._desk.look(offset, size)
        if found is None or self._wanted is None:
            return found
        form, memory = found
        at = {number: index for index, (number, _, _) in enumerate(form)}
        if not at.keys() >= set(self._wanted):
            return None
        return tuple([form[at[n]] for n in self._wanted]), [memory[at[n]] for n in self._wanted]

    def describe(self, form: Any) -> Described:
        return [(self._names[number], DTYPE_BY_CODE[code], shape) for number, code, shape in form]


def lay_out_outputs(queue: BatchQueue, names: Sequence[str]) -> OutputLayout:
    """The way out for requests that want these outputs."""
    return ColumnOutputs(queue, names) if queue.dense else SlabOutputs(queue, names)


def read_response(queue: BatchQueue, pending: Pending, wanted: Sequence[str]) -> InferResponse:
    """The answer of a place in any form, with the outputs of `wanted` where that is not the model's choice.
    Its release is the pending's. Raises ServeError when the place failed by itself."""
    outputs, parameters = form_of(queue).read(queue, pending.place, pending.rows)
    if wanted and not queue.requests:
        outputs = choose(outputs, wanted)
    return InferResponse(outputs, None, dict(parameters))
