"""The classification extension (spec 5): an output's largest values with their places and labels.

Elements are `VALUE:INDEX` or `VALUE:INDEX:LABEL`, as BYTES of shape [rows?, classes].
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from heapq import nlargest
from math import isnan, prod

from fastserve.dialects.kserve_v2.errors import invalid
from fastserve.dialects.kserve_v2.plans import Plan
from fastserve.tensor import DTYPES, KSERVE_NAME, Tensor

_NO_CLASSES = ("bool", "float16", "bfloat16", "bytes")
_TYPECODE = {
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
    "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "float32": "f", "float64": "d",
}  # fmt: skip


def classify(plan: Plan, name: str, tensor: Tensor, classes: int) -> Tensor:
    """The best `classes` of each row of an output. Raises ServeError for a type that has no order."""
    if tensor.dtype.name in _NO_CLASSES or tensor.dtype.name not in _TYPECODE:
        datatype = KSERVE_NAME.get(tensor.dtype.name, tensor.dtype.name)
        raise invalid(f"class result not available for output due to unsupported type '{datatype}'")
    batching = plan.max_batch_size > 0
    rows = tensor.shape[0] if batching and tensor.shape else 1
    items = prod(tensor.shape[batching:])
    values = array(_TYPECODE[tensor.dtype.name])
    values.frombytes(tensor.data)
    count = min(classes, items)
    labels = plan.labels(name)
    packed = b"".join(
        _pack_row(values[row * items : (row + 1) * items], count, labels) for row in range(rows)
    )
    return Tensor(DTYPES["bytes"], (rows, count) if batching else (count,), packed)


def _pack_row(values: Sequence[float], count: int, labels: Sequence[str]) -> bytes:
    order = nlargest(count, range(len(values)), key=lambda index: (_rank(values[index]), -index))
    return b"".join(_pack(_describe(values[index], index, labels)) for index in order)


def _rank(value: float) -> float:
    return float("-inf") if isnan(value) else value


def _describe(value: float, index: int, labels: Sequence[str]) -> bytes:
    number = str(value) if isinstance(value, int) else f"{value:f}"
    label = labels[index] if index < len(labels) else ""
    return f"{number}:{index}:{label}".encode() if label else f"{number}:{index}".encode()


def _pack(element: bytes) -> bytes:
    return struct.pack("<I", len(element)) + element
