"""Protobuf messages in the text format, as the C++ library prints them: `1.0` is `1`, bytes are octal.

    print_line(message)     a: 1 b { c: 2 }          headers
    print_lines(message)    one field to a line      bodies

The Python library prints floats in another way, and these texts are read by people's scripts. The way back is
`settings.text_proto`, by what `schema_of` says of a message.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from fastserve.settings.text_proto import Kind, TextField

_PLAIN = {i: chr(i) for i in range(0x20, 0x7F)}
_SIGNS = {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    ord('"'): '\\"',
    ord("\\"): "\\\\",
}
_ESCAPES = [({**_PLAIN, **_SIGNS}).get(i, f"\\{i:03o}") for i in range(256)]


_KINDS: dict[int, Kind] = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_MESSAGE: "message",
}


def schema_of(message: Descriptor) -> dict[str, TextField]:
    """The fields of a message as `parse_text` takes them: one without maps and choices, with none of itself
    inside, of the kinds that are asked for."""
    return {
        field.name: TextField(
            _KINDS[field.type],
            repeated=_repeats(field),
            fields=schema_of(field.message_type) if field.message_type else {},
        )
        for field in message.fields
    }


def _repeats(field: Any) -> bool:
    """Whether a field has a list of values; protobuf before 6.31 says it in another way."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


def quote(text: str | bytes) -> str:
    """A string or bytes in quotes."""
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return f'"{"".join(map(_ESCAPES.__getitem__, raw))}"'


def print_line(message: Message) -> str:
    """The message on one line."""
    return " ".join(line.lstrip() for line in _lines(message, ""))


def print_lines(message: Message) -> str:
    """The message with a line for each field."""
    return "".join(f"{line}\n" for line in _lines(message, ""))


def _lines(message: Message, indent: str) -> Iterator[str]:
    for field, value in message.ListFields():
        for one in _each(field, value):
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield f"{indent}{field.name} {{"
                yield from one(indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{field.name}: {_scalar(field, one)}"


def _each(field: Any, value: Any) -> Iterator[Any]:
    """The values of a field; messages as functions that print them at an indent."""
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        yield from value if _repeats(field) else (value,)
    elif field.message_type.GetOptions().map_entry:
        for key in sorted(value):
            yield _entry(field, key, value[key])
    else:
        for one in value if _repeats(field) else (value,):
            yield lambda indent, one=one: _lines(one, indent)


def _entry(field: Any, key: Any, value: Any) -> Any:
    names = field.message_type.fields_by_name

    def lines(indent: str) -> Iterator[str]:
        yield f"{indent}key: {_scalar(names['key'], key)}"
        if isinstance(value, Message):
            yield f"{indent}value {{"
            yield from _lines(value, indent + "  ")
            yield f"{indent}}}"
        else:
            yield f"{indent}value: {_scalar(names['value'], value)}"

    return lines


def _scalar(field: Any, value: Any) -> str:
    if isinstance(value, (str, bytes)):
        return quote(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if field.type == FieldDescriptor.TYPE_ENUM:
        found = field.enum_type.values_by_number.get(value)
        return str(value) if found is None else str(found.name)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return print_float(value)
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def print_float(value: float) -> str:
    """A float32 with 6 digits, or with 9 where 6 would read back as another number."""
    if math.isnan(value):
        return "nan"
    short = f"{value:.6g}"
    if math.isinf(value) or _as_float32(float(short)) == value:
        return short
    return f"{value:.9g}"


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf
