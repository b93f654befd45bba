"""grpc_messages against its oracle: every split of a stream gives the same messages."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.grpc_messages import (
    CLAIMED_BYTES,
    PREFIX_BYTES,
    MessageFault,
    MessageReader,
    frame_message,
    message_prefix,
    whole_message,
)
from fastserve._ext.http2_frames import PLACED, FrameReader
from tests.effort import examples
from tests.oracles import grpc_messages as oracle

MOST = 300
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
FRAMED = st.builds(oracle.write, st.binary(max_size=60), st.booleans())
STREAMS = st.lists(FRAMED, max_size=6).map(b"".join)
ODD = st.binary(max_size=40) | st.builds(lambda n: oracle.write(bytes(n), False), st.integers(290, 310))


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(at % (len(stream) + 1) for at in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(places)]


def read(
    pieces: list[bytes], most_bytes: int = MOST
) -> tuple[list[tuple[bytes, bool]], int | None, bool, int]:
    reader, messages, refused = MessageReader(most_bytes), [], None
    for piece in pieces:
        try:
            messages += reader.feed(memoryview(piece))
        except MessageFault as fault:
            refused = fault.size
            break
    return messages, refused, reader.partial, reader.wanted


@examples(300)
@given(STREAMS | st.builds(bytes.__add__, STREAMS, ODD), st.lists(st.integers(0, 400), max_size=8))
def test_any_split_gives_the_same_messages(stream: bytes, cuts: list[int]) -> None:
    wanted, fault, left = oracle.read(stream, MOST)
    messages, refused, partial, under_way = read(cut(stream, cuts))
    assert refused == fault
    if fault is None:
        assert (messages, partial) == (wanted, bool(left))
        length = int.from_bytes(left[1:5], "big") + PREFIX_BYTES if len(left) >= PREFIX_BYTES else 0
        assert under_way == length
    else:  # those of the refused piece are not handed out
        assert messages == wanted[: len(messages)]


@given(st.binary(max_size=80), st.booleans())
def test_what_is_framed_is_read(message: bytes, compressed: bool) -> None:
    framed = frame_message(message, compressed)
    assert framed == oracle.write(message, compressed) == message_prefix(len(message), compressed) + message
    assert read([framed])[0] == [(message, compressed)]
    assert whole_message(framed, len(message)) == (None if compressed else message)
    assert whole_message(framed, len(message) - 1 if message else 0) == (
        b"" if not message and not compressed else None
    )


@given(STREAMS | ODD)
def test_a_body_that_is_no_single_message_is_none(body: bytes) -> None:
    messages, fault, left = oracle.read(body, MOST)
    single = fault is None and not left and len(messages) == 1 and not messages[0][1]
    assert whole_message(body, MOST) == (messages[0][0] if single else None)


def test_every_split_of_a_large_message() -> None:
    stream = oracle.write(bytes(range(256)) * 3, False) * 2
    for at in range(len(stream)):
        assert read([stream[:at], stream[at:]], 1000)[0] == oracle.read(stream, 1000)[0]


def test_a_claimed_length_takes_no_memory_until_bytes_come() -> None:
    reader = MessageReader(1 << 31)
    tracemalloc.start()
    reader.feed(message_prefix((1 << 31) - 1) + b"some")
    claimed = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert claimed < CLAIMED_BYTES + 100_000
    assert reader.wanted == (1 << 31) + PREFIX_BYTES - 1


def test_a_message_beyond_the_claim_is_whole() -> None:
    message = bytes(range(251)) * ((CLAIMED_BYTES + 5_000_000) // 251)
    reader, piece, found = MessageReader(len(message)), 300_000, []
    stream = memoryview(oracle.write(message, False))
    for at in range(0, len(stream), piece):
        found += reader.feed(stream[at : at + piece])
    assert found == [(message, False)]


def test_a_refused_length_takes_nothing() -> None:
    reader = MessageReader(10)
    with pytest.raises(MessageFault, match="a message of 11 bytes") as fault:
        reader.feed(message_prefix(11))
    assert fault.value.size == 11


@given(
    st.binary(min_size=1, max_size=300), st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=12)
)
def test_what_is_written_into_the_room_is_the_message(message: bytes, steps: list[tuple[int, bool]]) -> None:
    """`feed` and `placed` in any order give what `feed` alone gives."""
    body, reader, found = frame_message(message), MessageReader(1 << 20), []
    assert len(memoryview(reader)) == 0
    for size, places in [*steps, (len(body), False)]:
        piece, room = body[:size], memoryview(reader)
        if places and len(room) > 0:
            piece = body[: min(size, len(room))]
            room[: len(piece)] = piece
            room.release()
            found += reader.placed(len(piece))
        else:
            room.release()
            found += reader.feed(piece)
        body = body[len(piece) :]
    assert found == [(message, False)]
    assert not reader.partial


def test_more_than_the_room_was_not_written() -> None:
    reader = MessageReader(1 << 20)
    for nbytes in (0, 1):
        with pytest.raises(ValueError, match="no room"):
            reader.placed(nbytes)
    reader.feed(frame_message(b"abc")[:6])
    for nbytes in (3, -1):
        with pytest.raises(ValueError, match="no room"):
            reader.placed(nbytes)
    assert reader.feed(b"bc") == [(b"abc", False)]


def test_a_diverted_message_beyond_the_claim_is_whole() -> None:
    """Room is made by what does not fit any more: nothing of the same read may be put into the old one."""
    message = bytes(range(251)) * (CLAIMED_BYTES // 251 + 400)
    framed = message_prefix(len(message)) + message
    edge = PREFIX_BYTES + CLAIMED_BYTES - 1000  # 300 bytes fit, 900 do not, 100 would
    head, most, *last = pieces(framed, PREFIX_BYTES, edge, edge + 300, edge + 1200, edge + 1300)
    frames, reader, found = FrameReader(1 << 20, 65536, 16), MessageReader(1 << 30), []
    frames.read(GREETING, len(GREETING))
    for data in (as_data(head), as_data(most), b"".join(map(as_data, last))):
        for kind, _, _, payload, _ in frames.read(data, len(data)):
            found += reader.placed(payload) if kind == PLACED else reader.feed(payload)
        frames.divert(1, reader)
    assert found == [(message, False)]


def pieces(stream: bytes, *edges: int) -> list[bytes]:
    return [stream[a:b] for a, b in itertools.pairwise((0, *edges, len(stream)))]


def as_data(piece: bytes) -> bytes:
    """DATA frames of stream 1."""
    parts = [piece[at : at + 16384] for at in range(0, len(piece), 16384)]
    return b"".join(len(part).to_bytes(3, "big") + b"\0\0\0\0\0\1" + part for part in parts)


@examples(100)
@given(STREAMS, st.integers(0, 4))
def test_no_more_messages_than_are_asked_for(stream: bytes, most: int) -> None:
    """Bytes that were not looked at are the caller's to bring again."""
    wanted, _, left = oracle.read(stream, MOST)
    reader, found, at = MessageReader(MOST), [], 0
    while at < len(stream):
        some = reader.feed(memoryview(stream)[at:], most or 1)
        assert len(some) <= (most or 1)
        found, at = found + some, at + reader.used
    assert (found, reader.partial) == (wanted, bool(left))
    assert reader.feed(b"anything", 0) == []
    assert reader.used == 0
