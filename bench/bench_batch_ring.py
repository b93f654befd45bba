"""One request through the batch ring, front and worker in one process, against queue.SimpleQueue."""

from __future__ import annotations

import mmap
from queue import SimpleQueue

import pytest

from fastserve._ext.batch_ring import BatchRing, format_arena, measure

SHAPE = {"slots": 8, "max_rows": 32, "inputs": [16], "outputs": [12]}


def ring():  # type: ignore[no-untyped-def]
    memory = mmap.mmap(-1, measure(**SHAPE))
    format_arena(memory, **SHAPE)
    front, worker = BatchRing(memory, front=0), BatchRing(memory, worker=0)

    def turn() -> tuple[int, int]:
        lease = front.reserve(1)
        front.commit(lease, 1)
        worker.publish(worker.take())
        found = front.drain()
        front.release(lease, 1)
        return lease >> 16, found[0][0]

    return turn


def queue():  # type: ignore[no-untyped-def]
    there, back = SimpleQueue(), SimpleQueue()  # type: ignore[var-annotated]
    return lambda: (there.put(1), back.put(there.get()), back.get())[1:]


@pytest.mark.parametrize("make", [ring, queue])
def test_one_request_there_and_back(benchmark, make):  # type: ignore[no-untyped-def]
    first, second = benchmark.pedantic(make(), rounds=20, iterations=5000)
    assert make is queue or first == second
    assert make is queue or benchmark.disabled or benchmark.stats["min"] < 3e-6
