"""JSON bodies read the slow and exact way: tensors, or TensorFlow Serving's own error text (spec 2).

The compiled reader is the fast way, and says only that something is wrong and where. This one walks general
JSON values in the original's order, so that the first fault it meets is the one the original names. Where
both succeed, both give the same tensors. The members of classify bodies are read in `examples`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from fastserve._ext.json_value import JSONSyntaxError, Members, ShownFloat, debug_text, parse
from fastserve.codec.byte_formats import pack_values
from fastserve.codec.json_text import decode_base64, to_bytes, to_text
from fastserve.dialects.tfserving.errors import TF_WORD, shape_text
from fastserve.errors import Kind, ServeError, invalid
from fastserve.tensor import DType, Tensor

if TYPE_CHECKING:
    from fastserve._ext.json_value import Value


_BASE64_SPACE = re.compile(rb"[ \t\n\v\f\r]+")
_KIND_WORD = {type(None): "Null", Members: "Object", list: "Array", bytes: "String"}
MAX_DEPTH = 100
"""Nesting of a JSON body; the original has no bound (a deliberate deviation)."""

MOST_VALUES = 1 << 19
"""Objects of up to 100 bytes that one body may become."""


def read_document(body: bytes | bytearray) -> Members:
    """The body's top-level object. Raises ServeError with the text of the first syntax error."""
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        document = parse(body, max_depth=MAX_DEPTH, max_values=MOST_VALUES, as_shown=True)
    except JSONSyntaxError as fault:
        raise invalid(f"JSON Parse error: {fault.reason} at offset: {fault.offset}") from None
    if not isinstance(document, Members):
        raise invalid(f"JSON Value: {debug_text(document)} Is not object")
    return document


def read_signature_name(document: Members) -> str:
    """The body's signature_name, "" when it has none. Raises ServeError unless it is a string."""
    name = document.get(b"signature_name", b"") if b"signature_name" in document else b""
    if not isinstance(name, bytes):
        raise format_error(document, "not formatted correctly. 'signature_name' key must be a string value.")
    return to_text(name)


def format_error(value: Value, words: str) -> ServeError:
    """The error that shows a value and says what is wrong with it."""
    return invalid(f"JSON Value: {debug_text(value)} {words}")


def kind_word(value: Value) -> str:
    """The kind of a JSON value in the words of the error texts."""
    if isinstance(value, bool):
        return "True" if value else "False"
    return _KIND_WORD.get(type(value), "Number")


def is_base64_object(value: Value) -> bool:
    """Whether a value is `{"b64": "..."}`, which stands for bytes wherever a string may stand."""
    if not isinstance(value, Members) or len(value) != 1:
        return False
    name, text = value.pairs[0]
    return name == b"b64" and isinstance(text, bytes)


def decode_base64_object(value: Members) -> bytes:
    """Its bytes: standard alphabet, padding optional, spaces skipped. Raises ServeError."""
    text = value.pairs[0][1] if is_base64_object(value) else None
    if not isinstance(text, bytes):
        raise format_error(value, "not formatted correctly for base64 data")
    data = decode_base64(_BASE64_SPACE.sub(b"", text))
    if data is None:
        raise invalid("Unable to base64 decode")
    return data


Shape = tuple[int, ...]
BULK_ITEMS = 256

RANGES: dict[str, tuple[int, int]] = {
    # Narrow types take any int32 literal and wrap afterwards (spec 2.6).
    **dict.fromkeys(("int8", "int16", "int32", "uint8"), (-(2**31), 2**31 - 1)),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}

# Dtype -> the kinds of values it takes. What is not here has no JSON form; bytes take base64 objects too.
TAKES: dict[str, frozenset[type]] = {
    **dict.fromkeys(("float32", "float64"), frozenset({int, float, ShownFloat})),
    **dict.fromkeys(RANGES, frozenset({int})),
    "bool": frozenset({bool}),
    "bytes": frozenset({bytes}),
}


