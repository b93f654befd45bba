"""V2 requests to memory, against orjson + numpy. bench_request_template has those that are as one before."""

import numpy as np
import orjson
import pytest

from fastserve._ext.infer_json import read_infer

RANDOM = np.random.default_rng(0)
SHAPES = {"tiny": (1, 4), "mlp": (1, 784), "image": (1, 150_528)}


def body_of(array: np.ndarray, digits: str) -> bytes:
    data = array.ravel().tolist() if digits == "long" else array.ravel()  # long: as Python prints float32
    tensor = {"name": "x", "shape": array.shape, "datatype": "FP32", "data": data}
    return orjson.dumps({"inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY)


def ours(body: bytes, out: np.ndarray) -> None:
    out.ravel()[:] = np.frombuffer(read_infer(body).inputs[0].data, np.float32)


def theirs(body: bytes, out: np.ndarray) -> None:
    out.ravel()[:] = np.asarray(orjson.loads(body)["inputs"][0]["data"], np.float32)


@pytest.mark.parametrize("read", [ours, theirs])
@pytest.mark.parametrize("digits", ["short", "long"])
@pytest.mark.parametrize("name", SHAPES)
def test_read(benchmark, name: str, digits: str, read) -> None:  # type: ignore[no-untyped-def]
    array = RANDOM.random(SHAPES[name]).astype(np.float32)
    body, out = body_of(array, digits), np.zeros_like(array)
    benchmark.group = f"v2 {name} {digits}"
    benchmark(read, body, out)
    np.testing.assert_array_equal(out, array)
