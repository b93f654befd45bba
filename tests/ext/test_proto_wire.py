"""proto_wire against protobuf's own library: everything one accepts the other does, and sees the same."""

from __future__ import annotations

import mmap
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.proto_wire import (
    MOST_ENTRIES,
    Fault,
    InferMessage,
    WireFault,
    read_infer_request,
    write_infer_response,
    write_stream_response,
)
from fastserve.tensor import DTYPES
from tests.effort import examples
from tests.ext.wire_strategies import LEAVES, MESSAGES, bent, field, fields
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


def serialize(content: dict[str, Any]) -> bytes:
    data: bytes = Request(**content).SerializeToString()
    return data


def serialize_contents(content: dict[str, Any]) -> bytes:
    data: bytes = oracle.KSERVE.InferTensorContents(**content).SerializeToString()
    return data


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


def quiet(memory: bytes) -> bytes:
    """float32 as they are after being Python floats: a signalling NaN no longer signals."""
    with np.errstate(invalid="ignore"):
        return np.frombuffer(memory, np.float32).astype(np.float64).astype(np.float32).tobytes()


def read_contents(message: InferMessage, index: int) -> dict[str, bytes] | None:
    tensor = message.inputs[index]
    if not tensor.contents:
        return None
    found = dict.fromkeys(oracle.FIELDS, b"")
    for name in oracle.FIELDS:
        code = DTYPES[name].code
        try:
            memory = bytearray(message.contents_bytes(index, code))
        except WireFault:
            continue
        message.copy_contents(index, code, memory)
        found[name] = quiet(memory) if name == "float32" else bytes(memory)
    return found if len(tensor.kinds) < 2 else None


def expected(data: bytes) -> dict[str, Any]:
    seen = oracle.read_infer_request(data)
    for index, contents in enumerate(seen["contents"]):
        kinds = {oracle.FIELDS[name] for name, memory in (contents or {}).items() if memory}
        if len(kinds) > 1:  # no dtype can be read of two fields
            seen["contents"][index] = None
    return seen


def same(data: bytes) -> None:
    """Both refuse, or both see the same."""
    try:
        seen = expected(data)
    except DecodeError:
        with pytest.raises(WireFault) as caught:
            read_infer_request(data)
        assert 0 <= caught.value.offset <= len(data)
    else:
        assert repr(facts(data)) == repr(seen)  # NaN is not equal to itself


@examples(200)
@given(REQUESTS)
def test_agrees_with_protobuf(content: dict[str, Any]) -> None:
    data = serialize(content)
    assert facts(data) == expected(data)


@examples(100)
@given(REQUESTS, REQUESTS)
def test_pieces_are_merged(first: dict[str, Any], second: dict[str, Any]) -> None:
    same(serialize(first) + serialize(second))


@examples(250)
@given(MESSAGES)
def test_any_fields(data: bytes) -> None:
    same(data)


@examples(200)
@given(bent(MESSAGES | REQUESTS.map(serialize)))
def test_bent_messages(data: bytes) -> None:
    same(data)


@examples(250)
@given(fields(LEAVES | CONTENTS.map(serialize_contents)))
def test_any_contents(data: bytes) -> None:
    same(field(5, 2, field(5, 2, data)))


NO_VALUE = b"\x22\x03\x0a\x01k"
GROUP, END = b"\xa3\x06", b"\xa4\x06"
TEN = b"\xff" * 9


