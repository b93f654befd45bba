"""POST .../infer: replies, the fast path of known request templates, the general path over HTTP (spec 3).

    {"id":"7","inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,2,3,4,5,6]}]}
          ^ id                               ^ rows                        ^ data

A request template is the text of a request that the general path has answered, with fields for the id, the
number of rows and the values (`_ext.request_template`). All other bytes must be equal, so a request that fits
means the same and is not checked again. Strings have no fixed size and no templates. For a request without
one, errors included, `HttpTemplates.start` returns False without a trace; the general path reads the body
again and hands it to `cache_template`.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import msgspec

from fastserve._ext.infer_json import InferCode, InferFault
from fastserve._ext.infer_reply import InferWriter, UnwritableCode, UnwritableOutput, write_infer
from fastserve._ext.request_template import RequestTemplate, find_placeholders
from fastserve.codec.json_text import leading_int
from fastserve.dialects.kserve.inference import Inference, deduce_raw, reply_parameters, show_outputs
from fastserve.dialects.kserve.json_values import not_in_json
from fastserve.dialects.kserve.request import (
    Header,
    InferBody,
    InferParameters,
    InputPart,
    ReplyOptions,
    read_body,
    read_header,
)
from fastserve.dialects.kserve.routes import KServeTarget
from fastserve.dialects.kserve.service import KServeService, too_large
from fastserve.engine import BatchQueue
from fastserve.errors import Kind, LimitError, Reason, ServeError, internal, invalid
from fastserve.net.compression import (
    DEFLATE,
    GZIP,
    IDENTITY,
    INFLATED_BYTES,
    choose_coding,
    inflate,
    inflate_offloaded,
    pack,
)
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.client_shared_memory import LARGE_BYTES, OutputBuffers, Range, hold_files
from fastserve.serving.fast_path import FastPath, Outcome, PathCache, open_path
from fastserve.serving.model_view import ModelView
from fastserve.serving.prepared_requests import Described, Later, Memory, PreparedRequest, ordinary_inputs
from fastserve.serving.request_templates import JsonTemplates
from fastserve.serving.slow_path import answer_slowly
from fastserve.serving.traces import RequestTrace
from fastserve.settings import Limits
from fastserve.tensor import Tensor
from fastserve.util.offload import OFFLOAD_BYTES, Offload

BINARY = b"application/octet-stream"
PACKING = 8  # compressing a byte costs as much as printing so many


def write_answer(
    view: ModelView, options: ReplyOptions, response: InferResponse, request_id: str, rooms: OutputBuffers
) -> tuple[int, bytes]:
    """Return how many bytes of the reply are JSON, 0 for all of them, and the reply. Raises ServeError."""
    described: list[tuple[str, int, tuple[int, ...], Memory | None, dict[str, Any] | None]] = []
    blobs: list[Memory] = []
    for name, tensor, outside in show_outputs(view, options, response, rooms):
        data, size = None, None
        if not outside and options.form(name) == "binary":
            blobs.append(tensor.data)
            size = {"binary_data_size": memoryview(tensor.data).nbytes}
        elif not outside:
            data = tensor.data
        described.append((name, tensor.dtype.code, tensor.shape, data, size))
    number, parameters = str(view.version.number), reply_parameters(view, options, response)
    try:
        header = write_infer(view.model, number, described, id=request_id, parameters=parameters)
    except UnwritableOutput as fault:
        raise output_error(fault) from None
    return (len(header), b"".join((header, *blobs))) if any(map(len, blobs)) else (0, header)


def output_error(fault: UnwritableOutput) -> ServeError:
    """Return the error for an output that has no JSON form."""
    if fault.code is UnwritableCode.UNSUPPORTED_DTYPE:
        return not_in_json("sending", fault.datatype, "output")
    return internal(f"output '{fault.name}' cannot be written: {fault.code.name}")


def send(call: Call, header_bytes: int, reply: bytes) -> None:
    """Reply 200. `header_bytes` of the reply are JSON, 0 for all of it."""
    coding = choose_coding(call.header(b"accept-encoding"))
    _send(call, header_bytes, reply if coding == IDENTITY else pack(reply, coding), coding)


async def send_offloaded(offload: Offload, call: Call, header_bytes: int, reply: bytes) -> None:
    """Reply 200 like `send`, compressing a large reply in a thread."""
    coding = choose_coding(call.header(b"accept-encoding"))
    if coding != IDENTITY:
        reply = await offload(len(reply) * PACKING, pack, reply, coding)
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
    """Undo the Content-Encoding of a body, of at most `most` bytes inflated. Raises ServeError."""
    name = coding.strip().lower()
    if name in (b"", IDENTITY):
        return body
    if name not in (GZIP, DEFLATE):
        raise ServeError(Kind.UNIMPLEMENTED, UNSUPPORTED, reason=Reason.UNKNOWN_ENCODING)
    within = msgspec.structs.replace(limits, inflated_bytes=most) if most < limits.inflated_bytes else limits
    try:
        return inflate(body, within)
    except LimitError as fault:  # too large a body is the client's error here
        if within is not limits and fault.setting == INFLATED_BYTES:
            raise too_large("Decompressed data size exceeds the maximum allowed value", most) from None
        raise invalid(fault.message) from None


MOST_TEXT_BYTES = 65536  # of a template, values excluded
MAX_TEMPLATES = 32


@dataclass(frozen=True, slots=True)
class RegionSource:
    """An input in client memory: the target it is for, and its place."""

    target: int
    region: str
    offset: int
    row_bytes: int


@dataclass(slots=True)
class HeaderFields:
    """A request's JSON split into fields for RequestTemplate.

    With `rows` 0 the text says how many rows there are.
    """

    header: bytes
    targets: list[int]
    rows: int
    placeholders: list[tuple[str, int, int, int, int, int]] = field(default_factory=list)
    blobs: list[tuple[int, int]] = field(default_factory=list)
    sources: list[RegionSource] = field(default_factory=list)
    rounded: list[int] = field(default_factory=list)
    """Targets of float64 whose numbers are sent as FP32."""


class TemplateWriter(InferWriter):
    """A writer of replies whose outputs are as `described`."""

    def __init__(
        self, view: ModelView, outputs: Sequence[tuple[str, int, tuple[int, ...], str]], described: Described
    ) -> None:
        super().__init__(view.model, str(view.version.number), outputs)
        self.described = described
        sizes = [prod(shape) * dtype.item_bytes for _, dtype, shape in described]
        # Bytes of all outputs; None with strings, whose lengths vary.
        self.nbytes = sum(sizes) if all(dtype.item_bytes for _, dtype, _ in described) else None


class InferTemplate(RequestTemplate, PreparedRequest):
    """One request template, prepared for one version."""

    def __init__(
        self,
        view: ModelView,
        queue: BatchQueue,
        service: KServeService,
        request: InferRequest,
        options: ReplyOptions,
        parts: HeaderFields,
    ) -> None:
        """`request` has the inputs' types and shapes, in the model's order, without data."""
        super().__init__(
            parts.header,
            parts.placeholders,
            parts.blobs,
            parts.targets,
            parts.rows,
            request.request_id,
            parts.rounded,
        )
        self.lay_out_like(queue, request, batching=view.batching)
        self.outside = bool(parts.sources or options.ranges)
        self._view, self._asked, self._sources = view, options, parts.sources
        self._blobs = [target for target, _ in parts.blobs]
        self.all_binary = len(parts.blobs) == len(parts.targets)  # no input in JSON or client memory
        self._regions, self._offload = service.regions, service.offload

    def fill(self, source: tuple[Memory | ArrivedBody, int], memory: list[memoryview]) -> bool:
        """Fill the batch slice from `source`: the body and its number of JSON bytes.

        Returns False, for the general path, when much client memory would be copied on the event loop.
        """
        if self._sources and sum(self.rows * given.row_bytes for given in self._sources) >= LARGE_BYTES:
            return False
        body, header_bytes = source
        if isinstance(body, ArrivedBody):
            return body.read_into([memory[target] for target in self._blobs], header_bytes)
        if not self.read_into(body, header_bytes, memory):
            return False
        for given in self._sources:
            range = Range(given.region, given.offset, self.rows * given.row_bytes)
            self._regions.read_into(range, memory[given.target])
        return True

    def hold(self) -> OutputBuffers | None:
        return hold_files(self._regions, self._asked.ranges) if self._asked.ranges else None

    def make_writer(self, described: Described) -> TemplateWriter | None:
        view = self._view
        try:
            outputs = [
                (name, dtype.code, view.client_shape(name, shape), self._asked.form(name))
                for name, dtype, shape in described
            ]
            return TemplateWriter(view, outputs, described)
        except (UnwritableOutput, ValueError, LookupError):
            return None

    def write(
        self,
        exchange: Call,
        writer: TemplateWriter,
        memory: Sequence[Memory],
        request_id: str,
        held: OutputBuffers | None,
    ) -> Later | None:
        nbytes = writer.nbytes
        if nbytes is None:
            nbytes = sum(map(len, memory))
        if nbytes >= OFFLOAD_BYTES:
            return self._write_offloaded(exchange, writer, memory, nbytes, request_id, held)
        if held:
            self._put_outside(writer, memory, held)
        packs = exchange.head.memo.packs
        head = b"" if packs else exchange.raw_head(BINARY if writer.binary else JSON)
        try:
            if head:
                exchange.reply_raw(writer.write(memory, request_id, head))
            else:
                json_bytes, text = writer.write_body(memory, request_id)
                send(exchange, json_bytes if writer.binary else 0, text)
        except UnwritableOutput as fault:
            raise output_error(fault) from None
        return None

    async def _write_offloaded(
        self,
        exchange: Call,
        writer: TemplateWriter,
        memory: Sequence[Memory],
        nbytes: int,
        request_id: str,
        held: OutputBuffers | None,
    ) -> None:
        offload, own = self._offload, self.make_writer(writer.described)
        assert own is not None
        try:
            if held:
                await offload(nbytes, self._put_outside, own, memory, held)
            json_bytes, text = await offload(nbytes, own.write_body, memory, request_id)
        except UnwritableOutput as fault:
            raise output_error(fault) from None
        await send_offloaded(offload, exchange, json_bytes if own.binary else 0, text)

    def _put_outside(self, writer: TemplateWriter, memory: Sequence[Memory], held: OutputBuffers) -> None:
        for (name, _, _), view in zip(writer.described, memory, strict=True):
            if name in held:
                held[name].put(name, view)

    def write_response(
        self, exchange: Call, response: InferResponse, request_id: str, held: OutputBuffers | None
    ) -> None:
        send(exchange, *write_answer(self._view, self._asked, response, request_id, held or OutputBuffers()))


class HttpTemplates:
    """The request templates of one version, for one target, in front of its fast path."""

    def __init__(self, path: FastPath, view: ModelView, service: KServeService) -> None:
        self.version = path.version
        self._path, self._view, self._service = path, view, service
        self._max_rows = path.queue.max_rows
        self._templates = JsonTemplates(MAX_TEMPLATES)

    @classmethod
    def open(cls, service: KServeService, version: Version) -> HttpTemplates | None:
        """Return the templates of a version; None for a version without a fast path."""
        view = service.views.of(version)
        if view.decoupled or service.forward_http:
            return None

        def refused(call: Call, prepared: InferTemplate, request_id: str, fault: ServeError) -> None:
            service.refuse(call, fault, version.model, version=version)

        path = open_path(version, service.traffic, Outcome(refused))
        return None if path is None else cls(path, view, service)

    def start(self, call: Call, header_bytes: int) -> bool:
        """Start a call with `header_bytes` of JSON.

        Returns False, without a trace, for an unknown template.
        """
        template: InferTemplate | None = self._templates.find(call.body, header_bytes)  # type: ignore[assignment]
        if template is None or template.rows > self._max_rows:
            return False
        return self._path.start(call, template, (call.body, header_bytes), template.id, call.deadline_ns)

    def take(self, call: Call, header_bytes: int, body: ArrivedBody) -> bool:
        """Start a call whose tensors are still in the socket; its JSON has been read."""
        if header_bytes > len(body.begin):
            return False
        template: InferTemplate | None = self._templates.find(body.begin, header_bytes, len(body))  # type: ignore[assignment]
        if template is None or template.rows > self._max_rows or not template.all_binary:
            return False
        if not self._path.takes_arrived(template):
            return False
        return self._path.start(call, template, (body, header_bytes), template.id, call.deadline_ns)

    def cache_template(
        self, header: Memory, given: list[InputPart], options: ReplyOptions, request: InferRequest
    ) -> None:
        """Cache the template of a request that `start` did not know and the general path has answered.

        `given` are the inputs as read from `header`, its JSON.
        """
        self._templates.cache_template(partial(self._make, header, given, options, request))

    def _make(
        self, header: Memory, given: list[InputPart], options: ReplyOptions, request: InferRequest
    ) -> InferTemplate | None:
        """Return the template of a request, None where it has none."""
        queue, batching = self._path.queue, self._view.batching
        found = None if options.classifies else ordinary_inputs(queue, request, batching=batching)
        if found is None:
            return None
        try:
            parts = _split_header(bytes(header), given, found[1], found[0], batching=batching)
            bare = replace(request, inputs=found[1])
            return (
                None
                if parts is None
                else InferTemplate(self._view, queue, self._service, bare, options, parts)
            )
        except ValueError:  # more tensors or larger rows than a template has
            return None


def _split_header(
    header: bytes, given: list[InputPart], inputs: dict[str, Tensor], rows: int, *, batching: bool
) -> HeaderFields | None:
    """Split a request's JSON into fields, b"" for a raw request; None where it has no template."""
    row_bytes = [prod(tensor.shape) * tensor.dtype.item_bytes // rows for tensor in inputs.values()]
    parts = HeaderFields(header, row_bytes, rows)
    if not header:
        parts.blobs = [(0, parts.targets[0])]
        return parts
    found = find_placeholders(header)
    if len(header) - sum(end - start for kind, start, end, _ in found if kind == "data") > MOST_TEXT_BYTES:
        return None
    targets = {name: target for target, name in enumerate(inputs)}
    has = {(kind, number) for kind, _, _, number in found}
    for number, part in enumerate(given):
        target = targets[part.name]
        if part.is_json:
            if ("data", number) not in has:
                return None
            if part.rounded:
                parts.rounded.append(target)
        elif part.range is None:
            parts.blobs.append((target, parts.targets[target]))
        else:
            place = part.range
            parts.sources.append(RegionSource(target, place.region, place.offset, parts.targets[target]))
    if batching and _rows_are_known(found, given):
        parts.rows = 0
    for kind, start, end, number in found:
        if parts.rows and kind in ("rows", "size"):
            continue
        if kind == "id" and any(
            placeholder[0] == "data" for placeholder in parts.placeholders
        ):  # one id is a template of its own
            continue
        name = given[number].name if number >= 0 else ""
        unit = _unit_of(kind, parts.targets, targets.get(name, 0), inputs.get(name))
        code = inputs[name].dtype.code if name else 0
        parts.placeholders.append(
            ("rows" if kind == "size" else kind, start, end, unit, targets.get(name, 0), code)
        )
    return parts


def _unit_of(kind: str, row_bytes: list[int], target: int, tensor: Tensor | None) -> int:
    """Return the number that one row counts for in a field."""
    if tensor is None or kind == "rows":
        return 1
    return row_bytes[target] if kind == "size" else row_bytes[target] // tensor.dtype.item_bytes


def _rows_are_known(found: list[tuple[str, int, int, int]], given: list[InputPart]) -> bool:
    """Return True when every number that depends on the rows was found, one of them before all data."""
    has = {(kind, number) for kind, _, _, number in found}
    numbers = [kind for kind, _, _, _ in found if kind in ("rows", "size", "data")]
    return numbers[:1] != ["data"] and all(
        ("rows", number) in has and (part.is_json or ("size", number) in has)
        for number, part in enumerate(given)
    )


HEADER_LENGTH = b"inference-header-content-length"
GENERAL = -2  # calls of this head take the general path
WHOLE = -1  # the whole body is JSON

# A number in JSON grows at most so many times as a tensor (`0,` is an FP64): smaller bodies need no check.
GROWTH = 4
RAW_INPUT = "Raw input has a byte_size (%d bytes) that exceeds the maximum allowed value"
JSON_INPUT = "JSON input '%s' has a byte_size (%d bytes) that exceeds the maximum allowed value"
FAST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read in a thread


class HeadTraits(NamedTuple):
    """Traits of a request head: the body's JSON bytes, WHOLE or GENERAL; whether replies are compressed."""

    json_bytes: int
    packs: bool


def read_traits(call: Call) -> HeadTraits:
    """Read the traits of a head, once: equal heads are one object."""
    said = call.header(HEADER_LENGTH)
    length = (int(said) if said.isdigit() and len(said) < 16 else GENERAL) if said else WHOLE
    if call.header(b"content-encoding") or call.head.repeats(HEADER_LENGTH):
        length = GENERAL
    kind = HeadTraits(length, choose_coding(call.header(b"accept-encoding")) != IDENTITY)
    call.head.memo = kind
    return kind


def _is_number(version: str) -> bool:
    return version.isdecimal() and len(version) < 20


class InferEndpoint:
    """The endpoint of one target."""

    __slots__ = ("_available", "_fast", "_most_bytes", "_number", "_service", "_target", "_traces")

    def __init__(self, service: KServeService, target: KServeTarget) -> None:
        self._service = service
        self._traces, self._available = service.traces, service.catalog.available
        self._target = target
        self._fast: PathCache[HttpTemplates] = PathCache(
            service.keepers, partial(HttpTemplates.open, service)
        )
        self._most_bytes = min(service.options.http_max_input_size // GROWTH, FAST_BYTES)
        # The general path finds a label's version, and reports a number of 20 digits, which reaches none.
        self._number = int(target.version) if _is_number(target.version) else -1 if target.version else None

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
        length = (call.head.memo or read_traits(call))[0]
        if length == GENERAL:
            return self._answer(call, None)
        if length == WHOLE:
            length = len(call.body)
        return None if fast.start(call, length) else self._answer(call, fast, length)

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Start a call whose tensors are still in the socket, when its template is known."""
        fast = self._fast.path
        if fast is None or self._traces.on or len(body) > self._most_bytes:
            return False
        if fast.version is not self._available(self._target.model, self._number):
            return False
        length: int = (call.head.memo or read_traits(call))[0]
        return length not in (GENERAL, WHOLE) and fast.take(call, length, body)

    async def _answer_traced(self, call: Call, traced: RequestTrace) -> None:
        traced.stamp("HTTP_RECV_START", "HTTP_RECV_END", ns=call.received_ns)  # one moment is known
        try:
            await self._answer(call, None, 0, traced)
        finally:
            traced.end()

    def _answer(
        self,
        call: Call,
        fast: HttpTemplates | None,
        header_bytes: int = 0,
        traced: RequestTrace | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Answer on the general path; `fast` did not know this request, and caches its template."""
        request = HttpInference(self._service, self._target, call, fast, header_bytes, traced)
        return answer_slowly(call, request)


class HttpInference(Inference):
    """A request on the general path; `fast` caches its template afterwards."""

    refusal = "HTTP end point doesn't support models with decoupled transaction policy"

    def __init__(
        self,
        service: KServeService,
        target: KServeTarget,
        call: Call,
        fast: HttpTemplates | None,
        header_bytes: int,
        traced: RequestTrace | None,
    ) -> None:
        super().__init__(service, service.forward_http, traced)
        self._target, self._call, self.deadline_ns = target, call, call.deadline_ns
        self._fast, self._header_bytes = fast, header_bytes

    def find(self) -> ModelView:
        return self.service.find(self._target.model, self._target.version)

    async def read_body(self, view: ModelView) -> InferBody:
        return await read_call(self.service, view, self._call)

    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        return headers_as_sent(self._call)

    def encode(self, view: ModelView, response: InferResponse) -> tuple[int, bytes]:
        return write_answer(view, self.options, response, self.body.request_id, self.rooms)

    async def send(self) -> None:
        if self.traced is not None:
            self.traced.stamp("HTTP_SEND_START")
        await send_offloaded(self.service.offload, self._call, *self.reply)
        if self.traced is not None:
            self.traced.stamp("HTTP_SEND_END")

    def answered(self, took_ns: int) -> None:
        fast = self._fast
        if self.request is None or self.converts:
            return
        if fast is not None and fast.version is self.version:
            header = memoryview(self._call.body)[: self._header_bytes]
            fast.cache_template(header, self.body.inputs, self.options, self.request)

    def refused(self, fault: ServeError) -> None:
        headers = SUPPORTED if fault.reason is Reason.UNKNOWN_ENCODING else ()
        version = None if self.view is None else self.view.version
        self.service.refuse(self._call, fault, self._target.model, headers, version)


def headers_as_sent(call: Call) -> list[tuple[str, str | bytes]]:
    """Return the call's headers with their names as the client spelled them."""
    spelled = {
        line.partition(b":")[0].lower(): line.partition(b":")[0] for line in call.head.raw.split(b"\r\n")
    }
    return [(spelled.get(name, name).decode("latin-1"), value) for name, value in call.headers]


def check_json(nbytes: int, most: int) -> None:
    """Raise ServeError for too much JSON. `limits.body_bytes` alone bounds the tensors behind it."""
    if nbytes > most:
        raise too_large(f"request JSON size of {nbytes} bytes exceeds the maximum allowed input size", most)


async def read_call(service: KServeService, view: ModelView, call: Call) -> InferBody:
    """Read the body of a call, a raw one as well. Raises ServeError."""
    most, limits, offload = service.options.http_max_input_size, service.limits, service.offload
    data, coding = call.body, call.header(b"content-encoding")
    if call.head.repeats(HEADER_LENGTH):  # a proxy that reads the other one sees another request
        raise invalid("More than one Inference-Header-Content-Length header")
    if coding:
        unpacked = unpack, data, coding, limits, most
        data = await inflate_offloaded(call.claim, offload, len(data), limits, *unpacked)
    length = _header_length(call.header(HEADER_LENGTH), len(data))
    if not length:
        if len(data) > most:
            raise too_large(RAW_INPUT % len(data), most)
        raw = deduce_raw(view, data)
        if length is None:
            said = call.header(HEADER_LENGTH).decode("latin-1")
            raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {said}")
        return InferBody(inputs=[raw], parameters=InferParameters(binary_output=True))
    check_json(length, most)
    memory = memoryview(data)
    read = await offload(length, read_header, memory[:length])
    if isinstance(read, InferFault) and view.version.config.loose_inputs and _may_have_nulls(read, data):
        read = await offload(length * _NULL_COST, read_nulls, memory[:length])
    body = read_body(read, memory[length:], view.model, service.regions.locate)
    for part in body.inputs if length * GROWTH > most else ():
        if part.is_json and (nbytes := memoryview(part.data).nbytes) > most:
            raise too_large(JSON_INPUT % (part.name, nbytes), most)
    return body


# A string, which has no null of ours, or a null in an array. Strings match also without their end: none is
# looked at twice.
_NULLS = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"?|(?P<before>[\[,][ \t\r\n]*)null(?=[ \t\r\n]*[,\]])', re.DOTALL
)
_NULL_COST = 8  # a byte is looked at as long as the reader reads so many
NULL_BYTES = 4 << 20
"""Bodies with null are read up to this size: each null is an object for a moment."""
MOST_ESCAPES = 10_000  # in such a body


def _may_have_nulls(fault: InferFault, body: bytes | bytearray) -> bool:
    """Return whether a refused body may have null where a number is wanted."""
    return (
        fault.code == InferCode.NOT_NUMBER
        and len(body) <= NULL_BYTES
        and b"null" in body
        and body.count(b"\\") <= MOST_ESCAPES
    )


def read_nulls(header: Memory) -> Header:
    """Read the JSON of a request whose arrays have null for a missing number."""

    def turn(match: re.Match[bytes]) -> bytes:
        before = match["before"]
        return match[0] if before is None else before + b"NaN"

    return read_header(_NULLS.sub(turn, header))


def _header_length(text: bytes, body_bytes: int) -> int | None:
    """Return how many bytes of the body are JSON; None where the header is no number.

    Triton 24.10 takes such a header for 0, so a raw request's errors come first; later releases refuse it.
    """
    if not text:
        return body_bytes
    said = text.decode("latin-1")
    length = leading_int(said)
    if length is not None and not 0 <= length <= body_bytes:
        raise invalid(f"inference header size should be in range (0, {body_bytes}), got: {said}")
    return length
