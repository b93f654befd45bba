"""Nested lists to memory by numpy, one element at a time."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def flatten(value: Any, dtype: str) -> tuple[tuple[int, ...], bytes]:
    """For regular values that fit; says nothing of others."""
    if dtype == "bytes":
        items = np.asarray(value, object)
        packed = [struct.pack("<I", len(item)) + item for item in items.ravel()]
        return items.shape, b"".join(packed)
    if dtype == "bfloat16":
        bits = np.asarray(value, np.float32).view(np.uint32).astype(np.uint64)
        return bits.shape, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    array = np.asarray(value, dtype)
    return array.shape, array.tobytes()
