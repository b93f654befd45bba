"""A reply to infer as bytes: JSON, then the outputs that go as they are (spec 3.1, 3.2).

The exact way, for outputs of any kind; `hot` writes the plain ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fastserve._ext.flatten import unpack_bytes
from fastserve._ext.json_writer import write_string
from fastserve.dialects.kserve_v2.errors import to_bytes
from fastserve.dialects.kserve_v2.leaves import refuse_json
from fastserve.tensor import KSERVE_NAME, Tensor

_TYPECODE = {
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
    "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "float32": "f", "float64": "d",
}  # fmt: skip


@dataclass(slots=True)
class OutputReply:
    """One output as it is answered: as JSON, as bytes after it (`binary`), or elsewhere (`outside`)."""

    name: str
    tensor: Tensor
    binary: bool = False
    outside: bool = False


def write_reply(
    model: str,
    version: int,
    request_id: str,
    outputs: Sequence[OutputReply],
    parameters: Mapping[str, object],
) -> tuple[bytes, list[bytes | bytearray | memoryview]]:
    """The JSON, and the memory that follows it. Raises ServeError for a type that has no JSON form."""
    parts = [b"{"]
    if request_id:
        parts.append(b'"id":%b,' % write_string(to_bytes(request_id)))
    parts.append(b'"model_name":%b,"model_version":"%d"' % (write_string(to_bytes(model)), version))
    if parameters:
        parts.append(b',"parameters":%b' % msgspec.json.encode(parameters))
    parts.append(b',"outputs":[%b]}' % b",".join(map(_write_output, outputs)))
    return b"".join(parts), [output.tensor.data for output in outputs if output.binary]


def _write_output(output: OutputReply) -> bytes:
    tensor = output.tensor
    head = b'{"name":%b,"datatype":"%b","shape":[%b]' % (
        write_string(to_bytes(output.name)),
        KSERVE_NAME[tensor.dtype.name].encode(),
        ",".join(map(str, tensor.shape)).encode(),
    )
    if output.outside:
        return head + b"}"
    if output.binary:
        return b'%b,"parameters":{"binary_data_size":%d}}' % (head, memoryview(tensor.data).nbytes)
    return b'%b,"data":[%b]}' % (head, b",".join(write_items(tensor)))


def write_items(tensor: Tensor) -> list[bytes]:
    """Every element as a JSON value. Raises ServeError for a type that has none."""
    name = tensor.dtype.name
    refuse_json(tensor.dtype, "sending", "output")
    if name == "bytes":
        size = 1
        for axis in tensor.shape:
            size *= axis
        return [write_string(item) for item in unpack_bytes(tensor.data, size)]
    if name == "bool":
        return [b"true" if item else b"false" for item in bytes(tensor.data)]
    items = array(_TYPECODE[name])
    items.frombytes(tensor.data)
    if name.startswith("float"):
        return [write_double(item) for item in items]
    return [b"%d" % item for item in items]


def write_double(value: float) -> bytes:
    """The shortest text of a double, laid out as the original does: fixed from 1e-6 up to 1e21."""
    if value != value:
        return b"NaN"
    if value in (float("inf"), float("-inf")):
        return b"Infinity" if value > 0 else b"-Infinity"
    text = repr(value)
    size = abs(value)
    if size == 0 or 1e-4 <= size < 1e16:
        return text.encode()
    digits, _, exponent = text.lstrip("-").partition("e")
    sign = "-" if text.startswith("-") else ""
    whole, _, fraction = digits.partition(".")
    if 1e-6 <= size < 1e21:
        return (sign + _fixed(whole + fraction, len(whole) + int(exponent or 0))).encode()
    return f"{sign}{digits}e{int(exponent)}".encode()


def _fixed(digits: str, point: int) -> str:
    """Digits with the decimal point after `point` of them."""
    if point <= 0:
        return "0." + "0" * -point + digits
    return digits.ljust(point, "0") + ".0" if len(digits) <= point else f"{digits[:point]}.{digits[point:]}"
