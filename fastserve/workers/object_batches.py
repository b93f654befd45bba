"""Batches of Python objects, for the batching library: each lease brings an element, or the first
brings the whole batch.

An element is a numpy row in a column, or bytes of codec/safe_msgpack in a slab. Results travel the same
ways back. What cannot travel fails its own lease; what the transformer raises fails the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.model_errors import end_if_lost, explain, is_out_of_memory
from fastserve.codec.object_codecs import ObjectCodec
from fastserve.errors import Kind, internal
from fastserve.workers.arena import Arena
from fastserve.workers.arrays import NUMPY
from fastserve.workers.isolation import OomSplit, counted
from fastserve.workers.warmup import SyntheticInput

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve.backends.base import ElementBackend

log = logging.getLogger(__name__)
LibraryLease = tuple[int, int, int, int]  # first row, rows, slab offset, bytes


class LibraryRunner:
    """Runs slots of a BatchedService. `whole`: the main process made the batch into one object."""

    def __init__(
        self, arena: Arena, ring: BatchRing, backend: ElementBackend, codec: ObjectCodec, *, whole: bool
    ) -> None:
        self._arena = arena
        self._ring = ring
        self._backend = backend
        self._whole = whole
        self._codec = codec
        self._columns: dict[tuple[int, bool], np.ndarray[Any, Any]] = {}

    def run(self, slot: int) -> None:
        """Answer every lease of the slot."""
        leases = self._ring.leases(slot)
        if not leases:
            return
        batch, leases = self._read(slot, leases)
        if not leases:
            return
        self._ring.start_run(slot)
        results = self._apply(slot, batch)
        self._ring.end_run(slot)
        if self._whole:
            self._answer(slot, leases[0][0], results)
            return
        if len(results) != len(leases) and not self._ring.inputs:
            raise internal(f"transform returned {len(results)} results for {len(leases)} elements")
        self._write(slot, leases, results)

    def _apply(self, slot: int, batch: Any) -> Any:
        """Run a batch, by halves where memory is short and the elements are separate."""
        try:
            return self._backend.apply(batch)
        except Exception as error:
            end_if_lost(error)
            if self._whole or len(batch) < 2 or not is_out_of_memory(error):
                raise
            fault = error
        try:
            return self._apply_parts(slot, batch, fault)
        finally:
            del fault  # its traceback holds this frame

    def _apply_parts(self, slot: int, batch: Any, error: Exception) -> Any:
        parts = OomSplit(self._backend, len(batch), error)

        def run(some: Sequence[int]) -> Any:
            with counted(self._ring, slot, len(some)):
                return self._backend.apply(batch[some[0] : some[-1] + 1])

        found = parts.run(range(len(batch)), run)
        return np.concatenate(found) if self._ring.outputs else [one for part in found for one in part]

    def warm_up(self, rows: int, guess: SyntheticInput) -> None:
        """Do nothing: no element can be synthesized."""

    def _read(self, slot: int, leases: list[LibraryLease]) -> tuple[Any, list[LibraryLease]]:
        """Return the batch and its leases, without those whose elements cannot be read: they get an error."""
        if self._whole:
            return self._codec.decode(bytes(self._ring.slab(leases[0][2], leases[0][3]))), leases
        if self._ring.inputs:
            return self._column(slot, output=False)[: self._ring.batch_rows(slot)], leases
        batch, good = [], []
        for lease in leases:
            row, _, offset, nbytes = lease
            try:
                batch.append(self._codec.decode(bytes(self._ring.slab(offset, nbytes))))
                good.append(lease)
            except Exception as error:  # pickle runs the code of the element's class
                told = f"the worker cannot read the element: {explain(error)}"
                self._send(slot, row, Kind.INVALID_ARGUMENT.value, self._codec.encode(told))
        return batch, good

    def _write(self, slot: int, leases: list[LibraryLease], results: Any) -> None:
        if self._ring.outputs:
            rows = self._ring.batch_rows(slot)
            results = np.asarray(results)
            column = self._column(slot, output=True)
            if results.shape != (rows, *column.shape[1:]):
                shapes = f"{list(results.shape)}, out_row says {[rows, *column.shape[1:]]}"
                raise internal(f"transform returned an array of shape {shapes}")
            np.copyto(column[:rows], results, casting="same_kind")
            return
        numbered = [p[0] for p in leases] if self._ring.inputs else range(len(leases))
        for lease, index in zip(leases, numbered, strict=True):
            self._answer(slot, lease[0], results[index])

    def _answer(self, slot: int, row: int, result: Any) -> None:
        status, payload = 0, b""
        try:
            if isinstance(result, BaseException):
                status, payload = Kind.INTERNAL.value, self._codec.encode(explain(result))
            else:
                payload = self._codec.encode(result)
        except TypeError as error:
            said = self._codec.encode(f"the result cannot be sent back: {error}")
            status, payload = Kind.INVALID_ARGUMENT.value, said
        self._send(slot, row, status, payload)

    def _send(self, slot: int, row: int, status: int, payload: bytes) -> None:
        offset = self._ring.allocate_slab(len(payload))
        if offset == 0:
            self._ring.answer_lease(slot, row, Kind.RESOURCE_EXHAUSTED.value, 0, 0)
            return
        self._ring.slab(offset, len(payload), True)[:] = payload
        self._ring.answer_lease(slot, row, status, offset, len(payload))

    def _column(self, slot: int, *, output: bool) -> np.ndarray[Any, Any]:
        """The slot's only input or output column as an array [max_rows, *row shape]; inputs read-only."""
        known = self._columns.get((slot, output))
        if known is None:
            specs = self._backend.outputs if output else self._backend.inputs
            spec = next(iter(specs.values()))
            at, row_bytes = self._ring.column_span(slot, 0, output)
            dtype = NUMPY[spec.dtype.name]
            count = self._ring.max_rows * row_bytes // dtype.itemsize
            known = np.frombuffer(self._arena.memory, dtype, count, at)
            known = known.reshape(self._ring.max_rows, *(spec.shape or ()))
            known.flags.writeable = output
            self._columns[slot, output] = known
        return known
