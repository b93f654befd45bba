"""POST .../infer: what an endpoint knows of heads and frames, and the general path's HTTP half (spec 3)."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from fastserve.codec.client_text import leading_int
from fastserve.dialects.kserve_v2.answers import (
    SUPPORTED,
    UNSUPPORTED,
    send_apart,
    unpack,
    write_answer,
)
from fastserve.dialects.kserve_v2.body import read_body, read_header
from fastserve.dialects.kserve_v2.errors import too_large
from fastserve.dialects.kserve_v2.frames import FastHttp
from fastserve.dialects.kserve_v2.inference import Inference, deduce_raw
from fastserve.dialects.kserve_v2.operations import Target
from fastserve.dialects.kserve_v2.request import InferBody, Parameters
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import ServeError, invalid
from fastserve.request import InferResponse
from fastserve.serving.model_view import ModelView
from fastserve.serving.paths import LastPath
from fastserve.serving.slow_path import answer_slowly
from fastserve.serving.traces import Traced
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call
from fastserve.wire.coding import IDENTITY, choose_coding
from fastserve.wire.inflate import work_of

HEADER_LENGTH = b"inference-header-content-length"
GENERAL = -2  # a head whose calls take the general path
WHOLE = -1  # the whole body is JSON
# A number in JSON grows at most so much as a tensor (`0,` is an FP64): below it no size has to be checked.
GROWTH = 4
RAW_INPUT = "Raw input has a byte_size (%d bytes) that exceeds the maximum allowed value"
JSON_INPUT = "JSON input '%s' has a byte_size (%d bytes) that exceeds the maximum allowed value"
FAST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read apart from the event loop


class HeadKind(NamedTuple):
    """What the calls of a head have in common: how much of the body is JSON (or WHOLE, or GENERAL); whether
    replies are compressed."""

    json_bytes: int
    packs: bool


def meet(call: Call) -> HeadKind:
    """Look at a head once: the wire hands equal heads on as one object."""
    said = call.header(HEADER_LENGTH)
    length = (int(said) if said.isdigit() and len(said) < 16 else GENERAL) if said else WHOLE
    if call.header(b"content-encoding"):
        length = GENERAL
    kind = HeadKind(length, choose_coding(call.header(b"accept-encoding")) != IDENTITY)
    call.head.memo = kind
    return kind


class Infer:
    """The endpoint of one target."""

    __slots__ = ("_available", "_fast", "_most_bytes", "_number", "_service", "_target", "_traces")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._traces, self._available = service.traces, service.catalog.available
        self._target = target
        self._fast: LastPath[FastHttp] = LastPath(service.keepers, partial(FastHttp.open, service))
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
        length = (call.head.memo or meet(call))[0]
        if length == GENERAL:
            return self._answer(call, None)
        if length == WHOLE:
            length = len(call.body)
        return None if fast.start(call, length) else self._answer(call, fast, length)

    def take(self, call: Call, body: Arrived) -> bool:
        """Take a call whose tensors are still in the socket, if its like has been answered."""
        fast = self._fast.path
        if fast is None or self._traces.on or len(body) > self._most_bytes:
            return False
        if fast.version is not self._available(self._target.model, self._number):
            return False
        length: int = (call.head.memo or meet(call))[0]
        return length not in (GENERAL, WHOLE) and fast.take(call, length, body)

    async def _answer_traced(self, call: Call, traced: Traced) -> None:
        traced.stamp("HTTP_RECV_START", "HTTP_RECV_END", ns=call.received_ns)  # the wire notes one moment
        try:
            await self._answer(call, None, 0, traced)
        finally:
            traced.end()

    def _answer(
        self, call: Call, fast: FastHttp | None, header_bytes: int = 0, traced: Traced | None = None
    ) -> Coroutine[Any, Any, None]:
        """The general path; `fast` is the one that did not know this request, and learns it."""
        request = HttpInference(self._service, self._target, call, fast, header_bytes, traced)
        return answer_slowly(call, request)


class HttpInference(Inference):
    """A request as the general path answers it, for `fast` to learn."""

    refusal = "HTTP end point doesn't support models with decoupled transaction policy"

    def __init__(
        self,
        service: Service,
        target: Target,
        call: Call,
        fast: FastHttp | None,
        header_bytes: int,
        traced: Traced | None,
    ) -> None:
        super().__init__(service, service.forward_http, traced)
        self._target, self._call = target, call
        self._fast, self._header_bytes = fast, header_bytes

    def find(self) -> ModelView:
        return self.service.find(self._target.model, self._target.version)

    async def read_body(self, view: ModelView) -> InferBody:
        return await read_call(self.service, view, self._call)

    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        return headers_as_sent(self._call)

    def encode(self, view: ModelView, response: InferResponse) -> tuple[int, bytes]:
        return write_answer(view, self.asked, response, self.body.request_id, self.rooms)

    async def send(self) -> None:
        if self.traced is not None:
            self.traced.stamp("HTTP_SEND_START")
        await send_apart(self.service.apart, self._call, *self.reply)
        if self.traced is not None:
            self.traced.stamp("HTTP_SEND_END")

    def answered(self, took_ns: int) -> None:
        fast = self._fast
        if fast is not None and fast.version is self.version and self.request is not None:
            fast.learn(self._call.body, self._header_bytes, self.asked, self.request)

    def refused(self, fault: ServeError) -> None:
        headers = SUPPORTED if fault.message == UNSUPPORTED else ()
        version = None if self.view is None else self.view.version
        self.service.refuse(self._call, fault, self._target.model, headers, version)


def headers_as_sent(call: Call) -> list[tuple[str, str | bytes]]:
    """The call's headers with their names as the client spelled them."""
    spelled = {
        line.partition(b":")[0].lower(): line.partition(b":")[0] for line in call.head.raw.split(b"\r\n")
    }
    return [(spelled.get(name, name).decode("latin-1"), value) for name, value in call.headers]


