"""The generate extension (spec 10): flat JSON in, flat JSON out, for models of any kind.

    {"text_input": "hi", "max_tokens": 2}  ->  {"model_name": "llm", "text_output": ".."}

A key that names an input becomes that tensor, any other a parameter of the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from math import prod

import msgspec

from fastserve._ext.infer_reply import UnwritableOutput, write_items
from fastserve._ext.json_writer import write_string
from fastserve.codec.json_text import to_bytes, to_text
from fastserve.dialects.kserve.http_infer import check_json, headers_as_sent, output_error
from fastserve.dialects.kserve.inference import make_request
from fastserve.dialects.kserve.json_values import (
    Value,
    as_object,
    as_string,
    find,
    members_of,
    read_json,
    read_leaves,
)
from fastserve.dialects.kserve.request import InferBody, InputPart, check_unique, read_model_parameter
from fastserve.dialects.kserve.routes import KServeTarget
from fastserve.dialects.kserve.service import HTTP_STATUS, KServeService, error_body, triton_error
from fastserve.errors import ModelError, ServeError, invalid
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.net.router import common_status
from fastserve.request import InferResponse
from fastserve.serving.model_view import ModelView, TensorView
from fastserve.serving.streams import Event, alone, generate
from fastserve.serving.traces import RequestTrace
from fastserve.tensor import kserve_name

Answer = tuple[int, bytes]
Events = AsyncGenerator[Event, None]
WORK = 16  # times the bytes of a body: the work of making an object for each value
MOST_VALUES = 1 << 18
MOST_PARAMETERS = 16384
EVENTS = b"text/event-stream; charset=utf-8"
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


class GenerateEndpoint:
    """The endpoint of one target: the one response of a model, or all of them as server-sent events."""

    __slots__ = ("_events", "_service", "_target")

    def __init__(self, service: KServeService, target: KServeTarget, *, events: bool) -> None:
        self._service = service
        self._target = target
        self._events = events

    async def __call__(self, call: Call) -> None:
        service, target = self._service, self._target
        try:
            view = service.find(target.model, target.version)
            if call.header(b"content-encoding").strip().lower() not in (b"", b"identity"):
                raise invalid("Unsupported content-encoding, only 'identity' is supported.")
            check_json(len(call.body), service.options.http_max_input_size)
            body = await service.offload(len(call.body) * WORK, read_generate, view, call.body)
            if service.forward_http:
                service.forward_http.add(headers_as_sent(call), body.parameters)
            with service.traces.one(target.model) as traced:
                send = self._send_events if self._events else self._send_one
                await send(call, view, self._answers(view, body, call.deadline_ns, traced))
        except ServeError as fault:  # nothing has been sent yet
            service.refuse(call, fault, target.model)

    async def _send_one(self, call: Call, view: ModelView, events: Events) -> None:
        status, reply = 200, b""
        async with aclosing(events):
            async for event in events:
                if reply:
                    status, reply = 200, error_body(NOT_ONE)  # as in Triton
                    break
                status, reply = self._status_of(call, event)
        stream = call.stream(status, JSON)
        await stream.write(reply or error_body(NOT_ONE))
        await stream.close()
        if status == 200:
            self._service.traffic.answered(view.model, view.version.number, call.received_ns)

    async def _send_events(self, call: Call, view: ModelView, events: Events) -> None:
        """Send every event. The first one decides the status; a later error is an event."""
        stream, well = None, True
        async with aclosing(events):
            async for event in events:
                status, text = self._status_of(call, event)
                stream, well = stream or call.stream(status, EVENTS), well and status == 200
                await stream.write(b"data: %b\n\n" % text)
        await (stream or call.stream(200, EVENTS)).close()
        if well:
            self._service.traffic.answered(view.model, view.version.number, call.received_ns)

    def _answers(
        self, view: ModelView, body: InferBody, deadline_ns: int, traced: RequestTrace | None
    ) -> Events:
        """Yield every response as JSON. Raises ServeError."""
        service, engine = self._service, traced or self._service.engine

        def start() -> AsyncGenerator[InferResponse, None]:
            request = make_request(view, body, service.regions)
            request.deadline_ns = deadline_ns
            if view.decoupled:
                return engine.stream(view.version, request)
            return alone(partial(engine.infer, view.version, request))

        return generate(start, partial(write_generated, view, body.request_id), service.offload)

    def _status_of(self, call: Call, event: Event) -> Answer:
        """Return an event's text, with the status it has as the first one."""
        return (200, event.text) if event.fault is None else self._refused(call, event.fault)

    def _refused(self, call: Call, fault: ServeError) -> Answer:
        fault = triton_error(call.cause_of(fault))
        self._service.count_fault(self._target.model, fault, call)
        # A model's error is 400 whatever its kind; an error before the model keeps its own status.
        status = 400 if isinstance(fault, ModelError) else common_status(fault) or HTTP_STATUS[fault.kind]
        return status, error_body(fault.message)


