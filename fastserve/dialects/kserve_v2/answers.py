"""What a request is answered with: its outputs in its client's shapes or as classes, where it wants them, and
the text of HTTP's reply (spec 3.1, 3.2, 5). For outputs of any kind; `frames` writes the plain ones.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from fastserve._ext.infer_reply import UnwritableCode, UnwritableOutput, write_infer
from fastserve.apart import Apart
from fastserve.config import Limits
from fastserve.dialects.kserve_v2.errors import not_in_json, too_large
from fastserve.dialects.kserve_v2.request import Asked, Memory
from fastserve.dialects.kserve_v2.service import JSON
from fastserve.errors import Kind, ServeError, internal, invalid, unsupported
from fastserve.request import InferResponse
from fastserve.serving.classification import Class, check_order, classify
from fastserve.serving.model_view import ModelView
from fastserve.serving.rooms import Room, Rooms
from fastserve.tensor import DTYPES, Tensor, kserve_name
from fastserve.wire.call import Call
from fastserve.wire.coding import DEFLATE, GZIP, IDENTITY, choose_coding, pack
from fastserve.wire.inflate import inflate

BINARY = b"application/octet-stream"
PACKING = 8  # times a byte that is printed: what packing one costs


class Shown(NamedTuple):
    """One output as it is answered. `outside`: its client has it already."""

    name: str
    tensor: Tensor
    outside: bool


def show_outputs(view: ModelView, asked: Asked, response: InferResponse, rooms: Rooms) -> list[Shown]:
    """Outputs as they were asked for; those for client memory are put there. Raises ServeError."""
    return [_show(view, asked, name, t, rooms.get(name)) for name, t in response.outputs.items()]


def _show(view: ModelView, asked: Asked, name: str, tensor: Tensor, room: Room | None) -> Shown:
    tensor, part = client_tensor(view, name, tensor), asked.parts.get(name)
    if part is not None and part.classes:
        tensor = _best_classes(view, name, tensor, part.classes)
    if room is not None:
        room.put(name, tensor.data)
    return Shown(name, tensor, outside=room is not None)


def client_tensor(view: ModelView, name: str, tensor: Tensor) -> Tensor:
    """An output in the shape clients see."""
    shape = view.client_shape(name, tensor.shape)
    return tensor if shape is tensor.shape else Tensor(tensor.dtype, shape, tensor.data)


def _best_classes(view: ModelView, name: str, tensor: Tensor, most: int) -> Tensor:
    """The classification extension (spec 5): `VALUE:INDEX` or `VALUE:INDEX:LABEL` as BYTES [rows?, classes].
    Raises ServeError for a type that has no order."""
    check_order(tensor, "output", kserve_name(tensor.dtype))
    rows = classify(tensor, most, view.labels(name), batching=view.batching)
    shape = (len(rows), min(most, prod(tensor.shape[view.batching :])))
    texts = [_describe(one) for row in rows for one in row]
    packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return Tensor(DTYPES["bytes"], shape if view.batching else shape[1:], packed)


def _describe(one: Class) -> bytes:
    number = str(one.value) if isinstance(one.value, int) else f"{one.value:f}"
    return f"{number}:{one.idx}:{one.label}".encode() if one.label else f"{number}:{one.idx}".encode()


def reply_parameters(view: ModelView, asked: Asked, response: InferResponse) -> dict[str, Any]:
    """The reply's own parameters; an ensemble's say again what sequence the request was of."""
    own = {key: value for key, value in response.parameters.items() if isinstance(value, str | int | float)}
    if not view.ensemble:
        return own
    names = ("sequence_id", "sequence_start", "sequence_end")
    return {**{name: getattr(asked.parameters, name) for name in names}, **own}


# --- over HTTP ------------------------------------------------------------------------------------------


def write_answer(
    view: ModelView, asked: Asked, response: InferResponse, request_id: str, rooms: Rooms
) -> tuple[int, bytes]:
    """How much of the reply is JSON when that is not all of it, and the reply. Raises ServeError."""
    described: list[tuple[str, int, tuple[int, ...], Memory | None, dict[str, Any] | None]] = []
    blobs: list[Memory] = []
    for name, tensor, outside in show_outputs(view, asked, response, rooms):
        data, size = None, None
        if not outside and asked.form(name) == "binary":
            blobs.append(tensor.data)
            size = {"binary_data_size": memoryview(tensor.data).nbytes}
        elif not outside:
            data = tensor.data
        described.append((name, tensor.dtype.code, tensor.shape, data, size))
    number, parameters = str(view.version.number), reply_parameters(view, asked, response)
    try:
        header = write_infer(view.model, number, described, id=request_id, parameters=parameters)
    except UnwritableOutput as fault:
        raise in_words(fault) from None
    return (len(header), b"".join((header, *blobs))) if any(map(len, blobs)) else (0, header)


def in_words(fault: UnwritableOutput) -> ServeError:
    """What a client is told of an output that has no JSON form."""
    if fault.code is UnwritableCode.UNSUPPORTED_DTYPE:
        return not_in_json("sending", fault.datatype, "output")
    return internal(f"output '{fault.name}' cannot be written: {fault.code.name}")


def send(call: Call, header_bytes: int, reply: bytes) -> None:
    """Reply 200; `header_bytes` of it are JSON, 0 when all of it is."""
    coding = choose_coding(call.header(b"accept-encoding"))
    _send(call, header_bytes, reply if coding == IDENTITY else pack(reply, coding), coding)


async def send_apart(apart: Apart, call: Call, header_bytes: int, reply: bytes) -> None:
    """The same, with a large reply packed apart from the event loop."""
    coding = choose_coding(call.header(b"accept-encoding"))
    if coding != IDENTITY:
        reply = await apart(len(reply) * PACKING, pack, reply, coding)
    _send(call, header_bytes, reply, coding)


def _send(call: Call, header_bytes: int, reply: bytes, coding: bytes) -> None:
    headers: list[tuple[bytes, bytes]] = []
    if header_bytes:
        headers.append((b"Inference-Header-Content-Length", b"%d" % header_bytes))
    if coding != IDENTITY:
        headers.append((b"Content-Encoding", coding))
    call.reply(200, reply, BINARY if header_bytes else JSON, headers)


SUPPORTED = ((b"Accept-Encoding", b"gzip, deflate"),)
UNSUPPORTED = "Unsupported compression type"


def unpack(body: bytes | bytearray, coding: bytes, limits: Limits, most: int) -> bytes | bytearray:
    """The body without its Content-Encoding, of at most `most` bytes. Raises ServeError."""
    name = coding.strip().lower()
    if name in (b"", IDENTITY):
        return body
    if name not in (GZIP, DEFLATE):
        raise unsupported(UNSUPPORTED)
    within = replace(limits, inflated_bytes=most) if most < limits.inflated_bytes else limits
    try:
        return inflate(body, within)
    except ServeError as fault:  # also one that grows too large is the request's own fault here
        if fault.kind is not Kind.RESOURCE_EXHAUSTED:
            raise
        if within is not limits and "limits.inflated_bytes" in fault.message:
            raise too_large("Decompressed data size exceeds the maximum allowed value", most) from None
        raise invalid(fault.message) from None
