"""The cache takes memory as it is used, and is zeros before."""

from __future__ import annotations

import resource

import pytest
import torch

from fastserve.backends.llm.kv_cache import CacheSize, Shape
from fastserve.backends.llm.torch_model import make_cache

MIB = 1 << 20


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_take_memory_as_they_are_used(dtype: torch.dtype) -> None:
    before = resident()
    cache = make_cache(Shape(layers=4, heads=4, dim=64), CacheSize(32, 4096), dtype, torch.device("cpu"))
    whole = cache.data.nbytes
    assert whole >= 512 * MIB
    assert resident() - before < whole // 8
    for row in range(32):
        for layer in range(4):
            cache.keys[layer][row, :, :40] = 1
            cache.values[layer][row, :, :40] = 2
    assert resident() - before < whole // 8
    cache.move(0, 1, 40)
    cache.wipe(0, 40)
    assert not cache.data[:, :, 0].any()
    assert cache.keys[3][1, 3, 39, 63] == 1
    assert not cache.data[:, :, :, :, 40:].any()


def test_no_room_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        make_cache(Shape(64, 64, 128), CacheSize(1 << 20, 1 << 20), torch.float32, torch.device("cpu"))
