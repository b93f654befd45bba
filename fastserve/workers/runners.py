"""Runners of batches of arrays.

DenseRunner   rows of fixed size in columns: one contiguous array a tensor, nothing gathered or copied in
SlabRunner    requests with slabs of their own: strings, free axes, models without a batch axis

Requests with slabs are joined and run together where their rows have one shape; others are run in groups
(`mixed_shapes: group`), padded to the largest (`pad`) or refused (`error`). A failure reaches only the
requests of its run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import SupportsOutputBinding, SupportsRequestJoining, SupportsSignatures
from fastserve.backends.cancellation import WatchedBatch
from fastserve.backends.model_errors import end_if_lost, explain, kind_of
from fastserve.errors import Kind, ServeError, internal, invalid, pack_status
from fastserve.settings.model_options import may_isolate
from fastserve.tensor import DTYPES, TensorSpec
from fastserve.workers.arrays import NUMPY, open_slab_codec, read_array, to_entry
from fastserve.workers.isolation import OomSplit, counted, isolate, most_runs
from fastserve.workers.warmup import SyntheticInput

if TYPE_CHECKING:
    from fastserve._ext.slab_tensors import Entry
    from fastserve.backends.base import Backend
    from fastserve.workers.arena import WorkerContext


log = logging.getLogger(__name__)
Columns = dict[str, "np.ndarray[Any, Any]"]
DenseLease = tuple[int, int, int, int]  # first row, rows; of slabs, nothing here


class DenseRunner:
    """Runs slots of an arena with columns. Arrays over each slot are made once and sliced per batch."""

    def __init__(self, lease: WorkerContext) -> None:
        backend: Backend
        self._arena, self._ring, backend, config = lease
        self._backend = backend
        self._isolating = may_isolate(config)
        # Results that a framework puts into the slot's columns by itself.
        self._binding: SupportsOutputBinding | None = None
        if isinstance(backend, SupportsOutputBinding) and backend.binds_outputs:
            self._binding = backend
        self._sizes: list[int] = list(config.get("allowed_batch_sizes") or ())
        self._slots: dict[int, tuple[Columns, Columns, Columns]] = {}
        self._watched = WatchedBatch(self._ring, self._arena.traces)

    def run(self, slot: int) -> None:
        """Run every row of the slot; outputs land in its output columns."""
        ring = self._ring
        rows = ring.batch_rows(slot)
        if not ring.leases(slot, 1):
            return  # everybody left: publishing frees the slot
        padded = self.pad(slot, rows)
        _, inputs, outputs = self._slots[slot]
        ring.start_run(slot)
        given = {name: column[:padded] for name, column in inputs.items()}
        into = {name: column[:padded] for name, column in outputs.items()} if self._binding else {}
        error: Exception | None = None
        self._watched.begin(slot, padded)
        try:
            if self._binding is not None:
                self._binding.run_into(given, into)
            else:
                results = self._backend.run(given)
        except Exception as fault:
            error = fault
        self._watched.end()
        if error is not None:  # handled here no more: see isolation.py
            try:
                self.recover(slot, error)
            finally:
                del error  # its traceback holds this frame
            return
        ring.end_run(slot)
        for name, column in outputs.items() if self._binding is None else ():
            _store(name, results[name], column, rows, padded)

    def pad(self, slot: int, rows: int) -> int:
        """Pad the batch with copies of its last row; returns the padded number of rows."""
        writable, _, _ = self._slots.get(slot) or self._open_slot(slot)
        padded = self._padded(rows)
        if padded > rows:
            for column in writable.values():
                column[rows:padded] = column[rows - 1]
        return padded

    def recover(self, slot: int, error: Exception, *, whole: bool = False) -> None:
        """A run of the whole batch raised `error`: run it again in parts, where its rows do not depend on
        each other. Raises what it cannot be answered for. `whole`: see OomSplit."""
        end_if_lost(error)
        rows, leases = self._ring.batch_rows(slot), self._ring.leases(slot)
        parts = OomSplit(self._backend, rows, error, padded=self._padded, whole=whole)
        alone = len(leases) == 1 and leases[0][1] == rows
        if not self._isolating or not leases or (alone and not parts.short):
            raise parts.fault
        if alone:
            self._run_part(slot, parts, range(rows))
        else:
            self._isolate(slot, leases, parts, error)
        self._ring.end_run(slot)

    def _run_part(self, slot: int, parts: OomSplit, rows: Sequence[int]) -> None:
        """Some rows of it, by halves where memory is short. Raises as OomSplit.run."""

        def run(some: Sequence[int]) -> None:
            with counted(self._ring, slot, len(some)):
                self._run_rows(slot, list(some))

        parts.run(rows, run)

    def warm_up(self, rows: int, guess: SyntheticInput) -> None:
        """Run the backend on a synthetic input; no slot is touched."""
        padded = self._padded(rows)
        self._backend.run({n: guess.make(spec, (padded,)) for n, spec in self._backend.inputs.items()})

    def _isolate(self, slot: int, leases: list[DenseLease], parts: OomSplit, error: Exception) -> None:
        failed: list[tuple[DenseLease, Exception]] = []

        def run(group: Sequence[DenseLease]) -> None:
            rows = [row for first, count, _, _ in group for row in range(first, first + count)]
            self._run_part(slot, parts, rows)

        def fail(lease: DenseLease, fault: Exception) -> None:
            failed.append((lease, fault))

        most = most_runs(len(leases), short=parts.short)
        isolate(leases, error, run=run, fail=fail, told=parts.fault, most=most)
        for lease, fault in failed:  # only now: should this worker die before, another runs the batch anew
            self.refuse(slot, lease[0], fault)
        failed.clear()  # their tracebacks hold this list

    def _run_rows(self, slot: int, index: list[int]) -> None:
        _, inputs, outputs = self._slots.get(slot) or self._open_slot(slot)
        filled = index + index[-1:] * (self._padded(len(index)) - len(index))
        given = {name: column[filled] for name, column in inputs.items()}
        for array in given.values():
            array.flags.writeable = False
        self._watched.begin(slot, filled)
        try:
            results = self._backend.run(given)
        finally:
            self._watched.end()
        for name, column in outputs.items():
            _check(name, results[name], column, len(filled))
            column[index] = results[name][: len(index)]

    def refuse(self, slot: int, row: int, error: Exception) -> None:
        """Answer a lease with an error text, in a slab."""
        status = pack_status(error if isinstance(error, ServeError) else kind_of(error))
        text = explain(error).encode("utf-8", "replace")
        offset = self._ring.allocate_slab(len(text))
        if offset:
            self._ring.slab(offset, len(text), True)[:] = text
        self._ring.answer_lease(slot, row, status, offset, len(text) if offset else 0)

    def _padded(self, rows: int) -> int:
        return next((size for size in self._sizes if size >= rows), rows)

    def _open_slot(self, slot: int) -> tuple[Columns, Columns, Columns]:
        writable = self._columns(slot, self._backend.inputs, output=False)
        inputs = {}
        for name, column in writable.items():
            inputs[name] = column.view()
            inputs[name].flags.writeable = False  # a retry on another worker must see what was sent
        outputs = self._columns(slot, self._backend.outputs, output=True)
        self._slots[slot] = writable, inputs, outputs
        return self._slots[slot]

    def _columns(self, slot: int, specs: Mapping[str, TensorSpec], *, output: bool) -> Columns:
        columns = {}
        for number, (name, spec) in enumerate(specs.items()):
            at, _ = self._ring.column_span(slot, number, output)
            shape = (self._ring.max_rows, *(spec.shape or ()))
            dtype = NUMPY[spec.dtype.name]
            columns[name] = np.frombuffer(self._arena.memory, dtype, prod(shape), at).reshape(shape)
        return columns


def _store(
    name: str, result: np.ndarray[Any, Any], column: np.ndarray[Any, Any], rows: int, padded: int
) -> None:
    _check(name, result, column, padded)
    column[:rows] = result[:rows]


def _check(name: str, result: np.ndarray[Any, Any], column: np.ndarray[Any, Any], rows: int) -> None:
    if result.shape != (rows, *column.shape[1:]):
        wanted, got = [rows, *column.shape[1:]], list(result.shape)
        raise internal(f"output {name!r} of the model has shape {got}, declared {wanted}")


Arrays = dict[str, "np.ndarray[Any, Any]"]
SlabLease = tuple[int, int, Arrays]  # first row, rows, inputs
# The words of TensorFlow Serving, spec 6.3 and vector ba-shape-clash.
SHAPE_CLASH = (
    "Tensors with name '{}' from different tasks have different shapes and padding is turned off. "
    "Set pad_variable_length_inputs to true, or ensure that all tensors with the same name have equal "
    "dimensions starting with the first dim."
)


class SlabRunner:
    """Runs slots whose leases carry slabs."""

    def __init__(self, lease: WorkerContext) -> None:
        backend: Backend
        arena, self._ring, backend, config = lease
        self._backend = backend
        self._codec = open_slab_codec(arena, self._ring)
        self._batching = int(config["max_batch_size"]) > 0
        self._isolating = may_isolate(config)
        self._mixed = str(config.get("mixed_shapes", "group"))
        self._inputs = list(self._backend.inputs)
        self._outputs = list(enumerate(self._backend.outputs.values()))
        # A model with signatures answers a batch with the outputs of those whose inputs it brings.
        self._parted = isinstance(backend, SupportsSignatures) and bool(backend.signatures)
        self._joining: SupportsRequestJoining | None = None
        if isinstance(backend, SupportsRequestJoining) and backend.joins_requests:
            self._joining = backend
        self._watched = WatchedBatch(self._ring, arena.traces)

    def run(self, slot: int) -> None:
        """Answer every lease of the slot."""
        leases = self.read_leases(slot)
        self._ring.start_run(slot)
        for group in self.groups_of(leases) if leases else ():
            error: Exception | None = None
            try:
                self._run_group(slot, group)
            except Exception as fault:
                error = fault
            try:
                if error is not None:  # handled here no more: see isolation.py
                    self.group_failed(slot, group, error)
            finally:
                del error  # its traceback holds this frame
                self._watched.end()

    def group_failed(
        self, slot: int, group: list[SlabLease], error: Exception, *, whole: bool = False
    ) -> None:
        """Run it again in parts, where that may be, and tell the rest. `whole`: see OomSplit. Raises
        DeviceLost."""
        end_if_lost(error)
        parts = OomSplit(self._backend, sum(lease[1] for lease in group), error, whole=whole)

        def fail(lease: SlabLease, fault: Exception) -> None:
            self._refuse(slot, [lease], ServeError(kind_of(fault), explain(fault)))

        def run(leases: Sequence[SlabLease]) -> None:
            if len(leases) == 1:
                self._run_alone(slot, leases[0], parts if len(group) == 1 else parts.anew())
                return
            with counted(self._ring, slot, sum(lease[1] for lease in leases)):
                self._run_group(slot, leases)

        if self._isolating and (len(group) > 1 or parts.short):
            most = most_runs(len(group), short=parts.short)
            isolate(group, error, run=run, fail=fail, told=parts.fault, most=most)
            return
        if not isinstance(parts.fault, ServeError):
            log.error("the model failed on a batch of %d requests", len(group), exc_info=error)
        for lease in group:
            fail(lease, parts.fault)

    def _run_alone(self, slot: int, lease: SlabLease, parts: OomSplit) -> None:
        """Run one request, by halves of its rows where memory is short and they are separate."""
        row, rows, arrays = lease
        separate = self._batching and self._joining is None

        def run(some: Sequence[int]) -> Mapping[str, np.ndarray[Any, Any]]:
            with counted(self._ring, slot, rows if not separate else len(some)):
                if separate:
                    self._watched.begin(slot, [row + at for at in some])
                    return self._backend.run({n: a[some[0] : some[-1] + 1] for n, a in arrays.items()})
                self._run_group(slot, [lease])
                return {}

        results = parts.run(range(rows if separate else 1), run)
        if separate:
            self._ring.end_run(slot)
            self._answer(slot, row, _join(results, parts))

    def recover(self, slot: int, error: Exception, *, whole: bool = False) -> None:
        """Fail a batch that could not be started."""
        end_if_lost(error)
        raise error

    def answer_slab(self, slot: int, row: int, offset: int, size: int) -> None:
        """Answer a lease with a slab; without one there was no room for it."""
        status = 0 if offset else Kind.RESOURCE_EXHAUSTED.value
        self._ring.answer_lease(slot, row, status, offset, size if offset else 0)

    def warm_up(self, rows: int, guess: SyntheticInput) -> None:
        """Run the backend on a synthetic input."""
        lead = (rows,) if self._batching else ()
        self._backend.run({name: guess.make(spec, lead) for name, spec in self._backend.inputs.items()})

    def read_leases(self, slot: int) -> list[SlabLease]:
        """Read the inputs of every lease of the slot; a lease that cannot be read is answered."""
        leases = []
        for row, rows, offset, nbytes in self._ring.leases(slot):
            try:
                leases.append(self._read(row, rows, offset, nbytes))
            except (ValueError, LookupError):  # strings whose lengths lie, say: its own caller's fault alone
                fault = invalid("the inputs cannot be read as the tensors they claim to be")
                self._refuse(slot, [(row, rows, {})], fault)
        return leases

    def _read(self, row: int, rows: int, offset: int, nbytes: int) -> SlabLease:
        entries, _ = self._codec.arrays(offset, nbytes)
        inputs = self._inputs
        return row, rows, {inputs[number]: read_array(*entry) for number, *entry in entries}

    def groups_of(self, leases: list[SlabLease]) -> list[list[SlabLease]]:
        """Leases that run together. Raises ServeError for shapes that may not be mixed."""
        if not self._batching:
            return [[lease] for lease in leases]
        groups: dict[tuple[Any, ...], list[SlabLease]] = {}
        for lease in leases:
            groups.setdefault(self._sort(lease[2]), []).append(lease)
        if len(groups) < 2 or self._mixed == "group":
            return list(groups.values())
        if self._mixed == "pad":
            return [_pad(leases)]
        for _, _, arrays in leases:
            clash = next(n for n in arrays if len({p[2][n].shape[1:] for p in leases}) > 1)
            raise ServeError(Kind.FAILED_PRECONDITION, SHAPE_CLASH.format(clash))
        return []

    def _sort(self, arrays: Arrays) -> tuple[Any, ...]:
        """The key that requests of one run have in common."""
        ragged = self._joining.ragged_inputs if self._joining is not None else ()
        return _row_shapes({name: array for name, array in arrays.items() if name not in ragged})

    def _run_group(self, slot: int, group: Sequence[SlabLease]) -> None:
        self._watched.begin(slot, group)
        if self._joining is not None:
            parts = self._joining.run_requests([arrays for _, _, arrays in group])
            self._ring.end_run(slot)
            for (row, _, _), part in zip(group, parts, strict=True):
                self._answer(slot, row, part)
            return
        if len(group) == 1:
            joined = dict(group[0][2])  # the model's: what it takes out of it is there for a second run
        else:
            joined = {name: np.concatenate([p[2][name] for p in group]) for name in group[0][2]}
        results = self._backend.run(joined)
        self._ring.end_run(slot)  # of several groups the last one's end
        at = 0
        for row, rows, _ in group:
            mine = results if len(group) == 1 else {n: a[at : at + rows] for n, a in results.items()}
            self._answer(slot, row, mine)
            at += rows

    def _answer(self, slot: int, row: int, results: Mapping[str, np.ndarray[Any, Any]]) -> None:
        outputs = [(i, spec) for i, spec in self._outputs if not self._parted or spec.name in results]
        self._answer_slab(slot, row, 0, [to_entry(i, results[spec.name], spec.dtype) for i, spec in outputs])

    def _refuse(self, slot: int, group: list[SlabLease], error: ServeError) -> None:
        text = error.message.encode("utf-8", "replace")[:4000]
        for row, _, _ in group:
            self._answer_slab(slot, row, pack_status(error), [(0, DTYPES["uint8"].code, (len(text),), text)])

    def _answer_slab(self, slot: int, row: int, status: int, entries: list[Entry]) -> None:
        offset, size = self._codec.put(entries)
        if offset == 0:
            status, size = status or Kind.RESOURCE_EXHAUSTED.value, 0
        self._ring.answer_lease(slot, row, status, offset, size)


def _join(parts: Sequence[Mapping[str, np.ndarray[Any, Any]]], short: OomSplit) -> Arrays:
    """Join the outputs of a request that was run by parts. Raises ServeError RESOURCE_EXHAUSTED where rows of
    another part have another shape."""
    if len(parts) == 1:
        return dict(parts[0])
    try:
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except ValueError:
        raise short.fault from None


def _row_shapes(arrays: Arrays) -> tuple[Any, ...]:
    return tuple((name, array.shape[1:]) for name, array in sorted(arrays.items()))


def _pad(leases: list[SlabLease]) -> list[SlabLease]:
    """Every input padded behind its own data to the largest row, with its own first element (spec 6.3)."""
    padded = [(row, rows, dict(arrays)) for row, rows, arrays in leases]
    for name in leases[0][2]:
        shapes = [arrays[name].shape[1:] for _, _, arrays in leases]
        if len({len(shape) for shape in shapes}) > 1:
            raise invalid(f"input {name!r}: requests differ in rank, padding cannot help")
        target = tuple(max(lengths) for lengths in zip(*shapes, strict=True))
        for _, _, arrays in padded:
            arrays[name] = _pad_array(arrays[name], target)
    return padded


def _pad_array(array: np.ndarray[Any, Any], target: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if array.shape[1:] == target or array.size == 0:
        return array
    widths = [(0, 0), *((0, want - have) for want, have in zip(target, array.shape[1:], strict=True))]
    return np.pad(array, widths, constant_values=array.reshape(-1)[0])
