"""POST .../infer. Read the body, await the engine, write the reply (spec 3)."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from typing import Any

from fastserve.dialects.kserve_v2.body import InferBody, OutputPart, read_body
from fastserve.dialects.kserve_v2.checks import check_inputs, check_outputs, deduce_raw
from fastserve.dialects.kserve_v2.classes import classify
from fastserve.dialects.kserve_v2.coding import SUPPORTED, UNSUPPORTED, choose_coding, pack, unpack
from fastserve.dialects.kserve_v2.errors import internal, invalid, unsupported
from fastserve.dialects.kserve_v2.hot import HotDoor
from fastserve.dialects.kserve_v2.lookup import find_version, read_version
from fastserve.dialects.kserve_v2.parameters import Parameters
from fastserve.dialects.kserve_v2.plans import Plan, to_client_shape
from fastserve.dialects.kserve_v2.regions import Destination
from fastserve.dialects.kserve_v2.replies import OutputReply, write_reply
from fastserve.dialects.kserve_v2.routes import Target
from fastserve.dialects.kserve_v2.service import JSON, Service
from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import Tensor
from fastserve.wire.call import Call

BINARY = b"application/octet-stream"
HEADER_LENGTH = b"inference-header-content-length"
_NUMBER = re.compile(rb"[ \t]*([+-]?[0-9]{1,19})[ \t]*")
Destinations = Mapping[str, Destination]


class Infer:
    """The endpoint of one target."""

    __slots__ = ("_door", "_doorless", "_head", "_number", "_service", "_target")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._target = target
        self._door: HotDoor | None = None
        self._head: object = None  # of the last call that may pass the hot door
        self._doorless: Version | None = None  # the version last found to have no hot door
        # A number too long to be one reaches no version either way; the general door says why.
        self._number = (int(target.version) if len(target.version) < 20 else -1) if target.version else None

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        door = self._door
        version = self._service.catalog.available(self._target.model, self._number)
        if door is None or door.version is not version:
            door = self._open_door(version)
            if door is None:
                return self._answer(call)
        if call.head is not self._head and not self._meet(call):
            return self._answer(call)
        return None if door.start(call) else self._answer(call)

    def _open_door(self, version: Version | None) -> HotDoor | None:
        if version is None or version is self._doorless:
            return None
        self._door = HotDoor.of(self._service, self._service.plans.of(version))
        self._doorless = version if self._door is None else None
        return self._door

    def _meet(self, call: Call) -> bool:
        """Look at a head once (the wire hands equal heads on as one object): is the body plain JSON?"""
        if call.header(HEADER_LENGTH) or call.header(b"content-encoding"):
            return False
        if choose_coding(call.header(b"accept-encoding")) != "identity":
            return False
        self._head = call.head
        return True

    async def _answer(self, call: Call) -> None:
        service, target = self._service, self._target
        version: Version | None = None
        try:
            plan = find_plan(service, target)
            version = plan.version
            if plan.decoupled:
                raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
            body = read_call(service, plan, call)
            with ExitStack() as held:
                header_bytes, reply = await _run(service, plan, body, held)
        except ServeError as fault:
            headers = SUPPORTED if fault.message == UNSUPPORTED else ()
            service.refuse(call, fault, target.model, headers, version)
        else:
            _send(call, header_bytes, reply)
            service.succeeded(call, plan)


def find_plan(service: Service, target: Target) -> Plan:
    """The plan of the version a URL names. Raises ServeError."""
    version = find_version(service.catalog, target.model, read_version(target.version))
    return service.plans.of(version)


def read_call(service: Service, plan: Plan, call: Call) -> InferBody:
    """The body of a call, raw ones as well. Raises ServeError."""
    data = unpack(call.body, call.header(b"content-encoding"), service.limits)
    length = _header_length(call.header(HEADER_LENGTH), len(data))
    if not length:
        raw = InferBody(inputs=[deduce_raw(plan, data)])
        if length is None:
            said = call.header(HEADER_LENGTH).decode("latin-1")
            raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {said}")
        raw.parameters.binary_output = True
        return raw
    view = memoryview(data)
    return read_body(view[:length], view[length:], plan.model, service.regions.read)


def _header_length(text: bytes, body_bytes: int) -> int | None:
    """How much of the body is JSON. None for what is no number: 24.10 took it for 0, so a raw request's
    faults are told first; releases since refuse it."""
    if not text:
        return body_bytes
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    length = int(match[1])
    if not 0 <= length <= body_bytes:
        raise invalid(f"inference header size should be in range (0, {body_bytes}), got: {length}")
    return length


async def _run(service: Service, plan: Plan, body: InferBody, held: ExitStack) -> tuple[int, bytes]:
    """The reply, and how much of it is JSON when that is not all. Raises ServeError."""
    parts = {part.name: part for part in reversed(body.outputs)}
    rooms = {
        name: held.enter_context(service.regions.holding(part.range))
        for name, part in parts.items()
        if part.range is not None
    }
    request = make_request(plan, body)
    response = await service.engine.infer(plan.version, request)
    try:
        outputs = [
            _answer_output(plan, name, tensor, parts.get(name), rooms, body.parameters.binary_output)
            for name, tensor in response.outputs.items()
        ]
        shown = reply_parameters(plan, body.parameters, response)
        number = plan.version.number
        header, blobs = write_reply(plan.model, number, body.request_id, outputs, shown)
        return (len(header), b"".join((header, *blobs))) if any(map(len, blobs)) else (0, header)
    finally:
        response.release()


def make_request(plan: Plan, body: InferBody) -> InferRequest:
    """The neutral request of a body that fits the model. Raises ServeError."""
    parameters = body.parameters
    wanted = check_outputs(plan, [part.name for part in body.outputs])
    return InferRequest(
        check_inputs(plan, body.inputs, body.request_id),
        wanted,
        request_id=body.request_id,
        priority=parameters.priority,
        parameters=parameters.own,
        sequence_id=parameters.sequence_id,
        sequence_start=parameters.sequence_start,
        sequence_end=parameters.sequence_end,
        timeout_us=parameters.timeout_us,
    )


def client_tensor(plan: Plan, name: str, tensor: Tensor) -> Tensor:
    """An output in the shape clients see."""
    side = plan.outputs.get(name)
    if side is None or side.dims == side.model_dims:
        return tensor
    return Tensor(tensor.dtype, to_client_shape(side, tensor.shape, plan.max_batch_size > 0), tensor.data)


def reply_parameters(plan: Plan, asked: Parameters, response: InferResponse) -> Mapping[str, object]:
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
    plan: Plan, name: str, tensor: Tensor, part: OutputPart | None, rooms: Destinations, binary: bool
) -> OutputReply:
    tensor = client_tensor(plan, name, tensor)
    if part is None:
        return OutputReply(name, tensor, binary=binary)
    if part.classes:
        tensor = classify(plan, name, tensor, part.classes)
    if name in rooms:
        put_outside(name, tensor, rooms[name])
        return OutputReply(name, tensor, outside=True)
    return OutputReply(name, tensor, binary=part.binary)


def put_outside(name: str, tensor: Tensor, room: Destination) -> None:
    """Write an output into its client's memory. Raises ServeError."""
    size = memoryview(tensor.data).nbytes
    if size > room.byte_size:
        raise internal(
            f"shared memory size specified with the request for output '{name}' ({room.byte_size} bytes) "
            f"should be at least {size} bytes to hold the results"
        )
    room.write(tensor.data)


def _send(call: Call, header_bytes: int, reply: bytes) -> None:
    headers: list[tuple[bytes, bytes]] = []
    if header_bytes:
        headers.append((b"Inference-Header-Content-Length", b"%d" % header_bytes))
    coding = choose_coding(call.header(b"accept-encoding"))
    if coding != "identity":
        reply = pack(reply, coding)
        headers.append((b"Content-Encoding", coding.encode()))
    call.reply(200, reply, BINARY if header_bytes else JSON, headers)
