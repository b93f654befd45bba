"""Dense batches on a device: one DMA for each input column, out of the slot as it lies, and one for each
output.

slot    [ column x ][ column y ] | [ column out ]        host memory, registered with the device
             \\            \\              ^
berth   [    x     ][    y     ]   results/             device memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from fastserve.backends.torch_tensors import torch_dtype
from fastserve.workers.dense import DenseRunner
from fastserve.workers.device import Device, Tensor
from fastserve.workers.device_runner import DeviceBackend, DeviceRunner
from fastserve.workers.lent import LentMemory, LentPlace, Span, gaps

if TYPE_CHECKING:
    from fastserve.tensor import TensorSpec
    from fastserve.workers.workplace import Workplace

Columns = dict[str, Tensor]


class Berth:
    """Device memory of one batch's inputs, and staging memory where the arena is not registered."""

    def __init__(self, device: Device, backend: DeviceBackend, max_rows: int, *, pinned: bool) -> None:
        self.inputs = {name: device.empty(*_room(spec, max_rows)) for name, spec in backend.inputs.items()}
        sides = ({}, {}) if pinned else (backend.inputs, backend.outputs)
        self.staged_in, self.staged_out = (
            {name: device.staging(*_room(spec, max_rows)) for name, spec in side.items()} for side in sides
        )


def _room(spec: TensorSpec, rows: int) -> tuple[tuple[int, ...], Any]:
    return (rows, *(spec.shape or ())), torch_dtype(spec.dtype.name)


