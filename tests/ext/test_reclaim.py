"""Fronts that die between any two instructions: their remains cost nobody anything."""

from __future__ import annotations

import mmap
import struct

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import BatchRing
from fastserve.server.front_pool import LostRows

# Where arena.h puts things, for a ring of four rows: the row table follows the slot's 512 bytes.
SLOT_BYTES, ROW_BYTES, COLUMNS_AT = 512, 64, 768
EMPTY, RESERVED, COMMITTED, ANSWERED, DROPPED = range(5)


class Shared:
    """Two fronts and a worker over one arena, and a hand that stops a front in the middle of a verb."""

    def __init__(self, **layout: object) -> None:
        shape = {"slots": 2, "max_rows": 4, "inputs": [8], "outputs": [8], "fronts": 2, **layout}
        self.memory = mmap.mmap(-1, batch_ring.measure(**shape))
        batch_ring.format_arena(self.memory, **shape)
        self.alive, self.dying = (BatchRing(self.memory, front=i) for i in (0, 1))
        self.worker = BatchRing(self.memory, worker=0)

    def slot_at(self, slot: int) -> int:
        return self.worker.column_span(slot, 0)[0] - COLUMNS_AT

    def set_row(self, lease: int, state: int, rows: int, front: int = 1) -> None:
        at = self.slot_at(lease >> 16) + SLOT_BYTES + (lease & 0xFFFF) * ROW_BYTES
        struct.pack_into("<IHH", self.memory, at, state, front, rows)

    def add_to_word(self, slot: int, *, reserved: int = 0, settled: int = 0) -> None:
        (word,) = struct.unpack_from("<Q", self.memory, self.slot_at(slot))
        struct.pack_into("<Q", self.memory, self.slot_at(slot), word + (reserved << 16) + settled)

    def reclaim(self) -> int:
        """Do the owner's part after a front has died; the rows that were lost between the two."""
        search = LostRows(self.alive, 1)
        lost = search.look()
        while search.suspected:
            lost += search.look()
        return lost

    def run(self) -> int:
        slot = self.worker.take()
        assert slot >= 0, "the batch still waits for the dead"
        self.worker.publish(slot)
        return slot


def commit(ring: BatchRing, rows: int) -> int:
    lease = ring.reserve(rows)
    ring.commit(lease, rows)
    return lease


@pytest.mark.parametrize("rows", [1, 2])
def test_died_after_claiming_rows_and_before_saying_whose_they_are(rows):
    shared = Shared()
    mine = commit(shared.alive, 1)
    orphan = shared.dying.reserve(rows)
    shared.alive.input_rows(orphan, rows, 0)[:] = b"x" * 8 * rows
    shared.set_row(orphan, EMPTY, 0, front=0)
    assert shared.worker.take() == -1
    assert shared.reclaim() == rows
    assert bytes(shared.alive.input_rows(orphan, rows, 0)) == bytes(8 * rows)
    shared.run()
    shared.alive.release(mine, 1)
    assert shared.alive.outstanding() == 0


@pytest.mark.parametrize("state", [COMMITTED, DROPPED])
def test_died_after_marking_its_rows_and_before_counting_them(state):
    shared = Shared()
    mine, theirs = commit(shared.alive, 1), shared.dying.reserve(2)
    shared.set_row(theirs, state, 2)
    assert shared.reclaim() == 2
    shared.run()
    shared.alive.release(mine, 1)
    assert shared.alive.outstanding() == 0


def test_died_after_releasing_its_rows_and_before_counting_them():
    shared = Shared()
    mine, theirs = commit(shared.alive, 1), commit(shared.dying, 2)
    shared.run()
    shared.set_row(theirs, DROPPED, 2)
    assert shared.reclaim() == 2
    assert shared.alive.describe(0)[0] == "done", "the living front still reads its rows"
    shared.alive.release(mine, 1)
    assert shared.alive.outstanding() == 0


def test_only_what_two_looks_find_the_same_was_lost():
    """A living front in the middle of a reserve looks as one that died there, at one look."""
    shared = Shared()
    mine, theirs = commit(shared.alive, 1), shared.dying.reserve(1)
    late = shared.alive.reserve(1)
    shared.set_row(theirs, EMPTY, 0, front=0)
    shared.set_row(late, EMPTY, 0, front=0)
    search = LostRows(shared.alive, 1)
    assert search.look() == 0
    assert search.suspected
    shared.set_row(late, RESERVED, 1, front=0)
    assert search.look() == 0, "one row fewer than before"
    assert search.look() == 1
    assert not search.suspected
    shared.alive.commit(late, 1)
    shared.run()
    for lease in (mine, late):
        shared.alive.release(lease, 1)
    assert shared.alive.outstanding() == 0


def test_a_request_that_is_met_in_two_of_its_steps_is_not_lost():
    """At one look it has counted its row and not named it, at the next written it and not counted it."""
    shared = Shared()
    mine, late = commit(shared.alive, 3), shared.alive.reserve(1)
    assert shared.alive.describe(0)[0] == "sealed"
    shared.set_row(late, EMPTY, 0, front=0)
    search = LostRows(shared.alive, 1)
    assert search.look() == 0
    shared.set_row(late, COMMITTED, 1, front=0)
    assert search.look() == 0
    assert search.suspected
    shared.set_row(late, RESERVED, 1, front=0)
    shared.alive.commit(late, 1)
    assert search.look() == 0
    assert not search.suspected
    shared.run()
    shared.alive.release(mine, 3)
    shared.alive.release(late, 1)
    assert shared.alive.outstanding() == 0


