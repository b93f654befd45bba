"""protobuf's own library as the oracle of proto_wire: the same facts of a message, read its way."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet

from fastserve.protos import Messages, load

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


def _unmap(message: DescriptorProto) -> None:
    message.options.ClearField("map_entry")
    for nested in message.nested_type:
        _unmap(nested)


def without_maps(messages: Messages) -> Messages:
    """Return the wire format with each map as the repeated entries it is.

    The library's Python half drops a map entry with an unknown field in it; its C++ half, which real
    servers use, keeps it, and so does a message that is not called a map.
    """
    files = FileDescriptorSet.FromString(messages.descriptor_set)
    for file in files.file:
        for message in file.message_type:
            _unmap(message)
    return Messages(files.SerializeToString())


FLAT = without_maps(KSERVE)


def read_parameters(entries: Any) -> dict[str, Any]:
    chosen = [(entry.key, entry.value, entry.value.WhichOneof("parameter_choice")) for entry in entries]
    return {key: getattr(value, field) if field else None for key, value, field in chosen}


def read_infer_request(data: bytes) -> dict[str, Any]:
    """Raises DecodeError."""
    message = FLAT.ModelInferRequest.FromString(data)
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


def make_parameters(field: Any, parameters: dict[str, Any] | None) -> None:
    names = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for key, value in (parameters or {}).items():
        entry = field[key]
        if value is not None:
            large = type(value) is int and value >= 2**63
            setattr(entry, "uint64_param" if large else names[type(value)], value)


def make_response(
    name: str, version: str, id: str, parameters: dict[str, Any], outputs: Any, raw: Any
) -> Any:
    message = KSERVE.ModelInferResponse(model_name=name, model_version=version, id=id)
    make_parameters(message.parameters, parameters)
    for name, datatype, shape, own in outputs:
        output = message.outputs.add(name=name, datatype=datatype, shape=shape)
        make_parameters(output.parameters, own)
    message.raw_output_contents.extend(bytes(memory) for memory in raw)
    return message


def write_infer_response(*content: Any) -> bytes:
    data: bytes = make_response(*content).SerializeToString()
    return data


def read_infer_response(data: bytes) -> tuple[None, Any]:
    return None, KSERVE.ModelInferResponse.FromString(data)


def read_stream_response(data: bytes) -> tuple[str, Any]:
    message = KSERVE.ModelStreamInferResponse.FromString(data)
    return message.error_message, message.infer_response
