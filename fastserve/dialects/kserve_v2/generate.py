"""The generate extension (spec 10): flat JSON in, flat JSON out, for models of any kind.

    {"text_input": "hi", "max_tokens": 2}  ->  {"model_name": "llm", "text_output": ".."}

A key that names an input becomes that tensor, any other a parameter of the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from math import prod
from typing import TYPE_CHECKING

import msgspec

from fastserve._ext.json_writer import write_string
from fastserve.dialects.kserve_v2.body import InferBody, InputPart
from fastserve.dialects.kserve_v2.document import as_object, as_string, read_object
from fastserve.dialects.kserve_v2.errors import (
    HTTP_STATUS,
    error_body,
    in_own_words,
    invalid,
    to_bytes,
    to_text,
)
from fastserve.dialects.kserve_v2.infer import client_tensor, find_plan, make_request
from fastserve.dialects.kserve_v2.leaves import read_leaves
from fastserve.dialects.kserve_v2.parameters import set_parameter
from fastserve.dialects.kserve_v2.plans import Plan, Side, full_dims
from fastserve.dialects.kserve_v2.replies import write_items
from fastserve.dialects.kserve_v2.routes import Target
from fastserve.dialects.kserve_v2.service import JSON, Service
from fastserve.errors import ModelError, ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.wire.call import Call

if TYPE_CHECKING:
    from fastserve._ext.json_value import Value

EVENTS = b"text/event-stream; charset=utf-8"
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


class Generate:
    """The endpoint of one target: the one response a model gives, or all as events."""

    __slots__ = ("_events", "_service", "_target")

    def __init__(self, service: Service, target: Target, *, events: bool) -> None:
        self._service = service
        self._target = target
        self._events = events

    async def __call__(self, call: Call) -> None:
        service, target = self._service, self._target
        try:
            plan = find_plan(service, target)
            if call.header(b"content-encoding").strip().lower() not in (b"", b"identity"):
                raise invalid("Unsupported content-encoding, only 'identity' is supported.")
            body = read_generate(plan, call.body)
        except ServeError as fault:
            service.refuse(call, fault, target.model)
            return
        if self._events:
            await self._send_events(call, plan, body)
        else:
            await self._send_one(call, plan, body)

    async def _send_one(self, call: Call, plan: Plan, body: InferBody) -> None:
        status, reply = 200, b""
        try:
            async with aclosing(_responses(self._service, plan, body)) as responses:
                async for text in responses:
                    if reply:
                        reply = error_body(NOT_ONE)  # and 200, as in the original
                        break
                    reply = text
            self._service.succeeded(call, plan)
        except ServeError as fault:
            status, reply = self._refused(fault)
        stream = call.stream(status, JSON)
        await stream.write(reply or error_body(NOT_ONE))
        await stream.close()

    async def _send_events(self, call: Call, plan: Plan, body: InferBody) -> None:
        """The first response decides the status; an error after it is one more event."""
        stream = None
        try:
            async with aclosing(_responses(self._service, plan, body)) as responses:
                async for text in responses:
                    stream = stream or call.stream(200, EVENTS)
                    await stream.write(b"data: %b\n\n" % text)
            self._service.succeeded(call, plan)
        except ServeError as fault:
            status, reply = self._refused(fault)
            stream = stream or call.stream(status, EVENTS)
            await stream.write(b"data: %b\n\n" % reply)
        await (stream or call.stream(200, EVENTS)).close()

    def _refused(self, fault: ServeError) -> tuple[int, bytes]:
        fault = in_own_words(fault)
        self._service.traffic.refused(self._target.model, fault.kind.name)
        # A model's error is 400 here whatever its code; what never reached the model keeps its own.
        status = 400 if isinstance(fault, ModelError) else HTTP_STATUS[fault.kind]
        return status, error_body(fault.message)


async def _responses(service: Service, plan: Plan, body: InferBody) -> AsyncGenerator[bytes, None]:
    """Every response as JSON. Raises ServeError."""
    request = make_request(plan, body)
    if not plan.decoupled:
        response = await service.engine.infer(plan.version, request)
        try:
            text = write_generated(plan, request, response)
        finally:
            response.release()
        yield text
        return
    async with aclosing(service.stream(plan.version, request)) as responses:
        async for response in responses:
            try:
                text = write_generated(plan, request, response) if response.outputs else b""
            finally:
                response.release()
            if response.error is not None:
                raise response.error
            if text:
                yield text


def read_generate(plan: Plan, data: bytes | bytearray) -> InferBody:
    """A generate body as an infer body. Raises ServeError."""
    body = InferBody()
    for key, value in read_object(data):
        name = to_text(key)
        if name == "id":
            body.request_id = as_string(value, "Unable to parse 'id'")
        elif name == "parameters":
            for inner, item in as_object(value, "Expected JSON object for keyword: 'parameters'"):
                _take(plan, body, to_text(inner), item)
        else:
            _take(plan, body, name, value)
    return body


def _take(plan: Plan, body: InferBody, name: str, value: Value) -> None:
    side = plan.inputs.get(name)
    if side is None:
        set_parameter(body.parameters, name, value)
    elif not any(part.name == name for part in body.inputs):
        leaves: list[Value] = value if isinstance(value, list) else [value]
        shape = shape_of(plan, side, len(leaves))
        data = read_leaves(leaves, side.dtype, len(leaves), name)
        body.inputs.append(InputPart(name, side.datatype, shape, data))


def shape_of(plan: Plan, side: Side, count: int) -> tuple[int, ...]:
    """The shape `count` elements have: the innermost free axis takes what the fixed ones leave."""
    dims = full_dims(plan, side)
    fixed = prod(size for size in dims if size != -1)
    free = [axis for axis, size in enumerate(dims) if size == -1]
    rest, odd = divmod(count, fixed) if fixed else (0, count)
    if odd or (not free and rest != 1):
        raise invalid(f"The schema can not convert input '{side.name}' to tensor with proper shape")
    return tuple(rest if free and axis == free[-1] else abs(size) for axis, size in enumerate(dims))


def write_generated(plan: Plan, request: InferRequest, response: InferResponse) -> bytes:
    """One response as a flat object, keys in the order of their bytes. Raises ServeError."""
    members = {to_bytes(key): msgspec.json.encode(value) for key, value in response.parameters.items()}
    members[b"model_name"] = write_string(to_bytes(plan.model))
    members[b"model_version"] = b'"%d"' % plan.version.number
    if request.request_id:
        members[b"id"] = write_string(to_bytes(request.request_id))
    for name, tensor in response.outputs.items():
        items = write_items(client_tensor(plan, name, tensor))
        members[to_bytes(name)] = items[0] if len(items) == 1 else b"[%b]" % b",".join(items)
    return b"{%b}" % b",".join(b"%b:%b" % (write_string(key), members[key]) for key in sorted(members))
