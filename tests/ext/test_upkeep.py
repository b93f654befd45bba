"""Unused memory of an arena, given back beside everything else that happens there."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import FULL, BatchRing
from fastserve._ext.upkeep import Looks

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
        self.looks = Looks(self.memory)

    @property
    def held(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def write(self, rows: int) -> int:
        place = self.front.reserve(rows)
        assert place != FULL
        self.front.input_rows(place, rows, 0)[:] = b"x" * rows * ROW
        self.front.commit(place, rows)
        return place

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
    del made.front, made.worker, made.looks
    made.memory.close()


def test_a_burst_is_given_back_and_what_is_in_use_stays(rig: Rig):
    rig.looks.give_back()
    empty = rig.held
    done = [rig.write(4) for _ in range(3)]
    for _ in done:
        rig.answer()
    for place in done[1:]:
        rig.front.release(place, 4)
    full = rig.held
    assert full > empty + 3 * 8 * ROW
    rig.looks.give_back()
    assert rig.held == full, "free at one look only"
    rig.looks.give_back()
    assert rig.held <= full - 2 * 8 * ROW + 4 * mmap.PAGESIZE
    assert bytes(rig.front.output_rows(done[0], 4, 0)) == b"y" * 4 * ROW
    rig.front.release(done[0], 4)
    for _ in range(3):
        rig.looks.give_back()
    assert rig.held <= empty + 12 * mmap.PAGESIZE
    assert rig.front.outstanding() == 0


def test_a_slot_that_is_used_between_two_looks_stays_as_it_is(rig: Rig):
    for _ in range(5):
        place = rig.write(4)
        rig.answer()
        rig.front.release(place, 4)
        held = rig.held
        rig.looks.give_back()
        assert rig.held == held


def test_what_was_given_back_serves_again(rig: Rig):
    for _ in range(3):
        places = [rig.write(4) for _ in range(4)]
        for place in places:
            assert bytes(rig.front.input_rows(place, 4, 0)) == b"x" * 4 * ROW
        for _ in places:
            rig.answer()
        for place in places:
            assert bytes(rig.front.output_rows(place, 4, 0)) == b"y" * 4 * ROW
            rig.front.release(place, 4)
        for _ in range(3):
            rig.looks.give_back()


def test_slabs_are_given_back_too(rig: Rig):
    offset = rig.front.lease(60 * mmap.PAGESIZE)
    rig.front.slab(offset, 60 * mmap.PAGESIZE, True)[:] = b"s" * 60 * mmap.PAGESIZE
    rig.front.return_lease(offset)
    full = rig.held
    for _ in range(2):
        assert not rig.looks.give_back()
    assert rig.held == full - 60 * mmap.PAGESIZE


def test_looks_beside_a_load_lose_and_mix_nothing(rig: Rig):
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            rig.looks.give_back()

    looking = threading.Thread(target=look)
    looking.start()
    for turn in range(2000):
        byte = bytes([turn % 251])
        place = rig.front.reserve(1)
        if place == FULL:  # the one free slot is being looked at
            continue
        rig.front.input_rows(place, 1, 0)[:] = byte * ROW
        rig.front.commit(place, 1)
        slot = rig.worker.take()
        at, _ = rig.worker.column_span(slot, 0)
        assert rig.memory[at : at + ROW] == byte * ROW
        rig.worker.publish(slot)
        rig.front.release(place, 1)
    done.set()
    looking.join()
    assert rig.front.outstanding() == 0


def test_memory_that_holds_no_arena():
    with pytest.raises(ValueError, match="no arena"):
        Looks(bytearray(1 << 16))
