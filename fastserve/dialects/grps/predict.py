"""POST .../predict: the fast path where a request is known, else the general one; streams (spec 3.6, 5, 7).

    Content-Type: application/json            a message as JSON
    Content-Type: application/octet-stream    the body is its bin_data

The fast path takes gtensors as JSON that differ from an earlier request in their numbers alone
(`_ext.request_template`), and bodies that are nothing but the numbers of the model's one input. On the
customised path with a body of the deployment's own, the model reads the HTTP request and writes the reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any

from fastserve._ext.request_template import RequestTemplate
from fastserve.dialects.grps.inference import WORK, GrpsCall, GrpsPredict, read_answer, stream_answers
from fastserve.dialects.grps.json_messages import (
    MOST_VALUES,
    JsonBody,
    find_arrays,
    read_json,
    tensor_head,
    wants_stream,
    write_json,
    write_ndarray,
    write_numbers,
)
from fastserve.dialects.grps.messages import BY_DTYPE, BY_NAME, Sent, field_of, raw_rows, write_outputs
from fastserve.dialects.grps.routes import Query
from fastserve.dialects.grps.service import (
    BYTES,
    OK_JSON,
    GrpsService,
    code_of,
    failure_json,
    speaks_messages,
)
from fastserve.errors import ServeError, internal, invalid
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.fast_path import FastPath, Outcome, PathCache, open_path
from fastserve.serving.prepared_requests import (
    Described,
    Later,
    Memory,
    PreparedRequest,
    ordinary_inputs,
    put_bytes,
)
from fastserve.serving.request_templates import JsonTemplates
from fastserve.serving.slow_path import answer_slowly
from fastserve.settings import GrpsOptions
from fastserve.tensor import Tensor
from fastserve.util.offload import OFFLOAD_BYTES

JSON_BODY, BIN = "json", "bin"
_KINDS = {b"application/json": JSON_BODY, b"application/octet-stream": BIN}
NO_TYPE, OTHER_TYPE = "No content type in headers.", "Unsupported content type."


def content_kind(call: Call, options: GrpsOptions) -> str:
    """JSON_BODY or BIN, found out once for equal heads. Raises ServeError."""
    if call.head.memo:
        return str(call.head.memo)
    given = call.header(b"content-type")
    if not given:
        raise invalid(NO_TYPE)
    if call.header(b"content-encoding") not in (b"", b"identity"):
        raise invalid("Unsupported content encoding.")
    kind = _KINDS.get(given if options.strict_content_type else given.partition(b";")[0].strip().lower())
    if kind is None:
        raise invalid(OTHER_TYPE)
    call.head.memo = kind
    return kind


MOST_TEMPLATES = 64  # of all models of a path
MOST_TEXT_BYTES = 65536  # of a template
MOST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read in a thread
_SHAPE = re.compile(rb'"shape"\s*:\s*\[\s*([0-9]+)')
FRAMED = ("float32", "float64", "int64")  # of the others V2 takes numbers that have no room, and wraps them
Placeholder = tuple[str, int, int, int, int, int]


def outcome_of(service: GrpsService, version: Version) -> Outcome:
    """Return how requests of one version end."""

    def refused(call: Call, prepared: object, request_id: object, fault: ServeError) -> None:
        service.refuse(call, fault, version.model)

    return Outcome(refused, service.answered)


class JsonTemplate(RequestTemplate, PreparedRequest):
    """One text with placeholders, for one version."""

    def __init__(
        self,
        service: GrpsService,
        path: FastPath,
        inputs: dict[str, Tensor],
        parts: JsonTemplateParts,
        model: str,
    ) -> None:
        targets = [prod(t.shape) * t.dtype.item_bytes // parts.first_rows for t in inputs.values()]
        super().__init__(parts.text, parts.placeholders, [], targets, parts.rows)
        self.lay_out(path.queue, inputs, (), batching=path.version.batching)
        self.path, self.model, self._service = path, model, service

    def fill(self, source: Memory, memory: list[memoryview]) -> bool:
        return self.read_into(source, len(source), memory)

    def make_writer(self, described: Described) -> GrpsJsonWriter | None:
        return GrpsJsonWriter.of(self._service, described)

    def write(
        self, exchange: Call, writer: GrpsJsonWriter, memory: Sequence[Memory], request_id: Any, held: Any
    ) -> Later | None:
        if (nbytes := sum(map(len, memory))) >= OFFLOAD_BYTES:
            return self._write_offloaded(exchange, writer, memory, nbytes)
        self._service.answer(exchange, writer.write(memory))
        return None

    async def _write_offloaded(
        self, exchange: Call, writer: GrpsJsonWriter, memory: Sequence[Memory], nbytes: int
    ) -> None:
        self._service.answer(exchange, await self._service.offload(nbytes, writer.write, memory))

    def write_response(self, exchange: Call, response: InferResponse, request_id: Any, held: Any) -> None:
        message = write_outputs(load("grps").GrpsMessage(gtensors={}), response.outputs)
        self._service.answer(exchange, write_json(message, self._service.options, OK_JSON))


class GrpsJsonWriter:
    """Writes answers whose outputs are `described` so."""

    def __init__(self, service: GrpsService, described: Described) -> None:
        self._options = service.options
        self._parts = []
        before = OK_JSON + b',"gtensors":{"tensors":['
        for name, dtype, shape in described:
            field = field_of(name, dtype)
            head = before + tensor_head(name, field.number, shape)
            count = prod(shape)
            self._parts.append((head + b',"%b":' % field.name.encode() if count else head, dtype.name, count))
            before = b"},"

    @classmethod
    def of(cls, service: GrpsService, described: Described) -> GrpsJsonWriter | None:
        """None for outputs that the general path has to look at."""
        if (
            any(dtype.name == "bytes" or dtype.name not in BY_DTYPE for _, dtype, _ in described)
            or not described
        ):
            return None
        return cls(service, described)

    def write(self, memory: Sequence[Memory]) -> bytes:
        pieces = []
        for (head, dtype, count), data in zip(self._parts, memory, strict=True):
            pieces.append(head)
            if count:
                pieces.append(write_numbers(data, dtype, count, self._options))
        pieces.append(b"}]}}")
        return b"".join(pieces)


class BinRows(PreparedRequest):
    """Bodies that are the little-endian rows of a model's one input; the answer is its one output, so."""

    def __init__(self, service: GrpsService, version: Version, path: FastPath) -> None:
        self.version, self._path, self._service = version, path, service
        ((name, self.spec),) = version.inputs.items()
        shape = self.spec.shape or ()
        inputs = {name: Tensor(self.spec.dtype, (1, *shape) if version.batching else shape, b"")}
        self.lay_out(path.queue, inputs, (), batching=version.batching)

    @classmethod
    def open(cls, service: GrpsService, version: Version) -> BinRows | None:
        """Open the path of a version; None for one with other tensors, or without a fast path."""
        if len(version.inputs) != 1 or len(version.outputs) != 1:
            return None
        specs = (*version.inputs.values(), *version.outputs.values())
        if not all(spec.row_bytes for spec in specs) or speaks_messages(version):
            return None
        path = open_path(version, service.traffic, outcome_of(service, version))
        return None if path is None else cls(service, version, path)

    def start(self, call: Call, body: Memory | ArrivedBody) -> bool:
        """Take the call, or return False: nothing has happened then."""
        shape = raw_rows(self.version, self.spec, len(body))
        if shape is None:
            return False
        self.rows = shape[0] if self.version.batching else 1
        deadline_ns = self._service.deadline_ns(call.received_ns, call.deadline_ns)
        return self.rows <= self._path.queue.max_rows and self._path.start(
            call, self, body, None, deadline_ns
        )

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Take a call whose rows are still in the socket, or return False."""
        return self._path.takes_arrived(self) and self.start(call, body)

    def fill(self, source: Memory | ArrivedBody, memory: list[memoryview]) -> bool:
        return put_bytes(source, memory)

    def make_writer(self, described: Described) -> bool:
        return True

    def write(
        self, exchange: Call, writer: bool, memory: Sequence[Memory], request_id: Any, held: Any
    ) -> None:
        exchange.reply(200, bytes(memory[0]), BYTES)

    def write_response(self, exchange: Call, response: InferResponse, request_id: Any, held: Any) -> None:
        ((_, tensor),) = response.outputs.items()
        exchange.reply(200, bytes(tensor.data), BYTES)


class FastHttp:
    """The fast path of one target: templates of requests, and bare rows."""

    def __init__(self, service: GrpsService, model: str) -> None:
        self._service, self._model = service, model
        self._templates = JsonTemplates(MOST_TEMPLATES)
        self._raw: PathCache[BinRows] = PathCache(
            service.keepers, lambda version: BinRows.open(service, version)
        )
        self._cached: PathCache[FastPath] = PathCache(service.keepers, self._open)
        service.keepers.add(self)

    def start(self, call: Call) -> bool:
        """Take the call, or return False: nothing has happened then."""
        if len(call.body) > MOST_BYTES:
            return False
        service, kind = self._service, self._kind(call)
        if not kind:
            return False
        if kind == BIN:
            raw = self._raw.find(service.look_up(self._model))
            return raw is not None and raw.start(call, call.body)
        template: JsonTemplate | None = self._templates.find(call.body, len(call.body))  # type: ignore[assignment]
        if template is None or template.rows > template.path.queue.max_rows:
            return False
        if service.look_up(template.model) is not template.path.version:
            return False
        return template.path.start(
            call, template, call.body, None, service.deadline_ns(call.received_ns, call.deadline_ns)
        )

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Take a call whose bare rows are still in the socket, or return False: other bodies are whole."""
        if len(body) > MOST_BYTES or self._kind(call) != BIN:
            return False
        raw = self._raw.path
        return raw is not None and raw.version is self._service.look_up(self._model) and raw.take(call, body)

    def _kind(self, call: Call) -> str:
        """Return the kind of the body; "" for one that the general path refuses."""
        try:
            return call.head.memo or content_kind(call, self._service.options)
        except ServeError:
            return ""

    def cache_template(self, call: Call, asked: GrpsCall, request: InferRequest) -> None:
        """Remember the template of a request that `start` did not take and the general path has answered."""
        if asked.message.WhichOneof("data_oneof") != "gtensors" or speaks_messages(asked.version):
            return
        path = self._cached.find(asked.version)
        if path is None:
            return
        self._templates.cache_template(partial(self._make, bytes(call.body), asked, path, request))

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        self._templates = JsonTemplates(MOST_TEMPLATES)

    def _open(self, version: Version) -> FastPath | None:
        return open_path(version, self._service.traffic, outcome_of(self._service, version))

    def _make(
        self, text: bytes, asked: GrpsCall, path: FastPath, request: InferRequest
    ) -> JsonTemplate | None:
        version = asked.version
        found = ordinary_inputs(path.queue, request, batching=version.batching)
        if found is None:
            return None
        inputs = found[1]
        parts = JsonTemplateParts.of(text, list(request.inputs.items()), list(inputs), version)
        if parts is None:
            return None
        try:
            return JsonTemplate(self._service, path, inputs, parts, asked.message.model or self._model)
        except ValueError:  # more tensors or larger rows than a template has
            return None


