"""Predict bodies to memory, against orjson + numpy: short and long numbers, images, tiny bodies."""

import json

import numpy as np
import orjson
import pytest

from fastserve._ext.json_reader import PredictReader

RANDOM = np.random.default_rng(0)
SHAPES = {"tiny": (1, 4), "mlp": (1, 784), "image": (1, 150_528), "rows": (1000, 4)}
READER = PredictReader([("x", 12)], b"serving_default", is_default=True)


def body_of(array: np.ndarray, digits: str) -> bytes:
    if digits == "long":  # what Python clients send: float32 printed as the double it is
        return json.dumps({"instances": array.tolist()}).encode()
    return orjson.dumps({"instances": array}, option=orjson.OPT_SERIALIZE_NUMPY)


def ours(body: bytes, out: np.ndarray) -> None:
    rows = READER.count_rows(body, out[0].size)
    assert READER.read_into(body, out, out.shape[1:], rows) == 0


def theirs(body: bytes, out: np.ndarray) -> None:
    out[:] = np.asarray(orjson.loads(body)["instances"], np.float32)


@pytest.mark.parametrize("read", [ours, theirs])
@pytest.mark.parametrize("digits", ["short", "long"])
@pytest.mark.parametrize("name", SHAPES)
def test_read(benchmark, name: str, digits: str, read) -> None:  # type: ignore[no-untyped-def]
    array = RANDOM.random(SHAPES[name]).astype(np.float32)
    body, out = body_of(array, digits), np.zeros_like(array)
    benchmark.group, benchmark.extra_info["bytes"] = f"{name} {digits}", len(body)
    benchmark(read, body, out)
    np.testing.assert_array_equal(out, array)
