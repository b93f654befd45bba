"""The two forms of an arena, as the engine writes and reads them: columns, and slabs.

whole     for models that see requests: slabs, and what else the request says in a note
columns   every row has a known size: inputs are copied once, into the rows reserved for them
slabs     strings, free axes, no batch axis: inputs are copied once, into a slab of their own
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from fastserve._ext import slab_tensors
from fastserve.codec.notes import RequestNote, read_answer_note, write_note
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.lending import attach_lent
from fastserve.errors import Kind, ModelError, ServeError
from fastserve.request import Carry, InferRequest
from fastserve.tensor import DTYPE_BY_CODE, Tensor

if TYPE_CHECKING:
    from fastserve._ext.slab_tensors import Entry, Read

Answer = tuple[dict[str, Tensor], Mapping[str, object]]  # outputs by name, and parameters
Rest = Sequence[tuple[Carry, memoryview]]
"""Inputs of a place that are still to be written, and where."""
NONE: Mapping[str, object] = MappingProxyType({})
UNREADABLE = "the worker's answer cannot be read"
SLICE_BYTES = 1 << 20  # copied before another thread may have the interpreter
NO_ROOM = "no room for the outputs (max_queue_bytes)"


class Form(Protocol):
    """How tensors get into a place and out of it."""

    def write_inputs(
        self,
        queue: BatchQueue,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> Rest:
        """Fill a reserved place; `request` is whose inputs they are. What is left is what it has `carried`.
        Raises ServeError without room."""

    def read(self, queue: BatchQueue, place: int, rows: int) -> Answer:
        """The outputs of an answered place, as views, and the parameters that came with them. Raises
        ServeError when it failed by itself."""


class Columns:
    """Fixed-size rows."""

    def write_inputs(
        self,
        queue: BatchQueue,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> Rest:
        lent, carried = (request.lent, request.carried) if request is not None else ({}, {})
        rest = []
        for column, name in enumerate(queue.inputs):
            if name in lent:
                continue
            room, data = queue.ring.input_rows(place, rows, column), memoryview(inputs[name].data).cast("B")
            if len(room) != len(data):
                raise ValueError(f"input {name!r} has {len(data)} bytes, its rows {len(room)}")
            if name in carried:
                rest.append((carried[name], room))
                continue
            for at in range(0, len(data), SLICE_BYTES):
                room[at : at + SLICE_BYTES] = data[at : at + SLICE_BYTES]
        if request is not None and (lent or request.placed):
            attach_lent(queue, place, request)
        return rest

    def read(self, queue: BatchQueue, place: int, rows: int) -> Answer:
        outputs = {
            name: Tensor(spec.dtype, (rows, *(spec.shape or ())), queue.ring.output_rows(place, rows, column))
            for column, (name, spec) in enumerate(queue.outputs.items())
        }
        return outputs, NONE


class Slabs:
    """Tensors of any shape."""

    def write_inputs(
        self,
        queue: BatchQueue,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> Rest:
        given = {i: name for i, name in enumerate(queue.inputs) if name in inputs}
        return _put(queue, place, given, inputs, b"", request)

    def read(self, queue: BatchQueue, place: int, rows: int) -> Answer:
        status = queue.ring.place_status(place)
        try:
            entries, _ = _read_slab(queue, *queue.ring.answer_slab(place))
            if status:
                raise ModelError(Kind(status), bytes(entries[0][3]).decode("utf-8", "replace"))
            return _named(entries, list(queue.outputs)), NONE
        except (ValueError, LookupError):
            raise ServeError(Kind.INTERNAL, UNREADABLE) from None


class Whole:
    """A request as its model sees it: optional inputs may be missing, a scheduler may have added some."""

    def write_inputs(
        self,
        queue: BatchQueue,
        place: int,
        rows: int,
        inputs: Mapping[str, Tensor],
        request: InferRequest | None = None,
    ) -> Rest:
        given, extra = {i: name for i, name in enumerate(queue.inputs) if name in inputs}, []
        if len(given) < len(inputs):
            extra = [name for name in inputs if name not in queue.inputs]
            given |= {len(queue.inputs) + i: name for i, name in enumerate(extra)}
        try:
            note = note_of(request or InferRequest({}), extra)
        except (TypeError, ValueError):
            raise ServeError(Kind.INVALID_ARGUMENT, "parameters are strings, numbers and bools") from None
        return _put(queue, place, given, inputs, note, request)

    def read(self, queue: BatchQueue, place: int, rows: int) -> Answer:
        outputs, parameters, error = read_answer(queue, *queue.ring.answer_slab(place))
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame by its traceback, and the frame the queue
        return outputs, parameters


def _put(
    queue: BatchQueue,
    place: int,
    given: Mapping[int, str],
    inputs: Mapping[str, Tensor],
    note: bytes,
    request: InferRequest | None,
) -> Rest:
    """Inputs, by their numbers, into a slab of their own, which is the place's. Raises ServeError."""
    assert queue.desk is not None
    carried = request.carried if request is not None else {}
    entries: list[Entry] = [
        (i, inputs[n].dtype.code, inputs[n].shape, len(inputs[n].data) if n in carried else inputs[n].data)
        for i, n in given.items()
    ]
    try:
        offset, size = queue.desk.put(entries, note)
    except ValueError as error:
        raise ServeError(Kind.INVALID_ARGUMENT, str(error)) from None
    if not offset:
        queue.rejected("queue_bytes")
        raise ServeError(
            Kind.UNAVAILABLE,
            f"no room for {size} bytes of inputs (max_queue_bytes)",
            retry_after_s=queue.meters.seconds_for(queue.ring.queued()),
        )
    queue.ring.attach_slab(place, offset, size)
    if not carried:
        return ()
    written = slab_tensors.read(queue.ring.slab(offset, size, True))
    return [(carried[given[i]], room) for i, _, _, room in written if given[i] in carried]