@pytest.mark.parametrize(
    ("data", "code", "offset"),
    [
        (b"\x8a", Fault.TRUNCATED, 0),
        (b"\x0a\x01m\x08", Fault.TRUNCATED, 4),
        (b"\x0a\x02m", Fault.BAD_LENGTH, 1),
        (b"\x3a\xff\xff\xff\xff\x07", Fault.BAD_LENGTH, 1),
        (b"\x3a\xff\xff\xff\xff\x1f", Fault.OVERLONG, 1),
        (b"\x8a" + b"\x80" * 5 + b"\x00\x00", Fault.OVERLONG, 0),
        (b"\x08" + b"\xff" * 10 + b"\x01", Fault.OVERLONG, 1),
        (b"\x2a\x0f\x2a\x0d\x1a\x0b" + b"\x80" * 10 + b"\x00", Fault.OVERLONG, 6),
        (b"\x2a\x05\x2a\x03\x12\x01\x80", Fault.BAD_PACKED, 6),
        (b"\x2a\x09\x2a\x07\x32\x05" + b"12345", Fault.BAD_PACKED, 6),
        (b"\x2a\x03\x1a\x01\x80", Fault.TRUNCATED, 4),
        (b"\x02\x01m", Fault.BAD_TAG, 0),
        (b"\x0e\x01m", Fault.BAD_TYPE, 1),
        (END, Fault.BAD_GROUP, 2),
        (GROUP + b"\xac\x06", Fault.BAD_GROUP, 2),
        (GROUP, Fault.TRUNCATED, 2),
        (GROUP * 101 + END * 101, Fault.TOO_DEEP, 200),
        (GROUP * 100_000, Fault.TOO_DEEP, 200),
        (b"\x0a\x02m\xff", Fault.BAD_TEXT, 3),
        (b"\x22\x04\x0a\x02k\xff", Fault.BAD_TEXT, 5),
    ],
)
def test_faults(data: bytes, code: Fault, offset: int) -> None:
    with pytest.raises(WireFault) as caught:
        read_infer_request(data)
    assert (caught.value.code, caught.value.offset) == (code, offset)
    with pytest.raises(DecodeError):
        oracle.read_infer_request(data)


@pytest.mark.parametrize(
    "data",
    [
        GROUP * 100 + END * 100,
        b"\x2a\x0b\x18" + TEN + b"\x7f",
        b"\x2a\x0c\x1a\x0a" + TEN + b"\x7f",
        b"\x22\x0b\x0a\x01k\x12\x02\x08\x01\x12\x02\x10\x05",
        b"\x22\x09\x0a\x01k\x12\x02\x08\x01\x12\x00",
        NO_VALUE,
        NO_VALUE + b"\x22\x07\x0a\x01k\x12\x02\x08\x01" + NO_VALUE,
        b"\x0a\x81\x80\x80\x80\x00m",
        b"\x0b\x0c",
        b"",
    ],
)
def test_odd_but_good(data: bytes) -> None:
    same(data)


@pytest.mark.parametrize(
    "unit",
    [b"\x2a\x00", b"\x3a\x00", b"\x32\x00", b"\x22\x00", b"\x22\x03\x0a\x01k"],
    ids=["inputs", "raw", "outputs", "parameters", "one key"],
)
def test_ten_million_empty_entries_are_refused(unit: bytes) -> None:
    with pytest.raises(WireFault) as caught:
        read_infer_request(unit * 10**7)
    assert caught.value.code is Fault.TOO_MANY
    read_infer_request(unit * MOST_ENTRIES)


@pytest.mark.parametrize("unit", [b"\x42\x00", b"\x12\x00", b"\x18\x01", b"\x80\x01\x00", b"\x35abcd"])
def test_ten_million_values_are_only_counted(unit: bytes) -> None:
    contents = unit * 10**7
    data = field(5, 2, field(5, 2, contents))
    started = time.process_time()
    tracemalloc.start()
    message = read_infer_request(data)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 10_000
    assert time.process_time() - started < 5
    for kind in message.inputs[0].kinds:
        assert message.inputs[0].count(kind) == 10**7


def test_a_long_name_and_a_high_rank() -> None:
    assert len(read_infer_request(field(1, 2, b"n" * 10**7)).model_name) == 10**7
    with pytest.raises(WireFault, match="TOO_MANY"):
        read_infer_request(field(5, 2, field(3, 2, b"\x01" * 10**5)))


