"""GrpsMessage as bytes (spec 1), and its generic tensors as tensors of a model (spec 10).

    read_message(data)                      the protobuf library's message
    read_sent(data)                         the same, with a large message's numbers beside it
    read_inputs(version, message, numbers)  the inputs of a model
    write_outputs(asked, outputs)           the answer's message

Messages are bounded before they are parsed. Small integers and halves travel as wider ones. A request's
tensors all have names or none has; without names they are the model's inputs in its order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from google.protobuf.message import DecodeError

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve._ext.number_fields import (
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    UINT32,
    Numbers,
    count_fields,
    cut_numbers,
    list_fields,
)
from fastserve.codec.byte_formats import head_of
from fastserve.errors import ServeError, internal, invalid
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.tensor import ARRAY_CODE, DTYPES, DType, Tensor, TensorSpec, count_items

MOST_FIELDS = 1024  # of a message, and tensors of a request: each costs the parser a hundred bytes
MOST_ITEMS = 1 << 16  # strings of a request's tensors
MOST_ENTRIES = 1 << 14  # of a map
SHAPE_BYTES = 4096  # 254 axes are less
STATUS, GTENSORS, GMAP = 1, 5, 7
KINDS_OF_DATA = frozenset({3, 4, GTENSORS, 6, GMAP})  # a oneof
TENSORS, SHAPE = 1, 3
CUT_BYTES = 1 << 18
"""From here on a message is parsed without its numbers: of 256 KiB the library takes 2 ms."""

NUMBERS = {4: UINT32, 5: INT32, 6: INT32, 7: INT32, 8: INT64, 9: FLOAT32, 10: FLOAT32, 11: FLOAT64}
"""Fields of a tensor."""


@dataclass(slots=True)
class Sent:
    """A GrpsMessage as it was sent. With `numbers` the tensors of `message` are without their own."""

    message: Any
    numbers: Numbers | None = None
    data: bytes = b""

    def serialize(self) -> bytes:
        """The whole message but for its status."""
        if self.numbers is None:
            return bytes(self.message.SerializeToString())
        fields = fields_of(self.data, 0, len(self.data))
        kept = [memoryview(self.data)[begin:end] for field, begin, _, end in fields if field != STATUS]
        return b"".join(kept)


def read_message(data: bytes) -> Any:
    """A GrpsMessage. Raises ServeError for what is none, or has too many tensors, strings or entries."""
    try:
        check_message(data)
        return load("grps").GrpsMessage.FromString(data)
    except (DecodeError, ValueError):
        raise malformed() from None


def read_sent(data: bytes) -> Sent:
    """Read a predict's message, of any size: numbers of a large one become no objects. Raises ServeError."""
    if len(data) < CUT_BYTES:
        message = read_message(data)
        message.ClearField("status")
        return Sent(message)
    try:
        kinds = check_message(data)
        if GTENSORS in kinds and len(kinds) > 1:  # the library has the last, and of its pieces some
            raise invalid("malformed GrpsMessage: data of more than one kind")
        numbers = cut_numbers(data, GTENSORS, TENSORS, NUMBERS)
        message = load("grps").GrpsMessage.FromString(numbers.rest)
    except (DecodeError, ValueError):  # WireFault is one
        raise malformed() from None
    message.ClearField("status")
    return Sent(message, numbers, data)


def malformed() -> ServeError:
    return invalid("malformed GrpsMessage")


def check_message(data: bytes) -> set[int]:
    """Return the kinds of data a message has. Raises ServeError for too much of anything, ValueError for
    bytes that are no message."""
    left, kinds = FieldBudget(), set()
    for field, _, start, end in fields_of(data, 0, len(data)):
        if field == GTENSORS:
            _check_tensors(data, start, end, left)
        elif field == GMAP:
            _check_map(data, start, end, left)
        elif field == STATUS:
            left.count_small("message", count_fields(data, start, end)[0])
        if field in KINDS_OF_DATA:
            kinds.add(field)
    return kinds


