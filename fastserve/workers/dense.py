"""Batches whose rows lie in columns: one contiguous array a tensor, nothing gathered, nothing copied in."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import Backend
from fastserve.errors import Kind, ServeError
from fastserve.tensor import TensorSpec
from fastserve.workers.arena import Arena
from fastserve.workers.arrays import NUMPY
from fastserve.workers.guesses import Guess

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

Columns = dict[str, "np.ndarray[Any, Any]"]


class DenseRunner:
    """Runs slots of an arena with columns. Arrays over each slot are made once and sliced per batch."""

    def __init__(self, arena: Arena, ring: BatchRing, backend: Backend, config: Mapping[str, Any]) -> None:
        self._arena = arena
        self._ring = ring
        self._backend = backend
        self._sizes: list[int] = list(config.get("allowed_batch_sizes") or ())
        self._slots: dict[int, tuple[Columns, Columns, Columns]] = {}

    def run(self, slot: int) -> None:
        """Run every row of the slot; outputs land in its output columns."""
        ring = self._ring
        rows = ring.batch_rows(slot)
        if not ring.places(slot):
            return  # everybody left: publishing frees the slot
        writable, inputs, outputs = self._slots.get(slot) or self._open_slot(slot)
        padded = self._padded(rows)
        if padded > rows:
            for column in writable.values():
                column[rows:padded] = column[rows - 1]
        ring.start_run(slot)
        results = self._backend.run({name: column[:padded] for name, column in inputs.items()})
        ring.end_run(slot)
        for name, column in outputs.items():
            _store(name, results[name], column, rows, padded)

    def warm_up(self, rows: int, guess: Guess) -> None:
        """Run the backend on a guess; no slot is touched."""
        padded = self._padded(rows)
        self._backend.run({n: guess.make(spec, (padded,)) for n, spec in self._backend.inputs.items()})

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
    if result.shape != (padded, *column.shape[1:]):
        wanted, got = [padded, *column.shape[1:]], list(result.shape)
        raise ServeError(Kind.INTERNAL, f"output {name!r} of the model has shape {got}, declared {wanted}")
    column[:rows] = result[:rows]
