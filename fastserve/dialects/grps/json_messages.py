"""GrpsMessage as JSON, in and out (spec 3): protobuf's rules, bounded; arrays of numbers by compiled code.

    {"gtensors": {"tensors": [{"dtype": "DT_FLOAT32", "shape": [2], "flat_float32": [1, 2]}]}}
                                                                  cut ^^^^^^^^^^^^^^^^^^^^^^

Arrays of numbers are cut out first and read straight into memory; the rest is small. An array that the
compiled reader does not take is read again number by number, for texts that stand for numbers and for errors.
On the way out members with their default are left out, and NaN and infinities are texts (spec 3.1).
"""

from __future__ import annotations

import binascii
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve._ext.flatten import FlattenFault, flatten
from fastserve._ext.json_bounds import Bounds, JSONBoundError, check_json
from fastserve._ext.json_reader import JSONFault, PredictReader
from fastserve._ext.json_value import JSONSyntaxError, Members, parse
from fastserve._ext.json_writer import MODE_SHORTEST, write_values
from fastserve.codec.json_text import decode_base64
from fastserve.dialects.grps.messages import (
    BY_NAME,
    BY_NUMBER,
    FIELDS,
    GrpsField,
    fill_packed,
    fill_whole,
    pack_values,
    take_packed,
)
from fastserve.errors import invalid
from fastserve.protos import load
from fastserve.settings import GrpsOptions
from fastserve.tensor import ARRAY_CODE, DTYPES

if TYPE_CHECKING:
    from fastserve._ext.json_value import Value


MOST_VALUES = 1 << 19  # of what becomes an object each
MOST_DEPTH = 100
MOST_TENSORS = 1024  # as over gRPC

BOUNDS = Bounds(
    depth=MOST_DEPTH, values=MOST_VALUES, numbers=MOST_VALUES, object_keys=16384, longest_key=1 << 20
)
"""Of a document whose arrays of numbers are cut out: each key becomes an entry of a message, at 1.5 us."""

ALIASES = {"flat_double": "flat_float64"}
BIN_IN_JSON = "bin_data should use application/octet-stream format."
NO_MEMBER = "Have no legal member in json body."
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_NUMERIC = "uint8|int8|int16|int32|int64|float16|float32|float64|double"
_DATA = re.compile(rf'"(flat_?(?i:{_NUMERIC}))"\s{{0,99}}:\s{{0,99}}(?=\[)'.encode())
_AT_ONCE, _KEY_BYTES = 1 << 18, 256
"""Bytes searched without giving the GIL away, and the most that a match has."""

_ALONE = re.compile(rb'\s*\{\s*"ndarray"\s*:')
_END = re.compile(rb"[^}]*\}\s*")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|-?Infinity|NaN")
_ONEOF = ("str_data", "gtensors", "ndarray", "gmap", "bin_data")

_READERS = {
    name: PredictReader([("values", DTYPES[name].code)], b"serving_default", is_default=True)
    for name in ("int32", "int64", "float32", "float64")
}

