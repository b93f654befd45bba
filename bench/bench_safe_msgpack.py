"""Plain objects there and back, with pickle as the baseline (reported; pickle is not safe to read)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fastserve.codec import safe_msgpack

TEXT = "the quick brown fox jumps over the lazy dog"
VALUES = {
    "text": TEXT,
    "record": {"text": TEXT, "ids": list(range(50)), "score": 0.123456789, "tags": ["a", "b"], "more": None},
    "tuples": [(i, i / 7, str(i)) for i in range(1000)],
    "floats": [i / 7 for i in range(10_000)],
    "image": {"image": np.arange(150_528, dtype=np.float32), "id": 1},
}
CODECS = {
    "wireable": (safe_msgpack.encode, safe_msgpack.decode),
    "pickle": (lambda value: pickle.dumps(value, protocol=5), pickle.loads),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", VALUES)
def test_there_and_back(benchmark, name: str, codec: str) -> None:  # type: ignore[no-untyped-def]
    encode, decode = CODECS[codec]
    benchmark.group = name
    found = benchmark(lambda: decode(encode(VALUES[name])))
    assert repr(found) == repr(VALUES[name])
