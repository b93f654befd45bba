"""tensor_proto against protobuf's own library and numpy: requests read, tensors decoded, replies written."""

from __future__ import annotations

import base64
import struct
import time
from math import prod
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.proto_wire import MOST_ENTRIES, Fault, WireFault
from fastserve._ext.tensor_proto import (
    DTYPE_NUMBER,
    PredictMessage,
    WireTensor,
    read_predict_request,
    write_model_spec,
    write_predict_response,
)
from fastserve.dialects.tfserving.errors import TF_NAME
from fastserve.tensor import DTYPES
from tests.dialects.tfserving.vectors import Vector, each
from tests.effort import examples
from tests.ext.wire_strategies import MESSAGES, bent, field, varint
from tests.oracles import tensor_proto as oracle
from tests.oracles.proto_wire import without_maps

TF = oracle.TF
FLAT = without_maps(TF)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
VALUES = {
    "float_val": st.floats(width=32, allow_nan=False),
    "double_val": st.floats(allow_nan=False),
    "int_val": INT32,
    "string_val": st.binary(max_size=5),
    "scomplex_val": st.floats(width=32, allow_nan=False),
    "int64_val": INT64,
    "bool_val": st.booleans(),
    "dcomplex_val": st.floats(allow_nan=False),
    "half_val": INT32,
    "uint32_val": st.integers(0, 2**32 - 1),
    "uint64_val": st.integers(0, 2**64 - 1),
}
CONTENTS = st.binary(max_size=40) | st.lists(st.binary(max_size=3), max_size=4).map(
    lambda strings: b"".join(map(varint, map(len, strings))) + b"".join(strings)
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.integers(0, 33),
        "dims": st.lists(st.integers(0, 3), max_size=3),
        "tensor_content": CONTENTS,
        **{name: st.lists(values, max_size=6) for name, values in VALUES.items()},
    },
)


def make_tensor(given: dict[str, Any]) -> Any:
    made = TF.TensorProto(**{key: value for key, value in given.items() if key != "dims"})
    for size in given.get("dims", ()):
        made.tensor_shape.dim.add(size=size)
    return made


def read_one(data: bytes) -> WireTensor:
    """The tensor of these bytes, as the one input of a request."""
    entry = field(1, 2, b"x") + field(2, 2, data)
    return read_predict_request(field(2, 2, entry)).inputs["x"]


def decode(tensor: WireTensor, dtype: str, items: int) -> bytes | None:
    size = tensor.measure(DTYPES[dtype].code, items)
    if size < 0:
        return None
    memory = bytearray(b"\xee" * size)
    tensor.fill(DTYPES[dtype].code, items, memory)
    return bytes(memory)


def agrees(data: bytes, extra: int = 0) -> None:
    """Every dtype of a TensorProto."""
    message = TF.TensorProto.FromString(data)
    tensor = read_one(data)
    assert tensor.number == message.dtype
    assert tensor.shape == tuple(dim.size for dim in message.tensor_shape.dim)
    items = max(0, prod(tensor.shape)) % 64 + extra
    for dtype in DTYPES:
        found = decode(tensor, dtype, items)
        expected = oracle.decode(message, dtype, items)
        assert found == expected, dtype


# --- decoding ------------------------------------------------------------------------------------


@each("tensor_proto_decode")
def test_vector(vector: Vector) -> None:
    data, expected = base64.b64decode(vector["input"]["serialized_b64"]), vector["expected"]
    tensor = read_one(data)
    (dtype,) = (DTYPES[name] for name, (word, _) in oracle.KINDS.items() if word == dtype_of(vector))
    assert DTYPE_NUMBER[dtype.code] == tensor.number
    items = prod(tensor.shape)
    if expected["status"] != "OK":  # some are refused for their shape, which is the dialect's to see
        assert min(tensor.shape) < 0 or items > 2**58 or tensor.measure(dtype.code, items) < 0
        return
    assert list(tensor.shape) == expected["shape"]
    memory = decode(tensor, dtype.name, items)
    assert memory is not None
    assert show(dtype.name, memory) == expected["values_flat"]


def dtype_of(vector: Vector) -> str:
    word: str = vector["input"]["fields"]["dtype"]
    assert word in TF_NAME.values()
    return word


def show(dtype: str, memory: bytes) -> list[Any]:
    if dtype == "bytes":
        strings = oracle.values_of(dtype, memory)
        return [{"b64": base64.b64encode(text).decode()} for text in strings]
    if dtype == "bfloat16":
        words = np.frombuffer(memory, "<u2").astype("<u4") << 16
        return words.view("<f4").tolist()
    found = np.frombuffer(memory, dtype).tolist()
    return [[v.real, v.imag] for v in found] if dtype.startswith("complex") else found


