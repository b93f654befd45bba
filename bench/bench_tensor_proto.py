"""TensorProto of 150528 floats against memcpy, and against protobuf's library with numpy; a reply of four."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve._ext.tensor_proto import read_predict_request, write_model_spec, write_predict_response
from fastserve.dialects.tfserving.grpc_predict import SCHEME
from fastserve.tensor import DTYPES
from tests.oracles.tensor_proto import TF, encode

ITEMS, CODE = 150528, DTYPES["float32"].code
VALUES = np.random.default_rng(7).random(ITEMS, np.float32)
MEMORY = bytearray(VALUES.nbytes)


def request(content: bool) -> bytes:
    made = TF.PredictRequest(model_spec={"name": "m"})
    tensor = made.inputs["x"]
    tensor.dtype = 1
    tensor.tensor_shape.dim.add(size=ITEMS)
    if content:
        tensor.tensor_content = VALUES.tobytes()
    else:
        tensor.float_val.extend(VALUES.tolist())
    return made.SerializeToString()


def read_general(data: bytes) -> None:
    tensor = read_predict_request(data).inputs["x"]
    tensor.fill(CODE, ITEMS, MEMORY)


def read_known(data: bytes) -> None:
    assert SCHEME.read(data).copy_data(0, MEMORY)


def read_protobuf(data: bytes) -> None:
    tensor = TF.PredictRequest.FromString(data).inputs["x"]
    given = tensor.tensor_content or np.asarray(tensor.float_val, np.float32).tobytes()
    MEMORY[:] = given


def copy(data: bytes) -> None:
    MEMORY[:] = memoryview(data)[-VALUES.nbytes :]


@pytest.mark.parametrize("read", [copy, read_known, read_general, read_protobuf])
@pytest.mark.parametrize("content", [True, False], ids=["content", "float_val"])
def test_read(benchmark, content, read) -> None:  # type: ignore[no-untyped-def]
    benchmark(read, request(content))
    if read is not copy or content:
        assert np.array_equal(np.frombuffer(MEMORY, np.float32), VALUES)


@pytest.mark.parametrize("ours", [True, False], ids=["fastserve", "protobuf"])
def test_write(benchmark, ours) -> None:  # type: ignore[no-untyped-def]
    data, spec = VALUES[:4].tobytes(), write_model_spec("", 0, "")
    described = [("y", CODE, (1, 4))]
    if ours:
        assert benchmark(write_predict_response, described, [data], spec)
    else:
        assert benchmark(lambda: encode("y", "float32", (1, 4), data, False).SerializeToString())
