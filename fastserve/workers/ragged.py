"""Batches whose requests bring their own slabs: strings, free axes, models without a batch axis.

Requests whose rows have one shape are joined and run together; what does not fit together is run
apart (`mixed_shapes: group`), padded to the largest (`pad`) or refused (`error`). A failure reaches
only the requests of its run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import explain, kind_of
from fastserve.backends.device_faults import end_if_lost
from fastserve.errors import Kind, ServeError
from fastserve.tensor import DTYPES
from fastserve.workers.arrays import open_desk, read_array, to_entry
from fastserve.workers.guesses import Guess
from fastserve.workers.isolation import counted, isolate, may_isolate, most_runs
from fastserve.workers.smaller import Smaller

if TYPE_CHECKING:
    from fastserve._ext.slab_tensors import Entry
    from fastserve.backends.base import Backend
    from fastserve.workers.workplace import Workplace

log = logging.getLogger(__name__)

Arrays = dict[str, "np.ndarray[Any, Any]"]
Place = tuple[int, int, Arrays]  # first row, rows, inputs

# The words of TensorFlow Serving, spec 6.3 and vector ba-shape-clash.
SHAPE_CLASH = (
    "Tensors with name '{}' from different tasks have different shapes and padding is turned off. "
    "Set pad_variable_length_inputs to true, or ensure that all tensors with the same name have equal "
    "dimensions starting with the first dim."
)


class SlabRunner:
    """Runs slots whose places carry slabs."""

    def __init__(self, place: Workplace) -> None:
        self._backend: Backend
        arena, self._ring, self._backend, config = place
        self._desk = open_desk(arena, self._ring)
        self._batching = int(config["max_batch_size"]) > 0
        self._isolating = may_isolate(config)
        self._mixed = str(config.get("mixed_shapes", "group"))
        self._inputs = list(self._backend.inputs)
        self._outputs = list(enumerate(self._backend.outputs.values()))
        # A model with signatures answers a batch with the outputs of those whose inputs it brings.
        self._parted = bool(getattr(self._backend, "signatures", None))
        # A model that is told where its requests begin (backends/batch_io.py) joins them by itself.
        self._batch_io = getattr(self._backend, "batch_io", None) or None

    def run(self, slot: int) -> None:
        """Answer every place of the slot."""
        places = self.read_places(slot)
        self._ring.start_run(slot)
        for group in self.groups_of(places) if places else ():
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

    def group_failed(self, slot: int, group: list[Place], error: Exception, *, whole: bool = False) -> None:
        """Run it again in parts, where that may be, and tell the rest. `whole`: see Smaller. Raises
        DeviceLost."""
        end_if_lost(error)
        parts = Smaller(self._backend, sum(place[1] for place in group), error, whole=whole)

        def fail(place: Place, fault: Exception) -> None:
            self._refuse(slot, [place], ServeError(kind_of(fault), explain(fault)))

        def run(places: Sequence[Place]) -> None:
            if len(places) == 1:
                self._run_alone(slot, places[0], parts if len(group) == 1 else parts.anew())
                return
            with counted(self._ring, slot, sum(place[1] for place in places)):
                self._run_group(slot, places)

        if self._isolating and (len(group) > 1 or parts.short):
            most = most_runs(len(group), short=parts.short)
            isolate(group, error, run=run, fail=fail, told=parts.fault, most=most)
            return
        if not isinstance(parts.fault, ServeError):
            log.error("the model failed on a batch of %d requests", len(group), exc_info=error)
        for place in group:
            fail(place, parts.fault)

    def _run_alone(self, slot: int, place: Place, parts: Smaller) -> None:
        """One request, by halves of its rows where memory is short and they are known apart."""
        row, rows, arrays = place
        apart = self._batching and not self._batch_io

        def run(some: Sequence[int]) -> Mapping[str, np.ndarray[Any, Any]]:
            with counted(self._ring, slot, rows if not apart else len(some)):
                if apart:
                    return self._backend.run({n: a[some[0] : some[-1] + 1] for n, a in arrays.items()})
                self._run_group(slot, [place])
                return {}

        results = parts.run(range(rows if apart else 1), run)
        if apart:
            self._ring.end_run(slot)
            self._answer(slot, row, _join(results, parts))

    def recover(self, slot: int, error: Exception, *, whole: bool = False) -> None:
        """The batch could not even be begun."""
        end_if_lost(error)
        raise error

    def answer_slab(self, slot: int, row: int, offset: int, size: int) -> None:
        """A slab of ours is a place's answer; without one there was no room for it."""
        status = 0 if offset else Kind.RESOURCE_EXHAUSTED.value
        self._ring.answer_place(slot, row, status, offset, size if offset else 0)

    def warm_up(self, rows: int, guess: Guess) -> None:
        """Run the backend on a guess."""
        lead = (rows,) if self._batching else ()
        self._backend.run({name: guess.make(spec, lead) for name, spec in self._backend.inputs.items()})

    def read_places(self, slot: int) -> list[Place]:
        """What every place of the slot brings; one that cannot be read is answered."""
        places = []
        for row, rows, offset, nbytes in self._ring.places(slot):
            try:
                places.append(self._read(row, rows, offset, nbytes))
            except (ValueError, LookupError):  # strings whose lengths lie, say: its own caller's fault alone
                fault = ServeError(
                    Kind.INVALID_ARGUMENT, "the inputs cannot be read as the tensors they claim to be"
                )
                self._refuse(slot, [(row, rows, {})], fault)
        return places

    def _read(self, row: int, rows: int, offset: int, nbytes: int) -> Place:
        entries, _ = self._desk.arrays(offset, nbytes)
        inputs = self._inputs
        return row, rows, {inputs[number]: read_array(*entry) for number, *entry in entries}

    def groups_of(self, places: list[Place]) -> list[list[Place]]:
        """Places that run together. Raises ServeError for shapes that may not be mixed."""
        if not self._batching:
            return [[place] for place in places]
        groups: dict[tuple[Any, ...], list[Place]] = {}
        for place in places:
            groups.setdefault(self._sort(place[2]), []).append(place)
        if len(groups) < 2 or self._mixed == "group":
            return list(groups.values())
        if self._mixed == "pad":
            return [_pad(places)]
        for _, _, arrays in places:
            clash = next(n for n in arrays if len({p[2][n].shape[1:] for p in places}) > 1)
            raise ServeError(Kind.FAILED_PRECONDITION, SHAPE_CLASH.format(clash))
        return []

    def _sort(self, arrays: Arrays) -> tuple[Any, ...]:
        """What requests that run together have in common."""
        ragged = self._batch_io.ragged if self._batch_io else ()
        return _row_shapes({name: array for name, array in arrays.items() if name not in ragged})

    def _run_group(self, slot: int, group: Sequence[Place]) -> None:
        if self._batch_io:
            parts = self._backend.run_requests([arrays for _, _, arrays in group])  # type: ignore[attr-defined]
            self._ring.end_run(slot)
            for (row, _, _), part in zip(group, parts, strict=True):
                self._answer(slot, row, part)
            return
        if len(group) == 1:
            joined = group[0][2]
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
        self._place(slot, row, 0, [to_entry(i, results[spec.name], spec.dtype) for i, spec in outputs])

    def _refuse(self, slot: int, group: list[Place], error: ServeError) -> None:
        text = error.message.encode("utf-8", "replace")[:4000]
        for row, _, _ in group:
            self._place(slot, row, error.kind.value, [(0, DTYPES["uint8"].code, (len(text),), text)])

    def _place(self, slot: int, row: int, status: int, entries: list[Entry]) -> None:
        offset, size = self._desk.put(entries)
        if offset == 0:
            status, size = status or Kind.RESOURCE_EXHAUSTED.value, 0
        self._ring.answer_place(slot, row, status, offset, size)


