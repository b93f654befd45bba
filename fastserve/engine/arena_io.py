"""Arena I/O: how tensors of requests get into the shared memory of a version, and answers out of it.

    dense     every row has a known size: inputs are copied once, into the rows reserved for them
    slabs     strings, free axes, no batch axis: inputs are copied once, into a slab of their own
    requests  models that see whole requests: slabs, and a note with the request's id, parameters, ...

The fast path writes without a copy and without another check, by a layout made from the first request:

    layout = lay_out_inputs(queue, request.inputs)
    reserved = layout.reserve(rows)                          None: there is no room
    lease, memory, slab = reserved
    ...every byte of memory is written...
    layout.settle(reserved); queue.submit(lease, rows, ...)                or: layout.abandon(reserved, rows)

    found = lay_out_outputs(queue, names).read(lease, rows)             (form, views) of an answered lease
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from fastserve._ext import slab_tensors
from fastserve._ext.fast_path import Columns, Ticket
from fastserve.codec.slab_contents import RequestNote, read_answer_note, write_note
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.device_memory import attach_lent
from fastserve.errors import Kind, ModelError, Reason, ServeError, internal, invalid, unpack_status
from fastserve.request import InferRequest, InferResponse, Repeated, by_name
from fastserve.tensor import DTYPE_BY_CODE, DType, Tensor

if TYPE_CHECKING:
    from fastserve._ext.slab_tensors import Entry, Read


ArenaAnswer = tuple[dict[str, Tensor], Mapping[str, object], Repeated]

"""Outputs by name, parameters, and what an InferResponse has as `repeated`."""

NONE: Mapping[str, object] = MappingProxyType({})

UNREADABLE = "the worker's answer cannot be read"

SLICE_BYTES = 1 << 20  # copied before another thread may have the interpreter

NO_ROOM = "no room for the outputs (max_queue_bytes)"


class ArenaIO:
    """Reads and writes the tensors of requests in the arena of one queue."""

    __slots__ = ("_queue",)

    def __init__(self, queue: BatchQueue) -> None:
        self._queue = queue

    def write_inputs(
        self, lease: int, rows: int, inputs: Mapping[str, Tensor], request: InferRequest | None = None
    ) -> None:
        """Write the inputs of `request` into a reserved lease. Raises ServeError without room."""
        queue = self._queue
        if queue.dense:
            _fill_columns(queue, lease, rows, inputs, request)
            return
        given, note = {i: name for i, name in enumerate(queue.inputs) if name in inputs}, b""
        if queue.requests:
            extra = [name for name in inputs if name not in queue.inputs]  # a scheduler may have added some
            given |= {len(queue.inputs) + i: name for i, name in enumerate(extra)}
            try:
                note = request_note(request or InferRequest({}), extra)
            except (TypeError, ValueError):
                raise invalid("parameters are strings, numbers and bools") from None
        _put(queue, lease, given, inputs, note)

    def read(self, lease: int, rows: int) -> ArenaAnswer:
        """Return the outputs of an answered lease, as views, with their parameters. Raises ServeError when
        the lease failed by itself."""
        queue = self._queue
        if queue.dense:
            outputs = {
                name: Tensor(
                    spec.dtype, (rows, *(spec.shape or ())), queue.ring.output_rows(lease, rows, column)
                )
                for column, (name, spec) in enumerate(queue.outputs.items())
            }
            return outputs, NONE, ()
        offset, size = queue.ring.answer_slab(lease)
        if not queue.requests and (status := queue.ring.lease_status(lease)):
            raise _read_fault(queue, status, offset, size)
        answer, error = read_answer(queue, offset, size)
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame by its traceback, and the frame the queue
        return answer


def _fill_columns(
    queue: BatchQueue, lease: int, rows: int, inputs: Mapping[str, Tensor], request: InferRequest | None
) -> None:
    lent = request.lent if request is not None else {}
    for column, name in enumerate(queue.inputs):
        if name in lent:
            continue
        room, data = queue.ring.input_rows(lease, rows, column), memoryview(inputs[name].data).cast("B")
        if len(room) != len(data):
            raise ValueError(f"input {name!r} has {len(data)} bytes, its rows {len(room)}")
        for at in range(0, len(data), SLICE_BYTES):
            room[at : at + SLICE_BYTES] = data[at : at + SLICE_BYTES]
    if request is not None and (lent or request.placed):
        attach_lent(queue, lease, request)


def _read_fault(queue: BatchQueue, status: int, offset: int, size: int) -> ServeError:
    """Return the error that a lease of a slab ended with, whose text is the slab's first entry."""
    kind, reason = unpack_status(status)
    try:
        entries, _ = _read_slab(queue, offset, size)
        return ModelError(kind, bytes(entries[0][3]).decode("utf-8", "replace"), reason=reason)
    except (ValueError, LookupError):
        return internal(UNREADABLE)


