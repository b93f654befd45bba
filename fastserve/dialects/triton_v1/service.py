"""The state of one front process: statuses, counts by batch size, replies (spec 1, 3, 4, 8).

How many requests of each batch size there were and how long they took is counted here, per front process. The
engine's stages are counted for all batch sizes together (`engine.counters`) and shared out evenly.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fastserve._ext.proto_wire import WireFault
from fastserve._ext.proto_wire_v1 import write_v1_response
from fastserve.dialects.triton_v1.answers import Answer, AnswerWriter, ResponseHeader, write_id
from fastserve.engine import Took, VersionCounts
from fastserve.errors import DeadlineError, Kind, Reason, ServeError, invalid
from fastserve.net.request import Call
from fastserve.net.router import retry_after
from fastserve.protos import load
from fastserve.protos.text import quote
from fastserve.repository.version import Version
from fastserve.serving.dialect import DialectService, ServingContext
from fastserve.serving.exchange import Exchange, RpcExchange
from fastserve.serving.fast_path import PerVersion
from fastserve.serving.model_view import ModelView, find_version
from fastserve.serving.streams import Turn

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


@dataclass(slots=True)
class BatchSizeCounts:
    """The requests of one batch size."""

    success: Took = field(default_factory=Took)
    failed: Took = field(default_factory=Took)


class VersionRequestCounts(dict[int, BatchSizeCounts]):
    """The requests of one loaded version by batch size."""

    def __missing__(self, batch_size: int) -> BatchSizeCounts:
        found = self[batch_size] = BatchSizeCounts()
        return found


class V1Statistics:
    """The counts of every version; they begin at zero when a version is loaded again."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Version, VersionRequestCounts] = WeakKeyDictionary()
        self.control = Took()
        self.health = Took()
        self.status = Took()
        self.repository = Took()

    def of(self, version: Version) -> VersionRequestCounts:
        """Return the counts of this version, zero for a new one."""
        return self._found.setdefault(version, VersionRequestCounts())


def durations(known: VersionCounts, counts: BatchSizeCounts) -> Iterator[tuple[str, Took]]:
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
    counts: VersionRequestCounts


class V1UnknownModel(ServeError):
    """There is no such model: UNAVAILABLE in this API."""


class V1Service(DialectService):
    """The dialect's state in one front process, shared by all listeners."""

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context, "triton_v1")
        self.statistics = V1Statistics()
        self._codes: dict[str, int] = dict(load("triton_v1").RequestStatusCode.items())
        self.started_ns = monotonic_ns()
        self.next_id: Callable[[], int] = itertools.count(1).__next__
        self.served = PerVersion(self.keepers, self._serve)

    def _serve(self, version: Version) -> ServedVersion:
        view = self.views.of(version)
        return ServedVersion(view, AnswerWriter(view), self.statistics.of(version))

    def find(self, model: str, number: int | None) -> ServedVersion:
        """Return the available version, the highest for None. Raises ServeError UNAVAILABLE (spec 3.4)."""
        try:
            return self.served.of(find_version(self.catalog, model, number))
        except ServeError as fault:
            made = V1UnknownModel if fault.kind is Kind.NOT_FOUND else ServeError
            raise made(Kind.UNAVAILABLE, fault.message) from None

    def count_failure(
        self, served: ServedVersion, batch_size: int, exchange: Exchange, fault: ServeError
    ) -> None:
        """Count a request to a version that was answered with an error."""
        model, since_ns = served.view.model, exchange.received_ns
        self.traffic.refused(model, fault.kind.name, message=fault.message, exchange=exchange)
        if 1 <= batch_size <= max(1, served.view.max_batch_size):  # a client may send any batch size
            served.counts[batch_size].failed.add(monotonic_ns() - since_ns)

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
        status = self._service.status_line(v1_error(fault))
        headers = ((NV_RESPONSE, line), (NV_STATUS, status), CONTENT_TYPE, *retry_after(fault))
        call.reply(400, b"", b"", headers)


class RpcReplies:
    """Replies as InferResponses; the status of the RPC itself is always OK."""

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
        exchange.reply(self._refusal(request_id, fault))

    def _refusal(self, request_id: int, fault: ServeError) -> bytes:
        return write_v1_response(self._service.status(v1_error(fault)), write_id(request_id), ())


class StreamReplies(RpcReplies):
    """The replies of a stream."""

    def refuse(self, exchange: Turn, request_id: int, fault: ServeError) -> None:  # type: ignore[override]
        kind = Kind.NOT_FOUND if isinstance(fault, V1UnknownModel) else fault.kind
        exchange.refuse_with(self._refusal(request_id, fault), kind)
