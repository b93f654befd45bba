"""Tensors in a slab, slow and plain: `struct` over the layout of ext/include/slab_tensors.h."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from fastserve.tensor import DTYPE_BY_CODE

MAX_RANK = 16
HEAD = struct.Struct("<II")  # magic, count
ENTRY = struct.Struct(f"<HBBIQQ{MAX_RANK}q")  # number, dtype code, rank, unused, offset, bytes, shape
TAIL = struct.Struct("<I")  # bytes of the note that ends here
MAGIC, NOTED = 0x74616C73, 0x74616C6E

Entry = tuple[int, int, tuple[int, ...], Any]


def measure(tensors: Sequence[Entry], note: bytes = b"") -> int:
    size = _body_at(len(tensors)) + sum(_align(len(data)) for _, _, _, data in tensors)
    return size + len(note) + TAIL.size if note else size


def write(slab: bytearray, tensors: Sequence[Entry], note: bytes = b"") -> None:
    HEAD.pack_into(slab, 0, NOTED if note else MAGIC, len(tensors))
    if note:
        slab[len(slab) - TAIL.size - len(note) :] = note + TAIL.pack(len(note))
    at = _body_at(len(tensors))
    for i, (number, code, shape, data) in enumerate(tensors):
        axes = (*shape, *(0,) * (MAX_RANK - len(shape)))
        ENTRY.pack_into(slab, HEAD.size + i * ENTRY.size, number, code, len(shape), 0, at, len(data), *axes)
        slab[at : at + len(data)] = data
        at += _align(len(data))


def read(slab: bytes) -> list[Entry]:
    """Raises ValueError for anything that is no such slab."""
    magic, count = HEAD.unpack_from(slab, 0) if len(slab) >= HEAD.size else (0, 0)
    if magic not in (MAGIC, NOTED) or _body_at(count) > len(slab):
        raise ValueError("no tensors")
    return [_read_entry(slab, HEAD.size + i * ENTRY.size) for i in range(count)]


def read_note(slab: bytes) -> bytes:
    read_head = HEAD.unpack_from(slab, 0) if len(slab) >= HEAD.size else (0, 0)
    if read_head[0] not in (MAGIC, NOTED) or _body_at(read_head[1]) > len(slab):
        raise ValueError("no tensors")
    if read_head[0] == MAGIC:
        return b""
    end = len(slab) - TAIL.size
    size = TAIL.unpack_from(slab, end)[0]
    if size > end - HEAD.size:
        raise ValueError("damaged note")
    return slab[end - size : end]


def _read_entry(slab: bytes, where: int) -> Entry:
    number, code, rank, _, at, size, *shape = ENTRY.unpack_from(slab, where)
    if code not in DTYPE_BY_CODE or rank > MAX_RANK or at + size > len(slab):
        raise ValueError("damaged table")
    items = 1
    for length in shape[:rank]:
        items *= length
    item_bytes = DTYPE_BY_CODE[code].item_bytes
    if min(shape) < 0 or (item_bytes and items * item_bytes != size):
        raise ValueError("shape and bytes differ")
    return number, code, tuple(shape[:rank]), slab[at : at + size]


def _align(size: int) -> int:
    return (size + 63) & ~63


def _body_at(count: int) -> int:
    return _align(HEAD.size + count * ENTRY.size)
