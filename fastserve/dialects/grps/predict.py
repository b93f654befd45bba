"""POST .../predict: the fast path where a request is known, else the general one; streams (spec 5, 7).

    Content-Type: application/json            a message as JSON
    Content-Type: application/octet-stream    the body is its bin_data

On the customised path with a body of the deployment's own, the model reads the HTTP request and writes the
reply.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from contextlib import aclosing
from math import prod
from typing import Any

from fastserve.dialects.grps.asking import WORK, Asked, GeneralPredict, read_answer, stream_answers
from fastserve.dialects.grps.codec_http import MOST_VALUES, JsonBody, read_json, wants_stream
from fastserve.dialects.grps.errors import OK_JSON, code_of, failure_json
from fastserve.dialects.grps.fast_http import FastHttp
from fastserve.dialects.grps.heads import BIN, content_kind
from fastserve.dialects.grps.replies import write_json, write_ndarray
from fastserve.dialects.grps.routes import Query
from fastserve.dialects.grps.service import BYTES, JSON, Service, speaks_messages
from fastserve.dialects.grps.tensors import BY_NAME
from fastserve.errors import ServeError, internal, invalid
from fastserve.protos import load
from fastserve.request import InferResponse
from fastserve.serving.slow_path import answer_slowly
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call

TEXT = b"text/plain"
BOTH = "Bad Request, err: Streaming and ret ndarray are not supported at the same time."
MOST_AXES = 64  # as many as numpy has
NO_FLOAT32 = "No float32 tensors in output. Cannot convert to ndarray."
EMPTY = "The http body is empty."
NOT_OWN = "a customised HTTP body is for customized models; model {} takes messages and gtensors"
# Of a reply that a model wrote itself: the wire's own business.
WIRES_OWN = frozenset({"connection", "content-length", "content-type", "date", "server", "transfer-encoding"})


class Predict:
    """The endpoint of one target. `own`: the customised path, on which models may see the call itself."""

    def __init__(self, service: Service, query: Query, *, own: bool = False) -> None:
        self.service, self.query = service, query
        self.raw = own and service.options.customized_body
        plain = not (self.raw or query.streaming or query.ndarray)
        self._fast = FastHttp(service, query.model) if plain else None
        self._mode = service.options.streaming_ctrl_mode
        self._header = service.options.streaming_ctrl_key.lower().encode()

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        if self._mode == "header_param" and call.header(self._header).strip().lower() == b"true":
            return self._stream(call)
        if self.query.streaming:
            return self._stream(call)
        if self._fast is not None and self._fast.start(call):
            return None
        if self._mode == "body_param":
            return self._decide(call)
        return answer_slowly(call, HttpPredict(self, call, self._fast))

    def take(self, call: Call, body: Arrived) -> bool:
        """Take a call whose rows are still in the socket."""
        if self._mode == "header_param" and call.header(self._header).strip().lower() == b"true":
            return False
        return self._fast is not None and self._fast.take(call, body)

    async def _decide(self, call: Call) -> None:
        """Where the body says whether it wants a stream, it is read first."""
        try:
            body = None if self.raw else await self.read_body(call)
        except ServeError as fault:
            self.service.refuse(call, fault, self.query.model)
            return
        if await self._says(call) if body is None else body.wants_stream:
            await self._stream(call, body)
        else:
            await answer_slowly(call, HttpPredict(self, call, self._fast, body))

    async def _says(self, call: Call) -> bool:
        key = self.service.options.streaming_ctrl_key
        return await self.service.apart(len(call.body), wants_stream, call.body, key)

    async def read_body(self, call: Call) -> JsonBody:
        """The body by its Content-Type. Raises ServeError."""
        if not call.body:
            raise invalid(EMPTY)
        if content_kind(call, self.service.options) == BIN:
            return JsonBody(load("grps").GrpsMessage(bin_data=bytes(call.body)))
        return await self.service.apart(len(call.body), read_json, call.body, self.service.options)

    async def read(self, call: Call, body: JsonBody | None, *, streaming: bool) -> Asked:
        """The whole call. Raises ServeError."""
        service, told = self.service, {"streaming": True} if streaming else {}
        if self.raw:
            version = service.find(self.query.model)
            if not speaks_messages(version):
                raise invalid(NOT_OWN.format(version.model))
            message = load("grps").GrpsMessage(bin_data=bytes(call.body))
            return Asked(version, message, {**told, "http": describe(call)}, len(call.body))
        body = body or await self.read_body(call)
        version = service.find(body.message.model or self.query.model)
        return Asked(version, body.message, dict(told), WORK * len(call.body))

    async def _stream(self, call: Call, body: JsonBody | None = None) -> None:
        """A chunk for each part, as it comes. What goes wrong is one more, and the last."""
        service, stream = self.service, None
        if self.query.ndarray:
            service.refuse(call, invalid(BOTH), self.query.model)
            return
        kind, fault, version = service.options.streaming_content_type.encode(), None, None
        try:
            asked = await self.read(call, body, streaming=True)
            version = asked.version
            async with aclosing(
                await stream_answers(service, asked, service.deadline_ns(call.received_ns), self._chunk)
            ) as events:
                async for event in events:
                    stream = stream or call.stream(200, kind)
                    if event.fault is not None:
                        fault = event.fault
                        break
                    await stream.write(event.text)
        except ServeError as found:
            fault = found
        stream = stream or call.stream(200, kind)
        if fault is not None:
            service.traffic.refused(version.model if version else self.query.model, fault.kind.name)
            await stream.write(self._failure(fault))
        elif version is not None:
            service.count(version, call.received_ns)
        await stream.close()

    def _chunk(self, message: Any) -> bytes:
        if message.WhichOneof("data_oneof") == "bin_data":
            return bytes(message.bin_data)
        return write_json(message, self.service.options, OK_JSON)

    def _failure(self, fault: ServeError) -> bytes:
        if self.raw:
            return fault.message.encode("utf-8", "replace")
        return failure_json(code_of(fault, self.service.options), fault.message)


class HttpPredict(GeneralPredict):
    """One call."""

    def __init__(
        self, endpoint: Predict, call: Call, fast: FastHttp | None, body: JsonBody | None = None
    ) -> None:
        self._endpoint, self._call, self._fast, self._body = endpoint, call, fast, body
        self.service = endpoint.service

    async def ask(self) -> tuple[Asked, int]:
        asked = await self._endpoint.read(self._call, self._body, streaming=False)
        return asked, self.service.deadline_ns(self._call.received_ns)

    async def write(self, response: InferResponse) -> None:
        if self._endpoint.raw:
            self._write_own(response)
            return
        body, kind = await self.service.apart(WORK * response.nbytes, self._encode, response)
        if kind == BYTES:
            self._call.reply(200, body, BYTES)
        else:
            self.service.answer(self._call, body)

    def _encode(self, response: InferResponse) -> tuple[bytes, bytes]:
        """The answer, and what it is."""
        message, options = read_answer(self.asked, response), self.service.options
        if self._endpoint.query.ndarray:
            return write_as_ndarray(message, several=options.ndarray_of_several == "first"), JSON
        if message.WhichOneof("data_oneof") == "bin_data":
            return message.bin_data, BYTES
        return write_json(message, options, OK_JSON), JSON

    def learn(self) -> None:
        if self._fast is not None:
            self._fast.learn(self._call, self.asked, self.request)

    def refused(self, fault: ServeError) -> None:
        if self._endpoint.raw:
            told = code_of(fault, self.service.options)
            self.service.traffic.refused(self._endpoint.query.model, fault.kind.name)
            self._call.reply(told, fault.message.encode("utf-8", "replace"), TEXT)
            return
        self.service.refuse(self._call, fault, self.model)

    def _write_own(self, response: InferResponse) -> None:
        """The reply as the model wrote it."""
        message, told = read_answer(self.asked, response), response.parameters
        headers: list[tuple[str, str]] = json.loads(str(told.get("http_headers", "[]")))
        kind = next((value for name, value in headers if name.lower() == "content-type"), "text/plain")
        own = [(n.encode("latin-1", "replace"), v.encode("latin-1", "replace")) for n, v in headers]
        kept = [(name, value) for name, value in own if name.decode("latin-1").lower() not in WIRES_OWN]
        status = int(str(told.get("http_status", 200)))
        try:
            self._call.reply(status, message.bin_data, kind.encode("latin-1", "replace"), kept)
        except ValueError:
            raise internal("the model's reply has a header that HTTP has not") from None


def write_as_ndarray(message: Any, *, several: bool) -> bytes:
    """The one float32 tensor of an answer as nested lists, with its status. Raises ServeError."""
    tensors = message.gtensors.tensors
    if not len(tensors) or tensors[0].dtype != BY_NAME["flat_float32"].number:
        raise internal(NO_FLOAT32)
    if len(tensors) > 1 and not several:
        raise internal(
            f"Output has {len(tensors)} tensors, ndarray has room for one. Cannot convert to ndarray."
        )
    _check_shape(tensors[0])
    return b'%b,"ndarray":%b}' % (OK_JSON, write_ndarray(tensors[0]))


def _check_shape(tensor: Any) -> None:
    """A model may give back what its client has sent. Raises ServeError."""
    shape, count = tuple(tensor.shape), len(tensor.flat_float32)
    lists = prod(size for size in shape if size)
    if prod(shape) != count or (not count and lists > MOST_VALUES) or len(shape) > MOST_AXES:
        shown = ", ".join(map(str, shape[:8])) + (", ..." if len(shape) > 8 else "")
        raise internal(f"Output of shape [{shown}] with {count} values. Cannot convert to ndarray.")


def describe(call: Call) -> str:
    """An HTTP request but for its body, as a parameter."""
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in call.headers]
    return json.dumps({"method": call.method, "target": call.target, "headers": headers})
