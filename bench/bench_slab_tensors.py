"""A request of two small tensors into a slab and out again as arrays, against `struct` and numpy alone."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve.tensor import DTYPES
from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.arrays import open_slab_codec
from tests.oracles import slab_tensors as plain

ARENA = Arena.create(Geometry(4, 8, (), (), slab_pages=64, max_delay_ns=0, workers=1, fronts=1))
RING = ARENA.ring(worker=0)
DESK = open_slab_codec(ARENA, RING)
NUMBERS = np.arange(16, dtype=np.int32).reshape(1, 16)
ENTRIES = [(number, DTYPES["int32"].code, (1, 16), NUMBERS.tobytes()) for number in range(2)]


def ours():  # type: ignore[no-untyped-def]
    offset, nbytes = DESK.put(ENTRIES)
    found = [array for _, _, _, array in DESK.arrays(offset, nbytes)[0]]
    RING.free_slab(offset)
    return found


def struct_and_numpy():  # type: ignore[no-untyped-def]
    slab = bytearray(plain.measure(ENTRIES))
    plain.write(slab, ENTRIES)
    return [np.frombuffer(data, np.int32).reshape(shape) for _, _, shape, data in plain.read(bytes(slab))]


@pytest.mark.parametrize("way", [ours, struct_and_numpy])
def test_two_tensors_there_and_back(benchmark, way):  # type: ignore[no-untyped-def]
    for array in benchmark(way):
        assert array.tolist() == NUMBERS.tolist()
    if way is ours and not benchmark.disabled:
        assert benchmark.stats["min"] < 8e-6
