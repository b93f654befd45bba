"""The state of one front process: statuses, counts by batch size, replies (spec 1, 3, 4, 8).

How many requests of each batch size there were and how long they took is counted with the version
(`engine.counters`), over all front processes. The engine's stages are counted for all batch sizes together
and shared out evenly.

All requests of one shape have the same InferResponseHeader of raw outputs, except for its last field, `id`.
The part before it is written once and cached in each of its three forms.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from time import monotonic_ns
from typing import Any, Protocol

from fastserve._ext.proto_wire import WireFault
from fastserve._ext.proto_wire_v1 import write_v1_header, write_v1_response
from fastserve.codec.byte_formats import write_varint
from fastserve.dialects.triton_v1.request import Buffer, OutputHeader, RequestHeader, write_dims
from fastserve.engine import RequestCounters, SizeCounts, Took, VersionCounts, counters_of
from fastserve.errors import DeadlineError, Kind, Reason, ServeError, invalid
from fastserve.metrics import Metric, Registry
from fastserve.net.request import Call
from fastserve.net.router import fault_headers, held_back_status
from fastserve.protos import load
from fastserve.protos.text import print_line, print_lines, quote
from fastserve.repository.triton_config.completion import DATA_TYPE
from fastserve.repository.version import Version
from fastserve.serving.client_shared_memory import OutputBuffers
from fastserve.serving.dialect import DialectService, ServingContext
from fastserve.serving.exchange import Exchange, RpcExchange
from fastserve.serving.fast_path import PerVersion
from fastserve.serving.model_view import Class, Dims, ModelView, check_order, classify, find_version
from fastserve.serving.streams import Turn
from fastserve.tensor import Tensor

# Error kind -> RequestStatusCode (spec 1). The only such table of this dialect.
SUCCESS = "SUCCESS"

STATUS_OF: dict[Kind, str] = {
    Kind.CANCELLED: "UNKNOWN",
    Kind.UNKNOWN: "UNKNOWN",
    Kind.INVALID_ARGUMENT: "INVALID_ARG",
    Kind.DEADLINE_EXCEEDED: "UNAVAILABLE",
    Kind.NOT_FOUND: "NOT_FOUND",
    Kind.ALREADY_EXISTS: "ALREADY_EXISTS",
    Kind.PERMISSION_DENIED: "UNSUPPORTED",
    Kind.RESOURCE_EXHAUSTED: "UNAVAILABLE",
    Kind.FAILED_PRECONDITION: "INVALID_ARG",
    Kind.ABORTED: "UNAVAILABLE",
    Kind.OUT_OF_RANGE: "INVALID_ARG",
    Kind.UNIMPLEMENTED: "UNSUPPORTED",
    Kind.INTERNAL: "INTERNAL",
    Kind.UNAVAILABLE: "UNAVAILABLE",
    Kind.DATA_LOSS: "INTERNAL",
    Kind.UNAUTHENTICATED: "UNSUPPORTED",
}

# Parts of a successful request, by InferRequestStats' names.
STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


CALLS = Metric("_triton_v1_calls", "Calls besides inference answered well.", "counter", ("call",))
CALLS_NS = Metric("_triton_v1_calls_ns", "Their time.", "counter", ("call",))


class CallStatistics:
    """Counts of the calls besides inference, over all front processes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @contextlib.contextmanager
    def counted(self, call: str) -> Iterator[None]:
        """Count a call and its time, unless it fails."""
        began_ns = monotonic_ns()
        yield
        self._registry.counters(CALLS).of(call).add()
        self._registry.counters(CALLS_NS).of(call).add(monotonic_ns() - began_ns)

    def of(self, call: str) -> Took:
        """Return how many calls there were, and their time."""
        calls, times = self._registry.read(CALLS, CALLS_NS)
        return Took(*(int(found.get((call,), (0,))[0]) for found in (calls, times)))


def durations(known: VersionCounts, counts: SizeCounts) -> Iterator[tuple[str, Took]]:
    """Yield the fields of InferRequestStats for one batch size; `known` has the counts of all sizes."""
    means = {stage: getattr(known, stage).ns / max(known.success.count, 1) for stage in STAGES}
    count = counts.success.count
    yield "success", counts.success
    yield "failed", counts.failed
    shares = {stage: Took(count, round(mean * count)) for stage, mean in means.items()}
    yield from shares.items()
    yield "compute", Took(count, sum(shares[stage].ns for stage in STAGES[1:]))


