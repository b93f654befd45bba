"""A request's way through the fast path without the model: the compiled parts against their oracle, on a real
ring whose worker is this process."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve._ext import fast_path
from fastserve.metrics.names import Traffic
from fastserve.metrics.registry import Registry
from fastserve.workers.arena import Arena, Geometry
from tests.oracles import fast_path as oracle

ROWS = 64


def nothing(*given: Any) -> None: ...


@pytest.mark.parametrize("of", [fast_path, oracle], ids=["compiled", "python"])
def test_in_and_out(benchmark: Any, of: Any) -> None:
    arena = Arena.create(Geometry(8, ROWS, (16,), (16,), 0, 0, 1, 1, False))
    ring, worker = arena.ring(front=0), arena.ring(worker=0)
    names = ("wake_soon", "watch", "settle", "failure", "undelivered", "cancel")
    queue = type("Queue", (of.TicketTable,), dict.fromkeys(names, nothing))(
        ring, 8, SimpleNamespace(record=nothing)
    )
    queue.room = SimpleNamespace(anyone=False)
    registry = Registry()
    traffic = Traffic(registry, "v2", ["m"])
    metrics = *traffic.succeeded("m", 1), *traffic.stages("m", 1)
    registry.close()
    path = type("Path", (of.Lifecycle,), {"respond": nothing, "refuse": nothing})(
        queue, ValueError, metrics, None, {}, False
    )
    columns = fast_path.Columns(ring, [0])
    prepared = SimpleNamespace(
        rows=1, noted=False, outside=False, fill=lambda source, memory: True, write=nothing, writers={1: 1},
        layout_in=columns, layout_out=columns,
    )  # fmt: skip
    exchange = SimpleNamespace(received_ns=time.monotonic_ns(), on_gone=None)

    def run() -> int:
        for _ in range(ROWS):
            assert path.start(exchange, prepared, b"")
        slot = worker.take()
        worker.publish(slot)
        queue.finish(slot)
        return slot

    try:
        assert benchmark(run) >= 0
        assert ring.outstanding() == 0
    finally:
        arena.close()
