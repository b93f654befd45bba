"""protobuf's own library as the oracle of proto_wire: the same facts of a message, read its way."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from fastserve.protos import load

KSERVE = load("kserve_v2")
# dtype name: the contents field that holds it (spec triton_v2 11)
FIELDS = {
    "bool": "bool_contents",
    "int8": "int_contents",
    "int16": "int_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
    "uint8": "uint_contents",
    "uint16": "uint_contents",
    "uint32": "uint_contents",
    "uint64": "uint64_contents",
    "float32": "fp32_contents",
    "float64": "fp64_contents",
    "bytes": "bytes_contents",
}


def read_parameters(parameters: Any) -> dict[str, Any]:
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {key: getattr(parameters[key], field) if field else None for key, field in chosen.items()}


def read_infer_request(data: bytes) -> dict[str, Any]:
    """Raises DecodeError."""
    message = KSERVE.ModelInferRequest.FromString(data)
    return {
        "head": (message.model_name, message.model_version, message.id),
        "parameters": read_parameters(message.parameters),
        "inputs": [
            (tensor.name, tensor.datatype, tuple(tensor.shape), read_parameters(tensor.parameters))
            for tensor in message.inputs
        ],
        "contents": [
            {name: pack(tensor.contents, name) for name in FIELDS} if tensor.HasField("contents") else None
            for tensor in message.inputs
        ],
        "outputs": [(output.name, read_parameters(output.parameters)) for output in message.outputs],
        "raw": list(message.raw_input_contents),
    }


def pack(contents: Any, dtype: str) -> bytes:
    """Tensor memory of one field: narrow integers are cut, strings packed."""
    values = getattr(contents, FIELDS[dtype])
    if dtype == "bytes":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    wide = {"int": "int64", "uint": "uint64"}.get(dtype.rstrip("123468"), dtype)
    return np.array(list(values), wide).astype(dtype).tobytes()
