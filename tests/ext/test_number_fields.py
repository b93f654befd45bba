"""number_fields' lists of fields against a walk in Python; its numbers are grps's test_bounds'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.number_fields import count_fields, list_fields
from fastserve._ext.proto_wire import WireFault
from tests.effort import examples
from tests.ext.wire_strategies import field, varint
from tests.oracles.number_fields import walk

FIELDS = st.one_of(
    st.tuples(st.just(0), st.integers(0, 2**64 - 1).map(varint)),
    st.tuples(st.just(1), st.binary(min_size=8, max_size=8)),
    st.tuples(st.just(5), st.binary(min_size=4, max_size=4)),
    st.tuples(st.just(2), st.binary(max_size=200).map(lambda data: varint(len(data)) + data)),
)
MESSAGES = st.lists(st.tuples(st.integers(1, 40), FIELDS), max_size=12).map(
    lambda fields: b"".join(varint(number << 3 | kind) + value for number, (kind, value) in fields)
)


@examples(300)
@given(before=st.binary(max_size=3), data=MESSAGES, after=st.binary(max_size=3))
def test_lists_are_those_of_a_walk(before: bytes, data: bytes, after: bytes) -> None:
    whole, begin, end = before + data + after, len(before), len(before) + len(data)
    found = list_fields(whole, begin, end, 100)
    assert found == list(walk(whole, begin, end))
    for number in (1, 40):
        nbytes = sum(last - first for one, _, first, last in found if one == number)
        assert count_fields(whole, begin, end, number) == (len(found), nbytes)
    assert list_fields(whole, begin, end, 3) == found[:4]


@examples(300)
@given(data=st.binary(max_size=30))
def test_garbage_is_refused_as_by_a_walk(data: bytes) -> None:
    try:
        wanted = list(walk(data, 0, len(data)))
    except ValueError:
        with pytest.raises(WireFault):
            list_fields(data, 0, len(data), 100)
        with pytest.raises(WireFault):
            count_fields(data, 0, len(data))
    else:
        assert list_fields(data, 0, len(data), 100) == wanted


@pytest.mark.parametrize(("begin", "end"), [(-1, 0), (0, 3), (2, 1), (3, 3)])
def test_parts_lie_in_their_message(begin: int, end: int) -> None:
    data = field(1, 2, b"")
    assert len(data) == 2
    with pytest.raises(IndexError):
        list_fields(data, begin, end, 1)
    with pytest.raises(IndexError):
        count_fields(data, begin, end)
