"""Values of a caller as the tensors of V2, and back.

A function of JSON is one string in and one out, `body`, whose platform tells that it is one. Every other
model has tensors: numbers become the declared type where that keeps their kind (ints become floats, floats
become no ints), strings are object arrays of bytes, and bfloat16, which numpy has not, is float32 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fastserve.errors import internal
from fastserve.tensor import DTYPE_BY_KSERVE

Array = np.ndarray[Any, Any]
BODY = "body"
JSON_PLATFORMS = frozenset({"script_json", "script_stream"})
STREAM_PLATFORM = "script_stream"
BYTES, BFLOAT16 = "BYTES", "BF16"
_LENGTH_BYTES = 4


class DeclaredTensor(NamedTuple):
    """An input or output as the model's metadata declares it; -1 stands for any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelDescription:
    """A model's metadata."""

    name: str
    platform: str
    inputs: tuple[DeclaredTensor, ...]
    outputs: tuple[DeclaredTensor, ...]

    @property
    def takes_json(self) -> bool:
        return self.platform in JSON_PLATFORMS


class CallInputs(NamedTuple):
    """The tensors of one call. `lone`: one row, which was given without the axis of rows."""

    arrays: tuple[tuple[DeclaredTensor, Array], ...]
    lone: bool


class CallOutputs(NamedTuple):
    """The tensors of an answer, by name, and its parameters."""

    arrays: dict[str, Array]
    parameters: Mapping[str, Any]


def lay_out(model: ModelDescription, args: Sequence[Any], named: Mapping[str, Any]) -> CallInputs:
    """Return the tensors of a call. Raises TypeError and ValueError, which name the input."""
    if model.takes_json:
        body = np.array([encode_json(model, args, named)], object)
        return CallInputs(((model.inputs[0], body),), lone=False)
    given = dict(zip((one.name for one in model.inputs), args, strict=False))
    if len(args) > len(model.inputs) or given.keys() & named.keys() or named.keys() - _names(model):
        raise TypeError(f"{model.name} has the inputs {', '.join(sorted(_names(model)))}, each given once")
    given.update(named)
    arrays = [(one, to_array(given[one.name], one)) for one in model.inputs if one.name in given]
    lone = bool(arrays) and all(
        one.shape[:1] == (-1,) and array.ndim == len(one.shape) - 1 for one, array in arrays
    )
    if lone:
        arrays = [(one, array[np.newaxis]) for one, array in arrays]
    return CallInputs(tuple(arrays), lone)


def read_result(model: ModelDescription, found: CallOutputs, *, lone: bool) -> Any:
    """Return what a call returns: a function's value, an array, or of several outputs a dict of arrays."""
    if model.takes_json:
        return decode_json(found)
    arrays = dict(found.arrays)
    if lone:
        rows = {one.name for one in model.outputs if one.shape[:1] == (-1,)}
        arrays = {n: a[0] if n in rows and a.shape[:1] == (1,) else a for n, a in arrays.items()}
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays


def encode_json(model: ModelDescription, args: Sequence[Any], named: Mapping[str, Any]) -> bytes:
    """Return the body of a call: its keywords, or the only argument as it is. Raises TypeError."""
    if len(args) > 1 or (args and named):
        raise TypeError(f"{model.name} takes its parameters by name, or one argument that is the whole body")
    return msgspec.json.encode(args[0] if args else named, enc_hook=_as_json)


def decode_json(found: CallOutputs) -> Any:
    """Return what a function of JSON answered: its value, or bytes of another media type."""
    content = found.arrays[BODY].reshape(-1)
    if len(content) != 1:
        raise internal(f"the answer has {len(content)} bodies")
    kind = str(found.parameters.get("content_type", "application/json"))
    return msgspec.json.decode(content[0]) if kind.startswith("application/json") else bytes(content[0])


