"""V2 requests and responses by the letter of spec triton_v2, section 3: a document tree, then its rules.

No claim to speed. `read` and `write` work on whole values; memory is made by numpy and struct.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from tests.oracles.json_value import Parser, Refused
from tests.oracles.json_writer import escaped, special

DEPTH = 103
DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "FP32": "f4",
    "FP64": "f8",
}
STRING = "attempt to access JSON non-string as string"
UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field"


class Fault(Exception):
    """Its only argument is the text that the client gets."""


def document(body: bytes) -> Any:
    parser = Parser(body, DEPTH)
    parser.at = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    try:
        parser.space()
        if parser.peek() == b"":
            raise Refused("The document is empty.", parser.at)
        value = parser.value(0)
        parser.space()
        if parser.peek() != b"":
            raise Refused("The document root must not be followed by other values.", parser.at)
    except Refused as refused:
        text = f"failed to parse the request JSON buffer: {refused.reason} at {refused.offset}"
        raise Fault(text) from None
    return value


def find(value: Any, name: bytes) -> Any:
    """The member's value in a list of one; an empty list when there is none."""
    members = value[1] if isinstance(value, tuple) else []
    return [found for key, found in members if key == name][:1]


def member(value: Any, name: str, kind: type, detail: str) -> Any:
    found = find(value, name.encode())
    if not found:
        raise Fault(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    if not isinstance(found[0], kind):
        raise Fault(f"Unable to parse '{name}': {detail}")
    return found[0]


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def parameters_of(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, one in value[1] if isinstance(value, tuple) else []:
        plain = text_of(one) if isinstance(one, bytes) else one
        found.setdefault(text_of(key), plain if isinstance(plain, str | int | float) else None)
    return found


def leaves_of(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in leaves_of(one)] if isinstance(value, list) else [value]


def number_of(leaf: Any, datatype: str) -> int | float:
    whole = isinstance(leaf, int) and not isinstance(leaf, bool)
    if datatype == "BOOL":
        if not isinstance(leaf, bool):
            raise Fault("Unable to parse 'data': attempt to access JSON non-boolean as boolean")
        return leaf
    if datatype.startswith("UINT"):
        if not whole or leaf < 0:
            raise Fault(f"Unable to parse 'data': {UNSIGNED}")
        return int(leaf)
    if datatype.startswith("INT"):
        if not whole or leaf >= 2**63:
            raise Fault("Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer")
        return int(leaf)
    if not whole and not isinstance(leaf, float):
        raise Fault("Unable to parse 'data': attempt to access JSON non-number as double")
    return float(leaf)


def memory_of(leaves: list[Any], items: int, datatype: str, name: str) -> bytes:
    if datatype in ("FP16", "BF16"):
        raise Fault(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    if datatype == "BYTES":
        if not all(isinstance(leaf, bytes) for leaf in leaves):
            raise Fault(f"Unable to parse JSON bytes array: {STRING}")
        return b"".join(struct.pack("<I", len(leaf)) + leaf for leaf in leaves)
    if datatype not in DTYPES:
        raise Fault(f"invalid datatype for input {name}")
    numbers = [number_of(leaf, datatype) for leaf in leaves[:items]]
    if len(leaves) != items:
        raise Fault(SHAPE)
    dtype = np.dtype(DTYPES[datatype])
    if dtype.kind in "iu":
        return b"".join((int(n) % 256**dtype.itemsize).to_bytes(dtype.itemsize, "little") for n in numbers)
    with np.errstate(over="ignore"):
        return np.array(numbers, "f8" if dtype.kind == "f" else "?").astype(dtype).tobytes()


def read_scalar(data: Any, datatype: str, name: str) -> bytes:
    """For the shape []: one leaf, or nothing at all."""
    if not isinstance(data, list):
        return b""
    leaves = leaves_of(data)
    try:
        return memory_of(leaves, 1, datatype, name) if len(leaves) == 1 else b""
    except Fault:
        return b""


def read_input(value: Any) -> tuple[Any, ...]:
    parameters = parameters_of(next(iter(find(value, b"parameters")), None))
    data = find(value, b"data")
    given = ["'data'"] if data else []
    given += [f"'{name}'" for name in ("binary_data_size", "shared_memory_region") if name in parameters]
    if len(given) != 1:
        found = "set " + " ".join(given) if given else "no field is set"
        raise Fault(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {found}"
        )
    name = text_of(member(value, "name", bytes, STRING))
    datatype = text_of(member(value, "datatype", bytes, STRING))
    shape = member(value, "shape", list, "attempt to access JSON non-array as array")
    for length in shape:
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise Fault(f"Unable to parse 'shape': {UNSIGNED}")
    items = math.prod(shape)
    memory = None
    if data and items == 0:
        memory = b""
    elif data and not shape:
        memory = read_scalar(data[0], datatype, name)
    elif data:
        leaves = leaves_of(member(value, "data", list, "attempt to access JSON non-array as array"))
        memory = memory_of(leaves, items, datatype, name)
    return name, datatype, tuple(shape), parameters, memory


def read_output(value: Any) -> tuple[str, dict[str, Any]]:
    name = text_of(member(value, "name", bytes, STRING))
    return name, parameters_of(next(iter(find(value, b"parameters")), None))


def read(body: bytes) -> tuple[Any, ...]:
    """(id, parameters, inputs, outputs). Raises Fault."""
    root = document(body)
    identity = text_of(member(root, "id", bytes, STRING)) if find(root, b"id") else ""
    parameters = find(root, b"parameters")
    if parameters and not isinstance(parameters[0], tuple):
        raise Fault("failed to get request params.: attempt to get members for non-object")
    inputs = member(root, "inputs", list, "attempt to access JSON non-array as array")
    read_inputs = [read_input(one) for one in inputs]
    asked = []
    if find(root, b"outputs"):
        outputs = member(root, "outputs", list, "attempt to access JSON non-array as array")
        asked = [read_output(one) for one in outputs]
    return identity, parameters_of(parameters[0] if parameters else None), read_inputs, asked


# -- responses -----------------------------------------------------------------------------------


def float_text(value: float) -> str:
    """The digits of Python's repr; positional for 1e-6 <= |x| < 1e21."""
    text = special(value)
    if text is not None:
        return text
    if value == 0 or 1e-6 <= abs(value) < 1e21:
        return np.format_float_positional(np.float64(value), unique=True, trim="0")
    text = np.format_float_scientific(np.float64(value), unique=True, trim="-")
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def scalar_text(value: Any) -> str:
    if isinstance(value, bytes):
        return escaped(value)
    if isinstance(value, str):
        return escaped(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    return float_text(float(value)) if isinstance(value, float | np.floating) else str(int(value))


def object_text(members: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f'"{key}":{value}' for key, value in members) + "}"


def parameters_text(parameters: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not parameters:
        return []
    inside = ",".join(f"{scalar_text(key)}:{scalar_text(value)}" for key, value in parameters.items())
    return [("parameters", "{" + inside + "}")]


def output_text(name: str, datatype: str, shape: Any, leaves: list[Any] | None, parameters: Any) -> str:
    members = [("name", scalar_text(name)), ("datatype", f'"{datatype}"')]
    members += [("shape", "[" + ",".join(map(str, shape)) + "]"), *parameters_text(parameters)]
    members += [("data", "[" + ",".join(map(scalar_text, leaves)) + "]")] if leaves is not None else []
    return object_text(members)


def write(model: str, version: str, outputs: list[Any], identity: str = "", parameters: Any = None) -> bytes:
    """outputs: (name, datatype, shape, flat leaves or None, parameters or None) each."""
    members = [("id", scalar_text(identity))] if identity else []
    members += [("model_name", scalar_text(model)), ("model_version", scalar_text(version))]
    members += parameters_text(parameters)
    members += [("outputs", "[" + ",".join(output_text(*output) for output in outputs) + "]")]
    return object_text(members).encode("latin-1")
