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


def walk_bytes(data: bytes, most: int) -> tuple[int, int, int]:
    """How many elements begin in the data, `most` at the most, and where the last begins and ends."""
    starts, end = [0], 0
    while len(starts) <= most and len(data) - end >= 4:
        starts.append(end)
        end += 4 + int.from_bytes(data[end : end + 4], "little")
    return len(starts) - 1, starts[-1], end
