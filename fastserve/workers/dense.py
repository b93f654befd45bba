"""Batches whose rows lie in columns: one contiguous array a tensor, nothing gathered, nothing copied in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import explain, kind_of
from fastserve.backends.device_faults import end_if_lost
from fastserve.errors import Kind, ServeError
from fastserve.tensor import TensorSpec
from fastserve.workers.arrays import NUMPY
from fastserve.workers.guesses import Guess
from fastserve.workers.isolation import counted, isolate, may_isolate, most_runs
from fastserve.workers.smaller import Smaller

if TYPE_CHECKING:
    from fastserve.backends.base import Backend
    from fastserve.workers.workplace import Workplace

log = logging.getLogger(__name__)

Columns = dict[str, "np.ndarray[Any, Any]"]
Place = tuple[int, int, int, int]  # first row, rows; of slabs, nothing here


class DenseRunner:
    """Runs slots of an arena with columns. Arrays over each slot are made once and sliced per batch."""

    def __init__(self, place: Workplace) -> None:
        self._backend: Backend
        self._arena, self._ring, self._backend, config = place
        self._isolating = may_isolate(config)
        # Results that a framework puts into the slot's columns by itself.
        self._binds = bool(getattr(self._backend, "binds", False))
        self._sizes: list[int] = list(config.get("allowed_batch_sizes") or ())
        self._slots: dict[int, tuple[Columns, Columns, Columns]] = {}

    def run(self, slot: int) -> None:
        """Run every row of the slot; outputs land in its output columns."""
        ring = self._ring
        rows = ring.batch_rows(slot)
        if not ring.places(slot, 1):
            return  # everybody left: publishing frees the slot
        padded = self.pad(slot, rows)
        _, inputs, outputs = self._slots[slot]
        ring.start_run(slot)
        given = {name: column[:padded] for name, column in inputs.items()}
        into = {name: column[:padded] for name, column in outputs.items()} if self._binds else {}
        error: Exception | None = None
        try:
            if self._binds:
                self._backend.run_into(given, into)  # type: ignore[attr-defined]
            else:
                results = self._backend.run(given)
        except Exception as fault:
            error = fault
        if error is not None:  # handled here no more: see isolation.py
            try:
                self.recover(slot, error)
            finally:
                del error  # its traceback holds this frame
            return
        ring.end_run(slot)
        for name, column in outputs.items() if not self._binds else ():
            _store(name, results[name], column, rows, padded)

    def pad(self, slot: int, rows: int) -> int:
        """How many rows the batch is run as; those behind its own are its last one's."""
        writable, _, _ = self._slots.get(slot) or self._open_slot(slot)
        padded = self._padded(rows)
        if padded > rows:
            for column in writable.values():
                column[rows:padded] = column[rows - 1]
        return padded

    def recover(self, slot: int, error: Exception, *, whole: bool = False) -> None:
        """A run of the whole batch raised `error`: run it again in parts, where its rows do not depend on
        each other. Raises what it cannot be answered for. `whole`: see Smaller."""
        end_if_lost(error)
        rows, places = self._ring.batch_rows(slot), self._ring.places(slot)
        parts = Smaller(self._backend, rows, error, padded=self._padded, whole=whole)
        alone = len(places) == 1 and places[0][1] == rows
        if not self._isolating or not places or (alone and not parts.short):
            raise parts.fault
        if alone:
            self._run_part(slot, parts, range(rows))
        else:
            self._isolate(slot, places, parts, error)
        self._ring.end_run(slot)

    def _run_part(self, slot: int, parts: Smaller, rows: Sequence[int]) -> None:
        """Some rows of it, by halves where memory is short. Raises as Smaller.run."""

        def run(some: Sequence[int]) -> None:
            with counted(self._ring, slot, len(some)):
                self._run_rows(slot, list(some))

        parts.run(rows, run)

    def warm_up(self, rows: int, guess: Guess) -> None:
        """Run the backend on a guess; no slot is touched."""
        padded = self._padded(rows)
        self._backend.run({n: guess.make(spec, (padded,)) for n, spec in self._backend.inputs.items()})

    def _isolate(self, slot: int, places: list[Place], parts: Smaller, error: Exception) -> None:
        failed: list[tuple[Place, Exception]] = []

        def run(group: Sequence[Place]) -> None:
            rows = [row for first, count, _, _ in group for row in range(first, first + count)]
            self._run_part(slot, parts, rows)

        def fail(place: Place, fault: Exception) -> None:
            failed.append((place, fault))

        most = most_runs(len(places), short=parts.short)
        isolate(places, error, run=run, fail=fail, told=parts.fault, most=most)
        for place, fault in failed:  # only now: should this worker die before, another runs the batch anew
            self.refuse(slot, place[0], fault)
        failed.clear()  # their tracebacks hold this list

    def _run_rows(self, slot: int, index: list[int]) -> None:
        _, inputs, outputs = self._slots.get(slot) or self._open_slot(slot)
        filled = index + index[-1:] * (self._padded(len(index)) - len(index))
        given = {name: column[filled] for name, column in inputs.items()}
        for array in given.values():
            array.flags.writeable = False
        results = self._backend.run(given)
        for name, column in outputs.items():
            _check(name, results[name], column, len(filled))
            column[index] = results[name][: len(index)]

    def refuse(self, slot: int, row: int, error: Exception) -> None:
        """A slab of this arena holds no rows, only such words."""
        kind, text = kind_of(error), explain(error).encode("utf-8", "replace")
        offset = self._ring.lease(len(text))
        if offset:
            self._ring.slab(offset, len(text), True)[:] = text
        self._ring.answer_place(slot, row, kind.value, offset, len(text) if offset else 0)

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
        raise ServeError(Kind.INTERNAL, f"output {name!r} of the model has shape {got}, declared {wanted}")