@dataclass(frozen=True, slots=True)
class JsonTemplateParts:
    """The text and the fields of a template. `rows` 0: the text says them; `first_rows` are its own."""

    text: bytes
    placeholders: list[Placeholder]
    rows: int
    first_rows: int

    @classmethod
    def of(
        cls, text: bytes, given: list[tuple[str, Tensor]], order: list[str], version: Version
    ) -> JsonTemplateParts | None:
        """`given`: the tensors in the order of the text; `order`: of the model. None when in doubt."""
        arrays = list(find_arrays(text))
        shapes = list(_SHAPE.finditer(text))
        values = sum(last - first for _, first, last, _ in arrays)
        if len(arrays) != len(given) or len(text) - values > MOST_TEXT_BYTES or b"\\" in text:
            return None
        if any(tensor.dtype.name not in FRAMED for _, tensor in given):
            return None
        first_rows = given[0][1].shape[0] if version.batching and given[0][1].shape else 1
        if not first_rows:
            return None
        counted = version.batching and len(shapes) == len(given)
        counted = counted and all(s.start() < a[0] for s, a in zip(shapes, arrays, strict=True))
        placeholders: list[Placeholder] = []
        for number, (name, tensor) in enumerate(given):
            if counted:
                placeholders.append(("rows", *shapes[number].span(1), 1, 0, 0))
            _, first, last, _ = arrays[number]
            unit = prod(tensor.shape) // first_rows
            placeholders.append(("data", first, last, unit, order.index(name), tensor.dtype.code))
        return cls(text, sorted(placeholders, key=itemgetter(1)), 0 if counted else first_rows, first_rows)


