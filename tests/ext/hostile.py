"""The two sides of test_hostile_worker.py, each a process of its own.

    python -m tests.ext.hostile scrawl FD BYTES SECONDS         the worker that went mad
    python -m tests.ext.hostile front FD BYTES SECONDS          a front that must live with it

The front attaches before the scrawling starts, and prints how often it did what. Beyond the arena's end
its mapping has no memory: a step outside is a SIGBUS.
"""

from __future__ import annotations

import collections
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import FULL, BatchRing

LONGEST_CALL_S = 0.1
EXPECTED = (ValueError, IndexError, OverflowError)  # refusals of what is given


def words(count: int, rng: random.Random) -> list[int]:
    """Values for shared words: noise, edges, and words of slots and leases that look right."""
    made = []
    for _ in range(count):
        slot_word = rng.randrange(1 << 16) << 48 | rng.randrange(3) << 40 | rng.randrange(9) << 32
        made += [
            rng.getrandbits(64),
            rng.choice([0, 1, 2, (1 << 64) - 1, 1 << 63, 0xFFFFFFFF, 4, 4096]),
            slot_word | rng.randrange(6) << 16 | rng.randrange(6),
            rng.randrange(5) << 32 | rng.choice([1, 2, 7, 40, 0xFFFFFFFF]),
            rng.randrange(6) | rng.randrange(3) << 32 | rng.randrange(6) << 48,
        ]
    return made


def scrawl(fd: int, nbytes: int, seconds: float) -> None:
    """Write over everything, again and again."""
    rng = random.Random(7)
    shared = memoryview(mmap.mmap(fd, nbytes)).cast("B").cast("Q")
    values = words(20_000, rng)
    leases = [rng.randrange(len(shared)) for _ in range(100_000)]
    until, written = time.monotonic() + seconds, 0
    print("scrawling", flush=True)
    while time.monotonic() < until:
        at = rng.randrange(len(values))
        for lease in leases:
            shared[lease] = values[at % 100_000]
            at += 1
        written += len(leases)
    print(written, flush=True)


class Front:
    """Calls everything a front or the owner ever calls, at random, and times it."""

    def __init__(self, memory: Any, bell: int) -> None:
        self.ring = BatchRing(
            memory, front=0, own_doorbell=bell, worker_doorbells=[bell], front_doorbells=[bell, bell]
        )
        self.held: list[tuple[int, int]] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.longest_s = 0.0
        self.rng = random.Random(11)

    def call(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        try:
            found = verb(*arguments)
            self.done[verb.__name__] += 1
        except EXPECTED:
            found = None
            self.done["refused"] += 1
        self.longest_s = max(self.longest_s, time.thread_time() - began)
        return found

    def turn(self) -> None:
        ring, rng = self.ring, self.rng
        rows = rng.randrange(1, 5)
        lease = self.call(ring.reserve, rows)
        if lease not in (FULL, None):
            self.write(lease, rows)
            if self.call(rng.choice([ring.commit, ring.commit, ring.abandon]), lease, rows) is None:
                self.held.append((lease, rows))
        self.call(ring.wake_workers)
        for slot, seq in self.call(ring.drain) or ():
            assert slot < ring.slots
            if slot >= 0:
                self.call(ring.is_done, slot, seq)
        if len(self.held) > 8:
            self.read(*self.held.pop(rng.randrange(8)))
        if rng.random() < 0.1:
            self.own(rng.randrange(ring.slots))

    def write(self, lease: int, rows: int) -> None:
        ring = self.ring
        for column in range(ring.inputs):
            view = self.call(ring.input_rows, lease, rows, column)
            view[:] = b"i" * len(view)
        offset = self.call(ring.allocate_slab, 6000)
        if offset:
            view = self.call(ring.slab, offset, 6000, True)
            if view is not None:
                view[:] = b"s" * 6000
            self.call(ring.attach_slab, lease, offset, 6000)

    def read(self, lease: int, rows: int) -> None:
        ring, slot = self.ring, lease >> 16
        if self.call(ring.drop, lease, rows, batch_ring.CANCELED):
            return
        for column in range(ring.outputs):
            bytes(self.call(ring.output_rows, lease, rows, column))
        offset, size = self.call(ring.answer_slab, lease)
        view = self.call(ring.slab, offset, size)
        if view is not None:
            bytes(view)
        failure = self.call(ring.failure, slot)
        assert failure is None or len(failure[1]) <= 384
        assert all(at <= time.monotonic_ns() for at in self.call(ring.times_ns, slot))
        for verb in (ring.lease_status, ring.seal):
            self.call(verb, lease)
        self.call(ring.describe, slot)
        self.call(ring.seq, slot)
        self.call(ring.release, lease, rows)

    def check_ended(self, slot: int) -> None:
        """No duration is negative or longer than the clock has run."""
        _, _, done_ns, took_ns, row_ns, stages = self.call(self.ring.ended, slot)
        assert 0 <= took_ns <= done_ns <= time.monotonic_ns()
        assert 0 <= row_ns <= time.monotonic_ns()
        assert stages is None or all(-1 <= ns <= time.monotonic_ns() for ns in stages)

    def own(self, slot: int) -> None:
        ring = self.ring
        for verb in (ring.outstanding, ring.queued, ring.pending, ring.slab_pages_used):
            assert self.call(verb) >= 0
        self.call(ring.worker_died, 0, 2, 14, "gone")
        self.call(ring.fail_ready, 14, "nobody")
        self.call(ring.reclaim_front, 1)
        for lost in self.call(ring.lost):
            self.call(ring.forgive, *lost)
        self.check_ended(slot)
        self.call(ring.count, batch_ring.CANCELED, 7)
        _, _, last_ns = self.call(ring.counters)
        assert last_ns <= time.monotonic_ns()
        assert len(self.call(ring.runs)) <= ring.max_rows
        assert {len(spread) for spread in self.call(ring.spreads)} == {4096}
        self.call(ring.free_slab, self.rng.randrange(1 << 20))


def front(fd: int, nbytes: int, seconds: float) -> None:
    """Go on as if nothing were wrong, then say how it went."""
    whole = nbytes + 16 * mmap.PAGESIZE
    os.ftruncate(fd, whole)
    memory = mmap.mmap(fd, whole)
    os.ftruncate(fd, nbytes)
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    it = Front(memoryview(memory)[:nbytes], bell)
    print("attached", flush=True)
    sys.stdin.readline()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        it.turn()
    assert it.longest_s < LONGEST_CALL_S, f"a call took {it.longest_s} s"
    print(dict(it.done), flush=True)


if __name__ == "__main__":
    {"scrawl": scrawl, "front": front}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