class Moving:
    """A ring that others move at each try of a look, as often as it is told to."""

    def __init__(self, ring: BatchRing, looks: int) -> None:
        self._ring, self._looks = ring, looks

    def __getattr__(self, name: str) -> object:
        return getattr(self._ring, name)

    def lost(self) -> list[tuple[int, int, int]]:
        self._looks -= 1
        return [(0, 0, 0)] if self._looks >= 0 else self._ring.lost()


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_batch_that_moves_during_a_look_is_looked_at_again(looks):
    shared = Shared()
    mine, theirs = commit(shared.alive, 1), commit(shared.dying, 2)
    shared.run()
    shared.set_row(theirs, DROPPED, 2)
    search = LostRows(Moving(shared.alive, looks), 1)
    for _ in range(max(2, looks + 1)):
        assert search.look() == 0
        assert search.suspected
    assert search.look() == 2
    assert not search.suspected
    shared.alive.release(mine, 1)
    assert shared.alive.outstanding() == 0


def test_what_it_had_released_is_not_released_again():
    shared = Shared()
    mine, theirs = commit(shared.alive, 1), commit(shared.dying, 1)
    shared.run()
    shared.dying.release(theirs, 1)
    assert shared.reclaim() == 0
    assert shared.alive.describe(0) == ("done", 2, 1, 0), "the living front still reads its rows"
    shared.alive.release(mine, 1)
    assert shared.alive.outstanding() == 0
    shared.alive.release(mine, 1)
    assert shared.alive.describe(0)[0] == "free"


@pytest.mark.parametrize("stage", ["reserved", "committed", "running", "done"])
def test_its_rows_are_dropped_at_every_stage(stage):
    shared = Shared()
    mine, theirs = commit(shared.alive, 1), shared.dying.reserve(2)
    if stage != "reserved":
        shared.dying.commit(theirs, 2)
    slot = shared.worker.take() if stage in ("running", "done") else -1
    if stage == "done":
        shared.worker.publish(slot)
    assert shared.reclaim() == 0
    if stage == "running":
        assert shared.worker.leases(slot) == [(0, 1, 0, 0)]
        shared.worker.publish(slot)
    elif stage != "done":
        shared.run()
    shared.alive.release(mine, 1)
    assert shared.alive.outstanding() == 0


def test_a_claimed_slot_is_freed():
    shared = Shared()
    shared.add_to_word(0, reserved=0)
    (word,) = struct.unpack_from("<Q", shared.memory, shared.slot_at(0))
    struct.pack_into("<Q", shared.memory, shared.slot_at(0), word & ~(0xFFFF << 32) | 1 << 40 | 1 << 32)
    assert shared.alive.describe(0)[0] == "claimed"
    shared.reclaim()
    assert shared.alive.describe(0)[0] == "free"


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_its_slabs_go_and_those_a_worker_reads_stay_until_then(attached, running):
    shared = Shared(inputs=(), outputs=(), slab_pages=8)
    mine = commit(shared.alive, 1)
    lease, offset = shared.dying.reserve(1), shared.dying.allocate_slab(5000)
    if attached:
        shared.dying.attach_slab(lease, offset, 5000)
    shared.dying.commit(lease, 1)
    slot = shared.worker.take() if running else -1
    shared.reclaim()
    assert shared.alive.slab_pages_used() == (2 if attached else 0)
    if running:
        shared.worker.publish(slot)
    else:
        shared.run()
    shared.alive.release(mine, 1)
    assert (shared.alive.slab_pages_used(), shared.alive.outstanding()) == (0, 0)


def test_living_fronts_lose_nothing():
    shared = Shared()
    commit(shared.alive, 1)
    shared.alive.reserve(2)
    assert shared.alive.lost() == []
    assert not shared.alive.forgive(0, 7, 1)
    assert not shared.alive.forgive(99, 0, 1)


def test_an_answer_given_again_lets_go_of_the_first():
    """A worker died after it had answered the place, and another runs the batch."""
    shared = Shared(inputs=(), outputs=(), slab_pages=8)
    mine = commit(shared.alive, 1)
    slot = shared.worker.take()
    for size in (5000, 100):
        shared.worker.answer_lease(slot, 0, 0, shared.worker.allocate_slab(size), size)
    assert shared.alive.slab_pages_used() == 1
    shared.worker.publish(slot)
    shared.alive.release(mine, 1)
    assert shared.alive.slab_pages_used() == 0


def test_every_page_of_a_lease_that_changed_hands_goes_with_who_has_it():
    shared = Shared(inputs=(), outputs=(), slab_pages=8)
    shared.alive.give_worker(shared.alive.allocate_slab(3 * 4096), 0)
    shared.alive.worker_died(0, 2, 14, "gone")
    assert shared.alive.slab_pages_used() == 0


def test_a_batch_whose_inputs_were_kept_is_not_run_again():
    """The worker died after a model had kept its inputs and before the answers were published."""
    shared = Shared(inputs=(), outputs=(), slab_pages=8)
    lease = shared.alive.reserve(1)
    shared.alive.attach_slab(lease, shared.alive.allocate_slab(100), 100)
    shared.alive.commit(lease, 1)
    slot = shared.worker.take()
    assert shared.worker.keep_inputs(slot, 0) > 0
    assert shared.alive.worker_died(0, 2, 14, "gone") == (0, 1)
    assert shared.alive.failure(slot) == (14, "gone")
    shared.alive.release(lease, 1)
    assert shared.alive.slab_pages_used() == 0
