"""Classification: the highest values of each row of an output, with their labels (spec 3.3)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastserve.dialects.triton_v1.inputs import invalid
from fastserve.dialects.triton_v1.names import TYPE_OF
from fastserve.dialects.triton_v1.plan import TensorPlan
from fastserve.tensor import Tensor

# memoryview formats; an output of another type has no order this API knows.
_FORMAT: dict[str, Any] = {
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "float32": "f",
    "float64": "d",
}


class Class(NamedTuple):
    """One of the highest values."""

    idx: int
    value: float
    label: str


def check_classes(plan: TensorPlan) -> None:
    """Raises ServeError INVALID_ARGUMENT for an output whose values have no order."""
    if plan.dtype.name not in _FORMAT:
        raise invalid(
            f"class result not available for output '{plan.name}' due to unsupported type "
            f"'{TYPE_OF.get(plan.dtype.name, plan.dtype.name)}'"
        )


def classify(
    plan: TensorPlan, tensor: Tensor, rows: int, count: int, labels: Sequence[str]
) -> list[list[Class]]:
    """At most `count` classes for each of `rows` rows, highest first; equal values by index, NaN last."""
    check_classes(plan)
    values = memoryview(tensor.data).cast("B").cast(_FORMAT[plan.dtype.name])
    per_row = len(values) // rows if rows else 0
    found = []
    for at in range(0, per_row * rows, per_row or 1):
        row = values[at : at + per_row].tolist()
        order = [(value == value, value, -i) for i, value in enumerate(row)]
        best = [-i for _, _, i in heapq.nlargest(count, order)]
        found.append([Class(i, row[i], _label(labels, i)) for i in best])
    return found


def _label(labels: Sequence[str], index: int) -> str:
    return labels[index] if index < len(labels) else ""
