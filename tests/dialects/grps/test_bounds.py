"""Bounds of a grps request before objects are made of it: JSON's counts, and numbers of large messages that
the protobuf library never sees. No server."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from fastserve._ext.number_fields import INT32, INT64, cut_numbers
from fastserve._ext.proto_wire import WireFault
from fastserve.codec.byte_formats import head_of, write_varint
from fastserve.dialects.grps import messages
from fastserve.dialects.grps.json_messages import MOST_TENSORS, read_json
from fastserve.dialects.grps.messages import (
    BY_NUMBER,
    CUT_BYTES,
    GTENSORS,
    NUMBERS,
    TENSORS,
    read_message,
    read_sent,
    read_tensor,
)
from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.settings import GrpsOptions

MOST_KEYS, LONGEST_KEY = 16384, 1 << 20
STATUS = head_of(1, 2) + b"\x08\x05"


def refusal(body: bytes) -> str:
    with pytest.raises(ServeError) as refused:
        read_json(body, GrpsOptions())
    return refused.value.message


# --- JSON


def tensors(count: int) -> bytes:
    return b'{"gtensors":{"tensors":[%b]}}' % b",".join([b"{}"] * count)


def entries(count: int) -> bytes:
    return b'{"gmap":{"s_i32":{%b}}}' % b",".join(b'"%d":1' % number for number in range(count))


def test_tensors_of_json_are_counted() -> None:
    assert len(read_json(tensors(MOST_TENSORS), GrpsOptions()).message.gtensors.tensors) == MOST_TENSORS
    assert refusal(tensors(MOST_TENSORS + 1)) == "gtensors.tensors: given 1025, allowed: up to 1024"


def test_keys_of_json_are_counted() -> None:
    assert len(read_json(entries(MOST_KEYS), GrpsOptions()).message.gmap.s_i32) == MOST_KEYS
    assert f"more than {MOST_KEYS}, at offset" in refusal(entries(MOST_KEYS + 1))


def test_a_key_of_json_is_bounded() -> None:
    body = b'{"gmap":{"s_i32":{"%b":1}}}'
    assert list(read_json(body % (b"k" * 1000), GrpsOptions()).message.gmap.s_i32) == ["k" * 1000]
    assert f"more than {LONGEST_KEY}, at offset" in refusal(body % (b"k" * (LONGEST_KEY + 1)))


def test_keys_are_found_wherever_a_window_ends() -> None:
    """Arrays are searched for in pieces."""
    text = b'{"gtensors":{"tensors":[{"dtype":4,"shape":[3],"flat_int32" : [1,2,3]}]}}'
    for more in range(280):
        body = b" " * (CUT_BYTES - more) + text
        (tensor,) = read_json(body, GrpsOptions()).message.gtensors.tensors
        assert list(tensor.flat_int32) == [1, 2, 3]


# --- protobuf

VALUES: dict[str, list[Any]] = {
    "flat_uint8": [0, 1, 127, 128, 255],
    "flat_int8": [0, -1, 127, -128],
    "flat_int16": [0, -1, 32767, -32768],
    "flat_int32": [0, -1, 2**31 - 1, -(2**31)],
    "flat_int64": [0, -1, 2**63 - 1, -(2**63)],
    "flat_float16": [0.5, -1.5, 65504.0],
    "flat_float32": [0.1, -1e30],
    "flat_float64": [0.1, -1e300],
}


def message_of(name: str, values: list[Any], shape: list[int] | None = None) -> bytes:
    number = next(field.number for field in BY_NUMBER.values() if field.name == name)
    message = load("grps").GrpsMessage(model="m")
    message.gtensors.tensors.add(name="first", dtype=9, shape=[1], flat_string=["a"])
    message.gtensors.tensors.add(name="x", dtype=number, shape=shape or [len(values)], **{name: values})
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("name", VALUES)
def test_large_messages_are_read_as_small_ones(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = message_of(name, VALUES[name]) + STATUS
    small = read_sent(data)
    monkeypatch.setattr(messages, "CUT_BYTES", 0)
    large = read_sent(data)
    assert (small.numbers, large.numbers is None) == (None, False)
    assert not len(getattr(large.message.gtensors.tensors[1], name))
    assert not large.message.HasField("status")
    assert load("grps").GrpsMessage.FromString(large.serialize()) == small.message
    for number in (0, 1):
        one = read_tensor(small.message.gtensors.tensors[number], number)
        other = read_tensor(large.message.gtensors.tensors[number], number, large.numbers)
        assert one[0] == other[0]
        assert (one[1].dtype, one[1].shape) == (other[1].dtype, other[1].shape)
        assert bytes(one[1].data) == bytes(other[1].data)


@pytest.mark.parametrize(
    ("name", "values", "shape", "words"),
    [
        ("flat_uint8", [256], None, "'x': flat_uint8 has values beyond uint8"),
        ("flat_int8", [-129], None, "'x': flat_int8 has values beyond int8"),
        ("flat_int16", [32768], None, "'x': flat_int16 has values beyond int16"),
        ("flat_float16", [1e6], None, "'x': flat_float16 has values beyond float16"),
        ("flat_int32", [1, 2], [3], "'x': shape [3] has 3 elements, flat_int32 has 2"),
        ("flat_int64", [], [0], "'x': flat_int64 is empty, which has the data of dtype DT_INT64"),
    ],
)
def test_large_messages_are_refused_as_small_ones(
    monkeypatch: pytest.MonkeyPatch, name: str, values: list[Any], shape: list[int] | None, words: str
) -> None:
    for most in (CUT_BYTES, 0):
        monkeypatch.setattr(messages, "CUT_BYTES", most)
        sent = read_sent(message_of(name, values, shape))
        with pytest.raises(ServeError) as refused:
            read_tensor(sent.message.gtensors.tensors[1], 1, sent.numbers)
        assert refused.value.message == f"tensor {words}"


def test_numbers_in_any_pieces() -> None:
    """Packed and one by one, of tensors in several pieces: one after the other, as protobuf has it."""
    draw, kinds = random.Random(4), {7: INT32, 8: INT64}
    data, wanted = b"", []
    for _ in range(50):
        tensor, values = b"", []
        for _ in range(draw.randrange(5)):
            some = [draw.randrange(-(2**31), 2**31) for _ in range(draw.randrange(4))]
            coded = [write_varint(value & 2**64 - 1) for value in some]
            if draw.random() < 0.5:
                tensor += head_of(7, sum(map(len, coded))) + b"".join(coded)
            else:
                tensor += b"".join(write_varint(7 << 3) + one for one in coded)
            tensor += head_of(1, 1) + b"n"
            values += some
        wanted.append(values)
        piece = head_of(TENSORS, len(tensor)) + tensor
        data += head_of(GTENSORS, len(piece)) + piece
    cut = cut_numbers(data, GTENSORS, TENSORS, kinds)
    whole = load("grps").GrpsMessage.FromString(data).gtensors.tensors
    rest = load("grps").GrpsMessage.FromString(cut.rest).gtensors.tensors
    assert [list(tensor.flat_int32) for tensor in whole] == wanted
    assert [tensor.name for tensor in rest] == [tensor.name for tensor in whole]
    for number, values in enumerate(wanted):
        assert cut.count(number, 7) == len(values)
        found = cut.take(number, 7, 4, -(2**31), 2**31 - 1)
        assert found == struct.pack(f"<{len(values)}i", *values)
    with pytest.raises(IndexError):
        cut.count(50, 7)


def packed(field: int, data: bytes) -> bytes:
    tensor = head_of(field, len(data)) + data
    piece = head_of(TENSORS, len(tensor)) + tensor
    return head_of(GTENSORS, len(piece)) + piece


@pytest.mark.parametrize("data", [packed(7, b"\xff"), packed(8, b"\xff" * 11 + b"\1"), packed(10, b"abc")])
def test_numbers_that_are_none(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    with pytest.raises(WireFault):
        cut_numbers(data, GTENSORS, TENSORS, NUMBERS)
    for most in (CUT_BYTES, 0):
        monkeypatch.setattr(messages, "CUT_BYTES", most)
        with pytest.raises(ServeError, match="malformed GrpsMessage"):
            read_sent(data)


def test_a_large_message_has_data_of_one_kind() -> None:
    """Of a oneof the last counts, and what of the tensors stays depends on what came between."""
    data = packed(7, b"\1" * CUT_BYTES) + head_of(3, 1) + b"a"
    with pytest.raises(ServeError, match="data of more than one kind"):
        read_sent(data)
    assert read_message(data).bin_data == b"a"


def test_garbage_is_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, good = random.Random(9), message_of("flat_int64", [1, -2, 3]) + STATUS
    for _ in range(2000):
        changed = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        said = []
        for most in (CUT_BYTES, 0):
            monkeypatch.setattr(messages, "CUT_BYTES", most)
            try:
                said.append(read_sent(bytes(changed)).serialize())
            except ServeError as fault:
                said.append(fault.message.encode())
        if b"more than one kind" in said[1]:
            continue
        if not said[0].startswith(b"malformed"):
            said = [load("grps").GrpsMessage.FromString(one).SerializeToString() for one in said]
        assert said[0] == said[1]
