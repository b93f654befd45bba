"""Unused memory of an arena, given back beside everything else that happens there."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.arena_maintenance import ArenaScanner
from fastserve._ext.batch_ring import FULL, BatchRing

ROW = 64 << 10
LAYOUT = {"slots": 4, "max_rows": 4, "inputs": [ROW], "outputs": [ROW], "slab_pages": 64}


class Rig:
    """An arena in a memfd, whose blocks tell what it holds."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("arena")
        os.ftruncate(self.fd, batch_ring.measure(**LAYOUT))
        self.memory = mmap.mmap(self.fd, batch_ring.measure(**LAYOUT))
        batch_ring.format_arena(self.memory, **LAYOUT)
        self.front, self.worker = BatchRing(self.memory, front=0), BatchRing(self.memory, worker=0)
        self.scanner = ArenaScanner(self.memory)

    @property
    def held(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def write(self, rows: int) -> int:
        lease = self.front.reserve(rows)
        assert lease != FULL
        self.front.input_rows(lease, rows, 0)[:] = b"x" * rows * ROW
        self.front.commit(lease, rows)
        return lease

    def answer(self) -> int:
        slot = self.worker.take()
        at, _ = self.worker.column_span(slot, 0, True)
        self.memory[at : at + 4 * ROW] = b"y" * 4 * ROW
        self.worker.publish(slot)
        return slot


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    os.close(made.fd)
    del made.front, made.worker, made.scanner
    made.memory.close()


def test_a_burst_is_given_back_and_what_is_in_use_stays(rig: Rig):
    rig.scanner.trim()
    empty = rig.held
    done = [rig.write(4) for _ in range(3)]
    for _ in done:
        rig.answer()
    for lease in done[1:]:
        rig.front.release(lease, 4)
    full = rig.held
    assert full > empty + 3 * 8 * ROW
    rig.scanner.trim()
    assert rig.held == full, "free at one look only"
    rig.scanner.trim()
    assert rig.held <= full - 2 * 8 * ROW + 4 * mmap.PAGESIZE
    assert bytes(rig.front.output_rows(done[0], 4, 0)) == b"y" * 4 * ROW
    rig.front.release(done[0], 4)
    for _ in range(3):
        rig.scanner.trim()
    assert rig.held <= empty + 12 * mmap.PAGESIZE
    assert rig.front.outstanding() == 0


def test_a_slot_that_is_used_between_two_looks_stays_as_it_is(rig: Rig):
    for _ in range(5):
        lease = rig.write(4)
        rig.answer()
        rig.front.release(lease, 4)
        held = rig.held
        rig.scanner.trim()
        assert rig.held == held


def test_what_was_given_back_serves_again(rig: Rig):
    for _ in range(3):
        leases = [rig.write(4) for _ in range(4)]
        for lease in leases:
            assert bytes(rig.front.input_rows(lease, 4, 0)) == b"x" * 4 * ROW
        for _ in leases:
            rig.answer()
        for lease in leases:
            assert bytes(rig.front.output_rows(lease, 4, 0)) == b"y" * 4 * ROW
            rig.front.release(lease, 4)
        for _ in range(3):
            rig.scanner.trim()


def test_slabs_are_given_back_too(rig: Rig):
    offset = rig.front.allocate_slab(60 * mmap.PAGESIZE)
    rig.front.slab(offset, 60 * mmap.PAGESIZE, True)[:] = b"s" * 60 * mmap.PAGESIZE
    rig.front.free_slab(offset)
    full = rig.held
    for _ in range(2):
        assert not rig.scanner.trim()
    assert rig.held == full - 60 * mmap.PAGESIZE


def test_looks_beside_a_load_lose_and_mix_nothing(rig: Rig):
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            rig.scanner.trim()

    looking = threading.Thread(target=look)
    looking.start()
    for turn in range(2000):
        byte = bytes([turn % 251])
        lease = rig.front.reserve(1)
        if lease == FULL:  # the one free slot is being looked at
            continue
        rig.front.input_rows(lease, 1, 0)[:] = byte * ROW
        rig.front.commit(lease, 1)
        slot = rig.worker.take()
        at, _ = rig.worker.column_span(slot, 0)
        assert rig.memory[at : at + ROW] == byte * ROW
        rig.worker.publish(slot)
        rig.front.release(lease, 1)
    done.set()
    looking.join()
    assert rig.front.outstanding() == 0


def test_memory_that_holds_no_arena():
    with pytest.raises(ValueError, match="no arena"):
        ArenaScanner(bytearray(1 << 16))
