"""Headers, tables and bodies of messages: what is packed is read, and what is damaged is refused."""

from __future__ import annotations

import pytest

from fastserve._ext.remote_batches import (
    COPIED_BYTES,
    MOST_JOINED,
    PROTOCOL,
    MessageKind,
    ProtocolFault,
    WireMessage,
    read_messages,
    read_protocol,
)
from fastserve.workers.remote.protocol import BODY_BYTES, Go, Hello, pack_message, read_body
from tests.workers.remote.rig import damaged


def test_a_message_of_another_protocol_says_so() -> None:
    packed = bytearray(WireMessage(MessageKind.HELLO).pack()[0])
    packed[4] = 9
    with pytest.raises(ProtocolFault, match=f"protocol 9; protocol {PROTOCOL} is spoken here"):
        read_messages([bytes(packed)])
    assert read_protocol(bytes(packed)) == 9


def test_a_body_that_is_too_long_is_not_read() -> None:
    body = b'{"dense":true}'
    for padding, fits in ((BODY_BYTES - len(body), True), (BODY_BYTES - len(body) + 1, False)):
        message = WireMessage(MessageKind.GO, parts=[body + b" " * padding])
        if fits:
            assert read_body(message, Go) == Go(True)
        else:
            with pytest.raises(ProtocolFault, match="a body that is too long"):
                read_body(message, Go)


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