def _put(
    queue: BatchQueue,
    lease: int,
    given: Mapping[int, str],
    inputs: Mapping[str, Tensor],
    note: bytes,
) -> None:
    """Inputs, by their numbers, into a slab of their own, which is the lease's. Raises ServeError."""
    assert queue.codec is not None
    entries: list[Entry] = [
        (i, inputs[name].dtype.code, inputs[name].shape, inputs[name].data) for i, name in given.items()
    ]
    try:
        offset, size = queue.codec.put(entries, note)
    except ValueError as error:
        raise invalid(str(error)) from None
    if not offset:
        queue.rejected("queue_bytes")
        raise ServeError(
            Kind.UNAVAILABLE,
            f"no room for {size} bytes of inputs (max_queue_bytes)",
            retry_after_s=queue.metrics.seconds_for(queue.ring.queued()),
            reason=Reason.QUEUE_FULL,
        )
    queue.ring.attach_slab(lease, offset, size)


def _read_slab(queue: BatchQueue, offset: int, size: int) -> tuple[list[Read], bytes]:
    if offset == 0:
        raise ServeError(Kind.RESOURCE_EXHAUSTED, NO_ROOM)
    assert queue.codec is not None
    return queue.codec.read(offset, size)


def _named(entries: list[Read], names: list[str]) -> tuple[dict[str, Tensor], Repeated]:
    return by_name(
        [(names[number], Tensor(DTYPE_BY_CODE[code], shape, data)) for number, code, shape, data in entries]
    )


def read_answer(queue: BatchQueue, offset: int, size: int) -> tuple[ArenaAnswer, ServeError | None]:
    """Return the outputs in a slab, as views, with their parameters; or the error that replaces them. Raises
    ServeError when the slab cannot be read."""
    try:
        entries, said = _read_slab(queue, offset, size)
        if not said:
            outputs, repeated = _named(entries, list(queue.outputs))
            return (outputs, NONE, repeated), None
        note = read_answer_note(said)
        if note.kind:
            return ({}, NONE, ()), ModelError(Kind(note.kind), note.message)
        outputs, repeated = _named(entries, [*queue.outputs, *note.extra])
        return (outputs, note.parameters, repeated), None
    except (ValueError, LookupError):
        raise internal(UNREADABLE) from None


