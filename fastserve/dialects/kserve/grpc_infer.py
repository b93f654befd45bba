"""ModelInfer and ModelStreamInfer (spec 11): messages read in place, the fast path, the general path.

    message --skeleton--> (skeleton, id, first axes, data)   a known skeleton: a version and its reply's form
            --copy--> batch slice ... worker ... views of its outputs --copy--> reply

The skeleton of a message is every field but the id, the first axes of the shapes and the tensors' data
(model, version, names, requested outputs, parameters), so equal skeletons make equal requests. Skeletons are
cached of requests whose inputs have a fixed size and are not in client memory. For every other message,
errors included, `start` returns False without a trace, and the general path reads it.

Raw inputs stay where they were received until the engine writes them into the batch; typed contents are
copied once. In a stream, requests of ordinary models are answered in order and those of decoupled models as
they respond. An error is a response, and the stream goes on unless its client asked otherwise. A client that
leaves cancels its stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastserve._ext.message_skeleton import DATA, LEADS, TEXT, Scheme, Skeleton, write_from_template
from fastserve._ext.proto_wire import (
    InferMessage,
    Unsigned,
    WireFault,
    WireInput,
    read_infer_request,
    write_infer_response,
    write_stream_response,
)
from fastserve._ext.slab import blank_bytes
from fastserve.dialects.kserve.inference import Inference, reply_parameters, show_outputs
from fastserve.dialects.kserve.request import (
    UINT64_MASK,
    InferBody,
    InputPart,
    OutputPart,
    ReplyOptions,
    RpcParameters,
    check_unique,
    id_prefix,
    read_int,
    read_rpc_parameters,
    wrong_type,
)
from fastserve.dialects.kserve.routes import SERVICE, STREAM
from fastserve.dialects.kserve.service import KServeService, rpc_error
from fastserve.errors import Kind, ServeError, internal, invalid
from fastserve.net.access_control import Scope
from fastserve.net.grpc import GrpcExchange, Method, Rpc
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.request import InferRequest, InferResponse, Lent
from fastserve.serving.client_shared_memory import OutputBuffers, Range, Regions
from fastserve.serving.exchange import RpcExchange, deadline_of, internal_error
from fastserve.serving.fast_path import Outcome
from fastserve.serving.model_view import ModelView
from fastserve.serving.prepared_requests import Described, Memory
from fastserve.serving.request_templates import FieldSource, MessageTemplate, MessageTemplates
from fastserve.serving.rpc import answer_rpc, read_in_place
from fastserve.serving.slow_path import answer_slowly
from fastserve.serving.streams import Turn, answer_stream, generate
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME
from fastserve.util.offload import OFFLOAD_BYTES
from fastserve.util.spans import current_span

# Fields of InferTensorContents by their numbers, with Triton's names of their types.
_CONTENTS = ("", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "BYTES")
PARTS = "inputs, outputs, parameters, raw tensors and axes of a shape"
TOO_LARGE = "the response is too large for a gRPC message"
FINAL = "triton_final_response"


@dataclass(slots=True)
class ReceivedRequest:
    """A request as received: the parsed message and the bytes its raw tensors lie in."""

    message: InferMessage
    data: memoryview
    typed: dict[int, Memory] = field(default_factory=dict)  # large contents, copied in a thread


def read_request(data: bytes) -> ReceivedRequest:
    """Read a serialized ModelInferRequest. Raises ServeError."""
    message = read_in_place(read_infer_request, data, "ModelInferRequest", PARTS, internal)
    sent = ReceivedRequest(message, memoryview(data))
    if len(data) >= OFFLOAD_BYTES:
        _read_ahead(sent)
    return sent


def _read_ahead(sent: ReceivedRequest) -> None:
    """Copy typed contents. Their errors are reported when the model is known."""
    for index, given in enumerate(sent.message.inputs):
        if given.contents and len(given.kinds) == 1:
            with suppress(WireFault):
                sent.typed[index] = _copy_contents(sent.message, index, given)


def read_message(view: ModelView, sent: ReceivedRequest, regions: Regions) -> InferBody:
    """Return the infer body of a message. Raises ServeError."""
    message = sent.message
    body = InferBody(message.id, parameters=read_rpc_parameters(message.parameters))
    names: set[str] = set()
    for given in message.inputs:  # Triton checks names before data
        check_unique(given.name, names, message.id)
    raws = iter(range(message.raw_count))
    for index, given in enumerate(message.inputs):
        found = _find_memory(view.model, regions, sent, index, raws)
        body.inputs.append(InputPart(given.name, given.datatype, given.shape, *found))
    body.outputs = [_read_output(one.name, one.parameters) for one in message.outputs]
    first = body.inputs[0] if len(body.inputs) > 1 else None
    if view.max_batch_size and first is not None and first.shape and first.shape[0] < 0:
        # Triton reports a negative batch axis as a different one.
        text = f"input '{first.name}' batch size does not match other inputs for '{view.model}'"
        raise invalid(id_prefix(message.id) + text)
    return body


def _find_memory(
    model: str, regions: Regions, sent: ReceivedRequest, index: int, raws: Iterator[int]
) -> tuple[Memory, Range | None, Lent | None]:
    """Return the bytes of one input, from its contents or the next raw entry, or its client memory."""
    message, given = sent.message, sent.message.inputs[index]
    of_model = f"'{given.name}' for model '{model}'"
    range = _read_range(given.name, given.parameters)
    if range is not None:
        if given.contents:
            text = "unexpected 'content' provided when using shared memory for input tensor "
            raise invalid(text + of_model)
        return b"", range, regions.locate(range)
    if given.contents and message.raw_count:
        raise invalid(f"contents field must not be specified when using raw_input_contents for {of_model}")
    if given.contents:
        return sent.typed.get(index) or _read_contents(of_model, message, index, given), None, None
    raw = next(raws, None)
    if raw is None:
        raise invalid(f"unable to find data for input tensor {of_model} in request.")
    offset, size = message.raw(raw)
    return sent.data[offset : offset + size], None, None


def _read_contents(of_model: str, message: InferMessage, index: int, given: WireInput) -> Memory:
    where = f"unexpected explicit tensor data for input tensor {of_model}"
    kinds = given.kinds
    if len(kinds) > 1:
        raise invalid(f"{where}, binary data was already supplied.")
    if not kinds:
        return b""
    try:
        return _copy_contents(message, index, given)
    except WireFault:
        wanted = given.datatype if given.datatype in DTYPE_BY_KSERVE else "<invalid>"
        raise invalid(f"{where} of type '{_CONTENTS[kinds[0]]}', expected datatype '{wanted}'") from None


def _copy_contents(message: InferMessage, index: int, given: WireInput) -> Memory:
    """Copy typed contents into memory of their own. Raises WireFault."""
    dtype = DTYPE_BY_KSERVE.get(given.datatype)
    code = dtype.code if dtype is not None else 0
    memory = blank_bytes(message.contents_bytes(index, code))
    message.copy_contents(index, code, memory)
    return memory


def _read_range(tensor: str, given: RpcParameters) -> Range | None:
    """Return the shared memory that a tensor's parameters name, None without any. Raises ServeError."""
    if "shared_memory_region" not in given:
        for name in ("shared_memory_offset", "shared_memory_byte_size"):
            if name in given:
                raise invalid(
                    f"'{name}' can not be specified without 'shared_memory_region' parameter "
                    f"for tensor '{tensor}'"
                )
        return None
    region = given["shared_memory_region"]
    if not isinstance(region, str):
        raise wrong_type(f"'shared_memory_region' parameter for tensor '{tensor}'", "string_param")
    if "shared_memory_byte_size" not in given:
        raise invalid(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
            f"for tensor '{tensor}'"
        )
    sizes = []
    for name in ("shared_memory_offset", "shared_memory_byte_size"):
        size = read_int(f"'{name}' parameter for tensor '{tensor}'", given.get(name, 0))
        sizes.append(size & UINT64_MASK)  # a negative number is far outside of every region
    return Range(region, *sizes)


