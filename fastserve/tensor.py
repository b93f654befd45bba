"""Tensors as the server sees them: dtype, shape and borrowed memory. No numpy here.

The front process never imports numpy (17 MB resident, measured): codecs fill and read memory
through the buffer protocol, and only workers and the library turn memory into arrays.

Strings travel in BYTES packing: each element is a 4-byte little-endian length followed by its
bytes, in row-major order. That is also the raw form of KServe V2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from fastserve.errors import ServeError, invalid

MOST_AXES = 254  # TensorFlow's limit
MOST_ITEMS = 1 << 58  # bytes of any dtype then still fit 64 bits
MOST_EMPTY = 1 << 20
_SHOWN_AXES = 8


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `code` is what compiled modules and the shared-memory structs use."""

    name: str  # numpy's name, "bytes" for strings
    code: int  # DT_* in ext/include/tensor.h
    item_bytes: int  # 0 for "bytes"


# The codes are numbered in ext/include/tensor.h too; tests/test_tensor.py compares the two.
DTYPES: dict[str, DType] = {
    name: DType(name, code, size)
    for code, (name, size) in enumerate(
        [
            ("bool", 1),
            ("uint8", 1),
            ("uint16", 2),
            ("uint32", 4),
            ("uint64", 8),
            ("int8", 1),
            ("int16", 2),
            ("int32", 4),
            ("int64", 8),
            ("float16", 2),
            ("bfloat16", 2),
            ("float32", 4),
            ("float64", 8),
            ("complex64", 8),
            ("complex128", 16),
            ("bytes", 0),
        ],
        start=1,
    )
}
DTYPE_BY_CODE: dict[int, DType] = {dtype.code: dtype for dtype in DTYPES.values()}

ARRAY_CODE: dict[str, str] = {
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
    "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "float32": "f", "float64": "d",
}  # fmt: skip
"""DType.name -> the typecode of `array` and of memoryviews, for the numbers that Python has."""

_KSERVE_OWN = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}
KSERVE_NAME: dict[str, str] = {
    name: _KSERVE_OWN.get(name, name.upper()) for name in DTYPES if not name.startswith("complex")
}
"""DType.name -> the datatype of the Open Inference Protocol; it has none for complex numbers."""
DTYPE_BY_KSERVE: dict[str, DType] = {kserve: DTYPES[name] for name, kserve in KSERVE_NAME.items()}

_TENSORFLOW_OWN = {"float16": "HALF", "float32": "FLOAT", "float64": "DOUBLE", "bytes": "STRING"}
TENSORFLOW_NAME: dict[str, str] = {name: f"DT_{_TENSORFLOW_OWN.get(name, name.upper())}" for name in DTYPES}
"""DType.name -> TensorFlow's DataType, such as DT_FLOAT."""
DTYPE_BY_TENSORFLOW: dict[str, DType] = {word: DTYPES[name] for name, word in TENSORFLOW_NAME.items()}


def kserve_name(dtype: DType) -> str:
    """Return the protocol's datatype; INVALID where it has none."""
    return KSERVE_NAME.get(dtype.name, "INVALID")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Declaration of one input or output of a model.

    `shape` leaves out the batch axis when the model batches; -1 stands for any length, and a
    shape of None for any rank.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...] | None
    columns: tuple[str, ...] = field(default=(), compare=False)
    """Names of the places of its last axis, where the model knows them: the columns of its training table."""

    @property
    def row_bytes(self) -> int | None:
        """Bytes of one row (shape without batch axis), or None when rows differ in size."""
        if self.shape is None or self.dtype.item_bytes == 0 or -1 in self.shape:
            return None
        return prod(self.shape) * self.dtype.item_bytes


@dataclass(slots=True)
class Tensor:
    """One tensor of a request or a response.

    `shape` is the full shape, batch axis included. `data` is C-contiguous and little-endian; it is
    borrowed: a tensor of a response is valid until the response is released.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


def fits_shape(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor of this shape fits the shape `wanted`, where -1 stands for any length."""
    return len(shape) == len(wanted) and all(w in (-1, n) for n, w in zip(shape, wanted, strict=True))


def count_items(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor whose shape came from outside.

    Raises ServeError INVALID_ARGUMENT for negative axes, more than MOST_AXES axes, or more than MOST_ITEMS
    elements. A shape without elements may still describe many empty lists, each of which costs work: their
    number is bounded by MOST_EMPTY.
    """
    if len(shape) > MOST_AXES:
        raise _impossible(shape, f"has {len(shape)} axes, allowed: up to {MOST_AXES}")
    items = extent = 1
    for size in shape:
        if size < 0:
            raise _impossible(shape, "has a negative axis")
        items *= size
        extent *= size or 1
        if extent > MOST_ITEMS:
            raise _impossible(shape, f"is too large, allowed: up to {MOST_ITEMS} elements")
    if not items and extent > MOST_EMPTY:
        raise _impossible(shape, f"is too large, allowed without elements: up to {MOST_EMPTY} empty lists")
    return items


def _impossible(shape: Sequence[int], why: str) -> ServeError:
    shown = ",".join(map(str, shape[:_SHOWN_AXES])) + (",..." if len(shape) > _SHOWN_AXES else "")
    return invalid(f"shape [{shown}] {why}")