_INTS = {"uint32": (0, 2**32 - 1), "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A request as read. `wants_stream`: its own member says so."""

    message: Any
    wants_stream: bool = False


def read_json(body: bytes | bytearray, options: GrpsOptions) -> JsonBody:
    """A request's body. Raises ServeError naming what is wrong and where."""
    alone = _read_alone(body)
    if alone is not None:
        return JsonBody(alone)
    text, cut = cut_arrays(bytes(body))
    document = _parse(text)
    if not isinstance(document, Members):
        raise invalid("Bad Request, err: the json body is not an object.")
    members = dict(_named(document))
    reader = _Reader(cut, options)
    given = [name for name in _ONEOF if members.get(name) is not None]
    if len(given) > 1:
        raise invalid(f"Bad Request, err: more than one of {', '.join(_ONEOF)}: {', '.join(given)}.")
    if given == ["bin_data"]:
        raise invalid(BIN_IN_JSON)
    if not given or (
        given == ["str_data"] and not members["str_data"] and options.empty_str_data == "reject"
    ):
        raise invalid(NO_MEMBER)
    message = load("grps").GrpsMessage()
    message.model = _text(members.get("model", b"") or b"", "model")
    reader.read(message, given[0], members[given[0]])
    return JsonBody(
        message, options.streaming_ctrl_key in members and members[options.streaming_ctrl_key] is True
    )


def read_text_member(body: bytes | bytearray) -> str:
    """The str_data of a small body; "" for none. Raises ServeError."""
    document = _parse(bytes(body)) if body else Members()
    if not isinstance(document, Members):
        raise invalid("Bad Request, err: the json body is not an object.")
    return _text(dict(_named(document)).get("str_data") or b"", "str_data")


def wants_stream(body: bytes | bytearray, key: str) -> bool:
    """Whether a body of a deployment's own is a JSON object with this member, and it is true. Nothing else
    of it becomes an object: it may be of any size and have any number of values."""
    try:
        said = msgspec.json.decode(body, type=_said(key))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return bytes(said.wanted) == b"true"


@lru_cache(maxsize=8)
def _said(key: str) -> Any:
    """An object of which this member alone is looked at, as the text that it is."""
    return msgspec.defstruct("Said", [("wanted", msgspec.Raw, msgspec.Raw())], rename={"wanted": key})


def cut_arrays(body: bytes) -> tuple[bytes, list[bytes]]:
    """The text with a number in place of each array of numbers, under a name of its own; and the arrays."""
    cut: list[bytes] = []
    texts, at = [], 0
    for start, first, last, name in find_arrays(body):
        texts += [body[at:start], b'"=%b":%d' % (name, len(cut))]
        cut.append(body[first:last])
        at = last
    return (b"".join([*texts, body[at:]]), cut) if cut else (body, cut)


def find_arrays(body: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(where its key begins, the array's begin and end, its key) of every flat array of numbers.

    Inside a JSON text no quote stands without a backslash, so what matches is a key."""
    last = 0
    for found in _find_keys(body):
        first = found.end()
        if last <= first:  # else that end is still the next: a body of keys alone is gone over once
            last = body.find(b"]", first) + 1
        if not last:
            return
        if body.find(b"[", first + 1, last) < 0:
            yield found.start(), first, last, found[1]


def _find_keys(body: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the matches of `_DATA`, window by window: a search of ten megabytes holds the GIL for 40 ms."""
    at = 0
    while at < len(body):
        found = _DATA.search(body, at, at + _AT_ONCE + _KEY_BYTES)
        if found is None:
            at += _AT_ONCE
        else:
            yield found
            at = found.end()


def _parse(text: bytes) -> Value:
    try:
        check_json(text, BOUNDS)
    except JSONBoundError as fault:
        raise invalid(
            f"Bad Request, err: {fault.bound}: more than {fault.limit}, at offset {fault.offset}."
        ) from None
    except JSONSyntaxError:
        pass  # told below, in this API's words
    try:
        return parse(text, max_depth=MOST_DEPTH, max_values=MOST_VALUES, alone=True)
    except JSONSyntaxError as fault:
        raise invalid(
            f"Bad Request, err: Parse json failed: {fault.reason} at offset {fault.offset}."
        ) from None


def _named(members: Members) -> Iterator[tuple[str, Value]]:
    """By the names of the messages' fields, camel case included; null is as good as nothing."""
    for key, value in members:
        name = key.decode("utf-8", "replace")
        if value is not None:
            yield (
                (name if "_" in name or name.islower() else _CAMEL.sub(lambda m: "_" + m[1].lower(), name)),
                value,
            )


class _Reader:
    """The one member that is the data."""

    def __init__(self, cut: Sequence[bytes], options: GrpsOptions) -> None:
        self._cut, self._aliases = cut, ALIASES if options.flat_double else {}

    def read(self, message: Any, kind: str, value: Value) -> None:
        if kind == "str_data":
            message.str_data = _text(value, "str_data")
        elif kind == "ndarray":
            message.gtensors.SetInParent()
            _read_ndarray(message.gtensors.tensors.add(), value)
        elif kind == "gmap":
            message.gmap.SetInParent()
            _read_gmap(message.gmap, value)
        else:
            message.gtensors.SetInParent()
            self._read_gtensors(message.gtensors, value)

    def _read_gtensors(self, out: Any, value: Value) -> None:
        tensors = dict(_named(_members(value, "gtensors"))).get("tensors", [])
        if isinstance(tensors, list) and len(tensors) > MOST_TENSORS:
            raise invalid(f"gtensors.tensors: given {len(tensors)}, allowed: up to {MOST_TENSORS}")
        for number, one in enumerate(_list(tensors, "gtensors.tensors")):
            self._read_tensor(out.tensors.add(), _members(one, f"gtensors.tensors[{number}]"), number)

    def _read_tensor(self, out: Any, members: Members, number: int) -> None:
        where = f"gtensors.tensors[{number}]"
        found: dict[str, tuple[Value, bool]] = {}
        for key, value in members:
            name, is_cut = self._name_of(key, value)
            if value is not None:
                found[name] = value, is_cut
        for alias, real in self._aliases.items():
            if alias in found:
                found.setdefault(real, found[alias])
        out.name = _text(found.get("name", (b"", False))[0], f"{where}.name")
        out.dtype = _dtype(found.get("dtype", (0, False))[0], f"{where}.dtype")
        shape = _list(found.get("shape", ([], False))[0], f"{where}.shape")
        out.shape.extend(_whole(size, _INTS["uint32"], f"{where}.shape") for size in shape)
        for name in BY_NAME.keys() & found.keys():
            value, is_cut = found[name]
            assert isinstance(value, int) or not is_cut
            given: Value | bytes = self._cut[value] if is_cut else value  # type: ignore[index]
            _read_values(out, BY_NAME[name], given, is_cut, f"{where}.{name}")

    def _name_of(self, key: bytes, value: Value) -> tuple[str, bool]:
        is_cut = key.startswith(b"=") and type(value) is int and 0 <= value < len(self._cut)
        name = key[is_cut:].decode("utf-8", "replace")
        if "_" not in name and name.startswith("flat"):
            name = "flat_" + name[4:].lower()
        return name, is_cut


def _read_values(out: Any, field: GrpsField, given: Any, is_cut: bool, where: str) -> None:
    if field.word == "DT_STRING":
        getattr(out, field.name).extend(_text(item, where) for item in _leaves(given, where))
        return
    data = _read_quickly(field.wire, given) if is_cut else None
    if data is None:
        values = _parse(given) if is_cut else given
        data = _read_slowly(field.wire, _leaves(values, where), where)
    if field.wire.startswith("float"):
        fill_packed(out, field, data)
    else:
        fill_whole(getattr(out, field.name), field.wire, data)


def _read_quickly(wire: str, text: bytes) -> bytes | None:
    """A whole array as memory; None for one with values that are no plain numbers."""
    reader = _READERS.get(wire)
    if reader is None:
        return None
    try:
        ((_, _, data),) = reader.read(b'{"inputs":%b}' % text).tensors.values()
    except JSONFault:
        return None
    return data


def _read_slowly(wire: str, values: Iterator[Value], where: str) -> bytes:
    if wire.startswith("float"):
        numbers = array(ARRAY_CODE[wire], [_real(value, where) for value in values])
    else:
        numbers = array(ARRAY_CODE[wire], [_whole(value, _INTS[wire], where) for value in values])
    return numbers.tobytes()


def _leaves(value: Value, where: str) -> Iterator[Value]:
    """Nested lists are read as the flat one they stand for."""
    for item in _list(value, where):
        if isinstance(item, list):
            yield from _leaves(item, where)
        else:
            yield item


def _read_alone(body: bytes | bytearray) -> Any | None:
    """The message of a body that is an ndarray of plain numbers and nothing else, however large; None for
    any other body, whose errors the general reader finds."""
    begin = _ALONE.match(body)
    if begin is None or body.count(b'"', begin.end()) or not _END.fullmatch(body, begin.end()):
        return None
    try:
        ((_, shape, data),) = _READERS["float32"].read(b'{"inputs":' + body[begin.end() :]).tensors.values()
    except JSONFault:
        return None
    message = load("grps").GrpsMessage()
    out = message.gtensors.tensors.add(dtype=BY_NAME["flat_float32"].number, shape=shape)
    fill_packed(out, BY_NAME["flat_float32"], data)
    return message


def _read_ndarray(out: Any, value: Value) -> None:
    out.dtype = BY_NAME["flat_float32"].number
    try:
        shape, data = flatten(value, DTYPES["float32"].code)
    except FlattenFault as fault:
        raise invalid(f"Parse NDArray failed: {_PYTHON.sub(lambda m: _WORDS[m[0]], str(fault))}") from None
    out.shape.extend(shape)
    fill_packed(out, BY_NAME["flat_float32"], data)


def _read_gmap(out: Any, value: Value) -> None:
    members = dict(_named(_members(value, "gmap")))
    for kind, read in _MAPS.items():
        given = members.get(kind)
        for key, item in _members(given, f"gmap.{kind}") if given is not None else ():
            name = _text(key, f"gmap.{kind}")
            getattr(out, kind)[name] = read(item, f"gmap.{kind}.{name[:100]}")


def _base64(value: Value, where: str) -> bytes:
    """Standard or URL-safe."""
    data = decode_base64(_text(value, where).encode(), url_safe=True)
    if data is None:
        raise invalid(f"{where}: Fail to decode base64.")
    return data


def _real(value: Value, where: str) -> float:
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        if not _NUMBER.fullmatch(text):
            raise invalid(f"{where}: given {text[:40]!r}, allowed: numbers")
        return float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{where}: given {_kind(value)}, allowed: numbers")
    try:
        return float(value)
    except OverflowError:
        raise invalid(f"{where}: a number is too large") from None


def _whole(value: Value, bounds: tuple[int, int], where: str) -> int:
    if isinstance(value, bytes) and re.fullmatch(rb"-?[0-9]{1,20}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{where}: given {_kind(value)}, allowed: whole numbers")
    if not bounds[0] <= value <= bounds[1]:
        raise invalid(f"{where}: given {value}, allowed: {bounds[0]} to {bounds[1]}")
    return value


def _float32(value: Value, where: str) -> float:
    return array("f", [_real(value, where)])[0]


def _text(value: Value, where: str) -> str:
    if not isinstance(value, bytes):
        raise invalid(f"{where}: given {_kind(value)}, allowed: text")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise invalid(f"{where}: is not UTF-8 text") from None


def _dtype(value: Value, where: str) -> int:
    if isinstance(value, bytes):
        name = value.decode("utf-8", "replace")
        found = next(
            (field.number for field in FIELDS if field.word == name), 0 if name == "DT_INVALID" else None
        )
        if found is None:
            raise invalid(f"{where}: given {name[:40]!r}, allowed: {', '.join(f.word for f in FIELDS)}")
        return found
    return _whole(value, _INTS["int32"], where)


def _members(value: Value, where: str) -> Members:
    if not isinstance(value, Members):
        raise invalid(f"{where}: given {_kind(value)}, allowed: an object")
    return value


def _list(value: Value, where: str) -> list[Value]:
    if not isinstance(value, list):
        raise invalid(f"{where}: given {_kind(value)}, allowed: a list")
    return value


_WORDS = {"Members": "an object", "list": "a list", "bytes": "text", "bool": "a boolean", "NoneType": "null"}
_PYTHON = re.compile(rf"^({'|'.join(_WORDS)})(?= where)")


def _kind(value: Value) -> str:
    return _WORDS.get(type(value).__name__, "a number")


_MAPS: dict[str, Callable[[Value, str], Any]] = {
    "s_s": _text,
    "s_b": _base64,
    "s_i32": lambda value, where: _whole(value, _INTS["int32"], where),
    "s_i64": lambda value, where: _whole(value, _INTS["int64"], where),
    "s_f": _float32,
    "s_d": _real,
}


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
