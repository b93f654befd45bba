"""Predict bodies by the letter of spec section 2: a document tree first, then its rules one by one."""

from __future__ import annotations

import base64
import math
import re
import struct
from typing import Any

from tests.oracles import json_value

RANGES = {"int32": 31, "int16": 31, "int8": 31, "uint8": 31, "int64": 63}
UNSIGNED = {"uint32": 32, "uint64": 64}
ITEM = {
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint32": "I",
    "uint64": "Q",
    "bool": "?",
}


class NotTensor(Exception):
    """Good JSON that is no body of the signature."""


def members_of(value: Any) -> list[tuple[bytes, Any]] | None:
    return value[1] if isinstance(value, tuple) else None


def base64_of(value: Any) -> bytes | None:
    members = members_of(value)
    if (
        members is None
        or len(members) != 1
        or members[0][0] != b"b64"
        or not isinstance(members[0][1], bytes)
    ):
        return None
    return members[0][1]


def first(members: list[tuple[bytes, Any]], name: bytes) -> Any:
    return next((value for key, value in members if key == name), NotTensor)


def shape_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    return (len(value), *(shape_of(value[0]) if value else ()))


def leaves_of(value: Any, shape: tuple[int, ...]) -> list[Any]:
    if not shape:
        if isinstance(value, list):
            raise NotTensor
        return [value]
    if not isinstance(value, list) or len(value) != shape[0]:
        raise NotTensor
    return [leaf for item in value for leaf in leaves_of(item, shape[1:])]


def decode_base64(text: bytes) -> bytes:
    plain = re.sub(rb"[ \t\n\v\f\r]", b"", text)
    match = re.fullmatch(rb"([A-Za-z0-9+/]*)(=*)", plain)
    if not match or len(match[1]) % 4 == 1 or (match[2] and len(match[2]) != -len(match[1]) % 4):
        raise NotTensor
    return base64.b64decode(match[1] + b"=" * (-len(match[1]) % 4))


def pack(value: Any, dtype: str) -> bytes:
    if dtype == "bytes":
        text = decode_base64(inner) if (inner := base64_of(value)) is not None else value
        if not isinstance(text, bytes):
            raise NotTensor
        return struct.pack("<I", len(text)) + text
    if dtype == "bool":
        if not isinstance(value, bool):
            raise NotTensor
        return struct.pack("?", value)
    if dtype not in ITEM or isinstance(value, bool) or not isinstance(value, int | float):
        raise NotTensor
    return pack_float(float(value), dtype) if dtype.startswith("float") else pack_integer(value, dtype)


def pack_float(value: float, dtype: str) -> bytes:
    try:
        return struct.pack("<" + ITEM[dtype], value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def pack_integer(value: int | float, dtype: str) -> bytes:
    low = 0 if dtype in UNSIGNED else -(2 ** RANGES[dtype])
    high = 2 ** (UNSIGNED[dtype] if dtype in UNSIGNED else RANGES[dtype])
    if not isinstance(value, int) or not low <= value < high:
        raise NotTensor
    return (value & (2**64 - 1)).to_bytes(8, "little")[: struct.calcsize(ITEM[dtype])]


def tensor(values: list[Any], dtype: str, *, rows: bool) -> tuple[tuple[int, ...], bytes]:
    """`values` are the rows, or one whole value. Items beyond the shape (a name twice) are dropped."""
    shape = shape_of(values[0])
    items = [pack(leaf, dtype) for value in values for leaf in leaves_of(value, shape)]
    return ((len(values), *shape) if rows else shape), b"".join(items)


def row_tensors(rows: Any, inputs: dict[str, str]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    if not isinstance(rows, list) or not rows:
        raise NotTensor
    is_object = [members_of(row) is not None and base64_of(row) is None for row in rows]
    if not is_object[0]:
        if len(inputs) != 1 or any(is_object):
            raise NotTensor
        return {name: tensor(rows, dtype, rows=True) for name, dtype in inputs.items()}
    if not all(is_object):
        raise NotTensor
    found: dict[str, list[Any]] = {name: [] for name in inputs}
    for row in rows:
        if {key for key, _ in row[1]} != {name.encode() for name in inputs}:
            raise NotTensor
        for key, value in row[1]:
            found[key.decode()].append(value)
    return {name: named_rows(found[name], dtype, len(rows)) for name, dtype in inputs.items()}


def named_rows(values: list[Any], dtype: str, rows: int) -> tuple[tuple[int, ...], bytes]:
    (_, *shape), memory = tensor(values, dtype, rows=True)
    if dtype != "bytes":
        return (rows, *shape), memory[: len(memory) // len(values) * rows]
    items = [pack(leaf, dtype) for value in values for leaf in leaves_of(value, tuple(shape))]
    return (rows, *shape), b"".join(items[: len(items) // len(values) * rows])


def column_tensors(value: Any, inputs: dict[str, str]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    members = members_of(value)
    if members is None or base64_of(value) is not None:
        if len(inputs) != 1:
            raise NotTensor
        return {name: tensor([value], dtype, rows=False) for name, dtype in inputs.items()}
    found = {name: first(members, name.encode()) for name in inputs}
    if NotTensor in found.values():
        raise NotTensor
    return {name: tensor([found[name]], dtype, rows=False) for name, dtype in inputs.items()}


def read(body: bytes, inputs: dict[str, str], max_depth: int = 100) -> tuple[bool, dict[str, Any]]:
    """(columnar, {name: (shape, memory)}) of the default signature; Refused or NotTensor."""
    members = members_of(json_value.parse(body, max_depth))
    if members is None or not inputs:
        raise NotTensor
    signature = first(members, b"signature_name")
    rows, columns = first(members, b"instances"), first(members, b"inputs")
    if signature not in (NotTensor, b"", b"serving_default") or (rows is NotTensor) == (columns is NotTensor):
        raise NotTensor
    if columns is NotTensor:
        return False, row_tensors(rows, inputs)
    return True, column_tensors(columns, inputs)