SERVER_ID = "inference:0"
GOOD = f'code: {SUCCESS} server_id: "{SERVER_ID}" request_id: '.encode()
QUEUE_FULL = "Exceeds maximum queue size"
NO_SEQUENCE = "non-zero or non-empty correlation ID"  # V1 has no sequences named by a string
_V2_PREFIX = re.compile(r"\A\[request id: [^\]]*\] ")
TOO_LATE = "Request timeout expired"


@dataclass(slots=True)
class ServedVersion:
    """The state of this API for one version."""

    view: ModelView
    answers: AnswerWriter
    counters: RequestCounters


class V1UnknownModel(ServeError):
    """There is no such model: UNAVAILABLE in this API."""


class V1Service(DialectService):
    """The dialect's state in one front process, shared by all listeners."""

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context, "triton_v1")
        self.statistics = CallStatistics(context.registry)
        self._codes: dict[str, int] = dict(load("triton_v1").RequestStatusCode.items())
        self.started_ns = context.started_ns
        self.next_id: Callable[[], int] = itertools.count(1).__next__
        self.served = PerVersion(self.keepers, self._serve)

    def _serve(self, version: Version) -> ServedVersion:
        view = self.views.of(version)
        return ServedVersion(view, AnswerWriter(view), counters_of(version))

    def find(self, model: str, number: int | None) -> ServedVersion:
        """Return the available version, the highest for None. Raises ServeError UNAVAILABLE (spec 3.4)."""
        try:
            return self.served.of(find_version(self.catalog, model, number))
        except ServeError as fault:
            if fault.reason in (Reason.SERVER_STARTING, Reason.API_KEY):
                raise
            made = V1UnknownModel if fault.kind is Kind.NOT_FOUND else ServeError
            raise made(Kind.UNAVAILABLE, fault.message) from None

    def count_failure(
        self, served: ServedVersion, batch_size: int, exchange: Exchange, fault: ServeError
    ) -> None:
        """Count a request to a version that was answered with an error."""
        model, since_ns = served.view.model, exchange.received_ns
        self.count_fault(model, fault, exchange)
        if 1 <= batch_size <= max(1, served.view.max_batch_size):  # a client may send any batch size
            served.counters.answered(batch_size, monotonic_ns() - since_ns, well=False)

    def status_line(self, fault: ServeError | None) -> bytes:
        """Return RequestStatus in one line of text: the value of NV-Status."""
        if fault is None:
            return b"%b%d" % (GOOD, self.next_id())
        text = quote(fault.message)
        word = STATUS_OF[fault.kind]
        return f'code: {word} msg: {text} server_id: "{SERVER_ID}" request_id: {self.next_id()}'.encode()

    def status(self, fault: ServeError | None) -> tuple[int, str, str, int]:
        """Return RequestStatus as its fields: code, msg, server_id, request_id."""
        if fault is None:
            return self._codes[SUCCESS], "", SERVER_ID, self.next_id()
        text = fault.message.encode("utf-8", "replace").decode()
        return self._codes[STATUS_OF[fault.kind]], text, SERVER_ID, self.next_id()


def v1_error(fault: ServeError) -> ServeError:
    """Return an engine's error with the original's kind and text (spec 3.4)."""
    if isinstance(fault, DeadlineError) and fault.queued:
        return ServeError(Kind.UNAVAILABLE, TOO_LATE)
    if fault.reason is Reason.QUEUE_FULL:
        return ServeError(Kind.UNAVAILABLE, QUEUE_FULL, retry_after_s=fault.retry_after_s)
    text = _V2_PREFIX.sub("", fault.message).replace(NO_SEQUENCE, "non-zero correlation ID")
    return ServeError(fault.kind, text, retry_after_s=fault.retry_after_s, reason=fault.reason)


NV_RESPONSE = b"NV-InferResponse"
NV_STATUS = b"NV-Status"
BINARY = b"application/octet-stream"
CONTENT_TYPE = (b"Content-Type", BINARY)
_BEFORE = b"NV-InferResponse: %b\r\nNV-Status: "
_AFTER = b"\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"


