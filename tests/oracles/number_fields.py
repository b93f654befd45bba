"""The fields of a protobuf message, by a walk in Python."""

from __future__ import annotations

from collections.abc import Iterator


def walk(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each field's number (0 unless it is length-delimited), begin, begin of the value, end."""
    while at < end:
        begin = at
        tag, at = read_varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29 or tag >> 32:
            raise ValueError("no such field")
        if kind == 0:
            _, stop = read_varint(data, at, end)
        elif kind == 2:
            size, at = read_varint(data, at, end)
            stop = at + size
        elif kind in (1, 5):
            stop = at + (8 if kind == 1 else 4)
        else:
            raise ValueError("no such type")
        if stop > end:
            raise ValueError("a field is longer than its message")
        yield (number if kind == 2 else 0), begin, at, stop
        at = stop


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    number = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number & 2**64 - 1, at
        shift += 7
    raise ValueError("a varint has at most ten bytes")