@examples(300)
@given(TENSORS, st.integers(0, 2))
def test_every_dtype_of_any_tensor(given: dict[str, Any], extra: int) -> None:
    agrees(make_tensor(given).SerializeToString(), extra)


@examples(150)
@given(TENSORS, TENSORS)
def test_pieces_are_merged(first: dict[str, Any], second: dict[str, Any]) -> None:
    """A message given twice is one; its values follow each other."""
    both = [make_tensor(given).SerializeToString() for given in (first, second)]
    agrees(b"".join(both))
    entry = field(1, 2, b"x") + b"".join(field(2, 2, piece) for piece in both)
    split = read_predict_request(field(2, 2, entry)).inputs["x"]
    whole = read_one(b"".join(both))
    for dtype in DTYPES:
        assert decode(split, dtype, 3) == decode(whole, dtype, 3)


UNPACKED = st.lists(
    st.sampled_from(
        [
            field(5, 5, struct.pack("<f", 1.5)),
            field(5, 2, struct.pack("<2f", 2.5, 3.5)),
            field(6, 1, struct.pack("<d", 4.5)),
            field(7, 0, varint(300)),
            field(7, 2, varint(2**64 - 1) + varint(7)),
            field(10, 0, varint(2**64 - 2, 0)),
            field(11, 0, varint(2)),
            field(13, 0, varint(80896)),
            field(16, 0, varint(2**32 + 5)),
            field(17, 2, varint(5, 2)),
            field(99, 2, b"unknown"),
            field(8, 2, b"text"),
        ]
    ),
    max_size=8,
).map(b"".join)


@examples(200)
@given(UNPACKED)
def test_packed_or_not(data: bytes) -> None:
    agrees(data, extra=3)


@examples(300)
@given(bent(TENSORS.map(lambda given: make_tensor(given).SerializeToString())) | MESSAGES)
def test_any_bytes(data: bytes) -> None:
    """Bytes that are no message for the library are none here, but for what nobody looks at."""
    try:
        FLAT.TensorProto.FromString(data)
    except DecodeError:
        try:
            read_one(data)
        except WireFault:
            return
        # messages within that are not read: handles, variants, and dims' unknown fields
        assert any(byte in data for byte in (0x72, 0x7A)), data
    else:
        agrees(data)


# --- requests ------------------------------------------------------------------------------------


def facts(message: PredictMessage) -> tuple[Any, ...]:
    return (
        message.has_spec,
        message.model,
        message.version,
        message.label,
        message.signature,
        set(message.inputs),
        message.output_filter,
    )


def expected(data: bytes) -> tuple[Any, ...]:
    request = TF.PredictRequest.FromString(data)
    spec, choice = request.model_spec, request.model_spec.WhichOneof("version_choice")
    return (
        request.HasField("model_spec"),
        spec.name,
        spec.version.value if choice == "version" else None,
        spec.version_label if choice == "version_label" else None,
        spec.signature_name,
        set(request.inputs),
        tuple(request.output_filter),
    )


SPECS = st.fixed_dictionaries(
    {},
    optional={"name": TEXTS, "signature_name": TEXTS, "version": st.fixed_dictionaries({"value": INT64})},
) | st.fixed_dictionaries({"name": TEXTS, "version_label": TEXTS})
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "model_spec": SPECS,
        "inputs": st.dictionaries(TEXTS, TENSORS.map(make_tensor), max_size=3),
        "output_filter": st.lists(TEXTS, max_size=3),
        "client_id": st.binary(max_size=3),
        "predict_streamed_options": st.just({"return_single_response": True}),
    },
)


def serialize(content: dict[str, Any]) -> bytes:
    data: bytes = TF.PredictRequest(**content).SerializeToString()
    return data


@examples(200)
@given(REQUESTS, REQUESTS)
def test_requests(first: dict[str, Any], second: dict[str, Any]) -> None:
    for data in (serialize(first), serialize(first) + serialize(second)):
        assert facts(read_predict_request(data)) == expected(data)


def test_the_last_of_one_name_counts() -> None:
    entries = [
        field(1, 2, b"x") + field(2, 2, make_tensor({"int_val": [n]}).SerializeToString()) for n in (1, 2)
    ]
    message = read_predict_request(b"".join(field(2, 2, entry) for entry in entries))
    assert message.sent == 2
    assert decode(message.inputs["x"], "int32", 1) == struct.pack("<i", 2)