class DenseCargo:
    """One slot's batch of `rows` rows, run as `padded`."""

    def __init__(
        self,
        runner: DeviceDenseRunner,
        slot: int,
        rows: int,
        padded: int,
        berth: Berth,
        lent: Sequence[LentPlace] = (),
    ) -> None:
        self.slot, self._rows, self._padded = slot, rows, padded
        self._runner, self._berth, self._lent = runner, berth, lent
        self._columns = runner.columns(slot)

    def incoming(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See Cargo. Rows that are in clients' memory on the device come from there."""
        berth = self._berth
        for name, column in self._columns[0].items():
            there = [one for one in self._lent if name in one.inputs]
            last_row = there[-1].inputs[name][-1:] if there and span_of(there[-1])[1] == self._rows else None
            for first, last in gaps(map(span_of, there), self._padded if last_row is None else self._rows):
                source = column[first:last]
                if berth.staged_in:
                    source = berth.staged_in[name][first:last].copy_(source)
                yield berth.inputs[name][first:last], source
            for one in there:
                yield berth.inputs[name][one.row : one.row + one.rows], one.inputs[name]
            if last_row is not None and self._padded > self._rows:  # the column's own is of another request
                yield berth.inputs[name][self._rows : self._padded], last_row

    def compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See Cargo."""
        results = self._runner.compute({name: t[: self._padded] for name, t in self._berth.inputs.items()})
        rows, staged = self._rows, self._berth.staged_out
        for name, column in (staged or self._columns[1]).items():
            there = [one for one in self._lent if name in one.outputs]
            for first, last in gaps(map(span_of, there), rows):
                yield column[first:last], results[name][first:last]
            for one in there:
                yield one.outputs[name], results[name][one.row : one.row + one.rows]

    def land(self) -> None:
        """See SlotCargo."""
        for name, staged in self._berth.staged_out.items():
            self._columns[1][name][: self._rows].copy_(staged[: self._rows])

    def leave(self) -> None:
        """Its berth is free for another."""
        self._runner.berths.append(self._berth)


class DeviceDenseRunner(DeviceRunner[DenseCargo]):
    """Runs slots of an arena with columns."""

    def __init__(self, place: Workplace, device: Device) -> None:
        self.lent = LentMemory(device.name, place.backend.inputs, place.backend.outputs)
        self.plain = LentDenseRunner(place, self)
        super().__init__(place, device, self.plain)
        self._slots: dict[int, tuple[Columns, Columns]] = {}
        self.berths: list[Berth] = []

    def _load(self, slot: int) -> DenseCargo | None:
        places = self._ring.places(slot)
        if not places:
            return None
        rows = self._ring.batch_rows(slot)
        padded = self.plain.pad(slot, rows)
        lent = self._read_lent(slot) if any(place[2] for place in places) else ()
        if len(places) == 1 and places[0][2] and not lent:
            return None  # what it could not bring was all there is
        berth = self.berths.pop() if self.berths else self._open_berth()
        return DenseCargo(self, slot, rows, padded, berth, lent)

    def _read_lent(self, slot: int) -> list[LentPlace]:
        """A place whose memory cannot be opened is told so, and its rows are run as zeros: what is in its
        columns is of another request."""
        found = self.lent.read(self._ring, slot)
        for one in found:
            if one.fault is not None:
                self.plain.refuse(slot, one.row, one.fault)
                for column in self.columns(slot)[0].values():
                    column[one.row : one.row + one.rows] = 0
        return [one for one in found if one.fault is None]

    def close_lent(self, handle: bytes) -> None:
        """A client has taken its memory back: nothing that is in flight may use it any more. Raises
        DeviceLost."""
        self.drain()
        self.lent.close(handle)

    def close(self) -> None:
        """See DeviceRunner. In a shared worker the process lives on, with what others have open."""
        super().close()
        self.lent.close_all()

    def _open_berth(self) -> Berth:
        return Berth(self._device, self._backend, self._ring.max_rows, pinned=self._pinned)

    def compute(self, inputs: Columns) -> Mapping[str, Tensor]:
        """Run the model where a device's script may have a say."""
        found: Mapping[str, Tensor] = self._device.run(self._backend.run_on_device, inputs)
        return found

    def columns(self, slot: int) -> tuple[Columns, Columns]:
        """Input and output columns of a slot, as tensors over the arena; made once."""
        found = self._slots.get(slot)
        if found is None:
            sides = (self._backend.inputs, False), (self._backend.outputs, True)
            made = [self._open_columns(slot, specs, output=output) for specs, output in sides]
            found = self._slots[slot] = made[0], made[1]
        return found

    def _open_columns(self, slot: int, specs: Mapping[str, TensorSpec], *, output: bool) -> Columns:
        import torch

        columns = {}
        for number, (name, spec) in enumerate(specs.items()):
            at, _ = self._ring.column_span(slot, number, output)
            shape, dtype = _room(spec, self._ring.max_rows)
            if prod(shape):
                flat = torch.frombuffer(self._arena.memory, dtype=dtype, count=prod(shape), offset=at)
                columns[name] = flat.reshape(shape)
            else:
                columns[name] = torch.empty(shape, dtype=dtype)
        return columns


class LentDenseRunner(DenseRunner):
    """What runs a batch again that failed on its way over the device, out of its columns and into them."""

    def __init__(self, place: Workplace, runner: DeviceDenseRunner) -> None:
        super().__init__(place)
        self._runner = runner
        self._refused: set[int] = set()  # of the batch that is run again

    def refuse(self, slot: int, row: int, error: Exception) -> None:
        """See DenseRunner."""
        super().refuse(slot, row, error)
        self._refused.add(row)

    def recover(self, slot: int, error: Exception, *, whole: bool = False) -> None:
        """See DenseRunner. Of a request that fails nothing is written: what its columns hold is of others."""
        runner = self._runner
        self._refused.clear()
        found = runner.lent.read(self._ring, slot)
        lent = [one for one in found if one.fault is None]
        inputs, outputs = runner.columns(slot)
        for one in lent:
            for name, tensor in one.inputs.items():
                inputs[name][one.row : one.row + one.rows].copy_(tensor)
        super().recover(slot, error, whole=whole)
        for one in lent:
            for name, tensor in one.outputs.items() if one.row not in self._refused else ():
                tensor.copy_(outputs[name][one.row : one.row + one.rows])
        for one in found:
            if one.fault is not None:  # whatever was said of its rows since
                self.refuse(slot, one.row, one.fault)


def span_of(one: LentPlace) -> Span:
    """Its rows."""
    return one.row, one.row + one.rows
