"""V1 inference messages against protobuf's own library: one FP32[4] tensor in, one out."""

from __future__ import annotations

import pytest

from fastserve._ext.proto_wire_v1 import read_v1_request, write_v1_header, write_v1_response
from tests.oracles.proto_wire_v1 import TRITON, write_protobuf

HEADER = {"batch_size": 1, "input": [{"name": "INPUT0", "dims": [4]}], "output": [{"name": "OUTPUT0"}]}
REQUEST = TRITON.InferRequest(
    model_name="simple", meta_data=HEADER, raw_input=[bytes(16)]
).SerializeToString()
STATUS, REPLY = (1, "", "inference:0", 7), ("simple", 1, 1, 0, [("OUTPUT0", (4,), 16, None)])


def write_ours(status, reply, raw) -> bytes:  # type: ignore[no-untyped-def]
    return write_v1_response(status, write_v1_header(*reply), raw)


def read_ours() -> tuple[object, ...]:
    message = read_v1_request(REQUEST)
    tensor, output = message.inputs[0], message.outputs[0]
    return message.model_name, message.batch_size, tensor.name, tensor.dims, output.name, message.raw(0)[1]


def read_protobuf() -> tuple[object, ...]:
    message = TRITON.InferRequest.FromString(REQUEST)
    header, tensor, output = message.meta_data, message.meta_data.input[0], message.meta_data.output[0]
    return message.model_name, header.batch_size, tensor.name, tuple(tensor.dims), output.name, 16


@pytest.mark.parametrize("read", [read_ours, read_protobuf], ids=["fastserve", "protobuf"])
def test_read(benchmark, read) -> None:  # type: ignore[no-untyped-def]
    assert benchmark(read) == ("simple", 1, "INPUT0", (4,), "OUTPUT0", 16)


@pytest.mark.parametrize("write", [write_ours, write_protobuf], ids=["fastserve", "protobuf"])
def test_write(benchmark, write) -> None:  # type: ignore[no-untyped-def]
    assert benchmark(write, STATUS, REPLY, [bytes(16)]) == write_protobuf(STATUS, REPLY, [bytes(16)])
