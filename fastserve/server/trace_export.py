"""Traces of requests on their way out: from front processes to the exporter's process, and its life.

    front    ended span -> SpanOutbox -> datagram ---.
    front    ended span -> SpanOutbox -> datagram ---+--> exporter (otlp_exporter.py) --OTLP--> collector
    owner    starts the exporter, counts what it lost <---'

All processes share one pair of sockets, which the owner keeps: an exporter that ends is started again on the
same end, and fronts notice nothing. A datagram that finds no room is lost and counted; nobody waits. No part
of OpenTelemetry is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from fastserve.errors import ConfigError, install_text
from fastserve.metrics import Registry, names
from fastserve.net.traced_endpoints import TraceSampler
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState, StateRecord
from fastserve.settings import OtelOptions, Settings
from fastserve.settings.kserve_options import OPENTELEMETRY, TraceValues, parse_trace_config
from fastserve.util.logs import current_logs
from fastserve.util.rate_limited_log import RateLimitedLog
from fastserve.util.spans import HttpFacts, RequestSpan, RpcFacts, count_spans
from fastserve.workers.control import ControlFault
from fastserve.workers.group import Backoff
from fastserve.workers.process import ENTRY, WorkerProcess, worker_environment

log = logging.getLogger(__name__)
_limited_log = RateLimitedLog(log)

ENTRY_EXPORTER = (*ENTRY[:-1], "fastserve.server.otlp_exporter")
PACKAGES = {
    "grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "http/protobuf": "opentelemetry-exporter-otlp-proto-http",
}
HTTP_PORT = "4318"  # of OTLP over HTTP, as 4317 is gRPC's
DEFAULT_RATIO = 0.01
PAUSE_S = 0.05  # ended spans of this long go together
MOST_TOGETHER = 64  # that wait until then
MOST_BYTES = 48 << 10  # of a datagram
SOCKET_BYTES = 4 << 20  # asked of the kernel, which gives what net.core.wmem_max allows
STOP_S = 5.0  # for the last spans to be taken by the collector

_encode = msgspec.msgpack.Encoder().encode


class TracePlan(NamedTuple):
    """Share of requests that are traced, and the collector. `endpoint` and `protocol` are "" where
    OpenTelemetry's own variables say."""

    endpoint: str
    protocol: str
    ratio: float
    parent_based: bool
    headers: dict[str, str]
    resource: dict[str, str]
    queue_spans: int

    @property
    def sampler(self) -> TraceSampler:
        """Return a sampler for one front process."""
        return TraceSampler(self.ratio, parent_based=self.parent_based)


def read_trace_plan(settings: Settings, environment: Mapping[str, str]) -> TracePlan | None:
    """Return what the settings, or OpenTelemetry's variables, ask for; None where requests are not traced.
    Equal in every front process. Raises ConfigError for a value that cannot be, and for packages that are not
    installed."""
    options, triton = settings.otel, parse_trace_config(settings.triton.trace_config)
    named = _variable(environment, "ENDPOINT")
    if options.endpoint:
        plan = _plan_of(options, environment, options.endpoint)
    elif triton.get("trace_mode") == OPENTELEMETRY:
        plan = _plan_of_triton(options, triton, environment)
    elif named and _speaks_otlp(environment):
        plan = _plan_of(options, environment, "")
    else:
        return None
    package = PACKAGES[_protocol_of(plan, environment)]
    missing = [one for one in ("opentelemetry-sdk", package) if not _is_installed(one)]
    if not missing:
        return plan
    hint = install_text(" ".join(missing), "otel")
    if options.endpoint or triton.get("trace_mode") == OPENTELEMETRY:
        raise ConfigError(f"otel: {missing[0]} is not installed: {hint}")
    log.warning("requests are not traced, though the environment names a collector: %s", hint)
    return None


def _variable(environment: Mapping[str, str], name: str) -> str:
    """Return OpenTelemetry's variable of an exporter: that of traces goes before that of everything."""
    found = environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environment.get(
        f"OTEL_EXPORTER_OTLP_{name}"
    )
    return (found or "").strip()


def _speaks_otlp(environment: Mapping[str, str]) -> bool:
    exporters = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return "otlp" in exporters.split(",") and not disabled


def _protocol_of(plan: TracePlan, environment: Mapping[str, str]) -> str:
    given = plan.protocol or _variable(environment, "PROTOCOL")
    if not given:
        place = (plan.endpoint or _variable(environment, "ENDPOINT")).partition("://")[2].partition("/")[0]
        given = "http/protobuf" if place.rpartition(":")[2] == HTTP_PORT else "grpc"
    if given not in PACKAGES:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: given {given!r}, allowed: {', '.join(PACKAGES)}")
    return given


def _plan_of(options: OtelOptions, environment: Mapping[str, str], endpoint: str) -> TracePlan:
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    ratio, parent_based = read_sampler(environment)
    resource = {"service.name": options.service_name} if options.service_name else {}
    plan = TracePlan(
        endpoint,
        options.protocol,
        ratio if options.ratio is None else options.ratio,
        parent_based,
        dict(pair.partition("=")[::2] for pair in options.headers),
        resource,
        options.queue_spans,
    )
    return plan._replace(protocol=_protocol_of(plan, environment))


def _plan_of_triton(options: OtelOptions, triton: TraceValues, environment: Mapping[str, str]) -> TracePlan:
    """As Triton's mode opentelemetry: OTLP over HTTP, every `rate`th request, and those whose parent is
    sampled."""
    queue_spans = int(str(triton.get("bsp_max_queue_size", options.queue_spans)))
    given = msgspec.structs.replace(options, protocol="http/protobuf", queue_spans=queue_spans)
    plan = _plan_of(given, environment, str(triton.get("url", "http://localhost:4318/v1/traces")))
    off = triton.get("trace_level", ["OFF"]) == ["OFF"]
    resource = dict(pair.partition("=")[::2] for pair in triton.get("resource", ()))
    ratio = 0.0 if off else 1 / int(str(triton.get("trace_rate", "1000")))
    return plan._replace(ratio=ratio, parent_based=not off, resource={**plan.resource, **resource})


