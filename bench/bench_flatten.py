"""Nested lists to memory and back, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve._ext.flatten import flatten, pack_bytes, unflatten, unpack_bytes, walk_bytes
from tests.oracles import flatten as oracle

ARRAY = np.random.default_rng(0).random((32, 784)).astype(np.float32)
LISTS, CODE = ARRAY.tolist(), 12
TEXTS = [b"word %d" % n for n in range(1000)]


@pytest.mark.parametrize(
    "read",
    [lambda: flatten(LISTS, CODE)[1], lambda: np.asarray(LISTS, np.float32).tobytes()],
    ids=["fastserve", "numpy"],
)
def test_flatten(benchmark, read) -> None:  # type: ignore[no-untyped-def]
    assert benchmark(read) == ARRAY.tobytes()


@pytest.mark.parametrize(
    "write", [lambda: unflatten(ARRAY, CODE, ARRAY.shape), lambda: ARRAY.tolist()], ids=["fastserve", "numpy"]
)
def test_unflatten(benchmark, write) -> None:  # type: ignore[no-untyped-def]
    assert benchmark(write) == LISTS


def test_texts(benchmark) -> None:  # type: ignore[no-untyped-def]
    assert benchmark(lambda: unpack_bytes(pack_bytes(TEXTS), len(TEXTS))) == TEXTS


@pytest.mark.parametrize("walk", [walk_bytes, oracle.walk_bytes], ids=["fastserve", "python"])
def test_walk(benchmark, walk) -> None:  # type: ignore[no-untyped-def]
    data = bytes(pack_bytes(TEXTS))
    assert benchmark(lambda: walk(data, len(TEXTS) + 1))[::2] == (len(TEXTS), len(data))
