"""Headers, tables and bodies of messages: what is packed is read, and what is damaged is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.workers.remote import protocol
from fastserve.workers.remote.protocol import (
    COPIED_BYTES,
    HEADER_BYTES,
    MOST_JOINED,
    Go,
    Hello,
    MessageKind,
    ProtocolFault,
    WireMessage,
    batch_number,
    pack_message,
    read_body,
    read_messages,
)
from tests.workers.remote.rig import damaged

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PARTS = st.lists(st.one_of(st.binary(max_size=9), st.just(bytes(COPIED_BYTES // 2))), max_size=4)
MESSAGES = st.builds(
    WireMessage,
    *(st.sampled_from(MessageKind), U64, U32, U32, U64, st.lists(st.tuples(U32, U32), max_size=3), PARTS),
)


@given(MESSAGES)
def test_a_message_is_read_as_it_was_packed(message: WireMessage) -> None:
    frames = message.pack()
    assert len(frames) == (1 if sum(map(len, message.parts)) < COPIED_BYTES else 1 + len(message.parts))
    assert frames[0][HEADER_BYTES:] or not (message.table or message.parts)
    assert read_messages([memoryview(frame) for frame in frames]) == [message]


@given(
    st.lists(
        MESSAGES.filter(lambda message: sum(map(len, message.parts)) < COPIED_BYTES), min_size=1, max_size=5
    )
)
def test_messages_of_one_frame_are_read_one_after_the_other(messages: list[WireMessage]) -> None:
    frame = b"".join(frame for message in messages for frame in message.pack())
    assert read_messages([memoryview(frame)]) == messages


@given(MESSAGES, st.data())
def test_any_bytes_are_read_or_refused(message: WireMessage, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in message.pack()]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from([frame for frame in frames if frame]))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_messages([memoryview(frame) for frame in frames])
    except ProtocolFault:
        return
    assert b"".join(frame for one in found for frame in one.pack()) == b"".join(frames)


def test_a_message_of_another_protocol_says_so() -> None:
    packed = bytearray(WireMessage(MessageKind.HELLO).pack()[0])
    packed[4] = 9
    with pytest.raises(ProtocolFault, match="protocol 9; protocol 2 is spoken here"):
        read_messages([bytes(packed)])
    assert protocol.read_protocol(bytes(packed)) == 9


def test_a_message_is_read_only_with_the_bytes_that_were_announced() -> None:
    small = WireMessage(MessageKind.ANSWER, table=[(0, 1), (3, 4)], parts=[b"abc", b"de"]).pack()
    large = WireMessage(MessageKind.ANSWER, table=[(0, 1)], parts=[bytes(COPIED_BYTES), b"de"]).pack()
    for frames in (
        [small[0][:-1]],
        [small[0] + b"x"],
        [small[0][:-5]],  # as many frames as lengths, and none of them
        [small[0][:-5], b"abc"],
        [small[0][:-5], b"abd", b"e"],
        [small[0] * (MOST_JOINED + 1)],
        damaged(small, entries=3),
        damaged(small, parts=1),
        damaged(small, nbytes=4),
        large[:2],
        [*large, b""],
        [large[0], large[1][:-1], large[2] + b"x"],
        [large[0] + b"x", *large[1:]],
        damaged(large, parts=1 << 17),
    ):
        with pytest.raises(ProtocolFault):
            read_messages(frames)
    assert read_messages([small[0][:-5], b"abc", b"de"])[0].parts == [b"abc", b"de"]
    assert len(read_messages([small[0] * MOST_JOINED])) == MOST_JOINED


def test_a_body_is_read_only_as_what_it_is() -> None:
    (told,) = read_messages(pack_message(MessageKind.GO, Go(True)))
    assert read_body(told, Go) == Go(True)
    for parts in ([], [b"{}"], [b"{}", b"{}"], [b"["], [b'{"dense": 1}'], [b"[" * 100_000]):
        with pytest.raises(ProtocolFault):
            read_body(WireMessage(MessageKind.GO, parts=parts), Go)
    (long,) = read_messages(pack_message(MessageKind.HELLO, Hello("x" * 65, 1, "n", 1)))
    with pytest.raises(ProtocolFault):
        read_body(long, Hello)


def test_numbers_of_batches_differ_by_generation_slot_and_attempt() -> None:
    numbers = {batch_number(g, s, a) for g in (1, 2, 2**32 + 3) for s in (0, 1, 255) for a in (0, 1)}
    assert len(numbers) == 18
