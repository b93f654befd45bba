"""Dialects and listeners of one front process, built from the settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fastserve.config import Listener, Settings
from fastserve.config.metrics import read_metrics_config
from fastserve.dialects.kserve_v2 import KServeV2, Service
from fastserve.dialects.kserve_v2.repository import NoRepository, RepositoryFace
from fastserve.dialects.kserve_v2.traces import Traces
from fastserve.dialects.metrics_port import MetricsPort
from fastserve.dialects.ops import Ops
from fastserve.dialects.tfserving.dialect import TFServing
from fastserve.dialects.triton_v1.control import Control
from fastserve.dialects.triton_v1.dialect import TritonV1
from fastserve.dialects.triton_v1.service import Service as ServiceV1
from fastserve.engine.cache import ResponseCache
from fastserve.engine.engine import Engine
from fastserve.errors import ConfigError
from fastserve.metrics import Heartbeat, Readiness, Registry
from fastserve.server.access import log_http, log_rpc
from fastserve.server.nv_metrics import NvMetrics
from fastserve.serving.shared_memory import Regions
from fastserve.wire import Dialect, HttpListener, check_free
from fastserve.wire.opening import Opening

if TYPE_CHECKING:
    from fastserve.wire.grpc import GrpcListener, Method

log = logging.getLogger(__name__)

DIALECTS = ("tfserving", "kserve_v2", "triton_v1")
OPS = "ops"  # health and metrics; alone on a listener, or before any mixture of dialects
METRICS = "metrics"  # a metrics port as Triton has it; alone on a listener
# Alone on a listener, these answer every path as their original does.
STANDS_IN = ("kserve_v2", "triton_v1", METRICS)
MakeDialect = Callable[[bool], Dialect]  # given whether it is alone on its listener
V2_SERVICE, V1_SERVICE = "inference.GRPCInferenceService", "nvidia.inferenceserver.GRPCService"


@runtime_checkable
class SpeaksGrpc(Protocol):
    """A dialect that has RPCs."""

    def grpc_methods(self) -> list[Method]: ...

    def grpc_descriptors(self) -> list[bytes]:
        """What reflection shows: serialized FileDescriptorSets."""


@dataclass
class Front:
    """What one front process serves with."""

    settings: Settings
    engine: Engine
    registry: Registry
    repository: RepositoryFace = field(default_factory=NoRepository)
    cache: ResponseCache | None = None
    regions: Regions = field(default_factory=lambda: Regions(False))
    traces: Traces = field(default_factory=Traces)
    readiness: Readiness = field(default_factory=Readiness)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    http: list[HttpListener] = field(default_factory=list)
    grpc: list[GrpcListener] = field(default_factory=list)
    custom_metrics: Callable[[], list[str]] = list
    opening: Opening = field(default_factory=Opening)
    owner: bool = False  # of the ports: the other fronts share them with it
    _asked: tuple[Listener, ...] = ()

    async def open(self, http: Sequence[Listener], grpc: Sequence[Listener], *, shared: bool) -> None:
        """Open listeners at these addresses; `shared` ports are shared with other front processes.

        Raises ConfigError for an unknown dialect, OSError for an address that cannot be had.
        """
        self.regions.allowed = self.settings.allow_client_shm
        dialects = self._dialects()
        for listener in (*http, *grpc):
            _check_dialects(listener)
        self._asked = tuple(http)
        for listener in http:
            await self._open_http(listener, dialects, shared)
        for listener in grpc:
            await self._open_grpc(listener, dialects, shared)

    def begin(self) -> None:
        """From now on every call is answered, not only those about health."""
        self.opening.done = True

    def set_ready(self, readiness: Readiness) -> None:
        """Take over what the owner knows about readiness."""
        self.readiness.ready = readiness.ready
        self.readiness.reason = readiness.reason
        self.readiness.models = readiness.models
        for listener in self.grpc:
            for service in ("", V2_SERVICE, V1_SERVICE):
                listener.set_health(service, readiness.ready)

    def addresses(self) -> tuple[tuple[Listener, ...], tuple[Listener, ...]]:
        """The HTTP and gRPC listeners with the ports they really have."""
        http = [_listed(o.address, s) for o, s in zip(self.http, self._asked, strict=True)]
        grpc = [_listed(o.address, s) for o, s in zip(self.grpc, self.settings.grpc, strict=True)]
        return tuple(http), tuple(grpc)

    async def drain(self, grace_s: float) -> int:
        """Finish what is in flight; returns how many connections had to be cut off."""
        closing = asyncio.gather(*(listener.drain(grace_s) for listener in self.http))
        await asyncio.gather(closing, *(listener.drain(grace_s) for listener in self.grpc))
        self.http, self.grpc = [], []
        self.regions.close()
        self.traces.close()
        return sum(closing.result())

    def _dialects(self) -> dict[str, MakeDialect]:
        settings = self.settings
        tfserving = TFServing(self.engine, self.registry, settings.tfserving, settings.limits, self.opening)
        kserve = Service(
            self.engine,
            self.registry,
            settings.limits,
            self.regions,
            self.repository,
            self.readiness,
            settings.triton,
            settings.log.level,
            settings.admin,
            self.opening,
        )
        self.traces = kserve.traces
        options = read_metrics_config(settings.metrics_config)
        metrics = NvMetrics(self.engine.catalog, self.cache, options)
        metrics.custom = lambda: self.custom_metrics()
        control, origins = Control(self.engine.catalog, self.repository), settings.admin.origins
        triton_v1 = ServiceV1(
            self.engine, self.registry, self.readiness, control, self.regions, origins, self.opening
        )
        return {
            "tfserving": lambda alone: tfserving,
            "kserve_v2": lambda alone: KServeV2(kserve, alone=alone),
            "triton_v1": lambda alone: TritonV1(triton_v1, alone=alone),
            METRICS: lambda alone: MetricsPort(metrics.prepare),
            OPS: lambda alone: Ops(
                self.readiness,
                self.heartbeat,
                self.registry if settings.allow_metrics else None,
                metrics.prepare,
            ),
        }

    async def _open_http(self, listener: Listener, known: dict[str, MakeDialect], shared: bool) -> None:
        names = listener.dialects or DIALECTS
        alone = len(names) == 1 and names[0] in STANDS_IN
        served = [known[name](alone) for name in names if name != OPS]
        if not alone:
            served.insert(0, known[OPS](alone))
        opened = HttpListener(
            listener.host,
            listener.port,
            served,
            self.settings.limits,
            reuse_port=shared,
            access_log=log_http if self.settings.log.access else None,
        )
        if self.owner:
            check_free(listener.host, listener.port)
        await opened.open()
        self.http.append(opened)

    async def _open_grpc(self, listener: Listener, known: dict[str, MakeDialect], shared: bool) -> None:
        from fastserve.wire.grpc import GrpcListener

        names = listener.dialects or DIALECTS
        chosen = [known[name](False) for name in names if name not in (OPS, METRICS)]
        spoken = [dialect for dialect in chosen if isinstance(dialect, SpeaksGrpc)]
        opened = GrpcListener(
            listener.host,
            listener.port,
            [method for one in spoken for method in one.grpc_methods()],
            self.settings.grpc_options,
            descriptors=[files for one in spoken for files in one.grpc_descriptors()],
            reuse_port=shared,
            nameless_health=names == ("kserve_v2",),  # as the original, which looks at no name
            access_log=log_rpc if self.settings.log.access else None,
            opening=self.opening,
            limits=self.settings.limits,
        )
        if self.owner:
            check_free(listener.host, listener.port)
        await opened.open()
        self.grpc.append(opened)


def with_metrics(settings: Settings) -> tuple[Listener, ...]:
    """The HTTP listeners, and the metrics port where there is one: beside the first of them."""
    if not (settings.allow_metrics and settings.metrics_port):
        return settings.http
    host = settings.http[0].address.rpartition(":")[0] if settings.http else "127.0.0.1"
    return (*settings.http, Listener(f"{host}:{settings.metrics_port}", (METRICS,)))


def _check_dialects(listener: Listener) -> None:
    for name in listener.dialects:
        if name not in (*DIALECTS, OPS, METRICS) or (name == METRICS and len(listener.dialects) > 1):
            allowed = f"{', '.join((*DIALECTS, OPS))}, or {METRICS} alone"
            raise ConfigError(f"{listener.address}: dialects: given {name!r}, allowed: {allowed}")


def _listed(address: tuple[str, int], listener: Listener) -> Listener:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return Listener(f"{host}:{address[1]}", listener.dialects)
