"""Dense batches on a device: one DMA for each input column, out of the slot as it lies, and one for each
output.

slot    [ column x ][ column y ] | [ column out ]        host memory, registered with the device
             \\            \\              ^
buffer  [    x     ][    y     ]   results/             device memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from fastserve.backends.frameworks.torch_tensors import torch_dtype
from fastserve.workers.device.base import ComputeDevice, Tensor
from fastserve.workers.device.client_cuda_memory import ClientMemory, ClientRanges, Span, gaps
from fastserve.workers.device.device_runner import DeviceBackend, DeviceRunner
from fastserve.workers.runners import DenseRunner

if TYPE_CHECKING:
    from fastserve.tensor import TensorSpec
    from fastserve.workers.arena import WorkerContext

DeviceColumns = dict[str, Tensor]


class DeviceBuffers:
    """Device memory of one batch's inputs, and staging memory where the arena is not registered."""

    def __init__(self, device: ComputeDevice, backend: DeviceBackend, max_rows: int, *, pinned: bool) -> None:
        self.inputs = {
            name: device.empty(*_shape_of(spec, max_rows)) for name, spec in backend.inputs.items()
        }
        sides = ({}, {}) if pinned else (backend.inputs, backend.outputs)
        self.staged_in, self.staged_out = (
            {name: device.staging(*_shape_of(spec, max_rows)) for name, spec in side.items()}
            for side in sides
        )


def _shape_of(spec: TensorSpec, rows: int) -> tuple[tuple[int, ...], Any]:
    return (rows, *(spec.shape or ())), torch_dtype(spec.dtype.name)


class DenseDeviceBatch:
    """One slot's batch of `rows` rows, run as `padded`."""

    def __init__(
        self,
        runner: DeviceDenseRunner,
        slot: int,
        rows: int,
        padded: int,
        buffers: DeviceBuffers,
        lent: Sequence[ClientRanges] = (),
    ) -> None:
        self.slot, self._rows, self._padded = slot, rows, padded
        self._runner, self._buffers, self._lent = runner, buffers, lent
        self._columns = runner.columns(slot)

    def incoming(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See DeviceBatch. Rows that are in clients' memory on the device come from there."""
        buffers = self._buffers
        for name, column in self._columns[0].items():
            there = [one for one in self._lent if name in one.inputs]
            last_row = there[-1].inputs[name][-1:] if there and span_of(there[-1])[1] == self._rows else None
            for first, last in gaps(map(span_of, there), self._padded if last_row is None else self._rows):
                source = column[first:last]
                if buffers.staged_in:
                    source = buffers.staged_in[name][first:last].copy_(source)
                yield buffers.inputs[name][first:last], source
            for one in there:
                yield buffers.inputs[name][one.row : one.row + one.rows], one.inputs[name]
            if last_row is not None and self._padded > self._rows:  # the column's own is of another request
                yield buffers.inputs[name][self._rows : self._padded], last_row

    def compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See DeviceBatch."""
        results = self._runner.compute({name: t[: self._padded] for name, t in self._buffers.inputs.items()})
        rows, staged = self._rows, self._buffers.staged_out
        for name, column in (staged or self._columns[1]).items():
            there = [one for one in self._lent if name in one.outputs]
            for first, last in gaps(map(span_of, there), rows):
                yield column[first:last], results[name][first:last]
            for one in there:
                yield one.outputs[name], results[name][one.row : one.row + one.rows]

    def land(self) -> None:
        """See SlotBatch."""
        for name, staged in self._buffers.staged_out.items():
            self._columns[1][name][: self._rows].copy_(staged[: self._rows])

    def leave(self) -> None:
        """Free its device memory for another batch."""
        self._runner.free_buffers.append(self._buffers)


class DeviceDenseRunner(DeviceRunner[DenseDeviceBatch]):
    """Runs slots of an arena with columns."""

    def __init__(self, lease: WorkerContext, device: ComputeDevice) -> None:
        self.lent = ClientMemory(device.name, lease.backend.inputs, lease.backend.outputs)
        self.plain = RetryDenseRunner(lease, self)
        super().__init__(lease, device, self.plain)
        self._slots: dict[int, tuple[DeviceColumns, DeviceColumns]] = {}
        self.free_buffers: list[DeviceBuffers] = []

    def _load(self, slot: int) -> DenseDeviceBatch | None:
        leases = self._ring.leases(slot)
        if not leases:
            return None
        rows = self._ring.batch_rows(slot)
        padded = self.plain.pad(slot, rows)
        lent = self._read_lent(slot) if any(lease[2] for lease in leases) else ()
        if len(leases) == 1 and leases[0][2] and not lent:
            return None  # its only request has been refused
        buffers = self.free_buffers.pop() if self.free_buffers else self._open_buffers()
        return DenseDeviceBatch(self, slot, rows, padded, buffers, lent)

    def _read_lent(self, slot: int) -> list[ClientRanges]:
        """Refuse leases whose memory cannot be opened, and run their rows as zeros: their columns hold data
        of other requests."""
        found = self.lent.read(self._ring, slot)
        for one in found:
            if one.fault is not None:
                self.plain.refuse(slot, one.row, one.fault)
                for column in self.columns(slot)[0].values():
                    column[one.row : one.row + one.rows] = 0
        return [one for one in found if one.fault is None]

    def close_lent(self, handle: bytes) -> None:
        """Close the memory that a client has unregistered, when nothing in flight uses it. Raises
        DeviceLost."""
        self.drain()
        self.lent.close(handle)

    def close(self) -> None:
        """See DeviceRunner. In a shared worker the process goes on, with the handles that others have
        open."""
        super().close()
        self.lent.close_all()

    def _open_buffers(self) -> DeviceBuffers:
        return DeviceBuffers(self._device, self._backend, self._ring.max_rows, pinned=self._pinned)

    def compute(self, inputs: DeviceColumns) -> Mapping[str, Tensor]:
        """Run the model, through the device."""
        found: Mapping[str, Tensor] = self._device.run(self._backend.run_on_device, inputs)
        return found

    def columns(self, slot: int) -> tuple[DeviceColumns, DeviceColumns]:
        """Input and output columns of a slot, as tensors over the arena; made once."""
        found = self._slots.get(slot)
        if found is None:
            sides = (self._backend.inputs, False), (self._backend.outputs, True)
            made = [self._open_columns(slot, specs, output=output) for specs, output in sides]
            found = self._slots[slot] = made[0], made[1]
        return found

    def _open_columns(self, slot: int, specs: Mapping[str, TensorSpec], *, output: bool) -> DeviceColumns:
        import torch

        columns = {}
        for number, (name, spec) in enumerate(specs.items()):
            at, _ = self._ring.column_span(slot, number, output)
            shape, dtype = _shape_of(spec, self._ring.max_rows)
            if prod(shape):
                flat = torch.frombuffer(self._arena.memory, dtype=dtype, count=prod(shape), offset=at)
                columns[name] = flat.reshape(shape)
            else:
                columns[name] = torch.empty(shape, dtype=dtype)
        return columns


class RetryDenseRunner(DenseRunner):
    """Runs a batch again that failed on the device, out of its columns and into them."""

    def __init__(self, lease: WorkerContext, runner: DeviceDenseRunner) -> None:
        super().__init__(lease)
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


def span_of(one: ClientRanges) -> Span:
    """The rows of a request."""
    return one.row, one.row + one.rows
