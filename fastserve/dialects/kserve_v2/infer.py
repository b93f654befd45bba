"""POST .../infer. Read the body, await the engine, write the reply (spec 3)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Coroutine
from typing import Any

from fastserve.dialects.kserve_v2.answers import Asked, send_apart, write_answer
from fastserve.dialects.kserve_v2.body import InferBody, read_body, read_header
from fastserve.dialects.kserve_v2.checks import check_inputs, check_outputs, deduce_raw
from fastserve.dialects.kserve_v2.coding import SUPPORTED, UNSUPPORTED, choose_coding, unpack
from fastserve.dialects.kserve_v2.errors import invalid, unsupported
from fastserve.dialects.kserve_v2.forwarding import headers_as_sent
from fastserve.dialects.kserve_v2.http_fast import FastHttp
from fastserve.dialects.kserve_v2.operations import Target
from fastserve.dialects.kserve_v2.service import Service
from fastserve.dialects.kserve_v2.sizes import check_json, check_raw, check_tensors
from fastserve.dialects.kserve_v2.traces import Traced
from fastserve.errors import ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.model_view import ModelView
from fastserve.serving.paths import LastPath
from fastserve.serving.shared_memory import Rooms, hold_rooms
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.wire.call import Call
from fastserve.wire.inflate import work_of

HEADER_LENGTH = b"inference-header-content-length"
_NUMBER = re.compile(rb"[ \t]*([+-]?[0-9]+)")  # and whatever follows it, as atoi reads
MOST_HEADS = 1024
GENERAL = -2  # a head whose calls take the general path
WHOLE = -1  # the whole body is JSON
# A number in JSON grows at most so much as a tensor (`0,` is an FP64): below it no size has to be checked.
GROWTH = 4
FAST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read apart from the event loop


class Infer:
    """The endpoint of one target."""

    __slots__ = (
        "_available", "_fast", "_heads", "_most_bytes", "_number", "_packing", "_service", "_target",
        "_traces",
    )  # fmt: skip

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._traces, self._available = service.traces, service.catalog.available
        self._target = target
        self._heads: dict[object, int] = {}  # of heads met: the length of the JSON, WHOLE or GENERAL
        self._packing: set[object] = set()  # those of them whose replies are compressed
        packing = self._packing
        self._fast: LastPath[FastHttp] = LastPath(
            service.keepers, lambda version: FastHttp.open(service, version, packing)
        )
        self._most_bytes = min(service.options.http_max_input_size // GROWTH, FAST_BYTES)
        # A number too long to be one reaches no version either way; the general path says why.
        self._number = (int(target.version) if len(target.version) < 20 else -1) if target.version else None

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        fast, traces = self._fast.path, self._traces
        if traces.on and (traced := traces.sample(self._target.model)) is not None:
            return self._answer_traced(call, traced)
        if len(call.body) > self._most_bytes:
            return self._answer(call, None)
        version = self._available(self._target.model, self._number)
        if fast is None or fast.version is not version:
            fast = self._fast.find(version)
            if fast is None:
                return self._answer(call, None)
        length = self._heads.get(call.head)
        if length is None:
            length = self._meet(call)
        if length == GENERAL:
            return self._answer(call, None)
        if length == WHOLE:
            length = len(call.body)
        return None if fast.start(call, length) else self._answer(call, fast)

    def _meet(self, call: Call) -> int:
        """Look at a head once: every connection hands equal heads on as one object."""
        said = call.header(HEADER_LENGTH)
        length = (int(said) if said.isdigit() and len(said) < 16 else GENERAL) if said else WHOLE
        if call.header(b"content-encoding"):
            length = GENERAL
        if len(self._heads) >= MOST_HEADS:
            self._heads.clear()
            self._packing.clear()
        if choose_coding(call.header(b"accept-encoding")) != "identity":
            self._packing.add(call.head)
        self._heads[call.head] = length
        return length

    async def _answer_traced(self, call: Call, traced: Traced) -> None:
        traced.stamp("HTTP_RECV_START", "HTTP_RECV_END", ns=call.received_ns)  # the wire notes one moment
        try:
            await self._answer(call, None, traced)
        finally:
            traced.end()

    def _answer(
        self, call: Call, fast: FastHttp | None, traced: Traced | None = None
    ) -> Coroutine[Any, Any, None]:
        """The general path; `fast` is the one that did not know this request, and learns it."""
        length = self._heads.get(call.head, WHOLE)
        header_bytes = len(call.body) if length == WHOLE else length
        request = GeneralInfer(self._service, self._target, call, fast, header_bytes, traced)
        return answer_slowly(call, request, self._service.traffic)


class GeneralInfer(SlowRequest):
    """A request as the general path answers it."""

    def __init__(
        self,
        service: Service,
        target: Target,
        call: Call,
        fast: FastHttp | None,
        header_bytes: int,
        traced: Traced | None,
    ) -> None:
        self._service, self._target, self._call, self._traced = service, target, call, traced
        self._fast, self._header_bytes = fast, header_bytes
        self._plan: ModelView | None = None
        self._rooms = Rooms()

    async def read(self) -> InferRequest:
        service = self._service
        plan = self._plan = service.find(self._target.model, self._target.version)
        self.version = plan.version
        if plan.decoupled:
            raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        body = self._body = await read_call(service, plan, self._call)
        if service.forward_http:
            service.forward_http.add(headers_as_sent(self._call), body.parameters)
        self._asked = Asked.of(body)
        self._rooms = hold_rooms(service.regions, self._asked.ranges)
        self._request = await service.apart(strings_bytes(body), make_request, plan, body)
        return self._request

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return self._service.infer(self.version, request, self._traced)

    async def write(self, response: InferResponse) -> None:
        assert self._plan is not None
        size = sum(memoryview(tensor.data).nbytes for tensor in response.outputs.values())
        self._reply = await self._service.apart(
            size, write_answer, self._plan, self._asked, response, self._body.request_id, self._rooms
        )

    def close(self) -> None:
        self._rooms.close()

    async def send(self) -> None:
        if self._traced is not None:
            self._traced.stamp("HTTP_SEND_START")
        await send_apart(self._service.apart, self._call, *self._reply)
        if self._traced is not None:
            self._traced.stamp("HTTP_SEND_END")

    def answered(self, took_ns: int) -> None:
        fast = self._fast
        if fast is not None and fast.version is self.version:
            fast.learn(self._call.body, self._header_bytes, self._body, self._request)

    def refused(self, fault: ServeError) -> None:
        headers = SUPPORTED if fault.message == UNSUPPORTED else ()
        version = None if self._plan is None else self._plan.version
        self._service.refuse(self._call, fault, self._target.model, headers, version)


async def read_call(service: Service, plan: ModelView, call: Call) -> InferBody:
    """The body of a call, raw ones as well. Raises ServeError."""
    most, limits, apart = service.options.http_max_input_size, service.limits, service.apart
    data, coding = call.body, call.header(b"content-encoding")
    if coding:
        data = await apart(work_of(data, limits), unpack, data, coding, limits, most)
    length = _header_length(call.header(HEADER_LENGTH), len(data))
    if not length:
        check_raw(len(data), most)
        raw = InferBody(inputs=[deduce_raw(plan, data)])
        if length is None:
            said = call.header(HEADER_LENGTH).decode("latin-1")
            raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {said}")
        raw.parameters.binary_output = True
        return raw
    check_json(length, most)
    view = memoryview(data)
    header = view[:length]
    read = await apart(length, read_header, header)
    body = read_body(read, header, view[length:], plan.model, service.regions.read)
    check_tensors(body, length, most)
    return body


def strings_bytes(body: InferBody) -> int:
    """Bytes that are looked at one string after another; the rest is only measured."""
    return sum(memoryview(part.data).nbytes for part in body.inputs if part.datatype == "BYTES")


def _header_length(text: bytes, body_bytes: int) -> int | None:
    """How much of the body is JSON. None for what is no number: 24.10 took it for 0, so a raw request's
    faults are told first; releases since refuse it."""
    if not text:
        return body_bytes
    match = _NUMBER.match(text)
    if match is None:
        return None
    length = int(match[1]) if len(match[1]) < 20 else -1
    if not 0 <= length <= body_bytes:
        said = text.decode("latin-1")
        raise invalid(f"inference header size should be in range (0, {body_bytes}), got: {said}")
    return length


def make_request(plan: ModelView, body: InferBody) -> InferRequest:
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
