"""Products of few rows against numpy's in float64, within float32's rounding; their bits beside others."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fastserve._ext.skinny_gemm import MOST_ROWS, SkinnyGemm, is_supported

FORMS = [lanes for lanes in (8, 16) if is_supported(1, lanes)]
SHAPES = [(1, 1), (7, 5), (25, 24), (40, 64), (33, 259)]
pytestmark = pytest.mark.skipif(not is_supported(), reason="a CPU without AVX2")


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.normal(size=shape).astype(np.float32)


def multiply(gemm: SkinnyGemm, rows: np.ndarray, outputs: int, *given: Any) -> np.ndarray:
    """Return the product in an array whose ends have not been written over."""
    room = np.full((len(rows) + 2, outputs), 1234.5, np.float32)
    gemm.multiply(rows, room[1:-1], *given)
    assert (room[[0, -1]] == 1234.5).all()
    return room[1:-1]


@pytest.mark.parametrize("lanes", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_numpys_and_that_of_each_row_alone(lanes: int, outputs: int, inputs: int) -> None:
    random = np.random.default_rng(inputs)
    weight, bias = normal(random, outputs, inputs), normal(random, outputs)
    rows, base = normal(random, MOST_ROWS, inputs), normal(random, MOST_ROWS, outputs)
    exact = rows.astype(np.float64) @ weight.astype(np.float64).T
    most = (np.abs(rows) @ np.abs(weight).T + 1) * inputs**0.5 * 2e-7
    plain = SkinnyGemm(weight, lanes=lanes)
    alone = np.concatenate([multiply(plain, row[None], outputs) for row in rows])
    assert (np.abs(alone - exact) <= most).all()
    biased = SkinnyGemm(weight, bias, lanes=lanes)
    for count in range(1, MOST_ROWS + 1):
        np.testing.assert_array_equal(multiply(plain, rows[:count], outputs), alone[:count])
        np.testing.assert_array_equal(multiply(biased, rows[:count], outputs), alone[:count] + bias)
        added = multiply(biased, rows[:count], outputs, base[:count], 0.5)
        assert (np.abs(added - (base + 0.5 * (exact + bias))[:count]) <= most[:count]).all()
    there = base.copy()
    biased.multiply(rows, there, there, 0.5)
    np.testing.assert_array_equal(there, added)


def test_threads_are_those_of_torch_and_make_the_same_bits() -> None:
    """A process of its own counts its threads."""
    code = """
import numpy as np, torch, os
from fastserve._ext.skinny_gemm import SkinnyGemm, is_supported
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
random = np.random.default_rng(0)
rows, weight = (random.normal(size=size).astype(np.float32) for size in ((9, 64), (203, 64)))
gemm, one, more = SkinnyGemm(weight), np.empty((9, 203), np.float32), np.zeros((9, 203), np.float32)
gemm.multiply(rows, one)
before = count()
assert is_supported(3)
gemm.multiply(rows, more, threads=3)
after = count()
assert (one == more).all() and after == before + 2, (before, after)
torch.ones(1 << 20).add_(1)
assert count() == after
SkinnyGemm(weight[:5]).multiply(rows, few := np.empty((9, 5), np.float32), threads=3)
assert (few == one[:, :5]).all()
print("same")
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert made.stdout == "same\n", made.stderr


def test_what_does_not_fit_is_refused() -> None:
    weight, rows, out = (np.ones(shape, np.float32) for shape in ((3, 4), (2, 4), (2, 3)))
    gemm = SkinnyGemm(weight)
    tall = np.ones((MOST_ROWS + 1, 4), np.float32)
    for given in (
        (rows[:0], out[:0]),
        (tall, np.ones((len(tall), 3), np.float32)),
        (out, out),
        (rows, rows),
        (rows, out[:1]),
        (rows, out, rows),
        (rows, out, out[:1]),
        (rows, np.ones((3, 2), np.float32).T),
        (rows.astype(np.float64), out),
    ):
        with pytest.raises(ValueError):
            gemm.multiply(*given)
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        gemm.multiply(rows, out)
    for refused in ((weight[:0],), (weight[:, :0],), (weight, weight[0]), (weight.T,)):
        with pytest.raises(ValueError):
            SkinnyGemm(*refused)
    assert not is_supported(1, 4)
    with pytest.raises(ValueError, match="no such product"):
        SkinnyGemm(weight, lanes=4)
