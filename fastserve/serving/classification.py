"""Classification: the largest values of each row of an output, with their places and labels.

Dialects tell classes in a form of their own: V1 as messages, V2 as `VALUE:INDEX:LABEL`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import nlargest
from math import prod
from typing import NamedTuple

from fastserve.errors import Kind, ServeError
from fastserve.tensor import ARRAY_CODE, Tensor


class Class(NamedTuple):
    """One of the largest values. `label` is "" for none."""

    idx: int
    value: float
    label: str


def classify(tensor: Tensor, most: int, labels: Sequence[str], *, batching: bool) -> list[list[Class]]:
    """At most `most` classes of each row, largest first; equal values by index, NaN last.

    The dtype has been looked at (`check_order`)."""
    values = array(ARRAY_CODE[tensor.dtype.name])
    values.frombytes(tensor.data)
    rows = tensor.shape[0] if batching and tensor.shape else 1
    items = prod(tensor.shape[batching:])
    return [_rank(values[row * items : (row + 1) * items], most, labels) for row in range(rows)]


def check_order(tensor: Tensor, what: str, datatype: str) -> None:
    """Raises ServeError INVALID_ARGUMENT for a type whose values have no order. `what` and `datatype` are the
    dialect's words for the output and its type."""
    if tensor.dtype.name not in ARRAY_CODE:
        text = f"class result not available for {what} due to unsupported type '{datatype}'"
        raise ServeError(Kind.INVALID_ARGUMENT, text)


def _rank(row: Sequence[float], most: int, labels: Sequence[str]) -> list[Class]:
    def key(index: int) -> tuple[bool, float, int]:
        value = row[index]
        return (True, value, -index) if value == value else (False, 0, -index)

    best = nlargest(most, range(len(row)), key=key)
    return [Class(index, row[index], labels[index] if index < len(labels) else "") for index in best]
