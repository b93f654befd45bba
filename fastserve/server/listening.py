"""Dialects and listeners of one front process, built from the settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from fastserve.config import Limits, Listener, Settings
from fastserve.config.metrics import read_metrics_config
from fastserve.engine.cache import ResponseCache
from fastserve.engine.engine import Engine
from fastserve.metrics import Heartbeat, Readiness, Registry
from fastserve.server.access import log_http, log_rpc
from fastserve.server.certificates import CertificateWatch
from fastserve.server.nv_metrics import NvMetrics
from fastserve.server.speaking import Spec, choose_grpc, choose_http, find_specs
from fastserve.serving.device_regions import DeviceMemory, keep_nothing
from fastserve.serving.dialect import Dialect, ServingContext, Spread, Stop, nobody_else, refuse_to_stop
from fastserve.serving.model_control import NoRepository, RepositoryFace
from fastserve.serving.shared_memory import Regions
from fastserve.serving.text import Texts
from fastserve.serving.text.tensors import TextTensors
from fastserve.wire import HttpListener, check_free, shown
from fastserve.wire.http2.lifetime import Lifetimes
from fastserve.wire.opening import Opening
from fastserve.wire.tls import Credentials
from fastserve.workers.device_line import DeviceLine

if TYPE_CHECKING:
    from fastserve.wire.grpc import GrpcListener

log = logging.getLogger(__name__)


@dataclass
class Front:
    """What one front process serves with."""

    settings: Settings
    engine: Engine
    registry: Registry
    repository: RepositoryFace = field(default_factory=NoRepository)
    cache: ResponseCache | None = None
    regions: Regions = field(default_factory=lambda: Regions(False))
    readiness: Readiness = field(default_factory=Readiness)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    http: list[HttpListener] = field(default_factory=list)
    grpc: list[GrpcListener] = field(default_factory=list)
    custom_metrics: Callable[[], list[str]] = list
    stop: Stop = refuse_to_stop
    spread: Spread = nobody_else
    opening: Opening = field(default_factory=Opening)
    owner: bool = False  # of the ports: the other fronts share them with it
    dialects: dict[str, Dialect] = field(default_factory=dict)  # those that a listener speaks, once built
    close_lent: Callable[[bytes], Awaitable[None]] = keep_nothing  # workers let go of memory on a GPU
    tls: Credentials | None = None  # of listeners that speak it
    certificates: CertificateWatch | None = None
    _asked_http: list[Listener] = field(default_factory=list)
    _asked_grpc: list[Listener] = field(default_factory=list)

    async def open(self, http: Sequence[Listener], grpc: Sequence[Listener], *, shared: bool) -> None:
        """Open listeners at these addresses; `shared` ports are shared with other front processes. An address
        that is among both is one port.

        Raises ConfigError for an unknown dialect or a certificate that cannot be used, OSError for an address
        that cannot be had.
        """
        self.regions.allowed = self.settings.allow_client_shm
        self.regions.devices = DeviceMemory(DeviceLine(), self.close_lent)
        if self.settings.tls.cert:
            self.tls = Credentials(self.settings.tls)
            self.tls.load()
            self.certificates = CertificateWatch(self.tls)
            self.certificates.open()
        specs, context = find_specs(self.settings), self._make_context()
        spoken_http = [choose_http(specs, listener) for listener in http]
        spoken_grpc = [choose_grpc(specs, listener) for listener in grpc]
        for spec in specs:
            if any(spec in spoken for spoken in (*spoken_http, *spoken_grpc)):
                self.dialects[spec.name] = spec.build(context, spec.read_options(self.settings))
        alone = list(zip(grpc, spoken_grpc, strict=True))
        for listener, spoken in zip(http, spoken_http, strict=True):
            beside = [pair for pair in alone if is_same(pair[0], listener)]
            alone = [pair for pair in alone if pair not in beside]
            await self._open_http(listener, spoken, shared, beside)
        for listener, spoken in alone:
            await self._open_grpc(listener, spoken, shared)
        for dialect in self.dialects.values():
            dialect.open()

    def hear(self, dialect: str, word: str) -> bool:
        """What a dialect says in another front process. Whether it is meant here."""
        spoken = self.dialects.get(dialect)
        return spoken is not None and spoken.hear(word)

    def begin(self) -> None:
        """From now on every call is answered, not only those about health."""
        self.opening.done = True

    def renew_certificates(self) -> None:
        """Look at their files now."""
        if self.certificates is not None:
            self.certificates.look()

    def set_ready(self, readiness: Readiness) -> None:
        """Take over what the owner knows about readiness."""
        self.readiness.ready = readiness.ready
        self.readiness.reason = readiness.reason
        self.readiness.models = readiness.models
        for listener in self.grpc:
            for service in ("", *listener.services):
                listener.set_health(service, readiness.ready)

    def addresses(self) -> tuple[tuple[Listener, ...], tuple[Listener, ...]]:
        """The HTTP and gRPC listeners with the ports they really have."""
        http = [_listed(o.address, s) for o, s in zip(self.http, self._asked_http, strict=True)]
        grpc = [_listed(o.address, s) for o, s in zip(self.grpc, self._asked_grpc, strict=True)]
        return tuple(http), tuple(grpc)

    async def drain(self, grace_s: float) -> int:
        """Finish what is in flight; returns how many connections had to be cut off."""
        closing = asyncio.gather(*(listener.drain(grace_s) for listener in self.http))
        await asyncio.gather(closing, *(listener.drain(grace_s) for listener in self.grpc))
        self.http, self.grpc = [], []
        if self.certificates is not None:
            self.certificates.close()
        self.regions.close()
        for dialect in self.dialects.values():
            dialect.close()
        return sum(closing.result())

    def _make_context(self) -> ServingContext:
        """What every dialect is built from."""
        options = read_metrics_config(self.settings.metrics_config)
        metrics = NvMetrics(self.engine.catalog, self.cache, options)
        metrics.custom = lambda: self.custom_metrics()
        context = ServingContext(
            engine=self.engine,
            registry=self.registry,
            settings=self.settings,
            repository=self.repository,
            regions=self.regions,
            readiness=self.readiness,
            heartbeat=self.heartbeat,
            model_metrics=metrics.prepare,
            stop=lambda force: self.stop(force),  # they are set later
            spread=lambda dialect, word: self.spread(dialect, word),
        )
        self.engine.tensors = TextTensors(Texts(context))
        return context

    async def _open_http(
        self,
        listener: Listener,
        spoken: Sequence[Spec],
        shared: bool,
        beside: Sequence[tuple[Listener, Sequence[Spec]]],
    ) -> None:
        """`beside` is gRPC on the same port."""
        opened = HttpListener(
            listener.host,
            listener.port,
            [self.dialects[spec.name] for spec in spoken],
            self._limits(bool(beside)),
            reuse_port=shared,
            access_log=log_http if self.settings.log.access else None,
            opening=self.opening,
            origins=self.settings.admin.origins,
            lifetimes=self._lifetimes(bool(beside)),
            tls=self.tls if listener.tls else None,
        )
        guests = [self._make_grpc(asked, specs, shared, opened) for asked, specs in beside]
        if self.owner:
            check_free(listener.host, listener.port)
        await opened.open()
        self.http.append(opened)
        self._asked_http.append(listener)
        for guest, (asked, _) in zip(guests, beside, strict=True):
            await self._add_grpc(guest, asked)

    def _limits(self, with_grpc: bool) -> Limits:
        limits, options = self.settings.limits, self.settings.grpc_options
        if not with_grpc:
            return limits
        return msgspec.structs.replace(
            limits,
            streams=max(limits.streams, options.concurrent_streams),
            idle_timeout_s=_sooner(limits.idle_timeout_s, options.max_connection_idle_s),
        )

    def _lifetimes(self, with_grpc: bool) -> Lifetimes | None:
        """On a port that both share the shorter life is that of its connections."""
        limits, options = self.settings.limits, self.settings.grpc_options
        plain = Lifetimes(
            max_age_s=limits.max_connection_age_s, max_age_grace_s=limits.max_connection_age_grace_s
        )
        if not with_grpc:
            return plain if plain.max_age_s else None
        return Lifetimes(
            options.keepalive_s,
            options.keepalive_timeout_s,
            _sooner(plain.max_age_s, options.max_connection_age_s),
            _sooner(plain.max_age_grace_s, options.max_connection_age_grace_s),
        )

    async def _open_grpc(self, listener: Listener, spoken: Sequence[Spec], shared: bool) -> None:
        opened = self._make_grpc(listener, spoken, shared)
        if self.owner:
            check_free(listener.host, listener.port)
        await self._add_grpc(opened, listener)

    async def _add_grpc(self, opened: GrpcListener, asked: Listener) -> None:
        await opened.open()
        self.grpc.append(opened)
        self._asked_grpc.append(asked)

    def _make_grpc(
        self, listener: Listener, spoken: Sequence[Spec], shared: bool, host: HttpListener | None = None
    ) -> GrpcListener:
        from fastserve.wire.grpc import GrpcListener

        return GrpcListener(
            listener.host,
            listener.port,
            [method for spec in spoken for method in spec.methods_of(self.dialects[spec.name])],
            self.settings.grpc_options,
            descriptors=[files for spec in spoken for files in spec.descriptors()],
            reuse_port=shared,
            nameless_health=len(spoken) == 1 and spoken[0].any_health_name,
            health_names=[name for spec in spoken for name in spec.health_names],
            access_log=log_rpc if self.settings.log.access else None,
            opening=self.opening,
            limits=self.settings.limits,
            host=host,
            tls=self.tls if listener.tls else None,
        )


def _sooner(one_s: float, other_s: float) -> float:
    """Of two times of which 0 is never."""
    return min(filter(None, (one_s, other_s)), default=0.0)


def is_same(one: Listener, other: Listener) -> bool:
    """Whether they are one port. Port 0 is another one each time, unless `listen` asks for both at once."""
    return one is other or ((one.port != 0 or one.in_file) and one.address == other.address)


def all_listeners(settings: Settings) -> tuple[tuple[Listener, ...], tuple[Listener, ...]]:
    """The HTTP and the gRPC listeners. Dialects with a port of their own have it beside the first that speaks
    HTTP. Raises ConfigError."""
    http, grpc = (*settings.listen, *settings.http), (*settings.listen, *settings.grpc)
    first = next((one for one in http if not one.in_file), None)
    host = first.address.rpartition(":")[0] if first else "127.0.0.1"
    ports = ((spec.name, spec.own_port(settings)) for spec in find_specs(settings))
    tls = first is None or first.tls
    return (*http, *(Listener(f"{host}:{port}", (name,), tls) for name, port in ports if port)), grpc


def _listed(address: tuple[str, int], listener: Listener) -> Listener:
    return Listener(shown(*address), listener.dialects, listener.tls)