def to_array(value: Any, declared: DeclaredTensor) -> Array:
    """Return a value as an array of the declared type. Raises TypeError and ValueError."""
    value = _on_host(value)
    if declared.datatype == BYTES:
        return np.array(value, object)
    try:
        found = np.asarray(value)
    except ValueError as fault:
        raise ValueError(f"{declared.name}: {fault}") from None
    wanted = numpy_type(declared.datatype)
    if found.dtype == wanted:
        return found
    if found.dtype.kind in "iu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if found.size and not limits.min <= int(found.min()) <= int(found.max()) <= limits.max:
            raise ValueError(f"{declared.name}: {wanted} has values from {limits.min} to {limits.max}")
    elif found.dtype.kind not in "biufc" or not np.can_cast(found.dtype, wanted, "same_kind"):
        raise TypeError(f"{declared.name}: given {found.dtype}, wanted {wanted}")
    return found.astype(wanted)


def numpy_type(datatype: str) -> np.dtype[Any]:
    """Return numpy's type of V2's; that of bfloat16 is float32. Raises ServeError for an unknown one."""
    dtype = DTYPE_BY_KSERVE.get(datatype)
    if dtype is None:
        raise internal(f"the server has a tensor of the unknown datatype {datatype}")
    if datatype == BYTES:
        return np.dtype(object)
    return np.dtype(np.float32 if datatype == BFLOAT16 else dtype.name)


def pack(array: Array, datatype: str) -> bytes | memoryview:
    """Return the raw form of V2: little-endian, strings with their lengths before them. It is the array's own
    memory where that has the form."""
    if datatype == BYTES:
        texts = [one.encode() if isinstance(one, str) else bytes(one) for one in array.reshape(-1)]
        return b"".join(part for one in texts for part in (len(one).to_bytes(_LENGTH_BYTES, "little"), one))
    if datatype == BFLOAT16:
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(array), 0x7FC0, nearest).astype("<u2").tobytes()
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def unpack(data: bytes | memoryview, datatype: str, shape: Sequence[int]) -> Array:
    """Return the array of a raw form; it may be written. Raises ServeError for a size that does not fit."""
    try:
        if datatype == BYTES:
            return np.array([*_split(memoryview(data)), None], object)[:-1].reshape(shape)
        if datatype == BFLOAT16:
            bits: Array = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(shape)
        found: Array = np.frombuffer(data, numpy_type(datatype).newbyteorder("<")).reshape(shape).copy()
        return found
    except ValueError as fault:
        raise internal(f"the answer has a tensor that cannot be read: {fault}") from None


def from_values(values: Any, datatype: str, shape: Sequence[int]) -> Array:
    """Return the array of numbers or strings as JSON has them. Raises ServeError."""
    values = values if isinstance(values, list) else [values]
    if datatype == BYTES:
        values = [one.encode() if isinstance(one, str) else one for one in values]
        return np.array([*values, None], object)[:-1].reshape(shape)
    try:
        return np.array(values, numpy_type(datatype)).reshape(shape)
    except (ValueError, TypeError) as fault:
        raise internal(f"the answer has a tensor that cannot be read: {fault}") from None


def as_values(array: Array, datatype: str) -> list[Any]:
    """Return the elements of an array as JSON has them. Raises ValueError for strings that are no text."""
    if datatype == BYTES:
        return [one if isinstance(one, str) else bytes(one).decode() for one in array.reshape(-1)]
    found: list[Any] = array.reshape(-1).tolist()
    return found


def _split(data: memoryview) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if end > len(data):
            raise ValueError("a string is longer than the tensor")
        found.append(bytes(data[at + _LENGTH_BYTES : end]))
        at = end
    return found


def _names(model: ModelDescription) -> set[str]:
    return {one.name for one in model.inputs}


def _on_host(value: Any) -> Any:
    """Return a tensor of torch as an array; anything else as it is."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()


def _as_json(value: Any) -> Any:
    """Return what msgspec writes in place of a value that it does not know. Raises NotImplementedError."""
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "detach"):
        return np.asarray(_on_host(value)).tolist()
    if hasattr(value, "model_dump"):  # pydantic's
        return value.model_dump()
    raise NotImplementedError(f"a {type(value).__qualname__} has no form in JSON")
