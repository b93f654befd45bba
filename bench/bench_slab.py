"""Leasing a slab, filling it and giving it back, against a new bytearray."""

from __future__ import annotations

import mmap

import pytest

from fastserve._ext import slab
from fastserve._ext.slab import SlabPool

DATA = bytes(range(256)) * 2048
POOL = SlabPool.create(mmap.mmap(-1, slab.pool_bytes(1024)), 1024)


def ours() -> memoryview:
    offset = POOL.allocate(len(DATA), 1)
    out = POOL.view(offset, len(DATA))
    out[:] = DATA
    POOL.release(offset)
    return out


@pytest.mark.parametrize("way", [ours, lambda: bytearray(DATA)], ids=["slab", "bytearray"])
def test_filling(benchmark, way):  # type: ignore[no-untyped-def]
    assert benchmark(way) == DATA
    assert benchmark.disabled or benchmark.stats["min"] < len(DATA) / 2e9  # 2 GB/s at least


def test_lease_and_release(benchmark):  # type: ignore[no-untyped-def]
    benchmark.pedantic(lambda: POOL.release(POOL.allocate(5000, 1)), rounds=20, iterations=5000)
    assert POOL.used() == 0
    assert benchmark.disabled or benchmark.stats["min"] < 1e-6