def test_the_copy_doors_refuse_what_does_not_fit() -> None:
    tensors = [
        {"contents": {"fp32_contents": [1, 2]}},
        {"contents": {"int_contents": [1], "fp32_contents": [1]}},
    ]
    data = Request(inputs=tensors, raw_input_contents=[b"abcd"]).SerializeToString()
    message = read_infer_request(data)
    code = DTYPES["float32"].code
    assert message.contents_bytes(0, code) == 8
    for size in (0, 7, 9):
        with pytest.raises(WireFault, match="WRONG_SIZE"):
            message.copy_contents(0, code, bytearray(size))
    with pytest.raises(WireFault, match="WRONG_SIZE"):
        message.copy_raw(0, bytearray(5))
    for index, dtype in ((0, "int32"), (0, "float16"), (0, "bfloat16"), (1, "float32")):
        with pytest.raises(WireFault, match="OTHER_KIND"):
            message.contents_bytes(index, DTYPES[dtype].code)
    assert (message.inputs[1].kinds, message.inputs[1].count(2)) == ((2, 6), 1)
    for wrong in (-1, 2):
        with pytest.raises(IndexError):
            message.contents_bytes(wrong, code)
    with pytest.raises(IndexError):
        message.raw(1)
    with pytest.raises((BufferError, TypeError)):
        message.copy_raw(0, b"abcd")  # type: ignore[arg-type]


def test_the_message_holds_its_buffer() -> None:
    data = bytearray(Request(raw_input_contents=[b"abcd"]).SerializeToString())
    message = read_infer_request(data)
    with pytest.raises(BufferError):
        data.append(0)
    del message
    data.append(0)


# -- replies ------------------------------------------------------------------------------------

PLAIN = st.dictionaries(
    TEXT,
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT | st.floats(allow_nan=False),
    max_size=3,
)
SHAPES = st.lists(INT64, max_size=4).map(tuple)
OUTPUTS = st.lists(st.tuples(TEXT, TEXT, SHAPES, st.none() | PLAIN), max_size=3)
RAW = st.lists(st.binary(max_size=300), max_size=3)


@examples(200)
@given(TEXT, TEXT, TEXT, PLAIN, OUTPUTS, RAW, st.none() | TEXT)
def test_replies_are_what_protobuf_reads(
    name: str,
    version: str,
    id: str,
    parameters: dict[str, Any],
    outputs: list[Any],
    raw: list[bytes],
    error: str | None,
) -> None:
    content = (name, version, id, parameters, outputs, raw)
    if error is None:
        data = write_infer_response(*content)
        assert oracle.read_infer_response(data) == (None, oracle.make_response(*content))
    else:
        data = write_stream_response(error, *content)
        assert oracle.read_stream_response(data) == (error, oracle.make_response(*content))


def test_a_reply_is_protobufs_byte_for_byte() -> None:
    raw = [np.arange(4, dtype=np.float32), b"x" * 20_000]
    outputs = [("y", "FP32", (1, -1), {"binary": True}), ("z" * 200, "BYTES", (2**62,), None)]
    data = write_infer_response("m", "1", "", {"a": 2**63}, outputs, raw)
    message = oracle.make_response("m", "1", "", {"a": 2**63}, outputs, raw)
    assert data == message.SerializeToString()
    stream = oracle.KSERVE.ModelStreamInferResponse(error_message="no", infer_response=message)
    assert write_stream_response("no", "m", "1", "", {"a": 2**63}, outputs, raw) == stream.SerializeToString()
    assert read_nothing(write_stream_response("no", id="7"))


def read_nothing(data: bytes) -> bool:
    response = oracle.KSERVE.ModelStreamInferResponse.FromString(data).infer_response
    return response.id == "7" and not response.outputs and not response.raw_output_contents


def test_replies_that_cannot_be() -> None:
    with pytest.raises(TypeError):
        write_infer_response("m", "1", "", {"a": []}, [], [])  # type: ignore[dict-item]
    with pytest.raises(OverflowError):
        write_infer_response("m", "1", "", {"a": 2**64}, [], [])
    with pytest.raises(OverflowError):
        write_infer_response("m", "1", "", None, [("y", "FP32", (2**63,), None)], [])
    with pytest.raises(UnicodeEncodeError):
        write_infer_response("\udc80", "1", "", None, [], [])
    with pytest.raises(WireFault, match="TOO_LARGE"), mmap.mmap(-1, 2**30) as memory:
        write_infer_response("m", "1", "", None, [], [memory, memory])
