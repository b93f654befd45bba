"""Fields of protobuf messages, written one by one: for messages whose values lie in memory as on the wire.

write_field(1, b"ab")      0a 02 'a' 'b'
head_of(1, 600_000)        what stands before that many bytes
"""

from __future__ import annotations

BYTES = 2  # the wire type of what has its length before it


def write_varint(number: int) -> bytes:
    """A number; one under 0 as the 64 bits of its two's complement."""
    number &= 2**64 - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def head_of(field: int, size: int) -> bytes:
    """What stands before that many bytes of a field."""
    return write_varint(field << 3 | BYTES) + write_varint(size)


def write_field(field: int, data: bytes) -> bytes:
    """A field of bytes, as small ones are."""
    return head_of(field, len(data)) + data
