"""float32 memory to JSON text: one image's worth of numbers and one small reply, against orjson."""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable

import numpy as np
import orjson
import pytest

from fastserve._ext.json_writer import MODE_SHORTEST, MODE_TFS, RowWriter, write_values

IMAGE = np.random.default_rng(0).random(150528, np.float32)
ROW = np.float32([0.25, 1 / 3, 0.1]).tobytes()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WRITERS: dict[str, Callable[[], bytes]] = {
    "orjson": lambda: orjson.dumps(IMAGE, option=orjson.OPT_SERIALIZE_NUMPY),
    "tfs": lambda: write_values(IMAGE, 12, IMAGE.shape, MODE_TFS),
    "shortest": lambda: write_values(IMAGE, 12, IMAGE.shape, MODE_SHORTEST),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_write(benchmark, writer):  # type: ignore[no-untyped-def]
    benchmark.group = "float32 (150528,) -> json"
    got = benchmark(WRITERS[writer])
    np.testing.assert_array_equal(np.array(json.loads(got), np.float32), IMAGE)
    if writer != "orjson" and not benchmark.disabled:
        assert min(timeit.repeat(WRITERS["orjson"], number=1, repeat=30)) > 1.3 * benchmark.stats["min"]


def test_small_reply(benchmark):  # type: ignore[no-untyped-def]
    rows = RowWriter("probabilities", 12, (3,))
    benchmark.pedantic(rows.write, args=(ROW, 1, HEAD), rounds=20, iterations=20_000)
    assert benchmark.disabled or benchmark.stats["min"] < 400e-9