def read_tensors(document: Members, inputs: Mapping[str, DType]) -> tuple[bool, dict[str, Tensor]]:
    """Whether the body is columnar, and its tensors by input name. Raises ServeError.

    `inputs` are the signature's, in its order. Integers keep their literal's exactness; floats are
    rounded to the input's dtype.
    """
    rows, columns = b"instances" in document, b"inputs" in document
    if rows and columns:
        words = "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
        raise format_error(document, words)
    if rows:
        return False, _read_rows(document, inputs)
    if columns:
        return True, _read_columns(document.get(b"inputs"), inputs)
    raise invalid("Missing 'inputs' or 'instances' key")


# --- rows ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class InputColumn:
    """One input while its rows are collected. `size` and `shape` are those of its first row."""

    dtype: DType
    values: list[Value] = field(default_factory=list)
    size: int = -1
    shape: Shape = ()

    def add_row(self, row: Value, place: str) -> None:
        """Take one more row. Raises ServeError: the inner text of spec 2.3, wrapped."""
        try:
            self._add_row(row)
        except ServeError as fault:
            raise wrapped(place, fault) from None

    def _add_row(self, row: Value) -> None:
        shape, before = dense_shape(row), len(self.values)
        fill(row, shape, 0, self.dtype, self.values)
        size = len(self.values) - before
        if self.size < 0:
            self.size, self.shape = size, shape
        elif size != self.size:
            raise invalid(f"Expecting tensor size: {self.size} but got: {size}")
        elif shape != self.shape:
            raise invalid(f"Expecting shape {shape_text(self.shape)} but got: {shape_text(shape)}")

    def tensor(self, rows: int) -> Tensor:
        """The tensor of so many rows. Values beyond it (duplicate keys in a row) are dropped."""
        shape = (rows, *self.shape)
        return Tensor(self.dtype, shape, pack_values(self.values[: prod(shape)], self.dtype))


def wrapped(place: str, fault: ServeError) -> ServeError:
    """A fault of one row with its place; INVALID_ARGUMENT whatever is inside (spec 2.3)."""
    inner = f"Error: {fault.kind.name}: {fault.message}"
    return invalid(f"Failed to process element: {place} of 'instances' list. {inner}")


def _read_rows(document: Members, inputs: Mapping[str, DType]) -> dict[str, Tensor]:
    rows = document.get(b"instances")
    if not isinstance(rows, list):
        raise format_error(document, "Expecting 'instances' to be an list/array")
    if not rows:
        raise format_error(document, "No values in 'instances' array")
    if not isinstance(rows[0], Members) and len(inputs) > 1:
        raise needs_names("instances is a plain list, but expecting list of objects")
    columns = {name: InputColumn(dtype) for name, dtype in inputs.items()}
    if _is_named(rows[0]):
        _collect_named(rows, columns)
    else:
        _collect_plain(rows, next(iter(columns.values())))
    missing = [name for name, column in columns.items() if column.size < 0]
    if missing:  # base64 objects where several inputs need names: seen only when the request is run (4.3)
        sent = [name for name in columns if name not in missing]
        raise invalid(
            f"input size does not match signature: {len(sent)}!={len(columns)} "
            f"len({{{','.join(sorted(sent))}}}) != len({{{','.join(sorted(columns))}}}). "
            f"Sent extra: {{}}. Missing but required: {{{','.join(sorted(missing))}}}."
        )
    return {name: column.tensor(len(rows)) for name, column in columns.items()}


def _collect_named(rows: Sequence[Value], columns: Mapping[str, InputColumn]) -> None:
    for index, row in enumerate(rows):
        if not isinstance(row, Members) or is_base64_object(row):
            raise invalid(f"Expecting object but got list at item {index} of input list")
        given = set()
        for key, value in row:
            name = to_text(key)
            given.add(name)
            place = f"{index} key: {name}"
            if name not in columns:
                raise wrapped(place, invalid(f"JSON object: does not have named input: {name}"))
            columns[name].add_row(value, place)
        if given != columns.keys():
            raise invalid(
                f"Failed to process element: {index} of 'instances' list. "
                f"JSON object: {debug_text(row)} keys must be equal to: {','.join(sorted(columns))}"
            )


def _collect_plain(rows: Sequence[Value], column: InputColumn) -> None:
    start = 0
    if len(rows) > BULK_ITEMS and not _is_named(rows[0]):
        column.add_row(rows[0], "0")
        start = 1 + take_plain(rows[1:], column.shape, column.dtype, column.values)
    for index, row in enumerate(rows[start:], start):
        if _is_named(row):
            raise invalid(f"Expecting value/list but got object at item {index} of input list")
        column.add_row(row, str(index))


