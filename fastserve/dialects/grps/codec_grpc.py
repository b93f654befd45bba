"""GrpsMessage as bytes (spec 1): bounded before it is parsed, and put together where it is known in advance.

read_message(data)                      the protobuf library's message
write_heads(tensors, before)            what stands before each tensor's values, which lie as on the wire
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from fastserve.codec.proto_fields import BYTES, head_of
from fastserve.errors import invalid
from fastserve.protos import load

MOST_FIELDS = 1024  # of a message, and tensors of a request: each costs the parser a hundred bytes
GTENSORS, TENSORS, SHAPE = 5, 1, 3
_VARINT, _FIXED64, _FIXED32 = 0, 1, 5
Span = tuple[int, int, int]  # field number, first byte of the value, end


def read_message(data: bytes) -> Any:
    """A GrpsMessage. Raises ServeError for what is none, or has too many tensors."""
    tensors = 0
    try:
        for field, start, end in walk(data, 0, len(data)):
            if field == GTENSORS:
                for _ in walk(data, start, end):
                    tensors += 1
                    if tensors > MOST_FIELDS:
                        raise invalid(f"gtensors: at most {MOST_FIELDS} tensors and fields are read")
        return load("grps").GrpsMessage.FromString(data)
    except (DecodeError, IndexError, ValueError):
        raise invalid("malformed GrpsMessage") from None


def walk(data: bytes, at: int, end: int) -> Iterator[Span]:
    """The fields of a message. Raises ServeError for too many, ValueError or IndexError for what is none."""
    for _ in range(MOST_FIELDS + 1):
        if at >= end:
            return
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, stop = read_varint(data, at)
        elif kind == BYTES:
            size, at = read_varint(data, at)
            stop = at + size
        elif kind in (_FIXED32, _FIXED64):
            stop = at + (4 if kind == _FIXED32 else 8)
        else:
            raise ValueError("groups are not read")
        if stop > end:
            raise ValueError("a field is longer than its message")
        yield (tag >> 3 if kind == BYTES else 0), at, stop
        at = stop
    raise invalid(f"a message has at most {MOST_FIELDS} fields")


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    number = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise ValueError("a varint has at most ten bytes")


def write_heads(tensors: Sequence[tuple[bytes, int, int]], before: bytes) -> list[bytes]:
    """What stands before each tensor's values. `tensors`: (the fields before, field, bytes of values)."""
    bodies = [head + head_of(field, size) for head, field, size in tensors]
    sizes = [len(body) + size for body, (_, _, size) in zip(bodies, tensors, strict=True)]
    heads = [head_of(TENSORS, size) + body for size, body in zip(sizes, bodies, strict=True)]
    whole = sum(len(head) + size for head, (_, _, size) in zip(heads, tensors, strict=True))
    heads[0] = before + head_of(GTENSORS, whole) + heads[0]
    return heads