# --- what would be too much ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x0a\x05m", Fault.BAD_LENGTH),
        (field(2, 2, field(2, 2, field(5, 2, b"123"))), Fault.BAD_PACKED),
        (field(2, 2, field(2, 2, field(7, 2, b"\xff"))), Fault.BAD_PACKED),
        (field(2, 2, field(2, 2, field(7, 2, b"\xff" * 11))), Fault.OVERLONG),
        (field(2, 2, field(2, 2, field(5, 5, b"123"))), Fault.TRUNCATED),
        (field(2, 2, field(2, 2, b"\x22\xff\xff\xff\xff\x07")), Fault.BAD_LENGTH),
        (field(2, 2, field(1, 2, b"\xff")), Fault.BAD_TEXT),
        (field(99, 3, field(99, 3, b"") * 200), Fault.TOO_DEEP),
        (field(2, 2, b"") * (MOST_ENTRIES + 1), Fault.TOO_MANY),
        (field(3, 2, b"") * (MOST_ENTRIES + 1), Fault.TOO_MANY),
        (field(2, 2, field(2, 2, field(2, 2, field(2, 2, b"") * (MOST_ENTRIES + 1)))), Fault.TOO_MANY),
    ],
    ids=range(11),
)
def test_what_is_refused(data: bytes, code: Fault) -> None:
    with pytest.raises(WireFault) as caught:
        read_predict_request(data)
    assert caught.value.code is code


def test_ten_million_empty_values_are_soon_read() -> None:
    """Nothing is kept of them, and no limit is needed."""
    data = field(2, 2, field(1, 2, b"x") + field(2, 2, b"\x42\x00" * 10_000_000))
    began = time.monotonic()
    tensor = read_predict_request(data).inputs["x"]
    assert decode(tensor, "bytes", 3) == bytes(12)
    assert time.monotonic() - began < 30


def test_memory_of_another_size_is_refused() -> None:
    tensor = read_one(make_tensor({"float_val": [1.0]}).SerializeToString())
    with pytest.raises(ValueError, match="8 bytes for a tensor of 4"):
        tensor.fill(DTYPES["float32"].code, 1, bytearray(8))


# --- responses -----------------------------------------------------------------------------------

SPEC = write_model_spec("m", 3, "serving_default")


@examples(200)
@given(
    st.sampled_from(list(DTYPES)), TEXTS, st.lists(st.integers(0, 3), max_size=3), st.booleans(), st.data()
)
def test_responses(dtype: str, name: str, shape: list[int], content: bool, data: st.DataObject) -> None:
    items = prod(shape)
    if dtype == "bytes":
        strings = data.draw(st.lists(st.binary(max_size=200), min_size=items, max_size=items))
        memory = b"".join(struct.pack("<I", len(s)) + s for s in strings)
    else:
        size = items * DTYPES[dtype].item_bytes
        memory = data.draw(st.binary(min_size=size, max_size=size))
        if dtype == "bool":
            memory = bytes(byte & 1 for byte in memory)
        elif dtype in ("float32", "complex64"):  # protobuf goes by doubles, which no signalling NaN survives
            values = np.frombuffer(memory, np.float32)
            memory = np.where(np.isnan(values), np.float32(np.nan), values).tobytes()
    expected = oracle.encode(name, dtype, tuple(shape), memory, content)
    expected.model_spec.name, expected.model_spec.signature_name = "m", "serving_default"
    expected.model_spec.version.value = 3
    described = [(name, DTYPES[dtype].code, tuple(shape))]
    found = write_predict_response(described, [memory], SPEC, content)
    if dtype in ("float32", "float64", "complex64", "complex128"):  # of which NaN is no other NaN's equal
        assert found == expected.SerializeToString(deterministic=True)
    else:
        assert TF.PredictResponse.FromString(found) == expected
        assert len(found) == expected.ByteSize()


def test_several_outputs_and_none() -> None:
    described = [("a", DTYPES["float32"].code, (2,)), ("b", DTYPES["int64"].code, ())]
    raw = [struct.pack("<2f", 1, 2), struct.pack("<q", -1)]
    reply = TF.PredictResponse.FromString(write_predict_response(described, raw, SPEC))
    assert list(reply.outputs["a"].float_val) == [1, 2]
    assert list(reply.outputs["b"].int64_val) == [-1]
    assert not TF.PredictResponse.FromString(write_predict_response([], [], SPEC)).outputs


def test_a_version_is_always_told() -> None:
    spec = TF.ModelSpec.FromString(write_model_spec("", 0, ""))
    assert spec.WhichOneof("version_choice") == "version"


@pytest.mark.parametrize("memory", [b"\x01\x00", b"\x05\x00\x00\x00ab"])
def test_strings_that_are_not_packed(memory: bytes) -> None:
    with pytest.raises(ValueError, match="not packed"):
        write_predict_response([("s", DTYPES["bytes"].code, (1,))], [memory], SPEC)