class Replies(Protocol):
    """The replies of one transport. `exchange` is its object for a request."""

    def answer(self, exchange: Any, request_id: int, answer: Answer) -> None:
        """Send an answer, copied. Raises ServeError when it cannot be sent."""

    def refuse(self, exchange: Any, request_id: int, fault: ServeError) -> None:
        """Send an error, with nothing but the request's id beside it."""


class HttpReplies:
    """Replies with raw outputs and their header behind them, as a message if `binary`, else as text."""

    def __init__(self, service: V1Service, *, binary: bool) -> None:
        self._service, self._binary = service, binary
        self.next_id = service.next_id

    def frame(self, forms: ResponseHeader) -> tuple[bytes, bytes, bytes]:
        """Return the parts of a good reply around its number and outputs, without an id, all outputs sent."""
        trailer = forms.trailer(binary=self._binary)
        return _BEFORE % forms.line() + GOOD, _AFTER % (forms.nbytes + len(trailer)), trailer

    def answer(self, call: Call, request_id: int, answer: Answer) -> None:
        forms, raws = answer
        trailer, status = forms.trailer(request_id, binary=self._binary), self._service.status_line(None)
        line, head = forms.line(request_id), call.raw_head(b"")
        if not head:
            headers = ((NV_RESPONSE, line), (NV_STATUS, status), CONTENT_TYPE)
            call.reply(200, b"".join((*raws, trailer)), b"", headers)
            return
        nbytes = len(trailer)
        for raw in raws:
            nbytes += len(raw)
        call.reply_raw(b"".join((head, _BEFORE % line, status, _AFTER % nbytes, *raws, trailer)))

    def refuse(self, call: Call, request_id: int, fault: ServeError) -> None:
        line = b"id: %d" % request_id if request_id else b""
        status = self._service.status_line(v1_error(call.cause_of(fault)))
        headers = ((NV_RESPONSE, line), (NV_STATUS, status), CONTENT_TYPE, *fault_headers(fault))
        call.reply(refusal_status(fault), b"", b"", headers)


def refusal_status(fault: ServeError) -> int:
    """Return the HTTP status of an error: 400, as the original, but where an API key does not suffice."""
    return held_back_status(fault) if fault.reason is Reason.API_KEY else 400


class RpcReplies:
    """Replies as InferResponses; the status of the RPC itself is always OK, but where an API key does not
    suffice."""

    def __init__(self, service: V1Service) -> None:
        self._service = service

    def answer(self, exchange: RpcExchange, request_id: int, answer: Answer) -> None:
        forms, raws = answer
        try:
            exchange.reply(write_v1_response(self._service.status(None), forms.binary(request_id), raws))
        except (WireFault, OverflowError):
            size = sum(memoryview(raw).nbytes for raw in raws)
            text = f"Response has byte size {size} which exceeds gRPC's byte size limit {2**31}."
            raise invalid(text) from None

    def refuse(self, exchange: RpcExchange, request_id: int, fault: ServeError) -> None:
        if fault.reason is Reason.API_KEY:
            exchange.refuse(fault)
        else:
            exchange.reply(self._refusal(request_id, fault))

    def _refusal(self, request_id: int, fault: ServeError) -> bytes:
        return write_v1_response(self._service.status(v1_error(fault)), write_id(request_id), ())


class StreamReplies(RpcReplies):
    """The replies of a stream."""

    def refuse(self, exchange: Turn, request_id: int, fault: ServeError) -> None:  # type: ignore[override]
        kind = Kind.NOT_FOUND if isinstance(fault, V1UnknownModel) else fault.kind
        exchange.refuse_with(self._refusal(request_id, fault), kind)


REMEMBERED_HEADERS = 64
_ID_TAG = b"\x28"  # field 5, varint


@dataclass(frozen=True, slots=True)
class RawOutput:
    """An output returned as bytes; `dims` as clients see them."""

    name: str
    dims: Dims
    nbytes: int


@dataclass(frozen=True, slots=True)
class ClassOutput:
    """An output returned as its highest values, for each row."""

    name: str
    rows: list[list[Class]]


