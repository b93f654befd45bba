"""Tensors in a slab: how a request or an answer of varying shape lies in shared memory.

The layout is in ext/include/slab_tensors.h, and `_ext.slab_tensors` reads and writes it; here are its
entries as Tensors. An entry names its tensor by its number in the model's own order of inputs or outputs.
Reading checks every number against the slab's size: the other process is not trusted with this one's
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastserve._ext import slab_tensors
from fastserve._ext.slab_tensors import read_note
from fastserve.tensor import DTYPE_BY_CODE, Tensor

__all__ = [
    "measure_tensors",
    "read_note",
    "read_tensors",
    "write_tensors",
]
Numbered = Sequence[tuple[int, Tensor]]


def measure_tensors(tensors: Numbered, note: bytes = b"") -> int:
    """Bytes a slab needs for these numbered tensors and the note. Raises ValueError for more than 16 axes."""
    return slab_tensors.measure([(n, t.dtype.code, t.shape, t.data) for n, t in tensors], note)


def write_tensors(slab: memoryview, tensors: Numbered, note: bytes = b"") -> None:
    """Fill a slab of at least measure_tensors() bytes; the note is at its very end.

    Raises ValueError for more than 16 axes.
    """
    slab_tensors.write(slab, [(n, t.dtype.code, t.shape, t.data) for n, t in tensors], note)


def read_tensors(slab: memoryview) -> list[tuple[int, Tensor]]:
    """The numbered tensors of a slab, as views of it. Raises ValueError when it holds none."""
    return [(n, Tensor(DTYPE_BY_CODE[code], shape, data)) for n, code, shape, data in slab_tensors.read(slab)]
