"""Batches of slabs on a device: each request's inputs are copied by DMA from its slab to its rows, and its
outputs into a slab made for them when their shapes are known. Requests whose shapes differ are run in groups
(runners.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserve.backends.frameworks.torch_tensors import as_tensor, torch_dtype
from fastserve.backends.model_errors import is_out_of_memory
from fastserve.workers.arrays import open_slab_codec
from fastserve.workers.device.base import ComputeDevice, Tensor
from fastserve.workers.device.device_runner import DeviceRunner
from fastserve.workers.runners import SlabLease, SlabRunner

if TYPE_CHECKING:
    from fastserve._ext.slab_tensors import Entry
    from fastserve.workers.arena import WorkerContext


@dataclass(slots=True)
class DeviceGroup:
    """Requests that run together, less those that were answered. `answers` are their slabs: (first row,
    offset or 0, bytes)."""

    leases: list[SlabLease]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    answers: list[tuple[int, int, int]] = field(default_factory=list)
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    fault: Exception | None = None


class SlabDeviceBatch:
    """One slot's requests."""

    def __init__(self, runner: DeviceSlabRunner, slot: int, groups: list[list[SlabLease]]) -> None:
        self.slot, self._runner = slot, runner
        self._groups = [DeviceGroup(leases) for leases in groups]

    def incoming(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See DeviceBatch."""
        for group in self._groups:
            yield from self._runner.take_in(group)

    def compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See DeviceBatch. A group that fails does so alone."""
        for group in self._groups:
            try:
                copies = list(self._runner.compute(group))
            except Exception as error:
                group.fault = error
                self._runner.give_up(group)
                continue
            yield from copies

    def land(self) -> None:
        """See SlotBatch."""
        for group in self._groups:
            for target, staged in group.staged:
                target.copy_(staged)
            if group.fault is None:
                self._runner.answer(self.slot, group)
        self._answer_failed()

    def run_again(self, error: Exception) -> None:
        """Run every unanswered group again: its copies failed, for no known group."""
        for group in self._groups:
            group.fault = group.fault or error
            self._runner.give_up(group)
        self._answer_failed()

    def _answer_failed(self) -> None:
        for group in self._groups:
            group.inputs.clear()
        for group in self._groups:
            self._runner.answer_failed(self.slot, group, beside=len(self._groups) > 1)

    def leave(self) -> None:
        """Return the slabs of results that could not be copied out."""
        for group in self._groups:
            self._runner.give_up(group)


class DeviceSlabRunner(DeviceRunner[SlabDeviceBatch]):
    """Runs slots whose leases carry slabs."""

    def __init__(self, lease: WorkerContext, device: ComputeDevice) -> None:
        self.plain = SlabRunner(lease)
        super().__init__(lease, device, self.plain)
        self._codec = open_slab_codec(lease.arena, lease.ring)
        self._batching = int(lease.config["max_batch_size"]) > 0

    def _load(self, slot: int) -> SlabDeviceBatch | None:
        leases = self.plain.read_leases(slot)
        return SlabDeviceBatch(self, slot, self.plain.groups_of(leases)) if leases else None

    def _run_again(self, slot: int, error: Exception, cargo: SlabDeviceBatch | None) -> None:
        """See DeviceRunner: by groups, as a model that fails is run again."""
        if cargo is None:
            super()._run_again(slot, error, cargo)
        else:
            cargo.run_again(error)

    def take_in(self, group: DeviceGroup) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one copy for each request's tensor, side by side on the device."""
        for name, spec in self._backend.inputs.items():
            arrays = [(rows, arrays[name]) for _, rows, arrays in group.leases if name in arrays]
            if not arrays:
                continue
            shape = arrays[0][1].shape
            whole = (sum(rows for rows, _ in arrays), *shape[1:]) if self._batching else shape
            room = group.inputs[name] = self._device.empty(whole, torch_dtype(spec.dtype.name))
            at = 0
            for rows, array in arrays:
                source = as_tensor(array, spec)
                if not self._pinned:
                    source = self._device.staging(tuple(source.shape), source.dtype).copy_(source)
                yield (room[at : at + rows] if self._batching else room), source
                at += rows

    def compute(self, group: DeviceGroup) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the group, and make slabs for what comes out."""
        results = self._device.run(self._backend.run_on_device, group.inputs)
        at = 0
        for row, rows, _ in group.leases:
            mine = {n: t[at : at + rows] for n, t in results.items()} if self._batching else results
            at += rows
            yield from self._make_slab(group, row, mine)

    def _make_slab(
        self, group: DeviceGroup, row: int, results: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        specs = list(self._backend.outputs.values())
        entries: list[Entry] = [
            (i, spec.dtype.code, tuple(results[spec.name].shape), results[spec.name].nbytes)
            for i, spec in enumerate(specs)
        ]
        offset, size = self._codec.put(entries)
        group.answers.append((row, offset, size))
        if not offset:
            return
        for number, _, _, array in self._codec.arrays(offset, size)[0]:
            target, source = as_tensor(array, specs[number]), results[specs[number].name]
            if not self._pinned:
                staged = self._device.staging(tuple(target.shape), target.dtype)
                group.staged.append((target, staged))
                target = staged
            yield target, source

    def give_up(self, group: DeviceGroup) -> None:
        """Return the slabs of a group that failed."""
        for _, offset, _ in group.answers:
            if offset:
                self._ring.free_slab(offset)
        group.answers.clear()
        group.staged.clear()

    def answer(self, slot: int, group: DeviceGroup) -> None:
        """Answer with the slabs of a group, which have been written."""
        while group.answers:  # each is the lease's own from there on
            row, offset, size = group.answers.pop(0)
            group.leases = [lease for lease in group.leases if lease[0] != row]
            self.plain.answer_slab(slot, row, offset, size)

    def answer_failed(self, slot: int, group: DeviceGroup, *, beside: bool) -> None:
        """Alone where requests may fail so; `beside`: others were on the device with it, and are gone. Raises
        DeviceLost."""
        leases, group.leases = group.leases, []
        fault, group.fault = group.fault, None
        if leases and fault is not None:
            self._device.check(fault)
            whole = self._make_room(fault) or (beside and is_out_of_memory(fault))
            self.plain.group_failed(slot, leases, fault, whole=whole)