def _join(parts: Sequence[Mapping[str, np.ndarray[Any, Any]]], short: Smaller) -> Arrays:
    """Outputs of a request that was run by parts. Raises ServeError RESOURCE_EXHAUSTED where rows of another
    part have another shape."""
    if len(parts) == 1:
        return dict(parts[0])
    try:
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except ValueError:
        raise short.fault from None


def _row_shapes(arrays: Arrays) -> tuple[Any, ...]:
    return tuple((name, array.shape[1:]) for name, array in sorted(arrays.items()))


def _pad(places: list[Place]) -> list[Place]:
    """Every input padded behind its own data to the largest row, with its own first element (spec 6.3)."""
    padded = [(row, rows, dict(arrays)) for row, rows, arrays in places]
    for name in places[0][2]:
        shapes = [arrays[name].shape[1:] for _, _, arrays in places]
        if len({len(shape) for shape in shapes}) > 1:
            raise ServeError(
                Kind.INVALID_ARGUMENT, f"input {name!r}: requests differ in rank, padding cannot help"
            )
        target = tuple(max(lengths) for lengths in zip(*shapes, strict=True))
        for _, _, arrays in padded:
            arrays[name] = _pad_array(arrays[name], target)
    return padded


def _pad_array(array: np.ndarray[Any, Any], target: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if array.shape[1:] == target or array.size == 0:
        return array
    widths = [(0, 0), *((0, want - have) for want, have in zip(target, array.shape[1:], strict=True))]
    return np.pad(array, widths, constant_values=array.reshape(-1)[0])
