"""SETTINGS (RFC 9113 6.5): what the server says of itself, and what it takes from a client."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastserve.wire.http2 import calm
from fastserve.wire.http2.errors import ConnectionFault, ErrorCode

if TYPE_CHECKING:
    from fastserve.wire.http2.connection import Http2Connection

PREFACE = b"PRI * HTTP/2.0\r\n\r\n"  # what tells it from HTTP/1.1: the rest of the preface is for the reader
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE, NO_RFC7540_PRIORITIES = 5, 6, 9
MOST_WINDOW = (1 << 31) - 1
FIRST_WINDOW = 65535  # of a connection, and of its streams until SETTINGS say otherwise
LEAST_FRAME_BYTES = 16384
# What a client may send before it hears of more: a body of a large tensor needs no round trip.
STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 16 << 20
FRAME_BYTES = 16384  # longest frame taken; longer ones would only keep a client's other streams waiting
# A block is read to its end even when what it says is too large: then its request alone is refused.
BLOCK_BYTES = 65536
CONTINUATIONS = 16  # of one header block; a frame of it has room for 16 KiB

_PAIR = struct.Struct(">HI")


def write_settings(streams: int, header_list_bytes: int) -> bytes:
    """The payload of the server's SETTINGS."""
    pairs = (
        (MAX_CONCURRENT_STREAMS, streams),
        (INITIAL_WINDOW_SIZE, STREAM_WINDOW),
        (MAX_FRAME_SIZE, FRAME_BYTES),
        (MAX_HEADER_LIST_SIZE, header_list_bytes),
        (NO_RFC7540_PRIORITIES, 1),
    )
    return b"".join(_PAIR.pack(*pair) for pair in pairs)


def take(payload: bytes, connection: Http2Connection) -> None:
    """What a client says of itself holds from now on. Raises ConnectionFault.

    A frame has room for 2730 pairs: the windows of all streams move once, by what they all come to.
    """
    before = largest = connection.client_window
    for name, value in read_settings(payload):
        if name == INITIAL_WINDOW_SIZE:
            connection.client_window = value
            largest = max(largest, value)
        elif name == MAX_FRAME_SIZE:
            connection.sending.frame_bytes = value
        elif name == HEADER_TABLE_SIZE:
            connection.sending.shrink_table(value)
    if largest > before or connection.client_window != before:
        connection.intake.shift_windows(connection.client_window - before, largest - before)


def cost(payload: bytes) -> int:
    """What a frame costs a client: more where it has more pairs than there are settings to set."""
    return calm.SETTINGS + len(payload) // (_PAIR.size * calm.SETTINGS_PAIRS)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """The pairs of a client's SETTINGS, checked. Raises ConnectionFault."""
    for name, value in _PAIR.iter_unpack(payload):
        if name in (ENABLE_PUSH, NO_RFC7540_PRIORITIES) and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"setting {name} is neither 0 nor 1")
        if name == INITIAL_WINDOW_SIZE and value > MOST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE above 2^31-1")
        if name == MAX_FRAME_SIZE and not LEAST_FRAME_BYTES <= value < 1 << 24:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of its bounds")
        yield name, value