TEXT = b"text/plain"
BOTH = "Bad Request, err: Streaming and ret ndarray are not supported at the same time."
MOST_AXES = 64  # as many as numpy has
NO_FLOAT32 = "No float32 tensors in output. Cannot convert to ndarray."
EMPTY = "The http body is empty."
NOT_OWN = "a customised HTTP body is for customized models; model {} takes messages and gtensors"

# Of a reply that a model wrote itself: the wire's own business.
WIRES_OWN = frozenset({"connection", "content-length", "content-type", "date", "server", "transfer-encoding"})


class HttpPredictEndpoint:
    """The endpoint of one target. `own`: the customised path, on which models may see the call itself."""

    def __init__(self, service: GrpsService, query: Query, *, own: bool = False) -> None:
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

    def take(self, call: Call, body: ArrivedBody) -> bool:
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
        return await self.service.offload(len(call.body), wants_stream, call.body, key)

    async def read_body(self, call: Call) -> JsonBody:
        """The body by its Content-Type. Raises ServeError."""
        if not call.body:
            raise invalid(EMPTY)
        if content_kind(call, self.service.options) == BIN:
            return JsonBody(load("grps").GrpsMessage(bin_data=bytes(call.body)))
        work = WORK * len(call.body)
        return await self.service.offload(work, read_json, call.body, self.service.options)

    async def read(self, call: Call, body: JsonBody | None, *, streaming: bool) -> GrpsCall:
        """The whole call. Raises ServeError."""
        service, told = self.service, {"streaming": True} if streaming else {}
        if self.raw:
            version = service.find(self.query.model)
            if not speaks_messages(version):
                raise invalid(NOT_OWN.format(version.model))
            message = load("grps").GrpsMessage(bin_data=bytes(call.body))
            return GrpsCall(version, Sent(message), {**told, "http": describe(call)}, len(call.body))
        body = body or await self.read_body(call)
        version = service.find(body.message.model or self.query.model)
        return GrpsCall(version, Sent(body.message), dict(told), WORK * len(call.body))

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
                await stream_answers(
                    service, asked, service.deadline_ns(call.received_ns, call.deadline_ns), self._chunk
                )
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
            model = version.model if version else self.query.model
            service.count_fault(model, fault, call)
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


class HttpPredict(GrpsPredict):
    """One call."""

    def __init__(
        self, endpoint: HttpPredictEndpoint, call: Call, fast: FastHttp | None, body: JsonBody | None = None
    ) -> None:
        self._endpoint, self._call, self._fast, self._body = endpoint, call, fast, body
        self.service = endpoint.service

    async def ask(self) -> tuple[GrpsCall, int]:
        asked = await self._endpoint.read(self._call, self._body, streaming=False)
        return asked, self.service.deadline_ns(self._call.received_ns, self._call.deadline_ns)

    async def write(self, response: InferResponse) -> None:
        if self._endpoint.raw:
            self._write_own(response)
            return
        body, kind = await self.service.offload(WORK * response.nbytes, self._encode, response)
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

    def cache_template(self) -> None:
        if self._fast is not None:
            self._fast.cache_template(self._call, self.asked, self.request)

    def refused(self, fault: ServeError) -> None:
        if self._endpoint.raw:
            told = code_of(fault, self.service.options)
            self.service.count_fault(self._endpoint.query.model, fault, self._call)
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