def _read_slab(queue: BatchQueue, offset: int, size: int) -> tuple[list[Read], bytes]:
    if offset == 0:
        raise ServeError(Kind.RESOURCE_EXHAUSTED, NO_ROOM)
    assert queue.desk is not None
    return queue.desk.read(offset, size)


def _named(entries: list[Read], names: list[str]) -> dict[str, Tensor]:
    return {names[number]: Tensor(DTYPE_BY_CODE[code], shape, data) for number, code, shape, data in entries}


def read_answer(
    queue: BatchQueue, offset: int, size: int
) -> tuple[dict[str, Tensor], Mapping[str, object], ServeError | None]:
    """Outputs as views of a slab, their parameters, or the error in their place. Raises ServeError when
    they cannot be read."""
    try:
        entries, said = _read_slab(queue, offset, size)
        if not said:
            return _named(entries, list(queue.outputs)), NONE, None
        note = read_answer_note(said)
        if note.kind:
            return {}, NONE, ModelError(Kind(note.kind), note.message)
        return _named(entries, [*queue.outputs, *note.extra]), note.parameters, None
    except (ValueError, LookupError):
        raise ServeError(Kind.INTERNAL, UNREADABLE) from None


def choose(outputs: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Outputs by name. Raises ServeError for one that is not among the answer's: a model with signatures
    answers with those of the inputs it was given."""
    for name in names:
        if name not in outputs:
            text = f"output {name!r} does not come of these inputs, but {', '.join(outputs)}"
            raise ServeError(Kind.INVALID_ARGUMENT, text)
    return {name: outputs[name] for name in names}


COLUMNS, SLABS, WHOLE = Columns(), Slabs(), Whole()


def note_of(request: InferRequest, extra: list[str]) -> bytes:
    """What a model may ask of a request besides its tensors. Raises TypeError or ValueError for a parameter
    that is no scalar."""
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


def inputs_bytes(inputs: Mapping[str, Tensor], elsewhere: Collection[str] = ()) -> int:
    """How much there is to write, but of those that others write."""
    return sum(memoryview(tensor.data).nbytes for name, tensor in inputs.items() if name not in elsewhere)


def form_of(queue: BatchQueue) -> Form:
    """The form of the queue's arena."""
    return COLUMNS if queue.dense else WHOLE if queue.requests else SLABS


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
