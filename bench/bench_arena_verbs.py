"""A part of an answer there and back against queue.SimpleQueue, and what a dead front's reclaim costs."""

from __future__ import annotations

import mmap
from queue import SimpleQueue

import pytest

from fastserve._ext.batch_ring import BatchRing, format_arena, measure

SHAPE = {"slots": 64, "max_rows": 32, "fronts": 2, "slab_pages": 64}
BYTES = 4096


def rings():  # type: ignore[no-untyped-def]
    memory = mmap.mmap(-1, measure(**SHAPE))
    format_arena(memory, **SHAPE)
    return *(BatchRing(memory, front=i) for i in range(2)), BatchRing(memory, worker=0)


def part():  # type: ignore[no-untyped-def]
    front, _, worker = rings()
    front.commit(front.reserve(1), 1)
    slot = worker.take()

    def turn() -> int:
        worker.send_part(slot, 0, worker.allocate_slab(BYTES), BYTES, False)
        ((_, found),) = front.drain()
        front.free_slab(found[3])
        return found[4]

    return turn


def queue():  # type: ignore[no-untyped-def]
    there = SimpleQueue()  # type: ignore[var-annotated]
    return lambda: (there.put(bytes(BYTES)), len(there.get()))[1]


@pytest.mark.parametrize("make", [part, queue])
def test_one_part(benchmark, make):  # type: ignore[no-untyped-def]
    assert benchmark.pedantic(make(), rounds=20, iterations=2000) == BYTES
    assert make is queue or benchmark.disabled or benchmark.stats["min"] < 5e-6


def test_a_dead_fronts_reclaim(benchmark):  # type: ignore[no-untyped-def]
    alive, dying, _ = rings()
    for _ in range(SHAPE["slots"] * SHAPE["max_rows"]):
        dying.commit(dying.reserve(1), 1)
    assert benchmark.pedantic(lambda: alive.reclaim_front(1), rounds=1) == 2048
    assert benchmark.disabled or benchmark.stats["max"] < 0.01
