"""What a request is answered with: its outputs as JSON, as bytes behind it, or in its client's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from fastserve.dialects.kserve_v2.body import InferBody, OutputPart
from fastserve.dialects.kserve_v2.coding import Coding, choose_coding, pack
from fastserve.dialects.kserve_v2.parameters import Parameters
from fastserve.dialects.kserve_v2.replies import OutputReply, write_reply
from fastserve.dialects.kserve_v2.service import JSON
from fastserve.request import InferResponse
from fastserve.serving.classification import Class, check_order, classify
from fastserve.serving.model_view import ModelView
from fastserve.serving.shared_memory import Destination, Range
from fastserve.tensor import DTYPES, Tensor, kserve_name
from fastserve.wire.apart import Apart
from fastserve.wire.call import Call

BINARY = b"application/octet-stream"
PACKING = 8  # times a byte that is printed: what packing one costs


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of its reply. `binary`: how outputs go that it does not name."""

    parts: dict[str, OutputPart]
    ranges: dict[str, Range]  # of outputs that go into client memory
    binary: bool
    parameters: Parameters

    @classmethod
    def of(cls, body: InferBody) -> Asked:
        parts = {part.name: part for part in reversed(body.outputs)}  # the first of a name counts
        ranges = {name: part.range for name, part in parts.items() if part.range is not None}
        return cls(parts, ranges, body.parameters.binary_output, body.parameters)

    @property
    def classifies(self) -> bool:
        return any(part.classes for part in self.parts.values())

    def form(self, name: str) -> str:
        """How an output goes: "json", "binary" or "outside"."""
        part = self.parts.get(name)
        if part is None:
            return "binary" if self.binary else "json"
        return "outside" if part.range is not None else "binary" if part.binary else "json"


def write_answer(
    plan: ModelView, asked: Asked, response: InferResponse, request_id: str, rooms: Mapping[str, Destination]
) -> tuple[int, bytes]:
    """The reply, and how much of it is JSON when that is not all. Raises ServeError."""
    outputs = [_answer_output(plan, asked, name, t, rooms) for name, t in response.outputs.items()]
    shown = reply_parameters(plan, asked.parameters, response)
    header, blobs = write_reply(plan.model, plan.version.number, request_id, outputs, shown)
    return (len(header), b"".join((header, *blobs))) if any(map(len, blobs)) else (0, header)


def client_tensor(plan: ModelView, name: str, tensor: Tensor) -> Tensor:
    """An output in the shape clients see."""
    shape = client_shape(plan, name, tensor.shape)
    return tensor if shape is tensor.shape else Tensor(tensor.dtype, shape, tensor.data)


def shown_tensor(plan: ModelView, name: str, tensor: Tensor, part: OutputPart | None) -> Tensor:
    """An output as it was asked for: in its clients' shape, or its best classes. Raises ServeError."""
    tensor = client_tensor(plan, name, tensor)
    return best_classes(plan, name, tensor, part.classes) if part is not None and part.classes else tensor


def client_shape(plan: ModelView, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape clients see of an output."""
    return plan.client_shape(name, shape)


def best_classes(plan: ModelView, name: str, tensor: Tensor, most: int) -> Tensor:
    """The classification extension (spec 5): `VALUE:INDEX` or `VALUE:INDEX:LABEL` as BYTES [rows?, classes].
    Raises ServeError for a type that has no order."""
    check_order(tensor, "output", kserve_name(tensor.dtype))
    rows = classify(tensor, most, plan.labels(name), batching=plan.batching)
    shape = (len(rows), min(most, prod(tensor.shape[plan.batching :])))
    texts = [_describe(one) for row in rows for one in row]
    packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return Tensor(DTYPES["bytes"], shape if plan.batching else shape[1:], packed)


def _describe(one: Class) -> bytes:
    number = str(one.value) if isinstance(one.value, int) else f"{one.value:f}"
    return f"{number}:{one.idx}:{one.label}".encode() if one.label else f"{number}:{one.idx}".encode()


def reply_parameters(plan: ModelView, asked: Parameters, response: InferResponse) -> Mapping[str, object]:
    """The reply's own parameters; an ensemble's say again what sequence the request was of."""
    if not plan.ensemble:
        return response.parameters
    sequence = {
        "sequence_id": asked.sequence_id,
        "sequence_start": asked.sequence_start,
        "sequence_end": asked.sequence_end,
    }
    return {**sequence, **response.parameters}


def _answer_output(
    plan: ModelView, asked: Asked, name: str, tensor: Tensor, rooms: Mapping[str, Destination]
) -> OutputReply:
    tensor = shown_tensor(plan, name, tensor, asked.parts.get(name))
    form = asked.form(name)
    if form == "outside":
        rooms[name].put(name, tensor.data)
    return OutputReply(name, tensor, binary=form == "binary", outside=form == "outside")


def send(call: Call, header_bytes: int, reply: bytes) -> None:
    """Reply 200; `header_bytes` of it are JSON, 0 when all of it is."""
    coding = choose_coding(call.header(b"accept-encoding"))
    _send(call, header_bytes, reply if coding == "identity" else pack(reply, coding), coding)


async def send_apart(apart: Apart, call: Call, header_bytes: int, reply: bytes) -> None:
    """The same, with a large reply packed apart from the event loop."""
    coding = choose_coding(call.header(b"accept-encoding"))
    if coding != "identity":
        reply = await apart(len(reply) * PACKING, pack, reply, coding)
    _send(call, header_bytes, reply, coding)


def _send(call: Call, header_bytes: int, reply: bytes, coding: Coding) -> None:
    headers: list[tuple[bytes, bytes]] = []
    if header_bytes:
        headers.append((b"Inference-Header-Content-Length", b"%d" % header_bytes))
    if coding != "identity":
        headers.append((b"Content-Encoding", coding.encode()))
    call.reply(200, reply, BINARY if header_bytes else JSON, headers)
