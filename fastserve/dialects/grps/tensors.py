"""Generic tensors and tensors of a model (spec 10): checked on the way in, widened on the way out.

Small integers and halves travel as wider ones. A request's tensors all have names or none has; without names
they are the model's inputs in its order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve.codec.proto_fields import head_of
from fastserve.dialects.grps.codec_grpc import walk
from fastserve.errors import internal, invalid
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.tensor import ARRAY_CODE, DTYPES, DType, Tensor, TensorSpec, count_items


@dataclass(frozen=True, slots=True)
class Field:
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


def _field(number: int, word: str, wire: str) -> Field:
    dtype = DTYPES["bytes" if word == "string" else word]
    return Field(number, f"DT_{word.upper()}", dtype, f"flat_{word}", number + 3, wire)


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
BY_DTYPE = {field.dtype.name: field for field in FIELDS}
BY_NAME = {field.name: field for field in FIELDS}
AT_ONCE = 1 << 14
"""Values that are turned into others in one go: 1 ms, after which other threads may come."""
FORMS = {"str_data": "str", "bin_data": "bin"}


def read_inputs(version: Version, message: Any) -> dict[str, Tensor]:
    """A request's data as inputs of a model that takes tensors. Raises ServeError."""
    kind = message.WhichOneof("data_oneof")
    if kind == "gtensors":
        return name_inputs(version, [read_tensor(one, n) for n, one in enumerate(message.gtensors.tensors)])
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


def read_tensor(given: Any, number: int) -> tuple[str, Tensor]:
    """One generic tensor. Raises ServeError naming it."""
    what = f"tensor {given.name!r}" if given.name else f"tensor {number}"
    field = BY_NUMBER.get(given.dtype)
    if field is None:
        raise invalid(f"{what}: dtype: given {given.dtype}, allowed: {', '.join(f.word for f in FIELDS)}")
    shape = tuple(given.shape)
    values = getattr(given, field.name)
    items = count_items(shape)
    if not len(values):
        raise invalid(f"{what}: {field.name} is empty, which has the data of dtype {field.word}")
    if items != len(values):
        raise invalid(f"{what}: shape {list(shape)} has {items} elements, {field.name} has {len(values)}")
    try:
        data = take_packed(given, field) if field.is_raw else pack_values(field.dtype.name, values)
        return given.name, Tensor(field.dtype, shape, data)
    except (OverflowError, struct.error):
        raise invalid(f"{what}: {field.name} has values beyond {field.dtype.name}") from None


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


def field_of(name: str, dtype: DType) -> Field:
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
        values.extend(struct.unpack(f"<{prod(tensor.shape)}e", tensor.data))
    elif field.is_raw:
        fill_packed(out, field, tensor.data)
    else:
        fill_whole(values, tensor.dtype.name, tensor.data)


def fill_packed(out: Any, field: Field, data: bytes | bytearray | memoryview) -> None:
    """Floats as they lie in memory: that is how they travel."""
    out.MergeFromString(head_of(field.tag, len(data)) + data)


def fill_whole(values: Any, dtype: str, data: bytes | bytearray | memoryview) -> None:
    """Whole numbers from memory."""
    items = array(ARRAY_CODE[dtype])
    items.frombytes(data)
    for at in range(0, len(items), AT_ONCE):
        values.extend(items[at : at + AT_ONCE])


def take_packed(given: Any, field: Field) -> memoryview:
    """The floats of a generic tensor that has some, in memory: no object is made for one of them."""
    given.DiscardUnknownFields()
    data = given.SerializeToString()
    spans = walk(data, 0, len(data))
    return next(memoryview(data)[start:end] for tag, start, end in spans if tag == field.tag)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise internal(f"{what} is not UTF-8 text") from None
