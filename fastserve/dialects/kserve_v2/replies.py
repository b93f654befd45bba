"""A reply to infer as bytes: JSON, then the outputs that go as they are (spec 3.1, 3.2).

For outputs of any kind; `http_fast` writes the plain ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastserve._ext.flatten import unpack_bytes
from fastserve._ext.infer_reply import UnwritableCode, UnwritableOutput, write_infer
from fastserve._ext.json_writer import write_string
from fastserve.dialects.kserve_v2.errors import internal, invalid
from fastserve.dialects.kserve_v2.leaves import refuse_json
from fastserve.errors import ServeError
from fastserve.tensor import ARRAY_CODE, Tensor

Memory = bytes | bytearray | memoryview
Scalar = str | int | float | bool


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
) -> tuple[bytes, list[Memory]]:
    """The JSON, and the memory that follows it. Raises ServeError for a type that has no JSON form."""
    described = [_describe(output) for output in outputs]
    own = {key: value for key, value in parameters.items() if isinstance(value, str | int | float)}
    try:
        header = write_infer(model, str(version), described, id=request_id, parameters=own or None)
    except UnwritableOutput as fault:
        raise in_words(fault) from None
    return header, [output.tensor.data for output in outputs if output.binary]


def _describe(output: OutputReply) -> tuple[str, int, Sequence[int], Memory | None, dict[str, Scalar] | None]:
    tensor = output.tensor
    if output.outside:
        return output.name, tensor.dtype.code, tensor.shape, None, None
    if output.binary:
        size: dict[str, Scalar] = {"binary_data_size": memoryview(tensor.data).nbytes}
        return output.name, tensor.dtype.code, tensor.shape, None, size
    return output.name, tensor.dtype.code, tensor.shape, tensor.data, None


def in_words(fault: UnwritableOutput) -> ServeError:
    """What a client is told of an output that has no JSON form."""
    if fault.code is UnwritableCode.UNSUPPORTED_DTYPE:
        return invalid(
            f"sending {fault.datatype} data via JSON is not supported. Please use the binary data format "
            "for output"
        )
    return internal(f"output '{fault.name}' cannot be written: {fault.code.name}")


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
    items = array(ARRAY_CODE[name])
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
