"""gRPC's messages in a stream of bytes, slow and plain: look again at all of it each time."""

from __future__ import annotations

import struct

PREFIX = struct.Struct(">BI")


def read(stream: bytes, most_bytes: int) -> tuple[list[tuple[bytes, bool]], int | None, bytes]:
    """The whole messages, the size a refused one has (-1 for a bad flag), and what is left."""
    messages = []
    while len(stream) >= PREFIX.size:
        flag, size = PREFIX.unpack_from(stream)
        if flag > 1 or size > most_bytes:
            return messages, -1 if flag > 1 else size, b""
        if len(stream) < PREFIX.size + size:
            break
        messages.append((stream[PREFIX.size : PREFIX.size + size], flag == 1))
        stream = stream[PREFIX.size + size :]
    return messages, None, stream


def write(message: bytes, compressed: bool) -> bytes:
    return PREFIX.pack(compressed, len(message)) + message
