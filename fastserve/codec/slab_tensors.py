"""Tensors in a slab: how a request or an answer of varying shape lies in shared memory.

    slab:  [ Head | Entry x count | tensor 0 | tensor 1 | ... ]      every tensor starts 64-byte aligned

A slab with a note (codec/notes.py) has a Tail at its very end, and the note before that; its magic says so.
An entry names its tensor by its number in the model's own order of inputs or outputs. Reading checks
every number against the slab's size: the other process is not trusted with this one's memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from fastserve.tensor import DTYPE_BY_CODE, DTYPES, Tensor

MAX_RANK = 16
HEAD = struct.Struct("<II")  # magic, count
ENTRY = struct.Struct(f"<HBBIQQ{MAX_RANK}q")  # number, dtype code, rank, unused, offset, bytes, shape
TAIL = struct.Struct("<I")  # bytes of the note that ends here
MAGIC = 0x74616C73
NOTED = 0x74616C6E
_NO_SHAPE = (0,) * MAX_RANK


def measure_tensors(tensors: Sequence[tuple[int, Tensor]], note: bytes = b"") -> int:
    """Bytes a slab needs for these numbered tensors and the note."""
    size = _body_at(len(tensors)) + sum(_align(_nbytes(t)) for _, t in tensors)
    return size + len(note) + TAIL.size if note else size


def write_tensors(slab: memoryview, tensors: Sequence[tuple[int, Tensor]], note: bytes = b"") -> None:
    """Fill a slab of exactly measure_tensors() bytes. Raises ValueError for more than 16 axes."""
    at = _body_at(len(tensors))
    HEAD.pack_into(slab, 0, NOTED if note else MAGIC, len(tensors))
    if note:
        TAIL.pack_into(slab, len(slab) - TAIL.size, len(note))
        slab[len(slab) - TAIL.size - len(note) : len(slab) - TAIL.size] = note
    for i, (number, tensor) in enumerate(tensors):
        rank, size = len(tensor.shape), _nbytes(tensor)
        if rank > MAX_RANK:
            raise ValueError(f"a tensor has at most {MAX_RANK} axes, not {rank}")
        shape = (*tensor.shape, *_NO_SHAPE[rank:])
        ENTRY.pack_into(
            slab, HEAD.size + i * ENTRY.size, number, tensor.dtype.code, rank, 0, at, size, *shape
        )
        slab[at : at + size] = memoryview(tensor.data).cast("B")
        at += _align(size)


def read_tensors(slab: memoryview) -> list[tuple[int, Tensor]]:
    """The numbered tensors of a slab, as views of it. Raises ValueError when it holds none."""
    magic, count = HEAD.unpack_from(slab, 0) if len(slab) >= HEAD.size else (0, 0)
    if (magic != MAGIC and magic != NOTED) or _body_at(count) > len(slab):
        raise ValueError("this slab holds no tensors")
    return [_read_entry(slab, HEAD.size + i * ENTRY.size) for i in range(count)]


def read_note(slab: memoryview) -> memoryview | bytes:
    """The note of a slab that holds tensors, as a view of it; empty when it has none. Raises ValueError for
    a damaged slab."""
    if HEAD.unpack_from(slab, 0)[0] != NOTED:
        return b""
    end = len(slab) - TAIL.size
    size = TAIL.unpack_from(slab, end)[0]
    if size > end - HEAD.size:
        raise ValueError("this slab's note is damaged")
    return slab[end - size : end]


def _read_entry(slab: memoryview, where: int) -> tuple[int, Tensor]:
    number, code, rank, _, at, size, *shape = ENTRY.unpack_from(slab, where)
    dtype = DTYPE_BY_CODE.get(code)
    if dtype is None or rank > MAX_RANK or at + size > len(slab):
        raise ValueError("this slab's table of tensors is damaged")
    items = 1
    for length in shape[:rank]:
        items *= length
    if min(shape) < 0 or (dtype is not DTYPES["bytes"] and items * dtype.item_bytes != size):
        raise ValueError("a tensor of this slab does not fill its bytes")
    return number, Tensor(dtype, tuple(shape[:rank]), slab[at : at + size])


def _nbytes(tensor: Tensor) -> int:
    data = tensor.data
    return data.nbytes if isinstance(data, memoryview) else len(data)


def _align(size: int) -> int:
    return (size + 63) & ~63


def _body_at(count: int) -> int:
    return _align(HEAD.size + count * ENTRY.size)
