"""Dense batches on a device: one DMA for each input column, out of the slot as it lies, and one for each
output.

slot    [ column x ][ column y ] | [ column out ]        host memory, registered with the device
             \\            \\              ^
berth   [    x     ][    y     ]   results/             device memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from fastserve.backends.torch_tensors import torch_dtype
from fastserve.workers.dense import DenseRunner
from fastserve.workers.device import Device, Tensor
from fastserve.workers.device_runner import DeviceBackend, DeviceRunner

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve.tensor import TensorSpec
    from fastserve.workers.arena import Arena

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

    def __init__(self, runner: DeviceDenseRunner, slot: int, rows: int, padded: int, berth: Berth) -> None:
        self.slot, self._rows, self._padded = slot, rows, padded
        self._runner, self._berth = runner, berth
        self._columns = runner.columns(slot)

    def incoming(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See Cargo."""
        padded, berth = self._padded, self._berth
        for name, column in self._columns[0].items():
            source = column[:padded]
            if berth.staged_in:
                source = berth.staged_in[name][:padded].copy_(source)
            yield berth.inputs[name][:padded], source

    def compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See Cargo."""
        results = self._runner.compute({name: t[: self._padded] for name, t in self._berth.inputs.items()})
        rows, staged = self._rows, self._berth.staged_out
        for name, column in (staged or self._columns[1]).items():
            yield column[:rows], results[name][:rows]

    def land(self) -> None:
        """See SlotCargo."""
        for name, staged in self._berth.staged_out.items():
            self._columns[1][name][: self._rows].copy_(staged[: self._rows])

    def leave(self) -> None:
        """Its berth is free for another."""
        self._runner.berths.append(self._berth)


class DeviceDenseRunner(DeviceRunner[DenseCargo]):
    """Runs slots of an arena with columns."""

    def __init__(
        self,
        arena: Arena,
        ring: BatchRing,
        backend: DeviceBackend,
        config: Mapping[str, Any],
        device: Device,
    ) -> None:
        self.plain = DenseRunner(arena, ring, backend, config)
        super().__init__(arena, ring, device, config, self.plain)
        self._arena, self._backend = arena, backend
        self._slots: dict[int, tuple[Columns, Columns]] = {}
        self.berths: list[Berth] = []

    def _load(self, slot: int) -> DenseCargo | None:
        if not self._ring.places(slot):
            return None
        rows = self._ring.batch_rows(slot)
        padded = self.plain.pad(slot, rows)
        berth = self.berths.pop() if self.berths else self._open_berth()
        return DenseCargo(self, slot, rows, padded, berth)

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
