"""Clients' memory on a worker's device: closed after what uses it, and never written for who failed."""

from __future__ import annotations

import ctypes
import socket
from typing import Any

import numpy as np
import pytest

from fastserve.codec.slab_contents import LentNote, write_lent
from fastserve.devices.cuda import CudaFault, OpenHandles
from fastserve.errors import Kind
from fastserve.workers.device import client_cuda_memory
from fastserve.workers.device.base import COMPUTE, COPY_IN, COPY_OUT
from fastserve.workers.device.pipeline import run_flights
from tests.devices.simulated_device import Script
from tests.workers.device_rig import DeviceFunction, DevicePair, device_pair
from tests.workers.pair import specs

X, Y = specs(x=("float32", (2,))), specs(y=("float32", (2,)))
ROW = 8
OUT = 64  # where in a client's memory the answer goes


class Memory:
    """A driver whose device memory is the host's: one allocation for each handle."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Any] = {}
        self.open: list[bytes] = []
        self.on_close: Any = lambda: None
        self.shy = False  # tells no ranges
        self.device = 0

    def allocate(self, number: int) -> tuple[bytes, Any]:
        handle = bytes([number]) * 64
        self._kept[handle] = (ctypes.c_ubyte * 128)()
        return handle, np.frombuffer(self._kept[handle], np.float32)

    def enter(self, device: int) -> None:
        pass

    def open_handle(self, handle: bytes) -> int:
        self.open.append(handle)
        return ctypes.addressof(self._kept[handle])

    def extent(self, address: int) -> int | None:
        return None if self.shy else 128

    def device_of(self, address: int) -> int:
        return self.device

    def to_host(self, memory: bytearray, address: int) -> None:
        if not any(0 <= address - ctypes.addressof(kept) < 128 for kept in self._kept.values()):
            raise CudaFault("cuMemcpyDtoH", 1 if self.shy else 700, "INVALID_VALUE")

    def close_handle(self, address: int) -> None:
        self.on_close()
        self.open.remove(next(h for h, kept in self._kept.items() if ctypes.addressof(kept) == address))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made: Any = Memory()
    handles = OpenHandles(made)
    monkeypatch.setattr(client_cuda_memory, "process_handles", lambda: handles)
    return made


def put(it: DevicePair, handle: bytes, rows: int, out: int = OUT) -> tuple[int, int]:
    """A request whose rows and answer are in that memory."""
    ranges = [(0, handle, 0, 0, rows * ROW, "r")], [(0, handle, 0, out, rows * ROW, "r")]
    note = write_lent(LentNote(*ranges))
    lease, offset = it.front.reserve(rows), it.front.allocate_slab(len(note))
    it.front.slab(offset, len(note), True)[:] = note
    it.front.attach_slab(lease, offset, len(note))
    it.front.commit(lease, rows)
    return lease, rows


def twice(inputs: Any) -> Any:
    if bool((inputs["x"] == 13).any()):
        raise ValueError("13 is not liked")
    return {"y": inputs["x"] * 2}


def prefer(*order: Any) -> Any:
    return lambda ready: next(stream for stream in order if stream in ready)


def test_a_handle_is_closed_when_what_is_in_flight_has_landed(memory: Memory) -> None:
    handle, floats = memory.allocate(1)
    floats[:4] = 1, 2, 3, 4
    found: list[Any] = []
    with device_pair(DeviceFunction(X, Y, twice), choose=prefer(COPY_IN, COMPUTE, COPY_OUT)) as it:
        lease = put(it, handle, 2)
        it.take()
        memory.on_close = lambda: found.append((it.runner.in_flight, floats[16:20].tolist()))
        assert not found
        it.runner.close_lent(handle)
        assert found == [(0, [2, 4, 6, 8])]
        assert memory.open == []
        memory.on_close = lambda: None
        it.get(*lease)


@pytest.mark.parametrize("shy", [False, True])
def test_a_range_beyond_its_allocation_is_refused_by_the_worker(memory: Memory, shy: bool) -> None:
    """Whether the driver tells the range of a handle or not; nothing is written, and the worker goes on."""
    memory.shy = shy
    handle, floats = memory.allocate(1)
    floats[:2] = 5, 6
    with device_pair(DeviceFunction(X, Y, twice)) as it:
        for out, status in ((128 - ROW + 4, Kind.INVALID_ARGUMENT.value), (OUT, 0)):
            lease = put(it, handle, 1, out)
            it.take()
            it.finish()
            assert it.front.lease_status(lease[0]) & 0xFF == status
            if status:
                text = bytes(it.front.slab(*it.front.answer_slab(lease[0]))).decode("latin-1")
                assert "shared memory region 'r' cannot be used: 132 bytes of it are named, " in text
                assert floats[2:].tolist() == [0] * 30
            it.get(*lease)
        assert floats[16:18].tolist() == [10, 12]
        it.runner.close()
    assert memory.open == []


def test_memory_of_another_device_is_refused_by_the_worker(memory: Memory) -> None:
    handle, _ = memory.allocate(1)
    memory.device = 1
    with device_pair(DeviceFunction(X, Y, twice)) as it:
        lease = put(it, handle, 1)
        it.take()
        it.finish()
        assert it.front.lease_status(lease[0]) & 0xFF == Kind.INVALID_ARGUMENT.value
        assert memory.open == []
        it.get(*lease)


def test_a_runner_that_ends_with_a_batch_in_flight(memory: Memory) -> None:
    """By a fault of its own: the copies are over, and what it had open is closed, before the arena goes."""
    handle, floats = memory.allocate(1)
    floats[:2] = 5, 6
    with device_pair(DeviceFunction(X, Y, twice)) as it:
        lease = put(it, handle, 1)
        it.take()
        found: list[Any] = []
        memory.on_close = lambda: found.append(floats[16:18].tolist())
        it.runner.close()
        assert found == [[10, 12]]
        assert not any(it.device._steps.values())
        assert memory.open == []
        it.finish()
        it.get(*lease)


@pytest.mark.lingers  # what is logged keeps the traceback, and that the arena
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_written_for_a_request_that_failed(memory: Memory, seed: int) -> None:
    """Its rows of the batch's columns are of somebody else's last answer."""
    with device_pair(DeviceFunction(X, Y, twice), Script(seed=seed)) as it:
        secret = it.put(x=np.full((4, 2), 1234, np.float32))
        it.take()
        it.finish()
        it.get(*secret)
        memories = [memory.allocate(number) for number in (1, 2)]
        for (_, floats), value in zip(memories, (13, 3), strict=True):
            floats[:4] = value
            floats[16:] = -1
        while True:  # until the batch is in the slot that the first one was in
            leases = [put(it, handle, 2) for handle, _ in memories]
            slot = it.take()
            it.finish()
            statuses = [it.front.lease_status(lease) for lease, _ in leases]
            assert statuses == [Kind.INTERNAL.value, 0]
            assert [len(it.get(*lease)) for lease in leases] == [1, 1]
            assert memories[1][1][16:20].tolist() == [6] * 4
            assert memories[0][1][16:].tolist() == [-1] * 16
            if slot == secret[0] >> 16:
                break
        it.runner.close()
        assert memory.open == []


def test_the_owner_is_heard_though_there_is_always_a_batch() -> None:
    class Busy:
        """A ring with a batch for whoever asks, and a runner that takes and lands each at once."""

        in_flight, room, taken, drained = 0, True, 0, False

        def take_or_wait(self, *limits: int) -> int:
            self.taken += 1
            assert self.taken < 10_000_000, "the owner is not heard"
            return 0

        take = take_or_wait

        def run(self, slot: int) -> bool:
            return True

        def land(self) -> bool:
            return True

        def drain(self) -> None:
            self.drained = True

    busy: Any = Busy()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked: list[int] = []

        def stopped() -> bool:
            asked.append(busy.taken)
            return ours.recv(16) == b"stop"

        theirs.send(b"close")
        busy.run = lambda slot: theirs.send(b"stop") > 0 if busy.taken == 100 else True
        run_flights(busy, busy, stopped, 0, ours.fileno())
    assert asked[0] == 0
    assert asked[1] >= 100
    assert busy.drained
