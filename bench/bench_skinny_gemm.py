"""Products of 1, 8 and 32 rows with weights that are in no cache, against torch's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import linear

from fastserve._ext.skinny_gemm import SkinnyGemm

WEIGHTS = [torch.randn(4096, 768) for _ in range(12)]
GEMMS = [SkinnyGemm(weight.numpy()) for weight in WEIGHTS]


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("way", ["torch", "compiled"])
def test_product(benchmark, way, count):  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    rows, out, turn = torch.randn(count, 768), torch.empty(count, 4096), itertools.cycle(range(12))
    given, target = rows.numpy(), out.numpy()
    if way == "torch":
        benchmark(lambda: linear(rows, WEIGHTS[next(turn)]))
    else:
        benchmark(lambda: GEMMS[next(turn)].multiply(given, target))
