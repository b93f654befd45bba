"""Shared memory as numpy arrays, and back. Imported by workers and the library alone.

Strings are object arrays of bytes on the numpy side and BYTES packing in memory; bfloat16 has no
numpy type and travels as uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve._ext.slab_tensors import SlabCodec
from fastserve.tensor import DTYPES, DType, Tensor

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve._ext.slab_tensors import Entry
    from fastserve.workers.arena import Arena

BYTES = DTYPES["bytes"]
NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype("uint16" if name == "bfloat16" else "object" if name == "bytes" else name)
    for name in DTYPES
}
_BY_CODE = (None, *(None if dtype is BYTES else NUMPY[name] for name, dtype in DTYPES.items()))
_BY_NUMPY = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name not in ("bfloat16", "bytes")}


def open_slab_codec(arena: Arena, ring: BatchRing) -> SlabCodec:
    """Open the slabs of a worker's arena: tensors as arrays, strings as views of their bytes."""
    return SlabCodec(arena.memory, worker=ring.worker, make_array=np.ndarray, types=_BY_CODE)


def unpack_strings(data: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Copy packed strings into an object array of bytes. Raises ValueError when lengths lie."""
    count = int(np.prod(shape, dtype=np.int64))
    strings = np.empty(count, object)
    strings[:] = unpack_bytes(data, count)
    return strings.reshape(shape)


def read_array(code: int, shape: tuple[int, ...], data: Any) -> np.ndarray[Any, Any]:
    """Return a slab entry as an array; strings are copied. Raises ValueError when their lengths lie."""
    return unpack_strings(data, shape) if code == BYTES.code else data


def to_entry(number: int, array: np.ndarray[Any, Any], dtype: DType) -> Entry:
    """Return a slab entry for an array whose elements are already of `dtype`; contiguous arrays are not
    copied."""
    if dtype is BYTES:
        return number, dtype.code, array.shape, pack_bytes(array.reshape(-1).tolist())
    return number, dtype.code, None, array if array.flags.c_contiguous else np.ascontiguousarray(array)


def as_read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a read-only view of numbers, as a batch's rows come to a model; arrays of strings as they
    are."""
    if array.dtype == object:
        return array
    view: np.ndarray[Any, Any] = array.view()
    view.flags.writeable = False
    return view


def as_tensor(array: np.ndarray[Any, Any], dtype: DType) -> Tensor:
    """Return the tensor of an array whose elements are already of `dtype`; contiguous arrays are not
    copied."""
    if dtype is BYTES:
        return Tensor(dtype, array.shape, pack_bytes(array.reshape(-1).tolist()))
    whole = np.ascontiguousarray(array)
    return Tensor(dtype, array.shape, whole.reshape(-1).view(np.uint8).data)


def dtype_of(array: np.ndarray[Any, Any]) -> DType | None:
    """Return the server's element type of a numeric array, None when it has none."""
    return _BY_NUMPY.get(array.dtype)
