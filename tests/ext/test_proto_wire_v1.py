"""proto_wire_v1 against protobuf's own library: everything one accepts the other does, and sees the same."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.proto_wire import Fault, WireFault
from fastserve._ext.proto_wire_v1 import (
    SharedMemoryPlace,
    read_v1_request,
    write_v1_header,
    write_v1_response,
)
from tests.effort import examples
from tests.ext.wire_strategies import LEAVES, MESSAGES, bent, field, fields
from tests.oracles import proto_wire_v1 as oracle

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
UINT32 = st.integers(0, 2**32 - 1)
DIMS = st.lists(INT64, max_size=4)
PLACES = st.fixed_dictionaries({}, optional={"name": TEXT, "offset": UINT64, "byte_size": UINT64})
INPUTS = st.fixed_dictionaries(
    {"name": TEXT, "dims": DIMS, "batch_byte_size": UINT64}, optional={"shared_memory": PLACES}
)
OUTPUTS = st.fixed_dictionaries(
    {"name": TEXT},
    optional={"cls": st.fixed_dictionaries({}, optional={"count": UINT32}), "shared_memory": PLACES},
)
HEADERS = st.fixed_dictionaries(
    {
        "batch_size": UINT32,
        "input": st.lists(INPUTS, max_size=3),
        "output": st.lists(OUTPUTS, max_size=3),
        "correlation_id": UINT64,
        "id": UINT64,
        "flags": UINT32,
        "priority": UINT32,
        "timeout_microseconds": UINT64,
    }
)
REQUESTS = st.fixed_dictionaries(
    {"model_name": TEXT, "model_version": INT64, "raw_input": st.lists(st.binary(max_size=20), max_size=3)},
    optional={"meta_data": HEADERS},
)


def serialize(content: dict[str, Any]) -> bytes:
    data: bytes = oracle.TRITON.InferRequest(**content).SerializeToString()
    return data


def facts(data: bytes) -> dict[str, Any]:
    message = read_v1_request(data)
    return {
        "head": (message.model_name, message.model_version, message.batch_size),
        "sequence": (message.correlation_id, message.flags),
        "id": (message.id, message.priority, message.timeout_us),
        "inputs": [
            (tensor.name, tensor.dims, tensor.batch_byte_size, place(tensor.shared_memory))
            for tensor in message.inputs
        ],
        "outputs": [
            (output.name, output.class_count, place(output.shared_memory)) for output in message.outputs
        ],
        "raw": [data[at : at + size] for at, size in map(message.raw, range(message.raw_count))],
    }


def place(found: SharedMemoryPlace | None) -> tuple[str, int, int] | None:
    return (found.name, found.offset, found.byte_size) if found else None


def same(data: bytes) -> None:
    """Both refuse, or both see the same."""
    try:
        seen = oracle.read_v1_request(data)
    except DecodeError:
        with pytest.raises(WireFault) as caught:
            read_v1_request(data)
        assert 0 <= caught.value.offset <= len(data)
    else:
        assert facts(data) == seen


@examples(200)
@given(REQUESTS)
def test_agrees_with_protobuf(content: dict[str, Any]) -> None:
    data = serialize(content)
    assert facts(data) == oracle.read_v1_request(data)


@examples(100)
@given(REQUESTS, REQUESTS)
def test_pieces_are_merged(first: dict[str, Any], second: dict[str, Any]) -> None:
    same(serialize(first) + serialize(second))


@examples(200)
@given(fields(LEAVES | fields(MESSAGES)))
def test_any_fields(data: bytes) -> None:
    same(data)


@examples(200)
@given(bent(MESSAGES | REQUESTS.map(serialize)))
def test_bent_messages(data: bytes) -> None:
    same(data)


@pytest.mark.parametrize("number", [2, 3], ids=["inputs", "outputs"])
def test_ten_million_empty_entries_are_refused(number: int) -> None:
    for data in (field(3, 2, field(number, 2, b"") * 10**7), field(4, 2, b"") * 10**7):
        with pytest.raises(WireFault) as caught:
            read_v1_request(data)
        assert caught.value.code is Fault.TOO_MANY


def test_copying_out() -> None:
    message = read_v1_request(serialize({"raw_input": [b"abcd"]}))
    memory = bytearray(4)
    message.copy_raw(0, memory)
    assert memory == b"abcd"
    with pytest.raises(WireFault, match="WRONG_SIZE"):
        message.copy_raw(0, bytearray(3))
    with pytest.raises(IndexError):
        message.copy_raw(1, memory)


CLASSES = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False), TEXT))
RESULTS = st.tuples(TEXT, DIMS, UINT64, st.none()) | st.tuples(
    TEXT, st.just(()), st.just(0), st.lists(CLASSES, max_size=3)
)


@examples(200)
@given(
    st.tuples(TEXT, INT64, UINT32, UINT64, st.lists(RESULTS, max_size=3)),
    st.tuples(st.integers(0, 8), TEXT, TEXT, UINT64),
    st.lists(st.binary(max_size=200), max_size=3),
)
def test_replies_are_protobufs_byte_for_byte(header: Any, status: Any, raw: list[bytes]) -> None:
    text = write_v1_header(*header)
    expected = oracle.make_header(*header)
    assert text == expected.SerializeToString()
    assert (
        write_v1_response(status, text, raw)
        == oracle.make_response(status, expected, raw).SerializeToString()
    )
