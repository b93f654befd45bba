"""`data` of an input, the exact way: any nesting of arrays -> flat memory (spec 3).

Only the number of leaves counts, not how they are nested. Whole numbers too large for a narrow type
wrap; floats too large for FP32 become infinite.
"""

from __future__ import annotations

import struct
from array import array

from fastserve.dialects.kserve_v2.errors import internal, invalid
from fastserve.dialects.kserve_v2.values import Value, as_bool, as_double, as_int, as_uint
from fastserve.tensor import ARRAY_CODE, DType

WHERE = "Unable to parse 'data'"
_READ = {"bool": as_bool, "float32": as_double, "float64": as_double}


def read_leaves(data: list[Value], dtype: DType, count: int, name: str) -> bytearray:
    """`count` items of `dtype` out of the arrays of input `name`. Raises ServeError.

    BYTES come in BYTES packing, however many there are: the model's shape is held against them later.
    """
    if dtype.name == "bytes":
        return _pack_strings(data)
    refuse_json(dtype, "receiving", f"input {name}")
    leaves: list[Value] = []
    read = _READ.get(dtype.name) or (as_uint if dtype.name.startswith("u") else as_int)
    _collect(data, leaves, count)
    if len(leaves) != count:
        raise internal(f"{WHERE}: Shape does not match true shape of 'data' field")
    return _flat(dtype, [read(leaf, WHERE) for leaf in leaves])


def refuse_json(dtype: DType, doing: str, what: str) -> None:
    """Raises ServeError for the types that have no JSON form."""
    if dtype.name in ("float16", "bfloat16"):
        kind = "FP16" if dtype.name == "float16" else "BF16"
        raise invalid(
            f"{doing} {kind} data via JSON is not supported. Please use the binary data format for {what}"
        )


def _collect(data: list[Value], leaves: list[Value], most: int) -> None:
    """Leaves in order, one more than `most` at the most. The reader has bounded the nesting."""
    for item in data:
        if isinstance(item, list):
            _collect(item, leaves, most)
        else:
            leaves.append(item)
        if len(leaves) > most:
            return


def _flat(dtype: DType, numbers: list[int | float | bool]) -> bytearray:
    code = ARRAY_CODE.get(dtype.name, "B")  # for bool
    if code in "fd":
        return bytearray(array(code, numbers).tobytes())
    mask = (1 << 8 * dtype.item_bytes) - 1
    return bytearray(array(code.upper(), [int(number) & mask for number in numbers]).tobytes())


def _pack_strings(data: list[Value]) -> bytearray:
    packed = bytearray()
    stack = [iter(data)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            if not isinstance(item, bytes):
                raise internal(
                    "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
                )
            packed += struct.pack("<I", len(item)) + item
        else:
            stack.pop()
    return packed
