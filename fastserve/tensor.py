"""Tensors as the server sees them: dtype, shape and borrowed memory. No numpy here.

The front process never imports numpy (17 MB resident, measured): codecs fill and read memory
through the buffer protocol, and only workers and the library turn memory into arrays.

Strings travel in BYTES packing: each element is a 4-byte little-endian length followed by its
bytes, in row-major order. That is also the raw form of KServe V2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `code` is what compiled modules and the shared-memory structs use."""

    name: str  # numpy's name, "bytes" for strings
    code: int  # DT_* in ext/include/tensor.h
    item_bytes: int  # 0 for "bytes"


# The codes are numbered in ext/include/tensor.h too; tests/test_tensor.py holds the two together.
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

_KSERVE_OWN = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}
KSERVE_NAME: dict[str, str] = {
    name: _KSERVE_OWN.get(name, name.upper()) for name in DTYPES if not name.startswith("complex")
}
"""DType.name -> the datatype of the Open Inference Protocol; it has none for complex numbers."""
DTYPE_BY_KSERVE: dict[str, DType] = {kserve: DTYPES[name] for name, kserve in KSERVE_NAME.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model says of one input or output.

    `shape` leaves out the batch axis when the model batches; -1 stands for any length, and a
    shape of None for any rank.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...] | None

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
