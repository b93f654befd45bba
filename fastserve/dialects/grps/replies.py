"""GrpsMessage as JSON, the way out (spec 3.1): what has its default is left out, what is no number is text.

write_json(message, options, OK_JSON)       {"status":{...},"gtensors":{"tensors":[{"name":...}]}}
"""

from __future__ import annotations

import binascii
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fastserve._ext.json_writer import MODE_SHORTEST, write_values
from fastserve.config import GrpsOptions
from fastserve.dialects.grps.tensors import BY_NUMBER, FIELDS, pack_values, take_packed
from fastserve.tensor import ARRAY_CODE, DTYPES


def write_json(message: Any, options: GrpsOptions, status: bytes) -> bytes:
    """A message; `status` begins the object, and takes the place of its own."""
    parts = [status]
    if message.model:
        parts.append(b',"model":%b' % _quote(message.model))
    kind = message.WhichOneof("data_oneof")
    if kind == "str_data":
        parts.append(b',"str_data":%b' % _quote(message.str_data))
    elif kind == "gtensors":
        parts.append(b',"gtensors":{')
        tensors = [_write_tensor(tensor, options) for tensor in message.gtensors.tensors]
        parts.append(b'"tensors":[%b]}' % b",".join(tensors) if tensors else b"}")
    elif kind == "gmap":
        parts.append(b',"gmap":%b' % _write_gmap(message.gmap, options))
    elif kind == "ndarray":
        parts.append(b',"ndarray":{}')
    parts.append(b"}")
    return b"".join(parts)


def tensor_head(name: str, dtype: int, shape: Sequence[int]) -> bytes:
    """The members of a tensor before its values; what has its default is left out."""
    members = []
    if name:
        members.append(b'"name":%b' % _quote(name))
    if dtype:
        field = BY_NUMBER.get(dtype)
        members.append(b'"dtype":"%b"' % field.word.encode() if field else b'"dtype":%d' % dtype)
    if shape:
        members.append(b'"shape":[%b]' % b",".join(b"%d" % size for size in shape))
    return b"{" + b",".join(members)


def write_numbers(
    data: bytes | bytearray | memoryview, dtype: str, count: int, options: GrpsOptions
) -> bytes:
    """Values as a JSON list."""
    text = bytes(write_values(data, DTYPES[dtype].code, (count,), MODE_SHORTEST))
    if dtype.startswith("float"):
        return quote_unreal(text)
    if dtype == "int64" and options.int64 == "string":
        return b'["%b"]' % text[1:-1].replace(b", ", b'","')
    return text


def quote_unreal(text: bytes) -> bytes:
    """JSON has no words for what is no number: they go as text."""
    if b"N" not in text and b"I" not in text:
        return text
    return re.sub(rb"-?Infinity|NaN", rb'"\g<0>"', text)


def write_ndarray(tensor: Any) -> bytes:
    """A float32 tensor as nested lists."""
    data = take_packed(tensor, BY_NUMBER[tensor.dtype]) if len(tensor.flat_float32) else b""
    return quote_unreal(bytes(write_values(data, DTYPES["float32"].code, tuple(tensor.shape), MODE_SHORTEST)))


def _write_tensor(tensor: Any, options: GrpsOptions) -> bytes:
    head = tensor_head(tensor.name, tensor.dtype, tensor.shape)
    parts = [head]
    for field in FIELDS:
        values = getattr(tensor, field.name)
        if not len(values):
            continue
        if field.word == "DT_STRING":
            text = b"[%b]" % b",".join(_quote(value) for value in values)
        else:
            is_float = field.wire.startswith("float")
            data = take_packed(tensor, field) if is_float else pack_values(field.wire, values)
            text = write_numbers(data, field.wire, len(values), options)
        parts.append(
            b'%b"%b":%b' % (b"," if len(parts) > 1 or head != b"{" else b"", field.name.encode(), text)
        )
    return b"".join([*parts, b"}"])


def _write_gmap(gmap: Any, options: GrpsOptions) -> bytes:
    members = []
    for kind, write in _WRITERS.items():
        given = getattr(gmap, kind)
        if given:
            pairs = (b"%b:%b" % (_quote(key), write(given[key], options)) for key in sorted(given))
            members.append(b'"%b":{%b}' % (kind.encode(), b",".join(pairs)))
    return b"{%b}" % b",".join(members)


def _quote(text: str) -> bytes:
    return msgspec.json.encode(text)


def _write_one(dtype: str) -> Callable[[Any, GrpsOptions], bytes]:
    code = ARRAY_CODE[dtype]
    return lambda value, options: write_numbers(array(code, [value]).tobytes(), dtype, 1, options)[1:-1]


_WRITERS: dict[str, Callable[[Any, GrpsOptions], bytes]] = {
    "s_s": lambda value, options: _quote(value),
    "s_b": lambda value, options: b'"%b"' % binascii.b2a_base64(value, newline=False),
    "s_i32": lambda value, options: b"%d" % value,
    "s_i64": _write_one("int64"),
    "s_f": _write_one("float32"),
    "s_d": _write_one("float64"),
}
