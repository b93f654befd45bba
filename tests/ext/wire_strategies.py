"""Protobuf bytes as no writer makes them: pieces in any order, padded, nested, cut and bent."""

from __future__ import annotations

from hypothesis import strategies as st


def varint(value: int, padding: int = 0) -> bytes:
    """`value` in as few bytes as it takes, and `padding` more that say nothing."""
    text = bytearray()
    while value >= 0x80:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    text.append(value)
    for _ in range(padding):
        text[-1] |= 0x80
        text.append(0)
    return bytes(text)


def field(number: int, kind: int, value: bytes) -> bytes:
    length = varint(len(value)) if kind == 2 else b""
    return varint(number << 3 | kind) + length + value


def fields(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A message of a few fields, right and wrong; those with a length hold `inner`."""
    numbers = st.integers(1, 9) | st.sampled_from([1, 2, 3, 4, 5, 5, 5, 6, 7, 16, 100])
    numeric = st.builds(
        lambda number, value, padding: field(number, 0, varint(value, padding)),
        numbers,
        st.integers(0, 2**64 - 1) | st.integers(0, 3),
        st.integers(0, 2),
    )
    fixed = st.builds(
        lambda number, value: field(number, 1, value), numbers, st.binary(min_size=8, max_size=8)
    )
    short = st.builds(
        lambda number, value: field(number, 5, value), numbers, st.binary(min_size=4, max_size=4)
    )
    held = st.builds(lambda number, value: field(number, 2, value), numbers, inner)
    groups = st.builds(
        lambda number, value, end: field(number, 3, value) + field(number + end, 4, b""),
        numbers,
        inner,
        st.sampled_from([0, 0, 0, 1]),
    )
    return st.lists(numeric | fixed | short | held | held | groups, max_size=4).map(b"".join)


LEAVES = st.binary(max_size=9) | st.text("aé", max_size=3).map(str.encode) | st.just(b"")
MESSAGES = fields(LEAVES | fields(LEAVES | fields(LEAVES | fields(LEAVES))))


@st.composite
def bent(draw: st.DrawFn, messages: st.SearchStrategy[bytes]) -> bytes:
    """A message with a few bytes changed, or cut."""
    data = bytearray(draw(messages))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)