def _read_output(name: str, given: RpcParameters) -> OutputPart:
    """Read a requested output. Raises ServeError."""
    part = OutputPart(name, range=_read_range(name, given))
    if "classification" in given:
        classes = given["classification"]
        if not isinstance(classes, int) or isinstance(classes, bool | Unsigned):
            raise invalid("invalid value type for 'classification' parameter, expected int64_param")
        if classes <= 0:
            raise invalid("invalid value for 'classification' parameter, expected >= 0")
        if part.range is not None:
            raise invalid("output can't set both 'shared_memory_region' and 'classification'")
        part.classes = classes
    return part


def write_message(
    view: ModelView,
    options: ReplyOptions,
    response: InferResponse,
    request_id: str,
    rooms: OutputBuffers,
    *,
    streams: bool = False,
) -> bytes:
    """Write a ModelInferResponse, or with `streams` a ModelStreamInferResponse. Raises ServeError."""
    outputs: list[tuple[str, str, tuple[int, ...], None]] = []
    raws: list[Memory] = []
    for name, tensor, outside in show_outputs(view, options, response, rooms):
        outputs.append((name, KSERVE_NAME[tensor.dtype.name], tensor.shape, None))
        raws.append(b"" if outside else tensor.data)
    number, parameters = str(view.version.number), reply_parameters(view, options, response)
    try:
        if not streams:
            return write_infer_response(view.model, number, request_id, parameters, outputs, raws)
        parameters[FINAL] = response.final
        return write_stream_response("", view.model, number, request_id, parameters, outputs, raws)
    except (WireFault, OverflowError):
        raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None


