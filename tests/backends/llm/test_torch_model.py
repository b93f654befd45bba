"""Numbers are read when their copy is over, and not before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastserve._ext.skinny_gemm import MOST_ROWS
from fastserve.backends.llm.torch_model import HostCopy, Int8Product, Product

FOUND = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def test_on_a_cpu_nothing_is_copied():
    found = HostCopy(torch.device("cpu")).bring(FOUND)
    assert found.ctypes.data == FOUND.data_ptr()


def test_what_a_device_has_is_waited_for_in_memory_of_its_own():
    made, waited = [], []

    class Room:
        def __init__(self, like: torch.Tensor) -> None:
            self.like, self.there, self.copied = like, torch.full_like(like, -1), False
            made.append(self)

        def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            self.copied = source is FOUND

        def numpy(self) -> np.ndarray:
            return self.there.numpy()

    class Mark:
        def synchronize(self) -> None:
            assert made[-1].copied  # the event is behind the copy
            made[-1].there.copy_(FOUND)
            waited.append(self)

    landing = HostCopy(torch.device("meta"), Room, Mark)
    first, second = landing.bring(FOUND), landing.bring(FOUND)
    np.testing.assert_array_equal(first, FOUND.numpy())
    assert len(waited) == 2
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("rows", [1, 4, MOST_ROWS, MOST_ROWS + 1])
def test_a_product_of_few_rows_is_that_of_more(rows: int) -> None:
    random = np.random.default_rng(rows)
    weight, given, hidden, bias = (
        random.normal(size=size).astype(np.float32) for size in ((9, 7), (rows, 7), (rows, 9), (9,))
    )
    for biased in (False, True):
        product = Product(torch.from_numpy(weight), torch.from_numpy(bias) if biased else None)
        expected = given @ weight.T + (bias if biased else 0)
        made = product(torch.from_numpy(given))
        assert made.is_contiguous()
        np.testing.assert_allclose(made.numpy(), expected, rtol=1e-4, atol=1e-5)
        added = product.add(torch.from_numpy(hidden), torch.from_numpy(given), 0.5).numpy()
        np.testing.assert_allclose(added, hidden + 0.5 * expected, rtol=1e-4, atol=1e-5)


def int8_product(weight: np.ndarray, bias: np.ndarray, given: np.ndarray) -> np.ndarray:
    """What Int8Product says it computes, in plain numbers."""
    scales = np.abs(weight).max(1) / np.float32(127)
    numbers = np.round(weight / scales[:, None]).astype(np.int64)
    rows = np.maximum(np.abs(given).max(-1, keepdims=True), np.float32(1e-30)) * np.float32(1 / 63)
    sums = np.round(given / rows).astype(np.int64) @ numbers.T
    made: np.ndarray = sums.astype(np.float32) * scales * rows + bias
    return made


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (64, 96), (333, 130)])
def test_an_int8_product_is_what_whole_numbers_give(inputs: int, outputs: int) -> None:
    random = np.random.default_rng(inputs)
    weight = random.normal(size=(outputs, inputs)).astype(np.float32)
    bias = random.normal(size=outputs).astype(np.float32)
    given = (random.normal(size=(9, inputs)) * 10.0 ** random.integers(-6, 6, (9, 1))).astype(np.float32)
    given[3] = 0
    given[4] = np.abs(given[4]).max()  # the largest sums: 16 bits would cut them off
    product = Int8Product(torch.from_numpy(weight), torch.from_numpy(bias))
    made = product(torch.from_numpy(given)).numpy()
    np.testing.assert_allclose(made, int8_product(weight, bias, given), rtol=1e-4, atol=1e-5)
    for row, alone in zip(given, made, strict=True):
        np.testing.assert_array_equal(product(torch.from_numpy(row[None])).numpy()[0], alone)
    hidden = torch.from_numpy(random.normal(size=(9, outputs)).astype(np.float32))
    added = product.add(hidden, torch.from_numpy(given), 0.5).numpy()
    np.testing.assert_array_equal(added, hidden.numpy() + 0.5 * made)