def read_sampler(environment: Mapping[str, str]) -> tuple[float, bool]:
    """Return the ratio and whether a parent decides, by OTEL_TRACES_SAMPLER and its argument. Raises
    ConfigError."""
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip() or "parentbased_traceidratio"
    given = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    kind = name.removeprefix("parentbased_")
    if kind not in ("always_on", "always_off", "traceidratio"):
        allowed = "always_on, always_off, traceidratio, each also with parentbased_ before it"
        raise ConfigError(f"OTEL_TRACES_SAMPLER: given {name[:80]!r}, allowed: {allowed}")
    if kind != "traceidratio":
        return float(kind == "always_on"), name != kind
    default = DEFAULT_RATIO if "OTEL_TRACES_SAMPLER" not in environment else 1.0
    try:
        ratio = float(given) if given else default
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG: given {given[:80]!r}, allowed: a number from 0 to 1")
    return ratio, name != kind


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class SpanOutbox:
    """Ended spans of one front process on their way to the exporter. Without a socket they are lost and
    counted."""

    def __init__(self, registry: Registry) -> None:
        self.socket: socket.socket | None = None
        self._sent = registry.counters(names.TRACED_REQUESTS).of()
        self._lost = registry.counters(names.TRACE_SPANS_LOST).of("busy")
        self._spans: list[RequestSpan] = []
        self._timer: asyncio.TimerHandle | None = None

    def put(self, span: RequestSpan) -> None:
        """Send a request's spans soon."""
        self._spans.append(span)
        if len(self._spans) >= MOST_TOGETHER:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self.flush)

    def flush(self) -> None:
        """Send what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        spans, self._spans = self._spans, []
        if spans:
            self._send(spans)

    def close(self) -> None:
        """Send what waits; nothing is sent afterwards."""
        self.flush()
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _send(self, spans: list[RequestSpan]) -> None:
        message = _encode(spans)
        if len(message) > MOST_BYTES and len(spans) > 1:
            half = len(spans) // 2
            self._send(spans[:half])
            self._send(spans[half:])
            return
        try:
            if self.socket is None:
                raise BlockingIOError
            self.socket.send(message)
        except OSError:  # no room: the exporter is behind, stopped or gone; or a message that nobody takes
            self._lost.add(sum(count_spans(span) for span in spans))
            _limited_log.warn("spans are lost: the exporter's process does not take them")
        else:
            self._sent.add(sum(isinstance(span.facts, HttpFacts | RpcFacts) for span in spans))


class TraceExport(ReplicatedPart):
    """The way out of one front process; in the owner the exporter's process too."""

    PART = "spans"

    def __init__(self, registry: Registry, state: ReplicatedState, plan: TracePlan) -> None:
        self.outbox = SpanOutbox(registry)
        self._plan, self._registry = plan, registry
        self._process: WorkerProcess | None = None
        self._backoff, self._started_s = Backoff(), 0.0
        self._again: asyncio.TimerHandle | None = None
        self._closing = False
        self._taking: socket.socket | None = None
        if state.owned:
            self.outbox.socket, self._taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            self.outbox.socket.setblocking(False)
            self.outbox.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        state.add(self.PART, self)

    @property
    def pid(self) -> int:
        """The id of the exporter's process, 0 where there is none."""
        return self._process.pid if self._process is not None and self._process.running else 0

    def records(self) -> Iterator[StateRecord]:
        if self.outbox.socket is not None:
            yield StateRecord({}, (self.outbox.socket.fileno(),))

    def apply(self, content: Content, fds: list[int]) -> None:
        (fd,) = fds
        self.outbox.socket = socket.socket(fileno=fd)
        self.outbox.socket.setblocking(False)

    # --- in the owner

    def open(self) -> None:
        """Start the exporter. Raises OSError."""
        self._process = WorkerProcess(
            worker_environment(0, {}), self._hear, self._ended, entry=ENTRY_EXPORTER, trusted=True
        )
        self._process.spawn()
        self._started_s = time.monotonic()
        assert self._taking is not None
        order = {"op": "begin", "plan": self._plan._asdict(), "logs": current_logs()}
        place = self._plan.endpoint or "the collector of OTEL_EXPORTER_OTLP_ENDPOINT"
        log.info("requests are traced", extra={"collector": place, "ratio": self._plan.ratio})
        with contextlib.suppress(ControlFault):  # it has ended already, and is started again
            self._process.send(order, [self._taking.fileno()])

    async def close(self) -> None:
        """End the exporter, which has a few seconds to hand over what it has."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        self.outbox.close()
        if self._process is not None:
            await self._process.stop(STOP_S)
        if self._taking is not None:
            self._taking.close()

    def _hear(self, message: dict[str, Any]) -> None:
        for cause, count in message["lost"].items():
            self._registry.counters(names.TRACE_SPANS_LOST).of(cause).add(count)
            _limited_log.warn("spans are lost (%s): %.200s", cause, message["reason"])

    def _ended(self, words: str) -> None:
        if self._closing:
            return
        wait_s = self._backoff.after_death(time.monotonic() - self._started_s)
        log.error("the exporter of traces ended (%s); it starts again in %g s", words, wait_s)
        self._again = asyncio.get_running_loop().call_later(wait_s, self._open_again)

    def _open_again(self) -> None:
        try:
            self.open()
        except OSError as error:
            self._ended(str(error.strerror))
