"""message_skeleton against protobuf's library: a head and its placeholders are the message, nothing else is.

`rebuild` reads heads backwards. What it makes must mean what the message meant, so two requests with one head
differ in their placeholders alone.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.message_skeleton import (
    DATA,
    LEAD,
    LEADS,
    MOST_HEAD_BYTES,
    MOST_PLACEHOLDERS,
    TEXT,
    First,
    Scheme,
    Skeleton,
    TemplateFields,
    TemplatesPath,
    write_from_template,
)
from fastserve._ext.proto_wire import write_infer_response
from fastserve.protos import load
from tests.effort import examples
from tests.ext.test_proto_wire import REQUESTS, serialize
from tests.ext.wire_strategies import MESSAGES, bent, field, varint
from tests.oracles import message_skeleton as oracle
from tests.oracles.message_skeleton import Holes, rebuild
from tests.oracles.proto_wire import FLAT, KSERVE, without_maps

V2: dict[int, Any] = {3: TEXT, 5: {3: LEADS, 5: dict.fromkeys(range(1, 8), DATA)}, 7: DATA}
SHAPE = {2: First({1: LEAD})}
TFS: dict[int, Any] = {2: {2: {2: SHAPE, **dict.fromkeys((4, 5, 6, 7, 10, 11), DATA)}}}
V2_SCHEME, TFS_SCHEME = Scheme(V2), Scheme(TFS)
TF = load("tfserving")
KINDS = {
    "v2": (V2, V2_SCHEME, FLAT.ModelInferRequest),
    "tfs": (TFS, TFS_SCHEME, without_maps(TF).PredictRequest),
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
DIMS = st.lists(st.integers(0, 300), max_size=3)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=4)


def tensor(dims: list[int], values: list[float], content: bytes, more: bool) -> bytes:
    made = TF.TensorProto(dtype=1, float_val=values, tensor_content=content)
    for size in dims:
        made.tensor_shape.dim.add(size=size, name="n" if more else "")
    data: bytes = made.SerializeToString()
    return data


TENSORS = st.builds(tensor, DIMS, FLOATS, st.binary(max_size=9), st.booleans())
ENTRIES = st.builds(
    lambda name, value: field(1, 2, name) + field(2, 2, value), st.binary(max_size=3), TENSORS
)
PREDICTS = st.lists(ENTRIES.map(lambda entry: field(2, 2, entry)), min_size=1, max_size=3).map(b"".join)
SENT = {"v2": REQUESTS.map(serialize), "tfs": PREDICTS}


def data_of(skeleton: Skeleton) -> list[bytes]:
    found = []
    for index, size in enumerate(skeleton.sizes):
        memory = bytearray(size)
        assert skeleton.copy_data(index, memory)
        found.append(bytes(memory))
    return found


def meaning(kind: Any, data: bytes) -> bytes | None:
    """Read a message by the library; None where it is none."""
    try:
        found: bytes = kind.FromString(data).SerializeToString(deterministic=True)
    except DecodeError:
        return None
    return found


def check(name: str, data: bytes) -> Skeleton | None:
    """Check that a message with a skeleton means the same as its head and placeholders, if anything."""
    fields, scheme, kind = KINDS[name]
    skeleton = scheme.read(data)
    if skeleton is not None:
        placeholders = Holes(deque(skeleton.leads), deque(data_of(skeleton)))
        again = rebuild(fields, skeleton.head, placeholders, skeleton.id.encode())
        assert meaning(kind, again) == meaning(kind, data)
    return skeleton


@pytest.mark.parametrize("name", KINDS)
@given(st.data())
def test_what_libraries_write(name: str, data: st.DataObject) -> None:
    check(name, data.draw(SENT[name]))


@examples(200)
@pytest.mark.parametrize("name", KINDS)
@given(st.data())
def test_anything_else_is_read_as_the_library_reads_it_or_not_at_all(name: str, data: st.DataObject) -> None:
    check(name, data.draw(MESSAGES | bent(MESSAGES) | bent(SENT[name])))


@given(REQUESTS, TEXTS, TEXTS, st.integers(1, 300), st.integers(1, 300))
def test_equal_heads_of_v2(content: dict[str, Any], one: str, two: str, first: int, second: int) -> None:
    """They differ in nothing but id, rows and data."""
    found = []
    for text, rows, size in ((one, first, 1), (two, second, 2)):
        inputs = [
            {"name": "x", "shape": [rows, 3], "contents": {"int_contents": [7] * size}},
            *({**given, "contents": {}, "shape": [rows, *given["shape"]]} for given in content["inputs"]),
        ]
        changed = {**content, "id": text, "inputs": inputs, "raw_input_contents": [b"1" * size]}
        found.append(V2_SCHEME.read(serialize(changed)))
    a, b = found
    assert a is not None
    assert b is not None
    assert a.head == b.head
    assert (a.id, b.id, a.sizes, b.sizes) == (one, two, (1, 1), (2, 2))
    assert (a.rows, b.rows) == (first, second)


@given(st.integers(1, 2**31), st.integers(1, 2**31), st.binary(min_size=1), st.binary(min_size=1))
def test_equal_heads_of_predict(first: int, second: int, one: bytes, two: bytes) -> None:
    """Lengths of all that is around a tensor change, and its head does not."""
    found = []
    for rows, content in ((first, one), (second, two)):
        request = TF.PredictRequest(model_spec={"name": "m"}, output_filter=["y"])
        request.inputs["x"].tensor_content = content
        for size in (rows, 5):
            request.inputs["x"].tensor_shape.dim.add(size=size)
        found.append(TFS_SCHEME.read(request.SerializeToString()))
    a, b = found
    assert a is not None
    assert b is not None
    assert a.head == b.head
    assert (a.rows, b.rows, data_of(a), data_of(b)) == (first, second, [one], [two])
    assert a.fields == ((0, 4),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([{"shape": [1, 2]}], [{"shape": [1, 3]}]),
        ([{"shape": [1, 2]}], [{"shape": [1, 2, 1]}]),
        ([{"shape": [1]}, {"shape": [1]}], [{"shape": [1]}]),
        ([{"name": "a"}], [{"name": "b"}]),
        ([{"contents": {"int_contents": [1]}}], [{"contents": {"uint_contents": [1]}}]),
        ([{"contents": {"int_contents": [1]}}, {}], [{}, {"contents": {"int_contents": [1]}}]),
        ([{"parameters": {"a": {"int64_param": 1}}}], [{"parameters": {"a": {"int64_param": 2}}}]),
    ],
    ids=range(7),
)
def test_other_requests_have_other_heads(one: list[Any], other: list[Any]) -> None:
    heads = []
    for inputs in (one, other):
        message = KSERVE.ModelInferRequest(inputs=inputs, raw_input_contents=[b"1"])
        skeleton = V2_SCHEME.read(message.SerializeToString())
        assert skeleton is not None
        heads.append(skeleton.head)
    assert heads[0] != heads[1]


HEAD, RAW = field(1, 2, b"m"), field(7, 2, b"abc")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD,
        field(3, 2, b"7") + field(3, 2, b"8") + RAW,
        field(3, 2, b"\xff") + RAW,
        field(3, 0, b"\x01") + RAW,
        field(1, 2, bytes(MOST_HEAD_BYTES)) + RAW,
        HEAD + RAW * (MOST_PLACEHOLDERS + 1),
        HEAD + RAW[:-1],
        HEAD + field(7, 0, b"\x01"),
        HEAD + RAW + b"\x3a\xff\xff\xff\xff\x0f",
        b"\x0b" + RAW,  # a group that never ends
        field(5, 2, field(3, 0, b"\x04") + field(3, 2, b"\x04"))
        + RAW,  # the first axis is not where it seems
        field(5, 2, field(3, 2, b"")) + RAW,
        field(5, 2, field(3, 2, b"\x01" * 257)) + RAW,
        field(5, 2, field(3, 2, b"\x80")) + RAW,
        field(5, 2, field(5, 2, field(6, 5, b"1234"))) + RAW,  # not packed
        field(5, 2, field(3, 2, b"\x01")) * (MOST_PLACEHOLDERS + 1) + RAW,
    ],
    ids=range(17),
)
def test_what_has_no_outline(data: bytes) -> None:
    assert V2_SCHEME.read(data) is None


def test_the_limits_themselves_are_allowed() -> None:
    assert V2_SCHEME.read(field(1, 2, bytes(MOST_HEAD_BYTES - 4)) + RAW) is not None
    assert V2_SCHEME.read(HEAD + RAW * MOST_PLACEHOLDERS) is not None


def test_rows_are_those_of_all() -> None:
    def rows(*shapes: bytes) -> int:
        skeleton = V2_SCHEME.read(b"".join(field(5, 2, field(3, 2, shape)) for shape in shapes) + RAW)
        assert skeleton is not None
        return skeleton.rows

    assert (rows(), rows(b"\x05"), rows(b"\x05\x01", b"\x05\x02"), rows(b"\x05", b"\x06")) == (-1, 5, 5, -1)
    assert rows(varint(2**64 - 1)) == -1


def test_copies_want_the_size_of_the_data() -> None:
    skeleton = V2_SCHEME.read(HEAD + RAW + field(7, 2, b"\x07\xac\x02"))
    assert skeleton is not None
    assert not skeleton.copy_data(0, bytearray(2))
    assert not skeleton.copy_data(0, bytearray(4))
    numbers = bytearray(4)
    assert skeleton.copy_data(1, numbers, 2)
    assert numbers == b"\x07\x00\x2c\x01"
    assert skeleton.copy_data(1, numbers[:2], 1, True)
    assert not skeleton.copy_data(1, bytearray(2), 2)
    assert not skeleton.copy_data(1, bytearray(6), 2)
    with pytest.raises(IndexError):
        skeleton.copy_data(2, bytearray(3))


@pytest.mark.parametrize("fields", [{0: DATA}, {32: DATA}, {-1: TEXT}])
def test_what_is_no_scheme(fields: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="field"):
        Scheme(fields)


@given(TEXTS, TEXTS, st.lists(st.binary(max_size=20), max_size=3))
def test_replies_are_those_of_the_general_writer(model: str, request_id: str, tensors: list[bytes]) -> None:
    outputs = [(f"y{index}", "UINT8", (len(data),), None) for index, data in enumerate(tensors)]
    before = write_infer_response(model, "3", "", None, (), ())
    after = write_infer_response("", "", "", None, outputs, ())
    whole = write_infer_response(model, "3", request_id, None, outputs, tensors)
    assert write_from_template(before, request_id, after, tensors) == whole


# -- messages that are known ---------------------------------------------------------------------

SIGNED = st.integers(-2, 5)


def shapes_and_raw(leads: list[int], sizes: list[int]) -> Skeleton:
    shapes = b"".join(field(5, 2, field(3, 2, varint(lead % 2**64))) for lead in leads)
    raw = b"".join(field(7, 2, bytes([index + 1]) * size) for index, size in enumerate(sizes))
    skeleton = V2_SCHEME.read(shapes + raw)
    assert skeleton is not None
    return skeleton


@given(st.lists(SIGNED, max_size=3), st.lists(SIGNED, max_size=3), st.booleans(), st.integers(0, 4))
def test_who_is_like_the_one_that_was_learned(
    leads: list[int], learned: list[int], batching: bool, most: int
) -> None:
    known, skeleton = TemplateFields(), shapes_and_raw(leads, [1])
    known.batching, known.leads = batching, tuple(learned)
    wanted = oracle.meets(skeleton, known.leads, batching, most)
    assert known.is_met_by(skeleton, SimpleNamespace(max_rows=most)) == bool(wanted)
    assert not wanted or known.rows == wanted


@pytest.mark.parametrize(
    ("width", "nbytes", "met"), [(0, 1 << 22, True), (4, 1 << 20, True), (4, (1 << 20) + 1, False)]
)
def test_numbers_that_take_long_to_read_are_not_met(width: int, nbytes: int, met: bool) -> None:
    """Bytes are copied; packed numbers are read one by one, on the event loop."""
    known, skeleton = TemplateFields(), shapes_and_raw([1], [nbytes])
    known.batching, known.sources = True, [(0, width, False)]
    assert known.is_met_by(skeleton, SimpleNamespace(max_rows=1)) == met


SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=3)
PLACES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from((0, 0, 1, 2)), st.booleans()), max_size=3)


@given(SIZES, PLACES, SIZES)
def test_inputs_go_to_their_places(
    sizes: list[int], sources: list[tuple[int, int, bool]], room: list[int]
) -> None:
    sources = [(placeholder % len(sizes), width, truth) for placeholder, width, truth in sources][: len(room)]
    known, skeleton = TemplateFields(), shapes_and_raw([], sizes)
    known.sources = sources
    assert known.sources == sources
    found, wanted = ([bytearray(size) for size in room[: len(sources)]] for _ in range(2))
    assert known.fill(skeleton, found) == oracle.fill(skeleton, sources, wanted)
    assert found == wanted
    with pytest.raises(ValueError, match="places for"):
        known.fill(skeleton, [*found, bytearray(1)])


def test_a_head_leads_to_its_path_and_no_further_than_its_version() -> None:
    skeleton = shapes_and_raw([2], [4])
    version, dropped, started = object(), list[bytes](), list[Any]()
    path = SimpleNamespace(
        version=version,
        queue=SimpleNamespace(max_rows=2),
        start=lambda *given: started.append(given) or len(started) < 2,
    )
    known, messages = TemplateFields(), TemplatesPath()
    known.batching, known.find_version = True, lambda: version
    heads: dict[bytes, Any] = {}
    messages.find, messages.drop = heads.get, dropped.append
    assert not messages.start(skeleton, "exchange", 7)
    heads[skeleton.head] = path, known
    assert messages.start(skeleton, "exchange", 7)
    assert started == [("exchange", known, skeleton, "", 7)]
    assert not messages.start(skeleton, "exchange", 7), "the path's word counts"
    assert not messages.start(shapes_and_raw([3], [4]), "exchange", 7), "more rows than a batch"
    assert len(started) == 2
    known.find_version = lambda: None
    assert not messages.start(skeleton, "exchange", 7)
    assert (dropped, len(started)) == ([skeleton.head], 2)


class Arrived:
    """A message of which all but `begin` is elsewhere, and can be read once."""

    def __init__(self, message: bytes, begun: int) -> None:
        self.begin, self.left = message[:begun], len(message) - begun
        self._message = message

    def read_into(self, places: list[memoryview], skip: int) -> bool:
        (place,) = places
        assert len(place) == len(self._message) - skip
        place[:] = self._message[skip:]
        self.left = 0
        return True


def check_arrived(scheme: Scheme, message: bytes, begun: int) -> bool:
    """A skeleton of a message that is not all here is that of the whole message, or there is none."""
    body, whole = Arrived(message, begun), scheme.read(message)
    skeleton = scheme.read_arrived(body)
    if skeleton is None:
        return False
    assert whole is not None
    assert skeleton.arrived is body
    for name in ("head", "id", "leads", "sizes", "fields", "rows"):
        assert getattr(skeleton, name) == getattr(whole, name)
    template = TemplateFields()
    template.sources = [(index, 0, False) for index in range(len(whole.sizes))]
    memory = [memoryview(bytearray(size)) for size in whole.sizes]
    if body.left:
        with pytest.raises(IndexError, match="is not here"):
            skeleton.copy_data(len(whole.sizes) - 1, memory[-1])
        template.sources = [*template.sources, (len(whole.sizes) - 1, 0, False)]
        assert not template.fill(skeleton, [*memory, memory[-1]]), "twice"
        template.sources = template.sources[:-1]
        assert not template.fill(skeleton, [*memory[:-1], memoryview(bytearray(whole.sizes[-1] + 1))])
        template.sources = [*template.sources[:-1], (len(whole.sizes) - 1, 4, False)]
        assert not template.fill(skeleton, memory), "one by one"
        template.sources = [*template.sources[:-1], (len(whole.sizes) - 1, 0, False)]
    assert body.left == len(message) - begun
    assert template.fill(skeleton, memory)
    assert [bytes(place) for place in memory] == data_of(whole)
    return True


@examples(100)
@pytest.mark.parametrize("name", KINDS)
@given(st.data())
def test_messages_that_are_not_all_here(name: str, data: st.DataObject) -> None:
    message = data.draw(SENT[name] | bent(SENT[name]))
    for begun in range(len(message) + 1):
        check_arrived(KINDS[name][1], message, begun)


@pytest.mark.parametrize("name", KINDS)
def test_a_message_whose_tensor_is_not_here(name: str) -> None:
    """From the length of its last tensor on, where that is the last of the message."""
    content = bytes(range(200))
    if name == "v2":
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 50]}]
        message = serialize({"model_name": "m", "inputs": inputs, "raw_input_contents": [content]})
    else:
        message = field(1, 2, field(1, 2, b"m")) + field(
            2, 2, field(1, 2, b"x") + field(2, 2, field(4, 2, content))
        )
    found = [begun for begun in range(len(message) + 1) if check_arrived(KINDS[name][1], message, begun)]
    assert found == list(range(len(message) - len(content), len(message) + 1))
    behind = message + field(9, 2, b"more")
    assert KINDS[name][1].read_arrived(Arrived(behind, len(behind) - 100)) is None