def read_generate(view: ModelView, data: bytes | bytearray) -> InferBody:
    """Read a generate body as an infer body. Raises ServeError."""
    body = InferBody()
    document = read_json(data, MOST_VALUES)
    found, value = find(document, "id")
    if found:
        body.request_id = as_string(value, "Unable to parse 'id'")
    for key, value in members_of(document):
        name = to_text(key)
        if name == "parameters":
            _take_nested(view, body, value)
        else:
            _take(view, body, name, value)
    return body


def _take_nested(view: ModelView, body: InferBody, value: Value) -> None:
    for inner, item in as_object(value, "Expected JSON object for keyword: 'parameters'"):
        try:
            _take(view, body, to_text(inner), item)
        except ServeError as fault:
            raise ServeError(fault.kind, f"Converting keyword: 'parameters': {fault.message}") from None


def _take(view: ModelView, body: InferBody, name: str, value: Value) -> None:
    """Add one key to the body: an input of the model, or else one of the model's parameters.

    Raises ServeError.
    """
    side = view.inputs.get(name)
    if side is None:
        if len(body.parameters.own) >= MOST_PARAMETERS:
            raise invalid(f"at most {MOST_PARAMETERS} parameters are read of one request")
        body.parameters.own[name] = read_model_parameter(name, value)
        return
    leaves: list[Value] = value if isinstance(value, list) else [value]
    data, shape = read_leaves(leaves, side.dtype, len(leaves), name), shape_of(view, side, len(leaves))
    check_unique(name, {part.name for part in body.inputs}, body.request_id)
    body.inputs.append(InputPart(name, kserve_name(side.dtype), shape, data))


def shape_of(view: ModelView, side: TensorView, count: int) -> tuple[int, ...]:
    """Return the shape of `count` elements: the innermost free axis takes what the fixed ones leave."""
    dims = view.full_dims(side)
    fixed = prod(size for size in dims if size != -1)
    free = [axis for axis, size in enumerate(dims) if size == -1]
    rest, odd = divmod(count, fixed) if fixed else (0, count)
    if odd or (not free and rest != 1):
        raise invalid(f"The schema can not convert input '{side.name}' to tensor with proper shape")
    return tuple(rest if free and axis == free[-1] else abs(size) for axis, size in enumerate(dims))


def write_generated(view: ModelView, request_id: str, response: InferResponse) -> bytes:
    """Write one response as a flat object, keys in the order of their bytes. Raises ServeError."""
    members = {to_bytes(key): msgspec.json.encode(value) for key, value in response.parameters.items()}
    members[b"model_name"] = write_string(to_bytes(view.model))
    members[b"model_version"] = b'"%d"' % view.version.number
    if request_id:
        members[b"id"] = write_string(to_bytes(request_id))
    for name, tensor in response.outputs.items():
        shape = view.client_shape(name, tensor.shape)
        try:
            items = write_items(tensor.dtype.code, prod(shape), tensor.data)
        except UnwritableOutput as fault:
            raise output_error(fault) from None
        members[to_bytes(name)] = items if prod(shape) == 1 else b"[%b]" % items
    return b"{%b}" % b",".join(b"%b:%b" % (write_string(key), members[key]) for key in sorted(members))
