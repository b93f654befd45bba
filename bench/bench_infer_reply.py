"""V2 responses: one image's worth of floats and one small row, against orjson writing the same doubles."""

import json

import numpy as np
import orjson
import pytest

from fastserve._ext.infer_reply import InferWriter, write_infer

IMAGE = np.random.default_rng(0).random(150_528, np.float32)
ROW = np.float32([0.25, 1 / 3, 0.1]).tobytes()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def ours() -> bytes:
    return write_infer("m", "1", [("y", 12, IMAGE.shape, IMAGE.data, None)])


def theirs() -> bytes:
    output = {"name": "y", "datatype": "FP32", "shape": IMAGE.shape, "data": IMAGE.astype(np.float64)}
    reply = {"model_name": "m", "model_version": "1", "outputs": [output]}
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)


@pytest.mark.parametrize("write", [ours, theirs])
def test_write(benchmark, write) -> None:  # type: ignore[no-untyped-def]
    benchmark.group = "float32 (150528,) -> v2 response"
    assert json.loads(benchmark(write)) == json.loads(theirs())


def test_small_reply(benchmark) -> None:  # type: ignore[no-untyped-def]
    writer = InferWriter("m", "1", [("probabilities", 12, (1, 3), "json")])
    benchmark.pedantic(writer.write, args=([ROW], "", HEAD), rounds=20, iterations=20_000)
    assert benchmark.disabled or benchmark.stats["min"] < 500e-9