# ModelInferRequest: the id; of each input its shape and its contents, from bool to fp64; raw contents.
SCHEME = Scheme({3: TEXT, 5: {3: LEADS, 5: dict.fromkeys(range(1, 8), DATA)}, 7: DATA})
RAW = (-1, 7)
VARINTS = range(1, 6)  # contents that are packed as such


class RpcTemplate(MessageTemplate):
    """The prepared request of all messages with one skeleton."""

    streams = False

    def __init__(self, view: ModelView, message: InferMessage, options: ReplyOptions) -> None:
        self.model, self.version = message.model_name, message.model_version
        number = view.version.number if message.model_version else None
        self.find_version = partial(view.catalog.available, view.model, number)
        self._view, self._asked, self._number = view, options, str(view.version.number)
        self._before = write_infer_response(view.model, self._number, "", None, (), ())

    def make_writer(self, described: Described) -> Any:
        """Return the part of a reply between the id and the tensors."""
        return write_infer_response("", "", "", None, self._describe(described), ())

    def _describe(self, described: Described) -> list[tuple[str, str, tuple[int, ...], None]]:
        return [
            (name, KSERVE_NAME[dtype.name], self._view.client_shape(name, shape), None)
            for name, dtype, shape in described
        ]

    def write(
        self, exchange: RpcExchange, writer: Any, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        try:
            message = write_from_template(self._before, request_id, writer, memory)
        except (WireFault, OverflowError):
            raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None
        exchange.reply(message)

    def write_response(
        self, exchange: RpcExchange, response: InferResponse, request_id: str, held: None
    ) -> None:
        rooms = OutputBuffers()
        message = write_message(self._view, self._asked, response, request_id, rooms, streams=self.streams)
        exchange.reply(message)


class StreamTemplate(RpcTemplate):
    """The template of a message in a stream, whose responses hold the answer as one field."""

    streams = True

    def make_writer(self, described: Described) -> Any:
        return self._describe(described)

    def write(
        self, exchange: RpcExchange, writer: Any, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        names = "", self._view.model, self._number
        try:
            message = write_stream_response(*names, request_id, {FINAL: True}, writer, memory)
        except (WireFault, OverflowError):
            raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None
        exchange.reply(message)


def outcome_of(service: KServeService, model: str) -> Outcome:
    """Return the callbacks for the end of one model's RPCs."""

    def refused(exchange: RpcExchange, prepared: RpcTemplate, request_id: str, fault: ServeError) -> None:
        error = rpc_error(fault, request_id)
        service.count_fault(model, fault, exchange)
        if isinstance(exchange, Turn):
            exchange.stream.refuse(exchange, error, prepared.model, prepared.version, request_id)
        else:
            exchange.refuse(error)

    return Outcome(refused)


def find_sources(
    skeleton: Skeleton, names: Sequence[str], request: InferRequest
) -> dict[str, FieldSource] | None:
    """Return the variable field of each input's data, by the input's name; `names` in the message's order.

    Either all inputs are raw or each is in its own contents; None for every other message.
    """
    fields = skeleton.fields
    if len(request.inputs) != len(names):
        return None
    if list(fields) == [RAW] * len(names):
        return {name: FieldSource(placeholder) for placeholder, name in enumerate(names)}
    if [owner for owner, _ in fields] != list(range(len(names))):
        return None
    return {
        name: FieldSource.of(placeholder, request.inputs[name].dtype, varints=field in VARINTS)
        for placeholder, (name, (_, field)) in enumerate(zip(names, fields, strict=True))
    }


def make_infer(service: KServeService) -> Method:
    """Return the method of ModelInfer."""
    infer, path = ModelInfer(service), SERVICE + "ModelInfer"
    return Method(path, bytes, infer, bytes, scope=Scope.INFER, start=infer.start, take=infer.take)


class ModelInfer:
    """The RPC ModelInfer of one front process."""

    def __init__(self, service: KServeService) -> None:
        self._service = service
        self._fast: MessageTemplates[RpcTemplate] = MessageTemplates(service, SCHEME)

    def start(self, data: bytes, exchange: GrpcExchange) -> bool:
        """Start a request of a known skeleton.

        Returns False, without a trace, to leave it to the coroutine.
        """
        service = self._service
        if service.traces.on or service.forward_grpc:  # as in skeleton_of
            return False
        skeleton = self._fast.read(data)
        return skeleton is not None and self._fast.start(skeleton, exchange, exchange.deadline_ns)

    def take(self, exchange: GrpcExchange, body: ArrivedBody) -> bool:
        """Start a request of a known skeleton whose last tensor is still in the socket, or return False."""
        service = self._service
        if service.traces.on or service.forward_grpc:
            return False
        return self._fast.take_arrived(exchange, body)

    async def __call__(self, data: bytes, rpc: Rpc) -> bytes:
        """Return a serialized ModelInferResponse. Raises ServeError."""
        service = self._service
        sent = await service.offload(len(data), read_request, data)
        known = skeleton_of(service, data), self._fast
        return await answer_rpc(
            rpc.received_ns, partial(GrpcInference, service, sent, rpc, deadline_of(rpc), *known)
        )


def skeleton_of(service: KServeService, data: bytes) -> Skeleton | None:
    """Return the skeleton of a message; None while tracing or forwarded headers want every message read."""
    return None if service.traces.on or service.forward_grpc else SCHEME.read(data)


class GrpcInference(Inference):
    """A request on the general path; `fast` caches its skeleton afterwards."""

    refusal = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    head = RpcTemplate
    streams = False

    def __init__(
        self,
        service: KServeService,
        sent: ReceivedRequest,
        rpc: Rpc,
        deadline_ns: int,
        skeleton: Skeleton | None,
        fast: MessageTemplates[RpcTemplate],
        exchange: RpcExchange,
    ) -> None:
        super().__init__(service, service.forward_grpc)
        self.exchange, self.message, self.deadline_ns = exchange, sent.message, deadline_ns
        self._sent, self._rpc = sent, rpc
        self._skeleton, self._fast = skeleton, fast

    def find(self) -> ModelView:
        return self.service.find(self.message.model_name, self.message.model_version)

    async def read_body(self, view: ModelView) -> InferBody:
        return read_message(view, self._sent, self.service.regions)

    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        return self._rpc.metadata

    async def prepare(self, view: ModelView) -> InferRequest:
        request = await super().prepare(view)
        traces = self.service.traces
        self.traced = traces.sample(view.model) if traces.on else None
        return request

    def encode(self, view: ModelView, response: InferResponse) -> bytes:
        if self.traced is not None:
            self.traced.stamp("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", ns=self.exchange.received_ns)
            self.traced.stamp("GRPC_SEND_START", "GRPC_SEND_END")
        return write_message(
            view, self.options, response, self.body.request_id, self.rooms, streams=self.streams
        )

    async def send(self) -> None:
        self.exchange.reply(self.reply)

    def close(self) -> None:
        super().close()
        if self.traced is not None:
            self.traced.end()

    def answered(self, took_ns: int) -> None:
        skeleton, view, request, options = self._skeleton, self.view, self.request, self.options
        if skeleton is None or view is None or request is None or self.converts:
            return
        if options.ranges or options.classifies:
            return
        names = [part.name for part in self.body.inputs]

        def prepare() -> tuple[RpcTemplate, dict[str, FieldSource]] | None:
            sources = find_sources(skeleton, names, request)
            return None if sources is None else (self.head(view, self.message, options), sources)

        outcome = outcome_of(self.service, self.version.model)
        self._fast.cache_template(skeleton, self.version, request, outcome, prepare)

    def refused(self, fault: ServeError) -> None:
        error = rpc_error(fault, self.message.id)
        self.service.count_fault(self.message.model_name, fault, self._rpc)
        self.exchange.refuse(error)


MOST_AT_ONCE = 256
"""Requests of one stream under way; the stream is read no further until one of them has ended."""

ERROR_MODE = ("triton_grpc_error", "true")


def make_stream(service: KServeService) -> Method:
    """Return the method of ModelStreamInfer."""
    fast: MessageTemplates[RpcTemplate] = MessageTemplates(service, SCHEME)

    def run(requests: AsyncIterator[bytes], rpc: Rpc) -> AsyncGenerator[bytes, None]:
        stream = ModelStream(service, fast, rpc)
        return answer_stream(requests, stream.begin, MOST_AT_ONCE, stream, service.repository.want)

    return Method(SERVICE + STREAM, bytes, run, bytes, True, True, scope=Scope.INFER)


class ModelStream:
    """One stream of ModelStreamInfer."""

    def __init__(self, service: KServeService, fast: MessageTemplates[RpcTemplate], rpc: Rpc) -> None:
        self._service, self._fast, self._rpc = service, fast, rpc
        self._ends_on_fault = ERROR_MODE in rpc.metadata
        self._deadline_ns = deadline_of(rpc)
        self._traced = current_span() is not None

    def begin(self, data: bytes, turn: Turn) -> Coroutine[Any, Any, None] | None:
        """Start a request of a known skeleton and return None, or return the coroutine that answers it."""
        skeleton = None if self._traced else skeleton_of(self._service, data)
        if skeleton is not None and self._fast.start(skeleton, turn, self._deadline_ns):
            return None
        return self._answer(data, skeleton, turn)

    async def _answer(self, data: bytes, skeleton: Skeleton | None, turn: Turn) -> None:
        service = self._service
        sent = await service.offload(len(data), read_request, data)
        request = StreamInference(service, sent, self._rpc, self._deadline_ns, skeleton, self._fast, turn)
        view = request.look()
        if view is None or not view.decoupled:
            await answer_slowly(turn, request)
            return
        try:
            await self._answer_many(turn, request, view)
        except ServeError as fault:
            request.refused(fault)
        except Exception as error:
            request.refused(internal_error(turn, error))
        finally:
            request.close()

    async def _answer_many(self, turn: Turn, request: StreamInference, view: ModelView) -> None:
        """Send a decoupled model's responses as they come. Raises ServeError before the first one."""
        service, message = self._service, request.message
        prepared = await request.prepare(view)
        turn.step_out()
        ended, well = False, True
        start = partial((request.traced or service.engine).stream, view.version, prepared)
        async with aclosing(generate(start, partial(request.encode, view), service.offload)) as events:
            async for event in events:
                ended, well = event.final, well and event.fault is None
                if event.fault is None:
                    await turn.say(event.text)
                elif not await self._send_error(turn, request, event.fault, final=ended):
                    return
        if request.body.parameters.empty_final and not ended:
            name, version = message.model_name, message.model_version
            await turn.say(write_stream_response("", name, version, message.id, {FINAL: True}))
        turn.leave()
        if well:
            service.traffic.answered(view.model, view.version.number, turn.received_ns)

    async def _send_error(
        self, turn: Turn, request: StreamInference, fault: ServeError, *, final: bool
    ) -> bool:
        """Send an error of the model. Returns False when it ends the stream."""
        error, message = rpc_error(fault, request.message.id), request.message
        self._service.count_fault(message.model_name, fault, turn)
        if self._ends_on_fault:
            turn.fail(error)
        else:
            await turn.say(_write_error(error, message.model_name, message.model_version, message.id, final))
        return not self._ends_on_fault

    def refuse(self, turn: Turn, error: ServeError, model: str, version: str, request_id: str) -> None:
        """Answer with the error of a request that passed its checks, or end the stream with it."""
        if self._ends_on_fault:
            turn.fail(error)
        else:
            turn.reply(_write_error(error, model, version, request_id, final=True))


def _write_error(error: ServeError, model: str, version: str, request_id: str, final: bool) -> bytes:
    return write_stream_response(error.message, model, version, request_id, {FINAL: final})


class StreamInference(GrpcInference):
    """A request of a stream on the general path."""

    exchange: Turn
    head = StreamTemplate
    streams = True

    def look(self) -> ModelView | None:
        """Return the version it is for; None where there is none, which `read` reports."""
        try:
            return self.find()
        except ServeError:
            return None

    def refused(self, fault: ServeError) -> None:
        turn, message, error = self.exchange, self.message, rpc_error(fault, self.message.id)
        self.service.count_fault(message.model_name, fault, turn)
        if self.request is None:  # an error before the model ends no stream
            turn.refuse_with(write_stream_response(error.message, id=message.id), fault.kind)
        else:
            turn.stream.refuse(turn, error, message.model_name, message.model_version, message.id)