class FieldBudget:
    """The fields that a message may still have: parts of a field may come in any number of pieces."""

    __slots__ = ("entries", "items", "tensors")

    def __init__(self) -> None:
        self.tensors, self.items, self.entries = MOST_FIELDS, MOST_ITEMS, MOST_ENTRIES

    def count(self, what: str, items: int) -> None:
        """So many fields of a message within. Raises ServeError."""
        self.items -= items
        if self.items < 0:
            raise invalid(f"{what}: more than {MOST_ITEMS} fields")

    def count_small(self, what: str, items: int) -> None:
        """Count the fields of a nested message that has few. Raises ServeError."""
        if items > MOST_FIELDS:
            raise invalid(f"{what}: more than {MOST_FIELDS} fields")
        self.count(what, items)


def _check_tensors(data: bytes, at: int, end: int, left: FieldBudget) -> None:
    """Packed numbers are one field; strings, and numbers that are not packed, one each."""
    for _, _, start, stop in fields_of(data, at, end, "gtensors", left.tensors, MOST_FIELDS):
        left.tensors -= 1
        items, nbytes = count_fields(data, start, stop, SHAPE)
        left.count("tensor", items)
        if nbytes > SHAPE_BYTES:
            raise invalid(f"shape: {nbytes} bytes, allowed: up to {SHAPE_BYTES}")


def _check_map(data: bytes, at: int, end: int, left: FieldBudget) -> None:
    for _, _, start, stop in fields_of(data, at, end, "gmap", left.entries, MOST_ENTRIES):
        left.entries -= 1
        left.count_small("entry", count_fields(data, start, stop)[0])


def fields_of(
    data: bytes, at: int, end: int, what: str = "message", left: int = MOST_FIELDS, most: int = MOST_FIELDS
) -> list[tuple[int, int, int, int]]:
    """The fields of a message as `list_fields` does it. Raises ServeError for more than are `left` of `most`,
    ValueError for what is no message."""
    found = list_fields(data, at, end, left)
    if len(found) > left:
        raise invalid(f"{what}: more than {most} fields")
    return found


def write_heads(tensors: Sequence[tuple[bytes, int, int]], before: bytes) -> list[bytes]:
    """Return the bytes before each tensor's values. `tensors`: (fields before, field, bytes of values)."""
    bodies = [head + head_of(field, size) for head, field, size in tensors]
    sizes = [len(body) + size for body, (_, _, size) in zip(bodies, tensors, strict=True)]
    heads = [head_of(TENSORS, size) + body for size, body in zip(sizes, bodies, strict=True)]
    whole = sum(len(head) + size for head, (_, _, size) in zip(heads, tensors, strict=True))
    heads[0] = before + head_of(GTENSORS, whole) + heads[0]
    return heads


@dataclass(frozen=True, slots=True)
class GrpsField:
    """A dtype of grps: its number, its name, and the field its values are in."""

    number: int
    word: str
    dtype: DType
    name: str
    tag: int
    wire: str
    """The neutral dtype of the values as they travel."""

    @property
    def is_raw(self) -> bool:
        """Whether values of a tensor travel as they lie in memory."""
        return self.dtype.name == self.wire and self.wire.startswith("float")


def _field(number: int, word: str, wire: str) -> GrpsField:
    dtype = DTYPES["bytes" if word == "string" else word]
    return GrpsField(number, f"DT_{word.upper()}", dtype, f"flat_{word}", number + 3, wire)


FIELDS = (
    _field(1, "uint8", "uint32"),
    _field(2, "int8", "int32"),
    _field(3, "int16", "int32"),
    _field(4, "int32", "int32"),
    _field(5, "int64", "int64"),
    _field(6, "float16", "float32"),
    _field(7, "float32", "float32"),
    _field(8, "float64", "float64"),
    _field(9, "string", "bytes"),
)

BY_NUMBER = {field.number: field for field in FIELDS}
BY_DTYPE = {known.dtype.name: known for known in FIELDS}
BY_NAME = {named.name: named for named in FIELDS}
AT_ONCE = 1 << 14
"""Values that are turned into others in one go: 1 ms, after which other threads may come."""

BOUNDS = {"uint8": (0, 255)} | {
    f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)
}

FORMS = {"str_data": "str", "bin_data": "bin"}


