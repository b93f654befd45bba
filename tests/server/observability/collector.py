"""An OpenTelemetry collector for tests: OTLP over gRPC and over HTTP, on ports of its own, with the messages
of the published proto files. What has come is in `spans`, in the collector's own words."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

WAIT_S = 60.0


@dataclass
class Span:
    """One span as a collector gets it."""

    name: str
    trace_id: str
    id: str
    parent: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    links: list[tuple[str, str]]
    failed: bool
    words: str
    state: str
    resource: Mapping[str, Any]


@dataclass
class Received:
    """Spans of one collector, by any protocol; `hold` keeps its answers back."""

    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    address: str = ""
    hold: threading.Event = field(default_factory=threading.Event)
    refuse: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        """Read one export; duplicates, which a repeated export brings, are kept out."""
        with self._changed:
            known = {span.id for span in self.spans}
            self.headers.append(headers)
            for group in request.resource_spans:
                resource = read_attributes(group.resource.attributes)
                for scope in group.scope_spans:
                    self.spans += [
                        read_span(s, resource) for s in scope.spans if s.span_id.hex() not in known
                    ]
            self._changed.notify_all()

    def wait(self, true: Callable[[list[Span]], Any]) -> list[Span]:
        """Wait until `true` of the spans."""
        until = time.monotonic() + WAIT_S
        with self._changed:
            while not true(self.spans):
                left_s = until - time.monotonic()
                assert left_s > 0, [span.name for span in self.spans]
                self._changed.wait(left_s)
            return list(self.spans)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def read_attributes(given: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in given}


def read_span(span: Any, resource: Mapping[str, Any]) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        read_attributes(span.attributes),
        [event.name for event in span.events],
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.code == 2,
        span.status.message,
        span.trace_state,
        resource,
    )


class GrpcTraces(TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, received: Received) -> None:
        self.received = received

    def Export(self, request: Any, context: Any) -> Any:
        self.received.hold.wait(WAIT_S)
        if self.received.refuse:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the collector wants none")
        self.received.take(request, {key: str(value) for key, value in context.invocation_metadata()})
        return ExportTraceServiceResponse()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Received]:
    """A collector of OTLP over gRPC."""
    received = Received()
    received.hold.set()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(GrpcTraces(received), server)
    received.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        received.hold.set()
        server.stop(0).wait(WAIT_S)


@contextlib.contextmanager
def http_collector() -> Iterator[Received]:
    """A collector of OTLP over HTTP, with protobuf."""
    received = Received()
    received.hold.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.hold.wait(WAIT_S)
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            headers = {name.lower(): value for name, value in self.headers.items()}
            received.take(ExportTraceServiceRequest.FromString(body), {**headers, ":path": self.path})
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Not on the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield received
    finally:
        received.hold.set()
        server.shutdown()
        server.server_close()
        thread.join(WAIT_S)
