"""protobuf's own library as the oracle of proto_wire_v1."""

from __future__ import annotations

from typing import Any

from fastserve.protos import load

TRITON = load("triton_v1")


def read_v1_request(data: bytes) -> dict[str, Any]:
    """Raises DecodeError."""
    message = TRITON.InferRequest.FromString(data)
    header = message.meta_data
    return {
        "head": (message.model_name, message.model_version, header.batch_size),
        "sequence": (header.correlation_id, header.flags),
        "id": (header.id, header.priority, header.timeout_microseconds),
        "inputs": [
            (tensor.name, tuple(tensor.dims), tensor.batch_byte_size, read_place(tensor))
            for tensor in header.input
        ],
        "outputs": [
            (output.name, output.cls.count if output.HasField("cls") else None, read_place(output))
            for output in header.output
        ],
        "raw": list(message.raw_input),
    }


def read_place(tensor: Any) -> tuple[str, int, int] | None:
    if not tensor.HasField("shared_memory"):
        return None
    place = tensor.shared_memory
    return (place.name, place.offset, place.byte_size)


def make_header(name: str, version: int, batch_size: int, id: int, outputs: Any) -> Any:
    header = TRITON.InferResponseHeader(model_name=name, model_version=version, batch_size=batch_size, id=id)
    for name, dims, byte_size, batch_classes in outputs:
        output = header.output.add(name=name)
        if batch_classes is None:
            output.raw.SetInParent()
            output.raw.dims.extend(dims)
            output.raw.batch_byte_size = byte_size
        for classes in batch_classes or ():
            item = output.batch_classes.add()
            for index, value, label in classes:
                item.cls.add(idx=index, value=value, label=label)
    return header


def make_response(status: tuple[int, str, str, int], header: Any, raw: list[bytes]) -> Any:
    code, msg, server_id, request_id = status
    message = TRITON.InferResponse(raw_output=raw, meta_data=header)
    message.request_status.SetInParent()
    message.request_status.code = code
    message.request_status.msg = msg
    message.request_status.server_id = server_id
    message.request_status.request_id = request_id
    return message


def write_protobuf(status: tuple[int, str, str, int], reply: tuple[Any, ...], raw: list[bytes]) -> bytes:
    data: bytes = make_response(status, make_header(*reply), raw).SerializeToString()
    return data
