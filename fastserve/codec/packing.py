"""Python values -> tensor memory, little-endian, strings in BYTES packing.

For readers that go value by value, because a body is odd or wrong; ordinary ones are read compiled (`_ext`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from fastserve.tensor import ARRAY_CODE, DType


def pack_values(values: Sequence[Any], dtype: DType) -> bytes:
    """Values of the kind that `dtype` is made of. Whole numbers are cut to its width; what is too large for
    float32 becomes infinite."""
    if dtype.name == "bytes":
        return pack_strings(values)
    code = ARRAY_CODE.get(dtype.name, "B")  # for bool
    if code in "fd":
        return array(code, values).tobytes()
    mask = (1 << 8 * dtype.item_bytes) - 1
    return array(code.upper(), [value & mask for value in values]).tobytes()


def pack_strings(values: Iterable[bytes]) -> bytes:
    """Each with its length before it."""
    return b"".join([part for value in values for part in (len(value).to_bytes(4, "little"), value)])