# --- columns ---------------------------------------------------------------------------------------


def _read_columns(given: Value, inputs: Mapping[str, DType]) -> dict[str, Tensor]:
    if _is_named(given) and isinstance(given, Members):
        return {name: _column(_named_input(given, name), dtype) for name, dtype in inputs.items()}
    if len(inputs) > 1:
        raise needs_names("inputs is a plain value/list, but expecting an object")
    return {name: _column(given, dtype) for name, dtype in inputs.items()}


def needs_names(what: str) -> ServeError:
    """Return the error for values without names where there are several inputs."""
    return invalid(f"{what} as multiple input tensors required as per tensorinfo_map")


def _named_input(given: Members, name: str) -> Value:
    key = to_bytes(name)
    if key not in given:
        raise invalid(f"Missing named input: {name} in 'inputs' object.")
    return given.get(key)


def _column(value: Value, dtype: DType) -> Tensor:
    shape = dense_shape(value)
    values: list[Value] = []
    fill(value, shape, 0, dtype, values)
    return Tensor(dtype, shape, pack_values(values, dtype))


def _is_named(value: Value) -> bool:
    return isinstance(value, Members) and not is_base64_object(value)


# --- values ----------------------------------------------------------------------------------------


def dense_shape(value: Value) -> Shape:
    """The shape along the first element of every level; `fill` checks that the rest agrees."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def fill(value: Value, shape: Shape, level: int, dtype: DType, into: list[Value]) -> None:
    """Append the leaves of `value`, checked against `shape` and `dtype`. Raises ServeError.

    Depth is bounded by the JSON reader's, so recursion is.
    """
    if not isinstance(value, list):
        if level != len(shape):
            raise invalid(
                f"JSON Value: {debug_text(value)} found at incorrect level: {level + 1} "
                f"in the JSON DOM. Expected at level: {len(shape)}"
            )
        into.append(leaf(value, dtype))
        return
    if level >= len(shape):
        raise invalid(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        where = f"unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        raise invalid(f"Encountered list at {where}")
    taken = take_plain(value, shape[level + 1 :], dtype, into)
    for item in value[taken:]:
        fill(item, shape, level + 1, dtype, into)


def take_plain(items: Sequence[Value], shape: Shape, dtype: DType, into: list[Value]) -> int:
    """Append the leading items that are surely good, and return how many: BULK_ITEMS at a time.

    Each item is a value or a list of values of that shape. A refused body of 1 MiB costs 0.4 s
    value by value, and a tenth of that with everything before the fault taken like this.
    """
    if len(shape) > 1:
        return 0
    for start in range(0, len(items), BULK_ITEMS):
        part: Sequence[Any] = items[start : start + BULK_ITEMS]
        if shape:
            if set(map(type, part)) != {list} or set(map(len, part)) != {shape[0]}:
                return start
            part = list(chain.from_iterable(part))
        if not _fit(part, dtype):
            return start
        into.extend(part)
    return len(items)


def _fit(values: Sequence[Any], dtype: DType) -> bool:
    """Whether values are stored as they are. Types and bounds are compared at C speed."""
    if not set(map(type, values)) <= TAKES.get(dtype.name, frozenset()):
        return False
    span = RANGES.get(dtype.name)
    return span is None or not values or (span[0] <= min(values) and max(values) <= span[1])


def leaf(value: Value, dtype: DType) -> Value:
    """One element as it is stored, or the ServeError of spec 2.6."""
    if _fit((value,), dtype):
        return value
    if dtype.name not in TAKES:
        shown = f"JSON Value: {debug_text(value)} to type: {TF_WORD[dtype.code]}"
        raise ServeError(Kind.UNIMPLEMENTED, f"Conversion of {shown}")
    if dtype.name == "bytes" and isinstance(value, Members):
        return decode_base64_object(value)
    shown = f"JSON Value: {debug_text(value)} Type: {kind_word(value)}"
    raise invalid(f"{shown} is not of expected type: {TF_WORD[dtype.code]}")