def choose(outputs: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the outputs of these names. Raises ServeError for one that the answer lacks: the outputs of a
    model with signatures depend on its inputs."""
    for name in names:
        if name not in outputs:
            text = f"output {name!r} does not come of these inputs, but {', '.join(outputs)}"
            raise invalid(text)
    return {name: outputs[name] for name in names}


def request_note(request: InferRequest, extra: list[str]) -> bytes:
    """Write the note with a request's id, parameters and flags for its model. Raises TypeError or ValueError
    for a parameter that is no scalar."""
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


def tensors_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes tensors have together."""
    return sum(memoryview(tensor.data).nbytes for tensor in tensors.values())


def join_parts(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the answers to the parts of a split request, in order."""
    joined = {}
    for name, first in parts[0].items():
        pieces = [part[name] for part in parts]
        if any(piece.shape[1:] != first.shape[1:] for piece in pieces):
            raise internal(f"output {name!r}: the pieces of a split request differ in shape")
        shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
        joined[name] = Tensor(first.dtype, shape, _join(piece.data for piece in pieces))
    return joined


def _join(pieces: Iterable[bytes | bytearray | memoryview]) -> bytearray:
    """Join pieces of memory. Other threads may have the interpreter after each and each SLICE_BYTES."""
    joined = bytearray()
    for piece in pieces:
        data = memoryview(piece).cast("B")
        for at in range(0, len(data), SLICE_BYTES):
            joined += data[at : at + SLICE_BYTES]
    return joined


MOST_LAYOUTS = 64

Described = list[tuple[str, DType, tuple[int, ...]]]

Found = tuple[Any, list[memoryview]]

# A reserved lease, memory for the rows of each input in the layout's order, and its slab's (offset, bytes).
# Plain tuples: a request costs few microseconds, and an object with names is a third of one.
SliceLease = tuple[int, list[memoryview], tuple[int, int]]

# The bytes of a slab before the first tensor, where each tensor lies, and its size without a note.
Layout = tuple[bytes, list[tuple[int, int]], int]


class InputLayout(Protocol):
    """Writes the inputs of requests whose inputs have the same names, dtypes and row shapes."""

    def reserve(self, rows: int, note: bytes = b"") -> SliceLease | None:
        """Reserve a lease; None when there is no room. Finish with `settle` or `abandon`."""

    def settle(self, reservation: SliceLease) -> None:
        """Make the lease ready to submit, after its memory was written."""

    def abandon(self, reservation: SliceLease, rows: int) -> None:
        """Give the lease back unsubmitted, settled or not."""


class ColumnInputs(Columns):
    """Rows of fixed size, in the columns of a batch."""

    def __init__(self, queue: BatchQueue, names: Sequence[str]) -> None:
        columns = list(queue.inputs)
        super().__init__(queue.ring, [columns.index(name) for name in names])
        self._queue = queue

    def settle(self, reservation: SliceLease) -> None:
        pass

    def abandon(self, reservation: SliceLease, rows: int) -> None:
        self._queue.abandon(reservation[0], rows)


class SlabInputs:
    """Tensors of shapes that differ only in their rows, each request in a slab of its own."""

    def __init__(self, queue: BatchQueue, inputs: Mapping[str, Tensor], *, batching: bool) -> None:
        assert queue.codec is not None
        numbers = {name: number for number, name in enumerate(queue.inputs)}
        self._queue, self._codec = queue, queue.codec
        self._batching = batching
        self._tensors = [(numbers[name], tensor.dtype, tensor.shape) for name, tensor in inputs.items()]
        self._layouts: dict[tuple[int, bool], Layout] = {}

    def reserve(self, rows: int, note: bytes = b"") -> SliceLease | None:
        queue = self._queue
        head, spans, size = self._layouts.get((rows, bool(note))) or self._lay_out(rows, noted=bool(note))
        lease = queue.ring.reserve(rows)
        if lease < 0:
            return None
        try:
            offset, size, memory = self._codec.lay(head, spans, size, note)
        except BaseException:
            queue.abandon(lease, rows)
            raise
        if not offset:
            queue.abandon(lease, rows)
            return None
        return lease, memory, (offset, size)

    def settle(self, reservation: SliceLease) -> None:
        lease, _, (offset, size) = reservation
        self._queue.ring.attach_slab(lease, offset, size)

    def abandon(self, reservation: SliceLease, rows: int) -> None:
        lease, _, (offset, _) = reservation
        self._queue.ring.free_slab(offset)
        self._queue.abandon(lease, rows)

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
    """Return the layout for requests with these inputs. A dense queue needs all inputs of the model."""
    return ColumnInputs(queue, list(inputs)) if queue.dense else SlabInputs(queue, inputs, batching=batching)


class OutputLayout(Protocol):
    """Reads the outputs of answered leases."""

    def read(self, lease: int, rows: int) -> Found | None:
        """Return an answer's form (equal forms, equal layouts) and views of its outputs; None for one that
        `read_response` has to read: errors, and answers with more than tensors."""

    def describe(self, form: Any) -> Described:
        """Return the outputs of answers of this form, in the order of the views."""


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
    """All outputs of a model that sees requests, which chose them itself; of others those in `names`."""

    def __init__(self, queue: BatchQueue, names: Sequence[str]) -> None:
        assert queue.codec is not None
        self._ring, self._codec = queue.ring, queue.codec
        self._names = list(queue.outputs)
        self._wanted = None if queue.requests else [self._names.index(name) for name in names]

    def read(self, lease: int, rows: int) -> Found | None:
        offset, size = self._ring.answer_slab(lease)
        if not offset or self._ring.lease_status(lease):
            return None
        found = self._codec.look(offset, size)
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
    """Return the layout that reads these outputs."""
    return ColumnOutputs(queue, names) if queue.dense else SlabOutputs(queue, names)


def read_response(queue: BatchQueue, ticket: Ticket, wanted: Sequence[str]) -> InferResponse:
    """Read the answer of a lease in an arena of any kind. `wanted` selects outputs, except of a model that
    sees requests, which chose them itself. The caller releases the ticket, not the response. Raises
    ServeError when the lease failed by itself."""
    outputs, parameters, repeated = ArenaIO(queue).read(ticket.lease, ticket.rows)
    if wanted and not queue.requests:
        outputs, repeated = choose(outputs, wanted), ()
    return InferResponse(outputs, None, dict(parameters), repeated=repeated)
