"""Values of a known type out of a JSON document, with Triton's error texts (spec 1.2).

Every accessor takes `where`, the beginning of its error text:

    as_string(5, "Unable to parse 'id'")
    -> INTERNAL "Unable to parse 'id': attempt to access JSON non-string as string"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeAlias, TypeVar

from fastserve._ext.json_value import JSONSyntaxError, Members, parse
from fastserve.codec.byte_formats import pack_strings, pack_values
from fastserve.codec.json_text import to_bytes, to_text
from fastserve.errors import ServeError, internal, invalid
from fastserve.tensor import DType, kserve_name

Value: TypeAlias = "Members | list[Value] | bytes | int | float | bool | None"
T = TypeVar("T")
MAX_DEPTH = 100
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1
MOST_VALUES = 16384
"""Values of a body without tensors: more than any client sends, read in 2 ms."""


def read_json(body: bytes | bytearray | memoryview, most: int = MOST_VALUES) -> Value:
    """Return the one value of a body, of at most `most` values in all. Raises ServeError INTERNAL."""
    fault = "failed to parse the request JSON buffer: "
    if not len(body):
        raise internal(f"{fault}The document is empty. at 0")
    try:
        return parse(body, max_depth=MAX_DEPTH, max_values=most, alone=True)
    except JSONSyntaxError as error:
        raise internal(f"{fault}{error.reason} at {error.offset}") from None


def find(value: Value, name: str) -> tuple[bool, Value]:
    """Return whether an object has the member, and its first value. Other values have no members."""
    key = name.encode()
    if isinstance(value, Members) and key in value:
        return True, value.get(key)
    return False, None


def need(value: Value, name: str, where: str = "") -> Value:
    """Return a member that must be there. Raises ServeError INTERNAL."""
    found, member = find(value, name)
    if not found:
        raise internal(_text(where, f"attempt to access non-existing object member '{name}'"))
    return member


def member(value: Value, name: str, read: Callable[[Value, str], T]) -> T:
    """Return a member that must be there, as `read` gives it. Raises ServeError INTERNAL."""
    where = f"Unable to parse '{name}'"
    return read(need(value, name, where), where)


def optional(value: Value, name: str, read: Callable[[Value, str], T], default: T, where: str = "") -> T:
    """Return a member as `read` gives it, or `default`. Raises ServeError INTERNAL."""
    found, given = find(value, name)
    return read(given, where or f"Unable to parse '{name}'") if found else default


def as_object(value: Value, where: str) -> Members:
    if not isinstance(value, Members):
        raise _mistyped(where, "object")
    return value


def members_of(value: Value, where: str = "") -> Members:
    """Return an object, to iterate over. Raises ServeError INTERNAL."""
    if not isinstance(value, Members):
        raise internal(_text(where, "attempt to get members for non-object"))
    return value


def as_array(value: Value, where: str = "") -> list[Value]:
    if not isinstance(value, list):
        raise internal(_text(where, "attempt to access JSON non-array as array"))
    return value


def as_string(value: Value, where: str = "") -> str:
    if not isinstance(value, bytes):
        raise _mistyped(where, "string")
    return to_text(value)


def as_bool(value: Value, where: str = "") -> bool:
    if not isinstance(value, bool):
        raise _mistyped(where, "boolean")
    return value


def as_uint(value: Value, where: str = "") -> int:
    if not is_uint(value):
        raise _mistyped(where, "unsigned-integer")
    assert isinstance(value, int)
    return value


def as_int(value: Value, where: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -INT64_MAX - 1 <= value <= INT64_MAX:
        raise _mistyped(where, "signed-integer")
    return value


def as_double(value: Value, where: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _mistyped(where, "number", "double")
    return float(value)


def is_uint(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= UINT64_MAX


def _text(where: str, complaint: str) -> str:
    return f"{where}: {complaint}" if where else complaint


def _mistyped(where: str, kind: str, as_kind: str = "") -> ServeError:
    return internal(_text(where, f"attempt to access JSON non-{kind} as {as_kind or kind}"))


def not_in_json(doing: str, datatype: str, what: str) -> ServeError:
    """Return the error for a type that has no JSON form."""
    return invalid(
        f"{doing} {datatype} data via JSON is not supported. Please use the binary data format for {what}"
    )


# --- a tensor's values: any nesting of arrays -> flat memory ---------------------------------------------

_READ = {"bool": as_bool, "float32": as_double, "float64": as_double}


def read_leaves(data: list[Value], dtype: DType, count: int, name: str) -> bytes:
    """Return `count` items of `dtype` out of the arrays of input `name`, as flat memory.

    Raises ServeError.

    Only the number of leaves counts, not their nesting. Strings come in BYTES packing, any number of them:
    they are held against the model's shape later.
    """
    if dtype.name in ("float16", "bfloat16"):
        raise not_in_json("receiving", kserve_name(dtype), f"input {name}")
    if dtype.name == "bytes":
        return pack_strings(
            to_bytes(as_string(leaf, "Unable to parse JSON bytes array")) for leaf in _walk(data)
        )
    where = "Unable to parse 'data'"
    read = _READ.get(dtype.name) or (as_uint if dtype.name.startswith("u") else as_int)
    leaves = list(islice(_walk(data), count + 1))
    if len(leaves) != count:
        raise internal(f"{where}: Shape does not match true shape of 'data' field")
    return pack_values([read(leaf, where) for leaf in leaves], dtype)


def _walk(data: list[Value]) -> Iterator[Value]:
    """Yield the leaves in order. The reader has bounded the nesting."""
    stack = [iter(data)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            yield item
        else:
            stack.pop()
