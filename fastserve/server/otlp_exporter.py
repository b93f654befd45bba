"""The exporter of traces: the one process that imports OpenTelemetry. `python -m
fastserve.server.otlp_exporter FD`.

    fronts --datagrams--> [ spans ] --------------.
                          [ batches, merged ] ----+--> queue, bounded --> OTLP over gRPC or HTTP --> collector

Each front that had a request in a batch reports it: BATCH_S after the last of them its span goes out,
with a link to every request's compute span. A batch has one span, however long it runs on after requests of
it were left. The main thread reads, and never waits for the collector: another thread does, and what finds
the queue full meanwhile is lost and reported to the owner.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from fastserve.server.span_records import MODEL, VERSION, BatchRecord, LinkTo, SpanRecord, read_request
from fastserve.util.logs import log_uncaught, setup_logs
from fastserve.util.spans import Attributes, RequestSpan
from fastserve.workers.control import (
    ControlChannel,
    ControlFault,
    PeerGone,
    enter_child,
    exit_now,
    name_process,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

TITLE = "exporter"
BATCH_S = 1.0  # after the last request of a batch
RUNNING_S = 120.0  # the same, where no request has seen its end: those that told of it were left
MOST_BATCHES = 4096  # that wait for further requests; the oldest goes first
MOST_LINKS = 1024  # of one batch
TOGETHER = 512  # spans of one message to the collector
DELAY_S = 0.5  # until fewer go
LAST_S = 3.0  # for what is left at the end
REPORT_S = 1.0  # between two reports of what was lost
MESSAGE_BYTES = 1 << 18
NICENESS = 10  # traces are for a look at requests, which go first

_decode = msgspec.msgpack.Decoder(list[RequestSpan]).decode


class SpanQueue:
    """Spans that wait for the collector, at most `most`; and how many were lost, by cause."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[SpanRecord] = deque()
        self._changed = threading.Condition()
        self._lost: Counter[str] = Counter()
        self._reason = ""
        self._ended = False

    def put(self, spans: Sequence[SpanRecord]) -> None:
        """Append spans; those without room are lost."""
        with self._changed:
            room = max(self._most - len(self._waiting), 0)
            self._waiting.extend(spans[:room])
            if len(spans) > room:
                self._lost["full"] += len(spans) - room
                self._reason = self._reason or f"{self._most} wait for the collector (otel.queue_spans)"
            if len(self._waiting) >= TOGETHER:
                self._changed.notify()

    def end(self) -> None:
        """No more spans come."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def take(self) -> list[SpanRecord]:
        """Wait for spans and return some; none when there will be no more."""
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait(DELAY_S)
            if len(self._waiting) < TOGETHER and not self._ended:
                self._changed.wait(DELAY_S)
            return [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]

    def refused(self, count: int, reason: str) -> None:
        """Count spans that the collector did not take."""
        with self._changed:
            self._lost["export"] += count
            self._reason = reason

    def report(self) -> tuple[dict[str, int], str]:
        """Return what was lost since the last call, and why."""
        with self._changed:
            lost, self._lost = dict(self._lost), Counter()
            reason, self._reason = self._reason, ""
            return lost, reason


class MergedBatch(NamedTuple):
    """A batch as its requests have told of it so far: who has seen most of it, and when its span goes out."""

    batch: BatchRecord
    links: list[LinkTo]
    rows: int
    due_s: float


class BatchMerger:
    """Batches that other requests may still tell of: of one that ran on when its request was left, until
    others have seen its end."""

    def __init__(self) -> None:
        self._ended: dict[str, MergedBatch] = {}
        self._running: dict[str, MergedBatch] = {}  # in both by ids, in the order of `due_s`

    def add(self, batch: BatchRecord, now_s: float) -> None:
        """Add one request's view of a batch."""
        place = batch.span_id
        known = self._ended.pop(place, None) or self._running.pop(place, None)
        first, links, rows, _ = known or MergedBatch(batch, [], 0, 0.0)
        if len(links) < MOST_LINKS:
            links.append(batch.link)
        if max(batch.times_ns) > max(first.times_ns):
            first = batch
        ended = first.times_ns[-1] > 0
        wait_s = BATCH_S if ended else RUNNING_S
        (self._ended if ended else self._running)[place] = MergedBatch(
            first, links, rows + batch.rows, now_s + wait_s
        )

    def due(self, now_s: float) -> list[SpanRecord]:
        """Return the spans of batches that no more requests tell of."""
        spans = []
        for batches in self._ended, self._running:
            while batches:
                batch, links, rows, due_s = next(iter(batches.values()))
                if due_s > now_s and len(batches) <= MOST_BATCHES:
                    break
                del batches[batch.span_id]
                spans.append(batch_span(batch, links, rows))
        return spans


def batch_span(batch: BatchRecord, links: list[LinkTo], rows: int) -> SpanRecord:
    """Return the span of a batch: from its first row to its end, in a trace of its own."""
    first_ns, taken_ns, run_ns, ran_ns, done_ns = batch.times_ns
    end_ns = done_ns or max(batch.times_ns)
    attributes: Attributes = {
        MODEL: batch.model,
        VERSION: batch.version,
        "fastserve.batch.traced_rows": rows,
        "fastserve.batch.traced_requests": len(links),
    }
    moments = (("taken", taken_ns), ("run started", run_ns), ("run ended", ran_ns))
    return SpanRecord(
        batch.trace_id,
        batch.span_id,
        "",
        "",
        f"batch {batch.model}",
        "internal",
        first_ns or end_ns,
        max(end_ns, first_ns),
        attributes,
        [(name, ns, {}) for name, ns in moments if ns],
        links,
        batch.error,
    )