def check_json(nbytes: int, most: int) -> None:
    """Raises ServeError for too much JSON. Tensors behind it are bounded by `limits.body_bytes` alone."""
    if nbytes > most:
        raise too_large(f"request JSON size of {nbytes} bytes exceeds the maximum allowed input size", most)


async def read_call(service: Service, view: ModelView, call: Call) -> InferBody:
    """The body of a call, raw ones as well. Raises ServeError."""
    most, limits, apart = service.options.http_max_input_size, service.limits, service.apart
    data, coding = call.body, call.header(b"content-encoding")
    if coding:
        data = await apart(work_of(data, limits), unpack, data, coding, limits, most)
    length = _header_length(call.header(HEADER_LENGTH), len(data))
    if not length:
        if len(data) > most:
            raise too_large(RAW_INPUT % len(data), most)
        raw = deduce_raw(view, data)
        if length is None:
            said = call.header(HEADER_LENGTH).decode("latin-1")
            raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {said}")
        return InferBody(inputs=[raw], parameters=Parameters(binary_output=True))
    check_json(length, most)
    memory = memoryview(data)
    read = await apart(length, read_header, memory[:length])
    regions = service.regions
    body = await apart(regions.largest_bytes, read_body, read, memory[length:], view.model, regions.borrow)
    for part in body.inputs if length * GROWTH > most else ():
        if part.is_json and (nbytes := memoryview(part.data).nbytes) > most:
            raise too_large(JSON_INPUT % (part.name, nbytes), most)
    return body


def _header_length(text: bytes, body_bytes: int) -> int | None:
    """How much of the body is JSON. None for what is no number: 24.10 took it for 0, so a raw request's
    faults are told first; releases since refuse it."""
    if not text:
        return body_bytes
    said = text.decode("latin-1")
    length = leading_int(said)
    if length is not None and not 0 <= length <= body_bytes:
        raise invalid(f"inference header size should be in range (0, {body_bytes}), got: {said}")
    return length
