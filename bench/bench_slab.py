"""Leasing a slab and filling it with strided rows, against bytearray and numpy."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from fastserve._ext import slab
from fastserve._ext.slab import SlabPool

DATA = np.random.default_rng(0).integers(0, 255, (256, 4096), np.uint8)
ROW = 2048  # the first half of each row
POOL = SlabPool.create(mmap.mmap(-1, slab.pool_bytes(1024)), 1024)


def ours():  # type: ignore[no-untyped-def]
    offset = POOL.allocate(256 * ROW, 1)
    out = POOL.view(offset, 256 * ROW)
    slab.copy_rows(out, DATA.reshape(-1), rows=256, row_bytes=ROW, out_stride=ROW, data_stride=4096)
    POOL.release(offset)
    return out


@pytest.mark.parametrize("way", [ours, lambda: DATA[:, :ROW].tobytes()], ids=["slab", "numpy"])
def test_strided_rows(benchmark, way):  # type: ignore[no-untyped-def]
    got = benchmark(way)
    assert bytes(got) == DATA[:, :ROW].tobytes()
    assert benchmark.disabled or benchmark.stats["min"] < 256 * ROW / 2e9  # 2 GB/s at least


def test_lease_and_release(benchmark):  # type: ignore[no-untyped-def]
    benchmark.pedantic(lambda: POOL.release(POOL.allocate(5000, 1)), rounds=20, iterations=5000)
    assert POOL.used() == 0
    assert benchmark.disabled or benchmark.stats["min"] < 1e-6
