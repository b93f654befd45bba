"""Headers, tables and bodies of messages: what is packed is read, and what is damaged is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.workers.remote import protocol
from fastserve.workers.remote.protocol import (
    HEADER_BYTES,
    Go,
    Header,
    Hello,
    MessageKind,
    ProtocolFault,
    batch_number,
    pack_message,
    pack_table,
    read_body,
    read_header,
    read_table,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(st.builds(Header, st.sampled_from(MessageKind), U64, U32, U32, U32, U32, U64, U64))
def test_a_header_is_read_as_it_was_packed(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 48
    assert read_header(packed) == header


@given(st.binary(max_size=100))
def test_a_header_of_any_bytes_is_read_or_refused(data: bytes) -> None:
    try:
        assert read_header(data).pack() == data
    except ProtocolFault:
        assert (
            len(data) != 48
            or data[:4] != b"FSRW"
            or data[4:6] != b"\1\0"
            or data[6] > 14
            or not data[6]
            or data[7]
        )


def test_a_header_of_another_protocol_says_so() -> None:
    packed = bytearray(Header(MessageKind.HELLO).pack())
    packed[4] = 9
    with pytest.raises(ProtocolFault, match="protocol 9; protocol 1 is spoken here"):
        read_header(bytes(packed))
    assert protocol.read_protocol(bytes(packed)) == 9


def test_a_table_is_read_only_with_the_frames_that_were_announced() -> None:
    header = Header(MessageKind.ANSWER, entries=2, parts=2, nbytes=5)
    frames = [header.pack(), pack_table([(0, 1), (3, 4)]), b"abc", b"de"]
    assert read_table(header, frames) == [(0, 1), (3, 4)]
    for damaged in (
        frames[:3],
        [*frames, b""],
        [frames[0], frames[1][:-1], *frames[2:]],
        [*frames[:3], b"def"],
        [frames[0]],
    ):
        with pytest.raises(ProtocolFault):
            read_table(header, damaged)


def test_a_body_is_read_only_as_what_it_is() -> None:
    assert read_body(pack_message(MessageKind.GO, Go(True)), Go) == Go(True)
    for damaged in ([b"{}"], [b"", b"{}"], [b"", b"["], [b"", b'{"dense": 1}'], [b"", b"[" * 100_000]):
        with pytest.raises(ProtocolFault):
            read_body(damaged, Go)
    long = pack_message(MessageKind.HELLO, Hello("x" * 65, 1, "n", 1))
    with pytest.raises(ProtocolFault):
        read_body(long, Hello)


def test_numbers_of_batches_differ_by_generation_slot_and_attempt() -> None:
    numbers = {batch_number(g, s, a) for g in (1, 2, 2**32 + 3) for s in (0, 1, 255) for a in (0, 1)}
    assert len(numbers) == 18