class ResponseHeader:
    """One InferResponseHeader without its id, in three forms: each is made at its first use."""

    def __init__(
        self, version: Version, batch_size: int, described: Sequence[RawOutput | ClassOutput]
    ) -> None:
        self._version = version
        self._batch_size = batch_size
        self._outputs = described

    @property
    def nbytes(self) -> int:
        """The bytes of its raw outputs."""
        return sum(one.nbytes for one in self._outputs if isinstance(one, RawOutput))

    def line(self, request_id: int = 0) -> bytes:
        """Return the header as one line of text."""
        return b"%b id: %d" % (self._line, request_id) if request_id else self._line

    def binary(self, request_id: int = 0) -> bytes:
        """Return the header as a serialized message."""
        return self._binary + write_id(request_id) if request_id else self._binary

    def trailer(self, request_id: int = 0, *, binary: bool) -> bytes:
        """Return the header as it follows the outputs of an HTTP reply."""
        if binary:
            return self.binary(request_id)
        return b"%bid: %d\n" % (self._lines, request_id) if request_id else self._lines

    @cached_property
    def _binary(self) -> bytes:
        version = self._version
        outputs = [
            (one.name, one.dims, one.nbytes, None)
            if isinstance(one, RawOutput)
            else (one.name, (), 0, one.rows)
            for one in self._outputs
        ]
        return write_v1_header(version.model, version.number, self._batch_size, 0, outputs)

    @cached_property
    def _line(self) -> bytes:
        return print_line(self._message).encode()

    @cached_property
    def _lines(self) -> bytes:
        return print_lines(self._message).encode()

    @property
    def _message(self) -> Any:
        return load("triton_v1").InferResponseHeader.FromString(self._binary)


# The header, and a view of each output in order, empty where nothing is sent.
# The views are valid until the response is released.
Answer = tuple[ResponseHeader, list[Buffer]]


class AnswerWriter:
    """Writes the answers of one version."""

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._remember = lru_cache(REMEMBERED_HEADERS)(partial(ResponseHeader, view.version))

    def write(self, header: RequestHeader, outputs: dict[str, Tensor], held: OutputBuffers) -> Answer:
        """Return the header, and the bytes sent beside it; `held` has the outputs in shared memory.

        Raises ServeError when an output cannot be classified or does not fit its shared memory.
        """
        described: list[RawOutput | ClassOutput] = []
        raws: list[Buffer] = []
        for wanted in header.outputs:
            tensor = self._find(outputs, wanted.name)
            if wanted.classes:
                described.append(self._classify(wanted, tensor))
                raws.append(b"")
                continue
            raw = self.describe(wanted.name, tensor.shape, memoryview(tensor.data).nbytes)
            described.append(raw)
            raws.append(_place(wanted, tensor, held))
        return self.forms(header.batch_size, described), raws

    def _find(self, outputs: Mapping[str, Tensor], name: str) -> Tensor:
        tensor = outputs.get(name)
        if tensor is None:
            text = f"model '{self._view.model}' did not return output '{name}'"
            raise ServeError(Kind.INTERNAL, text)
        return tensor

    def describe(self, name: str, shape: Dims, nbytes: int) -> RawOutput:
        """Return an output of this shape, batch axis included.

        Raises ServeError where the model's config forbids it.
        """
        dims = self._view.client_shape(name, shape)[self._view.batching :]
        output = self._view.outputs[name]
        if output.dims is not None and not output.fits(dims):
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"output '{name}' for model '{self._view.model}' has shape {write_dims(dims)} "
                f"but model configuration specifies shape {write_dims(output.dims)}",
            )
        return RawOutput(name, dims, nbytes)

    def _classify(self, wanted: OutputHeader, tensor: Tensor) -> ClassOutput:
        view, name = self._view, wanted.name
        check_order(tensor, f"output '{name}'", DATA_TYPE.get(tensor.dtype.name, tensor.dtype.name))
        rows = classify(tensor, wanted.classes, view.labels(name), batching=view.batching)
        return ClassOutput(name, rows)

    def forms(self, batch_size: int, described: Sequence[RawOutput | ClassOutput]) -> ResponseHeader:
        """Return the header of these outputs."""
        if all(isinstance(one, RawOutput) for one in described):
            return self._remember(batch_size, tuple(described))
        return ResponseHeader(self._view.version, batch_size, described)


def _place(wanted: OutputHeader, tensor: Tensor, held: OutputBuffers) -> Buffer:
    """Return the bytes to send of a raw output: none when it goes into shared memory."""
    if wanted.shared is None:
        return tensor.data
    held[wanted.name].put(wanted.name, tensor.data)
    return b""


def write_id(number: int) -> bytes:
    """Return the `id` field of an InferResponseHeader; nothing for 0."""
    return _ID_TAG + write_varint(number) if number else b""
