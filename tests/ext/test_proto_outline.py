"""proto_outline against protobuf's own library: what it takes apart is what the message says."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.proto_outline import MOST_HEAD_BYTES, MOST_RAWS, Outline, read_outline, write_known
from fastserve._ext.proto_wire import WireFault, write_infer_response
from tests.effort import examples
from tests.ext.test_proto_wire import REQUESTS, serialize
from tests.ext.wire_strategies import MESSAGES, bent, field
from tests.oracles import proto_outline as oracle

HEAD = field(1, 2, b"m")
RAW = field(7, 2, b"abc")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def raws(outline: Outline) -> list[bytes]:
    found = []
    for index, size in enumerate(outline.sizes):
        memory = bytearray(size)
        outline.copy_raw(index, memory)
        found.append(bytes(memory))
    return found


def agrees(data: bytes) -> Outline | None:
    """What has an outline is, where it is a message at all, what the library makes of it."""
    outline = read_outline(data)
    if outline is None:
        return None
    try:
        rest, request_id, tensors = oracle.take_apart(data)
    except DecodeError:  # inside of the head, which nobody has known before
        with pytest.raises(DecodeError):
            oracle.read_head(outline.head)
        return outline
    assert (outline.id, raws(outline)) == (request_id, tensors)
    assert oracle.read_head(outline.head) == rest
    return outline


@given(REQUESTS)
def test_what_libraries_write_has_an_outline(content: dict[str, Any]) -> None:
    outline = agrees(serialize(content))
    assert (outline is not None) == bool(content.get("raw_input_contents"))


@examples(150)
@given(MESSAGES | bent(MESSAGES) | bent(REQUESTS.map(serialize)), st.booleans())
def test_anything_else_is_read_as_the_library_reads_it_or_not_at_all(data: bytes, ends_well: bool) -> None:
    agrees(data + RAW if ends_well else data)


@given(REQUESTS, TEXT, TEXT)
def test_equal_heads_are_requests_that_differ_in_nothing_but_id_and_tensors(
    content: dict[str, Any],
    first: str,
    second: str,
) -> None:
    one = read_outline(serialize({**content, "id": first, "raw_input_contents": [b"1"]}))
    two = read_outline(serialize({**content, "id": second, "raw_input_contents": [b"22", b""]}))
    assert one is not None
    assert two is not None
    assert one.head == two.head
    assert (one.id, two.id, one.sizes, two.sizes) == (first, second, (1,), (2, 0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD,
        RAW + HEAD,  # a field after the tensors may change what they mean
        RAW + field(3, 2, b"7"),
        field(3, 2, b"7") + field(3, 2, b"8") + RAW,
        field(3, 2, b"\xff") + RAW,
        field(1, 2, bytes(MOST_HEAD_BYTES)) + RAW,
        HEAD + RAW * (MOST_RAWS + 1),
        HEAD + RAW[:-1],
        HEAD + field(7, 0, b"\x01"),
        HEAD + RAW + b"\x3a\xff\xff\xff\xff\x0f",
        b"\x0b" + RAW,  # a group that never ends
    ],
    ids=range(12),
)
def test_what_has_no_outline(data: bytes) -> None:
    assert read_outline(data) is None


def test_the_limits_themselves_are_allowed() -> None:
    assert read_outline(field(1, 2, bytes(MOST_HEAD_BYTES - 3)) + RAW) is not None
    assert read_outline(HEAD + RAW * MOST_RAWS) is not None


def test_copies_want_the_tensors_size() -> None:
    outline = read_outline(HEAD + RAW)
    assert outline is not None
    with pytest.raises(WireFault, match="WRONG_SIZE"):
        outline.copy_raw(0, bytearray(2))
    with pytest.raises(IndexError):
        outline.copy_raw(1, bytearray(3))


@given(TEXT, TEXT, st.lists(st.binary(max_size=20), max_size=3))
def test_replies_are_those_of_the_general_writer(model: str, request_id: str, tensors: list[bytes]) -> None:
    outputs = [(f"y{index}", "UINT8", (len(tensor),), None) for index, tensor in enumerate(tensors)]
    before = write_infer_response(model, "3", "", None, (), ())
    after = write_infer_response("", "", "", None, outputs, ())
    whole = write_infer_response(model, "3", request_id, None, outputs, tensors)
    assert write_known(before, request_id, after, tensors) == whole
