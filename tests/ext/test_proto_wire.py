"""proto_wire against protobuf's own library: everything one accepts the other does, and sees the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve._ext.proto_wire import (
    Fault,
    InferMessage,
    WireFault,
    read_infer_request,
)
from fastserve.tensor import DTYPES
from tests.oracles import proto_wire as oracle

Request = oracle.KSERVE.ModelInferRequest
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT64 = st.integers(-(2**63), 2**63 - 1)
CHOICES = st.one_of(
    st.fixed_dictionaries({"bool_param": st.booleans()}),
    st.fixed_dictionaries({"int64_param": INT64}),
    st.fixed_dictionaries({"string_param": TEXT}),
    st.fixed_dictionaries({"double_param": st.floats(allow_nan=False)}),
    st.fixed_dictionaries({"uint64_param": st.integers(0, 2**64 - 1)}),
    st.just({}),
)
PARAMETERS = st.dictionaries(TEXT, CHOICES, max_size=3)
CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": st.lists(st.booleans(), max_size=5),
        "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
        "int64_contents": st.lists(INT64, max_size=5),
        "uint_contents": st.lists(st.integers(0, 2**32 - 1), max_size=5),
        "uint64_contents": st.lists(st.integers(0, 2**64 - 1), max_size=5),
        "fp32_contents": st.lists(st.floats(width=32, allow_nan=False), max_size=5),
        "fp64_contents": st.lists(st.floats(allow_nan=False), max_size=5),
        "bytes_contents": st.lists(st.binary(max_size=9), max_size=5),
    },
)
INPUTS = st.fixed_dictionaries(
    {"name": TEXT, "datatype": TEXT, "shape": st.lists(INT64, max_size=4), "parameters": PARAMETERS},
    optional={"contents": CONTENTS},
)
REQUESTS = st.fixed_dictionaries(
    {
        "model_name": TEXT,
        "model_version": TEXT,
        "id": TEXT,
        "parameters": PARAMETERS,
        "inputs": st.lists(INPUTS, max_size=3),
        "outputs": st.lists(st.fixed_dictionaries({"name": TEXT, "parameters": PARAMETERS}), max_size=2),
        "raw_input_contents": st.lists(st.binary(max_size=20), max_size=3),
    }
)


def facts(data: bytes) -> dict[str, Any]:
    message = read_infer_request(data)
    return {
        "head": (message.model_name, message.model_version, message.id),
        "parameters": message.parameters,
        "inputs": [(t.name, t.datatype, t.shape, t.parameters) for t in message.inputs],
        "contents": [read_contents(message, index) for index in range(len(message.inputs))],
        "outputs": [(output.name, output.parameters) for output in message.outputs],
        "raw": [read_raw(message, data, index) for index in range(message.raw_count)],
    }


def read_raw(message: InferMessage, data: bytes, index: int) -> bytes:
    offset, size = message.raw(index)
    copy = bytearray(size)
    message.copy_raw(index, copy)
    assert copy == data[offset : offset + size]
    return bytes(copy)


def read_contents(message: InferMessage, index: int) -> dict[str, bytes] | None:
    tensor = message.inputs[index]
    if not tensor.contents:
        return None
    found = dict.fromkeys(oracle.FIELDS, b"")
    for name in oracle.FIELDS:
        code = DTYPES[name].code
        try:
            memory = bytearray(message.contents_bytes(index, code))
        except WireFault as fault:
            assert fault.code is Fault.OTHER_KIND
            continue
        message.copy_contents(index, code, memory)
        found[name] = bytes(memory)
    return found if len(tensor.kinds) < 2 else None


def expected(data: bytes) -> dict[str, Any]:
    seen = oracle.read_infer_request(data)
    for index, contents in enumerate(seen["contents"]):
        kinds = {oracle.FIELDS[name] for name, memory in (contents or {}).items() if memory}
        if len(kinds) > 1:  # no dtype can be read of two fields
            seen["contents"][index] = None
    return seen


@settings(max_examples=300)
@given(REQUESTS)
def test_agrees_with_protobuf(content: dict[str, Any]) -> None:
    data = Request(**content).SerializeToString()
    assert facts(data) == expected(data)
