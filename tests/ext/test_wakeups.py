"""Nothing that may run waits for a sleeping worker: whatever makes a batch runnable wakes one to take it.

Workers are threads here that really sleep at their doorbells, with no time limit of their own: where the word
is lost, they sleep for ever and the test fails after WAIT_S.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import FULL, BatchRing
from tests.running import WAIT_S, until

NEVER_NS = 1 << 60


class Sleeper:
    """A worker that takes one batch, in a thread of its own."""

    def __init__(self, arena: Arena, worker: int) -> None:
        self.slot = FULL
        self._control, self._speak = os.pipe()
        self._ring = arena.ring(
            worker=worker, own_doorbell=arena.worker_doorbells[worker], control=self._control
        )
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        self.sleeps()

    def _work(self) -> None:
        while (slot := self._ring.take_or_wait()) == -1:
            pass
        self.slot = slot

    def sleeps(self) -> None:
        """Waits until it stands at its doorbell, and has for some looks."""
        looks = 0

        def still() -> bool:
            nonlocal looks
            stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
            looks = looks + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
            return looks > 5

        until(still, "a worker sleeps")

    def took(self) -> int:
        """The batch it was woken for."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the worker sleeps on"
        return self.slot

    def close(self) -> None:
        os.write(self._speak, b"!")
        self._thread.join()
        os.close(self._control)
        os.close(self._speak)


class Arena:
    """Shared memory with its doorbells."""

    def __init__(self, **layout: int) -> None:
        shape = {"slots": 4, "max_rows": 4, "inputs": [8], "outputs": [8], **layout}
        delay = shape.pop("max_delay_ns", 0)
        self.memory = mmap.mmap(-1, batch_ring.measure(**shape))
        batch_ring.format_arena(self.memory, max_delay_ns=delay, **shape)
        self.worker_doorbells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(shape.get("workers", 1))]

    def ring(self, **who: int) -> BatchRing:
        return BatchRing(self.memory, worker_doorbells=self.worker_doorbells, **who)


@contextmanager
def asleep(**layout: int) -> Iterator[tuple[Arena, BatchRing, list[Sleeper]]]:
    """A front, and as many workers as there are, all asleep."""
    arena = Arena(**layout)
    with ExitStack() as closing:
        for bell in arena.worker_doorbells:
            closing.callback(os.close, bell)
        sleepers = []
        for worker in range(len(arena.worker_doorbells)):
            sleepers.append(Sleeper(arena, worker))
            closing.callback(sleepers[-1].close)
        yield arena, arena.ring(front=0), sleepers


def commit(ring: BatchRing, rows: int = 1) -> int:
    lease = ring.reserve(rows)
    ring.commit(lease, rows)
    return lease


@pytest.mark.parametrize("delay_ns", [NEVER_NS, 0])
def test_a_batch_sealed_by_hand(delay_ns: int) -> None:
    with asleep(max_delay_ns=delay_ns) as (_, front, (worker,)):
        lease = commit(front)
        if delay_ns:
            front.wake_workers()
            worker.sleeps()  # now only until the batch is due
        front.seal(lease)
        assert worker.took() == lease >> 16


def test_a_batch_sealed_because_the_next_request_does_not_fit() -> None:
    with asleep(max_delay_ns=NEVER_NS) as (_, front, (worker,)):
        commit(front, 3)
        front.wake_workers()
        worker.sleeps()
        front.reserve(2)
        assert worker.took() == 0


def test_a_batch_sealed_where_no_slot_is_left() -> None:
    with asleep(max_delay_ns=NEVER_NS, slots=1) as (_, front, (worker,)):
        commit(front, 3)
        front.wake_workers()
        worker.sleeps()
        assert front.reserve(2) == FULL
        assert worker.took() == 0


def test_a_batch_whose_last_unwritten_rows_are_given_back() -> None:
    with asleep() as (_, front, (worker,)):
        commit(front)
        unwritten = front.reserve(1)
        front.wake_workers()
        worker.sleeps()  # what is being written may keep the batch open
        front.abandon(unwritten, 1)
        front.wake_workers()
        assert worker.took() == 0


def test_a_batch_whose_unwritten_rows_are_given_back_after_it_was_sealed() -> None:
    with asleep(max_delay_ns=NEVER_NS) as (_, front, (worker,)):
        unwritten, lease = front.reserve(1), commit(front)
        front.wake_workers()
        worker.sleeps()
        front.seal(lease)
        worker.sleeps()
        front.abandon(unwritten, 1)
        front.wake_workers()
        assert worker.took() == 0


def test_a_full_batch_and_rows_of_the_next_wake_two() -> None:
    with asleep(workers=2) as (_, front, workers):
        commit(front, 4)
        commit(front)
        front.wake_workers()
        assert sorted(worker.took() for worker in workers) == [0, 1]


def test_who_was_woken_in_vain_is_told_of_the_next_batch() -> None:
    with asleep(workers=2, max_delay_ns=NEVER_NS) as (_, front, workers):
        commit(front)
        front.wake_workers()
        for worker in workers:
            worker.sleeps()
        commit(front, 3)
        commit(front, 4)
        front.wake_workers()
        assert sorted(worker.took() for worker in workers) == [0, 1]


@pytest.mark.parametrize("delay_ns", [NEVER_NS, 0])
def test_a_worker_that_dies_as_it_is_woken(delay_ns: int) -> None:
    """Another takes what it was woken for."""
    arena = Arena(workers=2, max_delay_ns=delay_ns)
    with ExitStack() as closing:
        for bell in arena.worker_doorbells:
            closing.callback(os.close, bell)
        silent, spoken = os.pipe()
        closing.callback(os.close, silent)
        closing.callback(os.close, spoken)
        dead = Sleeper(arena, 0)
        closing.callback(dead.close)
        living = Sleeper(arena, 1)
        closing.callback(living.close)
        front = arena.ring(front=0)
        # Its flag says asleep, and its doorbell is heard by nobody.
        os.dup2(silent, arena.worker_doorbells[0])
        lease = commit(front)
        if delay_ns:
            front.seal(lease)
        front.wake_workers()
        front.worker_died(0, 2, 14, "died")
        assert living.took() == 0


def test_a_front_that_dies_before_it_wakes_anybody() -> None:
    with asleep(fronts=2, max_delay_ns=NEVER_NS) as (arena, owner, (worker,)):
        first = arena.ring(front=1)
        lease = commit(owner)
        first.reserve(1)
        owner.wake_workers()
        worker.sleeps()
        owner.seal(lease)
        worker.sleeps()
        owner.reclaim_front(1)
        assert worker.took() == 0
