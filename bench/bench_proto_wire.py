"""V2 inference messages against protobuf's own library: FP32[1,4], and 600 KB of raw bytes."""

from __future__ import annotations

import pytest

from fastserve._ext.proto_wire import read_infer_request, write_infer_response
from tests.oracles.proto_wire import KSERVE
from tests.oracles.proto_wire import write_infer_response as write_protobuf

SIZES, NAMES = (16, 600_000), ("fastserve", "protobuf")
TENSOR = KSERVE.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 4])


def read_ours(data: bytes, memory: bytearray) -> tuple[object, ...]:
    message = read_infer_request(data)
    tensor = message.inputs[0]
    message.copy_raw(0, memory)
    return message.model_name, message.id, tensor.name, tensor.shape, tensor.parameters


def read_protobuf(data: bytes, memory: bytearray) -> tuple[object, ...]:
    message = KSERVE.ModelInferRequest.FromString(data)
    tensor = message.inputs[0]
    memory[:] = message.raw_input_contents[0]
    return message.model_name, message.id, tensor.name, tuple(tensor.shape), dict(tensor.parameters)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("read", [read_ours, read_protobuf], ids=NAMES)
def test_read(benchmark, read, size) -> None:  # type: ignore[no-untyped-def]
    request = KSERVE.ModelInferRequest(model_name="m", inputs=[TENSOR], raw_input_contents=[bytes(size)])
    assert benchmark(read, request.SerializeToString(), bytearray(size))[2:4] == ("INPUT0", (1, 4))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("write", [write_infer_response, write_protobuf], ids=NAMES)
def test_write(benchmark, write, size) -> None:  # type: ignore[no-untyped-def]
    content = ("simple", "1", "7", {}, [("OUTPUT0", "FP32", (1, 4), None)], [bytes(size)])
    assert benchmark(write, *content) == write_protobuf(*content)