class SpanWriter:
    """Writes records as spans of OpenTelemetry's SDK."""

    def __init__(self, resource: Resource) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.status import Status, StatusCode

        from fastserve import __version__

        self._resource, self._scope = resource, InstrumentationScope("fastserve", __version__)
        self._trace, self._span, self._event = trace, ReadableSpan, Event
        self._status, self._codes = Status, StatusCode
        self._kinds = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}

    def write(self, record: SpanRecord) -> ReadableSpan:
        """Return one span."""
        trace = self._trace
        error = record.error
        return self._span(
            name=record.name,
            context=self._context(record.trace_id, record.span_id, record.state),
            parent=self._context(record.trace_id, record.parent_id) if record.parent_id else None,
            resource=self._resource,
            attributes=record.attributes,
            events=[self._event(name, attributes, ns) for name, ns, attributes in record.events],
            links=[trace.Link(self._context(*link)) for link in record.links],
            kind=self._kinds[record.kind],
            status=self._status(self._codes.UNSET if error is None else self._codes.ERROR, error),
            start_time=record.start_ns,
            end_time=record.end_ns,
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: str, span_id: str, state: str = "") -> Any:
        trace = self._trace
        return trace.SpanContext(
            int(trace_id, 16),
            int(span_id, 16),
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            trace_state=trace.TraceState.from_header([state]) if state else None,
        )


class LastWords(logging.Handler):
    """Keeps what OpenTelemetry last logged, the reason of a failure, and writes nothing."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def open_exporter(plan: dict[str, Any]) -> SpanExporter:
    """Return the SDK's exporter. What the plan leaves out is read from OpenTelemetry's variables by the
    SDK."""
    endpoint, given = plan["endpoint"], plan["headers"]
    headers = {name.lower(): value for name, value in given.items()} or None
    if plan["protocol"] == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        pairs = None if headers is None else tuple(headers.items())
        return GrpcExporter(endpoint=endpoint or None, headers=pairs)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    if endpoint and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return HttpExporter(endpoint=endpoint or None, headers=headers)


def open_resource(attributes: dict[str, str]) -> Resource:
    """Return the resource of all spans: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, then the settings' on
    top."""
    from opentelemetry.sdk.resources import Resource

    from fastserve import __version__

    found = Resource.create({"service.version": __version__, **attributes})
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "fastserve"}))
    return found


def export_all(queue: SpanQueue, plan: dict[str, Any]) -> None:
    """Send what the queue has to the collector until it ends. A thread's work."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    words, sdk = LastWords(), logging.getLogger("opentelemetry")
    sdk.handlers, sdk.propagate = [words], False
    exporter, writer = open_exporter(plan), SpanWriter(open_resource(plan["resource"]))
    while spans := queue.take():
        try:
            taken = exporter.export([writer.write(span) for span in spans]) is SpanExportResult.SUCCESS
        except Exception as error:
            taken, words.text = False, f"{type(error).__name__}: {error}"
        if not taken:
            queue.refused(len(spans), words.text or "the collector did not take them")
    exporter.shutdown()


def serve(control: ControlChannel, taking: socket.socket, plan: dict[str, Any]) -> None:
    """Read spans until the owner says stop, and hand over what is left."""
    queue, merger = SpanQueue(plan["queue_spans"]), BatchMerger()
    sender = threading.Thread(target=export_all, args=(queue, plan), name="otlp", daemon=True)
    sender.start()
    poll, stopped, report_s = select.poll(), False, 0.0
    for fd in (taking.fileno(), control.fileno()):
        poll.register(fd, select.POLLIN)
    while not stopped:
        ready = {fd for fd, _ in poll.poll(DELAY_S * 1000)}
        if not sender.is_alive():
            raise RuntimeError("the thread that exports has ended")
        take_all(taking, queue, merger)
        queue.put(merger.due(time.monotonic()))
        if control.fileno() in ready:
            stopped = is_told_to_stop(control)
        if time.monotonic() >= report_s:
            report_s = time.monotonic() + REPORT_S
            report(control, queue)
    take_all(taking, queue, merger)
    queue.put(merger.due(math.inf))
    queue.end()
    sender.join(LAST_S)
    report(control, queue)


def take_all(taking: socket.socket, queue: SpanQueue, merger: BatchMerger) -> None:
    """Read the datagrams that have come. One that cannot be read is left out."""
    for _ in range(TOGETHER):
        try:
            data = taking.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        with contextlib.suppress(msgspec.DecodeError):
            for request in _decode(data):
                spans, batches = read_request(request)
                queue.put(spans)
                for batch in batches:
                    merger.add(batch, time.monotonic())


def is_told_to_stop(control: ControlChannel) -> bool:
    """Read one message of the owner's; its end is a stop too."""
    try:
        return bool(control.receive().message["op"] == "stop")
    except PeerGone:
        return True


def report(control: ControlChannel, queue: SpanQueue) -> None:
    """Tell the owner what was lost."""
    lost, reason = queue.report()
    if lost:
        with contextlib.suppress(ControlFault):  # the owner has gone
            control.send({"op": "lost", "lost": lost, "reason": reason})


def main(arguments: list[str]) -> int:
    """Run the exporter to its end; the exit status."""
    control = enter_child(int(arguments[0]))
    order, fds = control.receive()
    name_process(TITLE)
    setup_logs(order["logs"]["level"], order["logs"]["format"], fields={"worker": TITLE})
    log_uncaught()
    os.environ["OTEL_SDK_DISABLED"] = "false"  # decided by the owner
    os.nice(NICENESS)
    taking = socket.socket(fileno=fds[0])
    taking.setblocking(False)
    serve(control, taking, order["plan"])
    exit_now(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
