"""json_bounds against its oracle: what is JSON, how large it is, and which bound it is beyond."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.json_bounds import Bounds, JSONBoundError, check_json, find_not_utf8, write_plain
from fastserve._ext.json_value import JSONSyntaxError
from tests.effort import examples
from tests.ext.json_strategies import at_edge, broken, values
from tests.oracles import json_bounds as oracle

ANY = 1 << 40
FREE: dict[str, int] = {
    "depth": 1000,
    "values": ANY,
    "numbers": ANY,
    "object_keys": ANY,
    "key_bytes": ANY,
    "longest_key": ANY,
    "longest_number": ANY,
}
OPEN = Bounds(**FREE)
documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=5) | st.dictionaries(st.text(max_size=8), children, max_size=5)
    ),
    max_leaves=20,
)


def is_refused(body: memoryview) -> bool:
    with pytest.raises(JSONSyntaxError) as caught:
        check_json(body, OPEN)
    return 0 <= caught.value.offset <= len(body)


@examples(300)
@given(broken(values))
def test_json_bounds_agrees_with_the_library_on_what_is_json(body: bytes) -> None:
    try:
        wanted = oracle.read(body.decode())
    except UnicodeDecodeError:
        return  # whoever decodes finds that
    except ValueError:
        with at_edge(body) as view:
            assert is_refused(view)
        return
    size = oracle.measure(wanted)
    with at_edge(body) as view:
        assert check_json(view, OPEN) == (size.values, size.numbers, size.keys)


@examples(300)
@given(documents, st.sampled_from(oracle.Size._fields[:6]), st.integers(0, 12))
def test_json_bounds_refuses_what_is_beyond_each_bound_and_nothing_else(
    document: Any, name: str, most: int
) -> None:
    body = json.dumps(document).encode()
    size = oracle.measure(oracle.read(body.decode()))
    bounds = Bounds(**{**FREE, name: most})
    if getattr(size, name) <= most:
        assert check_json(body, bounds) == (size.values, size.numbers, size.keys)
        return
    with pytest.raises(JSONBoundError) as caught:
        check_json(body, bounds)
    assert (caught.value.bound, caught.value.limit) == (name, most)
    assert 0 <= caught.value.offset < len(body)
    # What stands before that place is within the bound, so it is where it is gone beyond.
    with pytest.raises(JSONSyntaxError):
        check_json(body[: caught.value.offset], bounds)


@pytest.mark.parametrize(
    ("body", "bounds", "told"),
    [
        (b'{"a":1,"logit_bias":{"1":1,"2":2}}', {"object_keys": 2}, None),
        (
            b'{"a":1,"logit_bias":{"1":1,"2":2,"3":3}}',
            {"object_keys": 2},
            ("object_keys", 2, 33, "logit_bias"),
        ),
        (b'{"prompt":[[],[],[]]}', {"values": 4}, ("values", 4, 17, "prompt")),
        (b"[1, 22, 333]", {"longest_number": 2}, ("longest_number", 2, 8, "")),
        (b"[[[]]]", {"depth": 2}, ("depth", 2, 2, "")),
        (b'{"aa":{"bbb":1}}', {"longest_key": 2}, ("longest_key", 2, 7, "aa")),
        (b'{"aa":1,"bb":1}', {"key_bytes": 3}, ("key_bytes", 3, 8, "bb")),
    ],
)
def test_json_bounds_name_the_bound_and_the_place(body: bytes, bounds: dict[str, int], told: Any) -> None:
    if told is None:
        check_json(body, Bounds(**bounds))
        return
    with pytest.raises(JSONBoundError) as caught:
        check_json(body, Bounds(**bounds))
    fault = caught.value
    assert (fault.bound, fault.limit, fault.offset, fault.key) == told


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"[1,]", b'{"a":1,}', b"{,}", b"[1 2]", b"01", b"1.", b".1", b"+1", b"1e", b"NaN", b"-",
     b"[1]]", b"1 1", b'{"a"}', b"{1:2}", b'"a', b'"\x01"', b'"\\ud800"', b"[1]\0", b"tru",
     b"\xef\xbb\xbf[1]"],
)  # fmt: skip
def test_json_bounds_refuse_what_is_no_json(body: bytes) -> None:
    with pytest.raises(JSONSyntaxError):
        check_json(body, OPEN)


@st.composite
def nearly_utf8(draw: st.DrawFn) -> bytes:
    """A text of all lengths of characters, cut short and with a few bytes replaced."""
    body = bytearray("".join(draw(st.lists(st.sampled_from("aé\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"), max_size=40))).encode())  # fmt: skip  # noqa: E501
    for _ in range(draw(st.integers(0, 2)) if body else 0):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.sampled_from(EDGES) | st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)))])


# Where RFC 3629 begins and ends what may stand at a place.
EDGES = (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5)


@examples(300)
@given(nearly_utf8() | st.binary(max_size=12))
def test_find_not_utf8_agrees_with_python(body: bytes) -> None:
    try:
        body.decode()
        wanted = -1
    except UnicodeDecodeError as fault:
        wanted = fault.start
    with at_edge(body) as view:
        assert find_not_utf8(view) == wanted


@pytest.mark.parametrize("place", range(33))
def test_find_not_utf8_finds_a_byte_at_every_place_of_plain_text(place: int) -> None:
    with at_edge(b"a" * place + b"\xff" + b"a" * (32 - place)) as view:
        assert find_not_utf8(view) == place


def test_find_not_utf8_agrees_with_python_on_every_first_two_bytes() -> None:
    for first in range(0x80, 0x100):
        for second in range(0x100):
            body = bytes((first, second)) + b"\x80\x80"
            try:
                body[: 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2].decode()
                refused = False
            except UnicodeDecodeError:
                refused = True
            assert (find_not_utf8(body) == 0) is refused, body


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'"",', b"1,", b'{"a":[1]},', b"true,"])
def test_json_bounds_make_no_objects(piece: bytes) -> None:
    body = b"[" + piece * 100_000 + b"0]"
    tracemalloc.start()
    try:
        check_json(body, OPEN)
        assert tracemalloc.get_traced_memory()[1] < 4096
    finally:
        tracemalloc.stop()


@examples(300)
@given(documents)
def test_write_plain_changes_no_value(value: Any) -> None:
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        with at_edge(body) as view:
            plain = write_plain(view, OPEN)
        assert json.loads(plain) == value
        assert len(plain) <= len(body)


@pytest.mark.parametrize(
    ("body", "plain"),
    [
        (rb'"\u00e9\u20ac"', '"é€"'.encode()),
        (rb'"\ud83d\ude00"', '"😀"'.encode()),
        (rb'"\udc00\u0000\u0022\u005c\n\/"', rb'"\udc00\u0000\u0022\u005c\n\/"'),
        (b"[1, true]", b"[1, true]"),
    ],
)
def test_write_plain_leaves_what_must_stay_escaped(body: bytes, plain: bytes) -> None:
    assert write_plain(body, OPEN) == plain


def test_write_plain_refuses_more_escapes_than_the_bound() -> None:
    assert write_plain(rb'"\n\n\u00e9"', Bounds(escapes=2)) == '"\\n\\né"'.encode()
    with pytest.raises(JSONBoundError) as caught:
        write_plain(rb'"\n\n\t"', Bounds(escapes=2))
    assert (caught.value.bound, caught.value.limit, caught.value.offset) == ("escapes", 2, 5)


def test_bounds_are_no_deeper_than_the_reader_can_go() -> None:
    with pytest.raises(ValueError, match="depth: given 1024, allowed: 0 to 1023"):
        Bounds(depth=1024)