def read_inputs(version: Version, message: Any, numbers: Numbers | None = None) -> dict[str, Tensor]:
    """A request's data as inputs of a model that takes tensors; `numbers` where the message is without them.
    Raises ServeError."""
    kind = message.WhichOneof("data_oneof")
    if kind == "gtensors":
        given = enumerate(message.gtensors.tensors)
        return name_inputs(version, [read_tensor(one, number, numbers) for number, one in given])
    if kind in FORMS:
        data = message.bin_data if kind == "bin_data" else message.str_data.encode()
        return _read_plain(version, kind, data)
    if kind is None:
        raise invalid("The request has no data.")
    raise invalid(f"{kind} is for customized models; model {version.model} takes gtensors")


def name_inputs(version: Version, given: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """By the model's names. Raises ServeError."""
    names = [name for name, _ in given]
    if not any(names):
        if len(given) != len(version.inputs):
            raise invalid(f"{len(given)} tensors without names, the model has {len(version.inputs)} inputs")
        names = list(version.inputs)
    elif not all(names):
        raise invalid("either all tensors have names, or none has")
    if len(set(names)) < len(names):
        raise invalid("two tensors have the same name")
    return {name: tensor for name, (_, tensor) in zip(names, given, strict=True)}


def read_tensor(given: Any, number: int, numbers: Numbers | None = None) -> tuple[str, Tensor]:
    """One generic tensor, the message's so many-th. Raises ServeError naming it."""
    what = f"tensor {given.name!r}" if given.name else f"tensor {number}"
    field = BY_NUMBER.get(given.dtype)
    if field is None:
        raise invalid(f"{what}: dtype: given {given.dtype}, allowed: {', '.join(f.word for f in FIELDS)}")
    cut = numbers if field.wire != "bytes" else None
    shape = tuple(given.shape)
    items = count_items(shape)
    count = len(getattr(given, field.name)) if cut is None else cut.count(number, field.tag)
    if not count:
        raise invalid(f"{what}: {field.name} is empty, which has the data of dtype {field.word}")
    if items != count:
        raise invalid(f"{what}: shape {list(shape)} has {items} elements, {field.name} has {count}")
    try:
        data = _read_values(given, field) if cut is None else _take_values(cut, number, field)
        return given.name, Tensor(field.dtype, shape, data)
    except (OverflowError, struct.error):
        raise invalid(f"{what}: {field.name} has values beyond {field.dtype.name}") from None


def _read_values(given: Any, field: GrpsField) -> bytes | memoryview:
    if field.is_raw:
        return take_packed(given, field)
    return pack_values(field.dtype.name, getattr(given, field.name))


def _take_values(numbers: Numbers, owner: int, field: GrpsField) -> bytes:
    """Values that were cut out of their message. Raises as `pack_values`."""
    if field.wire.startswith("float"):
        data = numbers.take(owner, field.tag)
        assert data is not None
        return data if field.is_raw else pack_values(field.dtype.name, memoryview(data).cast("f"))
    low, high = BOUNDS[field.dtype.name]
    found = numbers.take(owner, field.tag, field.dtype.item_bytes, low, high)
    if found is None:
        raise OverflowError
    return found


def pack_values(dtype: str, values: Any) -> bytes:
    """Values as memory of their dtype. Raises OverflowError or struct.error for one that has no room."""
    return b"".join(_pack(dtype, values[at : at + AT_ONCE]) for at in range(0, len(values), AT_ONCE))


def _pack(dtype: str, values: Any) -> bytes | bytearray:
    if dtype == "bytes":
        return pack_bytes(values)
    if dtype == "float16":
        return struct.pack(f"<{len(values)}e", *values)
    return array(ARRAY_CODE[dtype], values).tobytes()


def _read_plain(version: Version, kind: str, data: bytes) -> dict[str, Tensor]:
    if len(version.inputs) == 1:
        ((name, spec),) = version.inputs.items()
        shape = spec.shape if spec.shape is not None else ()
        if spec.dtype.name == "bytes" and all(size in (1, -1) for size in shape):
            ones = (1,) * (len(shape) + version.batching)
            return {name: Tensor(spec.dtype, ones, pack_bytes([data]))}
        raw = raw_rows(version, spec, len(data)) if kind == "bin_data" else None
        if raw is not None:
            return {name: Tensor(spec.dtype, raw, data)}
    raise invalid(
        f"model {version.model} takes no {kind} of {len(data)} bytes: send gtensors "
        f"({', '.join(f'{s.name} {s.dtype.name} {list(s.shape or ())}' for s in version.inputs.values())})"
    )


def raw_rows(version: Version, spec: TensorSpec, nbytes: int) -> tuple[int, ...] | None:
    """The shape of so many bytes of little-endian values; None for what is no whole number of rows."""
    if not spec.row_bytes or spec.shape is None:
        return None
    rows, rest = divmod(nbytes, spec.row_bytes)
    if rest or not rows or (rows > 1 and not version.batching):
        return None
    return (rows, *spec.shape) if version.batching else spec.shape


# --- outputs -------------------------------------------------------------------------------------


def field_of(name: str, dtype: DType) -> GrpsField:
    """How an output travels. Raises ServeError for a dtype that grps has not."""
    field = BY_DTYPE.get(dtype.name)
    if field is None:
        raise internal(f"output {name!r} is of dtype {dtype.name}, which grps has not")
    return field


def plain_form(message: Any, outputs: Mapping[str, Tensor]) -> str:
    """An answer takes the form of its question where it can: "str" and "bin" for one output of one element,
    "raw" for one of numbers that was asked for with bin_data; "" for gtensors."""
    form = FORMS.get(message.WhichOneof("data_oneof") or "", "")
    if not form or len(outputs) != 1:
        return ""
    (tensor,) = outputs.values()
    if tensor.dtype.name != "bytes":
        return "raw" if form == "bin" else ""
    return form if prod(tensor.shape) == 1 else ""


def write_outputs(asked: Any, outputs: Mapping[str, Tensor]) -> Any:
    """The answer's message, without a status. Raises ServeError."""
    message = load("grps").GrpsMessage()
    form = plain_form(asked, outputs)
    if form:
        (tensor,) = outputs.values()
        data = bytes(tensor.data) if form == "raw" else unpack_bytes(tensor.data, 1)[0]
        if form == "str":
            message.str_data = _text(data, "the output")
        else:
            message.bin_data = data
        return message
    message.gtensors.SetInParent()
    for name, tensor in outputs.items():
        write_tensor(message.gtensors.tensors.add(), name, tensor)
    return message


def write_tensor(out: Any, name: str, tensor: Tensor) -> None:
    """Fill a generic tensor. Raises ServeError."""
    field = field_of(name, tensor.dtype)
    out.name, out.dtype = name, field.number
    out.shape.extend(tensor.shape)
    values = getattr(out, field.name)
    if field.word == "DT_STRING":
        values.extend(
            _text(item, f"output {name!r}") for item in unpack_bytes(tensor.data, prod(tensor.shape))
        )
    elif field.word == "DT_FLOAT16":
        fill_halves(values, tensor.data)
    elif field.is_raw:
        fill_packed(out, field, tensor.data)
    else:
        fill_whole(values, tensor.dtype.name, tensor.data)


def fill_packed(out: Any, field: GrpsField, data: bytes | bytearray | memoryview) -> None:
    """Floats as they lie in memory: that is how they travel."""
    out.MergeFromString(head_of(field.tag, len(data)) + data)


def fill_whole(values: Any, dtype: str, data: bytes | bytearray | memoryview) -> None:
    """Whole numbers from memory."""
    items: memoryview[int] = memoryview(data).cast("B").cast(ARRAY_CODE[dtype])  # type: ignore[call-overload]
    for at in range(0, len(items), AT_ONCE):
        values.extend(items[at : at + AT_ONCE])


def fill_halves(values: Any, data: bytes | bytearray | memoryview) -> None:
    """Half floats from memory."""
    halves = memoryview(data).cast("B")
    for at in range(0, len(halves), 2 * AT_ONCE):
        piece = halves[at : at + 2 * AT_ONCE]
        values.extend(struct.unpack(f"<{len(piece) // 2}e", piece))


def take_packed(given: Any, field: GrpsField) -> memoryview:
    """The floats of a generic tensor that has some, in memory: no object is made for one of them."""
    given.DiscardUnknownFields()
    data = given.SerializeToString()
    spans = fields_of(data, 0, len(data))
    return next(memoryview(data)[start:end] for tag, _, start, end in spans if tag == field.tag)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise internal(f"{what} is not UTF-8 text") from None
