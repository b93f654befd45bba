"""protobuf's own library and numpy as the oracle of tensor_proto: the rules of TensorProto (spec 4.2)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from fastserve.protos import load
from fastserve.tensor import DTYPES

TF = load("tfserving")
# dtype: its name in DataType, its field
KINDS = {
    "bool": ("DT_BOOL", "bool_val"),
    "uint8": ("DT_UINT8", "int_val"),
    "uint16": ("DT_UINT16", "int_val"),
    "uint32": ("DT_UINT32", "uint32_val"),
    "uint64": ("DT_UINT64", "uint64_val"),
    "int8": ("DT_INT8", "int_val"),
    "int16": ("DT_INT16", "int_val"),
    "int32": ("DT_INT32", "int_val"),
    "int64": ("DT_INT64", "int64_val"),
    "float16": ("DT_HALF", "half_val"),
    "bfloat16": ("DT_BFLOAT16", "half_val"),
    "float32": ("DT_FLOAT", "float_val"),
    "float64": ("DT_DOUBLE", "double_val"),
    "complex64": ("DT_COMPLEX64", "scomplex_val"),
    "complex128": ("DT_COMPLEX128", "dcomplex_val"),
    "bytes": ("DT_STRING", "string_val"),
}


def decode(tensor: Any, dtype: str, items: int) -> bytes | None:
    """A TensorProto message as memory of that dtype; None where it cannot be decoded."""
    if not items:
        return b""
    if dtype == "bytes":
        strings = _strings(tensor, items)
        return None if strings is None else b"".join(struct.pack("<I", len(s)) + s for s in strings)
    width = DTYPES[dtype].item_bytes
    if tensor.tensor_content:
        return tensor.tensor_content if len(tensor.tensor_content) == items * width else None
    values = _numbers(getattr(tensor, KINDS[dtype][1]), dtype)
    values = values[: len(values) // width * width]
    last = values[-width:] or bytes(width)
    return (values + last * items)[: items * width]


def _numbers(values: Any, dtype: str) -> bytes:
    if dtype in ("float32", "float64", "complex64", "complex128"):
        return np.asarray(values, "<f8" if dtype in ("float64", "complex128") else "<f4").tobytes()
    mask = (1 << 8 * DTYPES[dtype].item_bytes) - 1
    return b"".join((value & mask).to_bytes(DTYPES[dtype].item_bytes, "little") for value in values)


def _strings(tensor: Any, items: int) -> list[bytes] | None:
    if not tensor.tensor_content:
        values = list(tensor.string_val)
        return (values + (values[-1:] or [b""]) * items)[:items]
    content, at, lengths = tensor.tensor_content, 0, []
    for _ in range(items):
        length = shift = 0
        while True:
            if at == len(content) or shift > 63:
                return None
            length |= (content[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if content[at - 1] < 0x80:
                break
        lengths.append(length)
    if sum(lengths) != len(content) - at:
        return None
    strings = []
    for length in lengths:
        strings.append(content[at : at + length])
        at += length
    return strings


def encode(name: str, dtype: str, shape: tuple[int, ...], data: bytes, content: bool) -> Any:
    """A PredictResponse of one output."""
    response = TF.PredictResponse()
    tensor = response.outputs[name]
    tensor.dtype = TF.DataType.Value(KINDS[dtype][0])
    tensor.tensor_shape.SetInParent()
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)
    if content and dtype != "bytes":
        tensor.tensor_content = data
    else:
        getattr(tensor, KINDS[dtype][1]).extend(values_of(dtype, data))
    return response


def values_of(dtype: str, data: bytes) -> list[Any]:
    """Return the values in the field of a dtype."""
    if dtype == "bytes":
        found = []
        while data:
            size = struct.unpack_from("<I", data)[0]
            found.append(data[4 : 4 + size])
            data = data[4 + size :]
        return found
    kinds = {"float16": "<u2", "bfloat16": "<u2", "complex64": "<f4", "complex128": "<f8"}
    return [value.item() for value in np.frombuffer(data, kinds.get(dtype, dtype))]
