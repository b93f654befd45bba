"""A look at an arena in which nothing is to be given back: what it costs the event loop every few seconds."""

from __future__ import annotations

from fastserve._ext.arena_maintenance import ArenaScanner
from fastserve.workers.arena import Arena, Geometry

ARENA = Arena.create(Geometry(256, 8, (), (), slab_pages=1 << 17, max_delay_ns=0, workers=1, fronts=1))
RING = ARENA.ring(front=0)
RING.free_slab(RING.allocate_slab(1 << 29))
SCANNER = ArenaScanner(ARENA.memory)
SCANNER.trim()  # the first look only notes what is free
while SCANNER.trim():
    pass


def test_a_look_at_512_mb_of_free_slabs(benchmark):  # type: ignore[no-untyped-def]
    assert benchmark(SCANNER.trim) is False
    assert benchmark.disabled or benchmark.stats["min"] < 2e-3
