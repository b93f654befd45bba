"""One front process: listeners and dialects built from the settings, access log, certificates, gauges.

The access log has a line for each reply. Replies are not sent raw while it is on.

    fastserve.access: POST /v2/models/m/infer protocol=http status=200 bytes=31 duration_ms=0.4 request_id=4f
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec

from fastserve import __version__
from fastserve.engine.counters import counters_of
from fastserve.engine.engine import Engine
from fastserve.engine.schedulers.cache import ResponseCache
from fastserve.engine.schedulers.shadow import ShadowVersions
from fastserve.errors import ConfigError
from fastserve.metrics import Heartbeat, Readiness, Registry, names
from fastserve.metrics.readiness import write_failures
from fastserve.net import Call, HttpListener, InheritedSockets, shown
from fastserve.net.accept_balance import AcceptBalancer
from fastserve.net.access_control import Opening, Restrictions
from fastserve.net.api_keys import ApiKeyGate
from fastserve.net.http2.settings import Lifetimes
from fastserve.net.key_usage import KeyCounts, KeyLimits, KeyUsage
from fastserve.net.tls import Credentials
from fastserve.net.traced_endpoints import Tracer
from fastserve.net.traffic_split import BY_VALUE, SplitRule, TrafficSplit
from fastserve.server.audit_log import AuditLog
from fastserve.server.dialect_selection import (
    DialectCompartment,
    Spec,
    choose_grpc,
    choose_http,
    find_specs,
)
from fastserve.server.key_shares import KeyShares
from fastserve.server.nv_metrics import NvMetrics
from fastserve.server.trace_export import TraceExport, read_trace_plan
from fastserve.serving.client_shared_memory import DeviceMemory, Regions, keep_nothing
from fastserve.serving.dialect import (
    PART,
    Dialect,
    ServingContext,
    Spread,
    Stop,
    models_text,
    nobody_else,
    refuse_to_stop,
)
from fastserve.serving.model_control import NoRepository, RepositoryFace
from fastserve.serving.replication import ReplicatedState
from fastserve.serving.text import TextModels
from fastserve.serving.text.tensors import TextTensors
from fastserve.settings import Limits, Listener, Settings
from fastserve.settings.key_file import KeyEntry
from fastserve.settings.kserve_options import read_metrics_config
from fastserve.settings.model_options import TrafficRules
from fastserve.util.memory import HeapTrim, own_memory_bytes
from fastserve.util.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from fastserve._ext.shared_metrics import Gauge
    from fastserve.engine.loader import LoadedPart
    from fastserve.net.grpc import GrpcListener
    from fastserve.repository.residency import Residency
    from fastserve.repository.version import Version

access = logging.getLogger("fastserve.access")


def log_http(call: Call, status: int, nbytes: int) -> None:
    """Log a reply. `nbytes` are those of the body; status 499: the client left before its reply."""
    # A request that was refused before it was understood has neither.
    text = f"{call.method or '-'} {call.target or '-'}"
    _log_access(text, "http", status, nbytes, call.received_ns, call.request_id, call.client, call.address)


def log_rpc(
    path: str, status: str, nbytes: int, received_ns: int, request_id: str, client: str, address: str
) -> None:
    """Log a reply. `nbytes` are those of all its messages, `status` is gRPC's name."""
    _log_access(path, "grpc", status, nbytes, received_ns, request_id, client, address)


def _log_access(
    text: str,
    protocol: str,
    status: int | str,
    nbytes: int,
    received_ns: int,
    request_id: str,
    client: str,
    address: str,
) -> None:
    """Write the line. `client` is the subject of the client's certificate, "" without one."""
    fields = {
        **{"protocol": protocol, "status": status, "bytes": nbytes},
        **{"duration_ms": round((monotonic_ns() - received_ns) / 1e6, 3), "request_id": request_id},
        "address": address,
        **({"client": client} if client else {}),
    }
    access.info("%s", text, extra=fields)


log = logging.getLogger(__name__)


class FileWatch:
    """Reads files again when they may have changed, and at SIGHUP: certificates, keys.

    Those that cannot be used are logged once, and what is in use stays.
    """

    def __init__(self, what: str, renew: Callable[[], bool], pause_s: Callable[[], float]) -> None:
        """`renew` returns whether something has changed, or raises ConfigError; `pause_s` the time until the
        next look."""
        self._what, self._renew, self._pause_s = what, renew, pause_s
        self._told = ""
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Start on the running loop."""
        self._timer = asyncio.get_running_loop().call_later(self._pause_s(), self._turn)

    def look(self) -> None:
        """Read the files now."""
        try:
            if self._renew():
                log.info("the %s were renewed", self._what)
            self._told = ""
        except ConfigError as fault:
            if str(fault) != self._told:
                log.error("the %s stay as they were: %s", self._what, fault)
            self._told = str(fault)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self.open()  # first: what nobody foresaw must not end the watch
        self.look()


SOON_S = 0.01  # after a key has expired the watch looks at it

WORKERS_A_BEAT, ROUND_BEATS = 8, 8
"""Workers whose memory is read in one beat: 0.1 ms, and 200 workers have their turn in 13 s. Few have it once
in so many beats, 4 s: to read them in each was a third of what an idle front did."""

_DEVICE = (names.DEVICE_BATCHES, names.DEVICE_OUT_OF_MEMORY)


WorkerId = tuple[str, int, int]  # model, version, worker


class FrontGauges:
    """The gauges of one front process."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._refused: Counter[tuple[str, str]] = Counter()
        self._refused_memory = 0
        self._due_ns = self._cpu_us = 0
        self._devices: WeakKeyDictionary[Version, tuple[int, int]] = WeakKeyDictionary()
        self._queues: dict[tuple[str, int], tuple[Gauge, Gauge]] = {}  # rows and seconds, by version
        self._turn: list[tuple[WorkerId, int]] = []  # workers whose memory is read next, and their pids
        self._rest_beats = 0  # until all workers have their turn again
        self._read: set[WorkerId] = set()
        registry.gauges(names.BUILD).of(__version__).set(1)

    def beat(self, listeners: Mapping[str, Sequence[HttpListener]], interval_s: float) -> None:
        """Record connections, refusals and the lateness of this call, which is due every `interval_s`.

        `listeners` are by kind.
        """
        registry, refused = self._registry, Counter[tuple[str, str]]()
        for kind, some in listeners.items():
            for listener in some:
                refused.update({(kind, cause): count for cause, count in listener.refusals.items()})
            registry.gauges(names.CONNECTIONS).of(kind).set(sum(len(one.connections) for one in some))
        for who, count in (refused - self._refused).items():
            registry.counters(names.WIRE_REJECTS).of(*who).add(count)
        self._refused = refused
        now_ns = time.monotonic_ns()
        if self._due_ns:
            registry.histograms(names.LOOP_DELAY).of().observe_ns(max(now_ns - self._due_ns, 0))
        self._due_ns = now_ns + int(interval_s * 1e9)
        cpu_us = int(time.process_time() * 1e6)
        registry.counters(names.FRONT_CPU_US).of().add(cpu_us - self._cpu_us)
        self._cpu_us = cpu_us
        registry.gauges(names.FRONT_RESIDENT).of().set(own_memory_bytes(os.getpid()))

    def show_memory(self, budget: MemoryBudget) -> None:
        """Record the memory of requests and unread replies, and its limit."""
        registry, refused = self._registry, budget.refused
        registry.gauges(names.MEMORY).of("used").set(budget.used)
        registry.gauges(names.MEMORY).of("limit").set(budget.limit)
        registry.gauges(names.MEMORY_WAITING).of().set(budget.waiting)
        registry.counters(names.MEMORY_REFUSED).of().add(refused - self._refused_memory)
        self._refused_memory = refused

    def show_certificate(self, credentials: Credentials | None) -> None:
        """Record when the certificate expires. Only the owner does: all fronts read the same files."""
        if credentials is not None:
            self._registry.gauges(names.TLS_EXPIRES).of().set(credentials.expires_at)

    def show_keys(self, gate: ApiKeyGate | None) -> None:
        """Record how many API keys are in force. Only the owner does: all fronts read the same file."""
        if gate is not None:
            self._registry.gauges(names.API_KEYS).of().set(gate.count)
            self._registry.gauges(names.API_KEYS_STALE).of().set(gate.stale)

    def show_queues(self, hosted: Iterable[LoadedPart]) -> None:
        """Record the rows that wait over all fronts. Only the owner does, from the shared rings."""
        for one in hosted:
            who = (one.version.model, one.version.number)
            rows = one.queue.ring.queued()
            gauges = self._queues.get(who)
            if gauges is None:
                metrics = names.QUEUE_ROWS, names.QUEUE_SECONDS
                waiting, seconds = (self._registry.gauges(metric).of(*who) for metric in metrics)
                gauges = self._queues[who] = waiting, seconds
            gauges[0].set(rows)
            gauges[1].set(one.queue.metrics.drain_s(rows))
            if one.part == 0:
                self._show_devices(one.version)
                self._show_remotes(one.version)
                self._show_drafts(one.version)

    def show_residency(self, residency: Residency) -> None:
        """Record the memory of all models, and who was unloaded. Only the owner does."""
        memory = self._registry.gauges(names.MODELS_MEMORY)
        memory.of("used").set(residency.used)
        memory.of("budget").set(residency.budget)
        self._registry.gauges(names.LOAD_WAITING).of().set(residency.waiters.count)
        evictions, residency.evictions = residency.evictions, Counter()
        for model, count in evictions.items():
            self._registry.counters(names.MODEL_EVICTIONS).of(model).add(count)

    def show_workers(self, hosted: Iterable[LoadedPart]) -> None:
        """Record the memory of some workers; at the next call that of others. Only the owner does."""
        memory = self._registry.gauges(names.WORKER_MEMORY)
        self._rest_beats -= 1
        if not self._turn and self._rest_beats <= 0:
            self._turn = [
                ((one.version.model, one.version.number, one.part + worker), pid)
                for one in hosted
                for worker, pid in enumerate(one.group.pids)
            ]
            self._rest_beats = ROUND_BEATS if self._turn else 0
            there = {who for who, _ in self._turn}
            for gone in self._read - there:
                memory.of(*gone).set(0)
            self._read = there
        for who, pid in self._turn[-WORKERS_A_BEAT:]:
            memory.of(*who).set(own_memory_bytes(pid) if pid else 0)
        del self._turn[-WORKERS_A_BEAT:]

    def _show_remotes(self, version: Version) -> None:
        """Record the remote workers of each machine, and their batches since the last call."""
        for node, told in counters_of(version).remotes.items():
            who = (version.model, version.number, node)
            self._registry.gauges(names.REMOTE_WORKERS).of(*who).set(told.workers)
            self._registry.counters(names.REMOTE_BATCHES).of(*who).add(told.batches)
            told.batches = 0
        if counters_of(version).remotes_wanted:
            wanted = self._registry.gauges(names.REMOTE_WORKERS_WANTED).of(version.model, version.number)
            wanted.set(counters_of(version).remotes_wanted)

    def _show_drafts(self, version: Version) -> None:
        """Record the tokens that a text model drafted and accepted since the last call."""
        counters, who = counters_of(version), (version.model, version.number)
        if counters.drafted:
            self._registry.counters(names.TEXT_DRAFTED_TOKENS).of(*who).add(counters.drafted)
            self._registry.counters(names.TEXT_ACCEPTED_TOKENS).of(*who).add(counters.accepted)
            counters.drafted = counters.accepted = 0

    def _show_devices(self, version: Version) -> None:
        """Record batches on GPUs and out-of-memory events since the last call."""
        counters, who = counters_of(version), (version.model, version.number)
        told = counters.devices.values()
        if not told and not counters.out_of_memory:
            return
        sums = sum(one.batches for one in told), counters.out_of_memory
        before = self._devices.get(version, (0, 0))
        for metric, now, then in zip(_DEVICE, sums, before, strict=True):
            self._registry.counters(metric).of(*who).add(now - then)
        self._devices[version] = sums
        if told:
            staged = sum(not one.pinned for one in told)
            self._registry.gauges(names.DEVICE_STAGED).of(*who).set(staged)


@dataclass
class Front:
    """The listeners, dialects and state of one front process."""

    settings: Settings
    engine: Engine
    registry: Registry
    repository: RepositoryFace = field(default_factory=NoRepository)
    cache: ResponseCache | None = None
    state: ReplicatedState = field(default_factory=ReplicatedState)
    started_ns: int = field(default_factory=monotonic_ns)  # of the whole server
    readiness: Readiness = field(default_factory=Readiness)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    http: list[HttpListener] = field(default_factory=list)
    grpc: list[GrpcListener] = field(default_factory=list)
    custom_metrics: Callable[[], list[str]] = list
    stop: Stop = refuse_to_stop
    spread: Spread = nobody_else
    opening: Opening = field(default_factory=Opening)
    number: int = 0  # 0: the owner's
    balancer: AcceptBalancer | None = None  # of ports that several front processes share
    passed_on: InheritedSockets = field(default_factory=InheritedSockets)  # by a service manager
    dialects: dict[str, Dialect] = field(default_factory=dict)  # those that a listener speaks, once built
    close_lent: Callable[[bytes], Awaitable[None]] = keep_nothing  # workers let go of memory on a GPU
    tls: Credentials | None = None  # of listeners that speak it
    gate: ApiKeyGate | None = None  # where API keys are on
    watches: list[FileWatch] = field(default_factory=list)
    traces: TraceExport | None = None  # where requests are traced
    budget: MemoryBudget = field(init=False)  # of all listeners
    regions: Regions = field(init=False)
    _trim: HeapTrim = field(init=False)
    _context: ServingContext = field(init=False)
    _shares: KeyShares = field(init=False)  # where keys are on
    _audit: AuditLog | None = None
    _tracer: Tracer | None = None
    _specs: Sequence[Spec] = ()  # of dialects that a listener speaks
    _compartments: WeakValueDictionary[str, DialectCompartment] = field(default_factory=WeakValueDictionary)
    _split: TrafficSplit = field(init=False)
    _shadows: ShadowVersions = field(init=False)
    _asked_http: list[Listener] = field(default_factory=list)
    _asked_grpc: list[Listener] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = MemoryBudget(self.settings.memory_bytes)
        self.regions = Regions(self.settings.allow_client_shm, state=self.state)
        self.regions.budget = self.budget
        self._trim = HeapTrim(self.budget)

    async def open(self, http: Sequence[Listener], grpc: Sequence[Listener]) -> None:
        """Open listeners at these addresses. An address that is among both is one port.

        Raises ConfigError for an unknown dialect or a certificate that cannot be used, OSError for an address
        that cannot be had.
        """
        self.regions.open(DeviceMemory(self.close_lent))
        if self.settings.tls.cert:
            self.tls = Credentials(self.settings.tls)
            self.tls.load()
            pause_s = self.settings.tls.poll_s
            self._watch(FileWatch("certificates", self.tls.renew, lambda: pause_s))
        if self.settings.keys:
            self._open_keys()
        plan = read_trace_plan(self.settings, os.environ)
        if plan is not None:
            self.traces = TraceExport(self.registry, self.state, plan)
            self._tracer = Tracer(plan.sampler, self.traces.outbox.put)
        specs = find_specs(self.settings)
        context = self._context = self._make_context()
        self._split = self._make_split(context)
        self.engine.catalog.on_rules.append(self._follow_rules)
        self._shadows = ShadowVersions(self.engine.catalog, self.registry)
        spoken_http = [choose_http(specs, listener) for listener in http]
        spoken_grpc = [choose_grpc(specs, listener) for listener in grpc]
        self._specs = [
            spec for spec in specs if any(spec in spoken for spoken in (*spoken_http, *spoken_grpc))
        ]
        for spec in self._specs:
            self.dialects[spec.name] = spec.build(context, spec.read_options(self.settings))
        alone = list(zip(grpc, spoken_grpc, strict=True))
        for listener, spoken in zip(http, spoken_http, strict=True):
            beside = [pair for pair in alone if is_same(pair[0], listener)]
            alone = [pair for pair in alone if pair not in beside]
            await self._open_http(listener, spoken, beside)
        for listener, spoken in alone:
            await self._add_grpc(self._make_grpc(listener, spoken), listener)
        self.passed_on.check()
        self.engine.catalog.tell_rules()  # it may have been known before there was anything to split
        for dialect in self.dialects.values():
            dialect.open()
        if self.balancer is not None:
            self.balancer.open()

    async def accept(self) -> None:
        """Begin to accept from sockets that were passed on: earlier, requests would have been refused."""
        for listeners in self.listeners().values():
            for listener in listeners:
                await listener.accept()

    def hear(self, dialect: str, word: str) -> bool:
        """Pass on a dialect's message from another front process, and return whether it was meant here."""
        name, _, models = dialect.partition(PART)
        compartment = self._compartments.get(models)
        if models:
            if compartment is None:
                return False
            return compartment.hear(name, word) or _hear_drawn(compartment.split, name, word)
        spoken = self.dialects.get(name)
        return (spoken is not None and spoken.hear(word)) or _hear_drawn(self._split, name, word)

    def _make_compartment(self, models: tuple[str, ...]) -> DialectCompartment:
        """Build the dialects once more, for keys of some models."""
        made = DialectCompartment(self._context.narrow(models), self._specs)
        made.split = self._make_split(made.context, PART + models_text(models))
        made.split.change(self._list_rules(made.context))
        self._compartments[models_text(models)] = made
        return made

    def _make_split(self, context: ServingContext, part: str = "") -> TrafficSplit:
        """Return what draws among the requests of the dialects of a context; `part` is behind their names."""

        async def spread(dialect: str, word: str) -> bool:
            return self.hear(dialect + part, word) or await context.spread(dialect, word)

        def make(arms: Mapping[str, str]) -> DialectCompartment:
            return DialectCompartment(context.draw(arms, spread), self._specs)

        return TrafficSplit(make)

    def _list_rules(self, context: ServingContext) -> dict[str, SplitRule]:
        models = context.catalog.models.values()
        return {model.name: _split_rule(model.rules) for model in models if model.rules.traffic}

    def _follow_rules(self) -> None:
        """Split requests by the rules that models have now."""
        for compartment in self._compartments.values():
            if compartment.split is not None:
                compartment.split.change(self._list_rules(compartment.context))
        self._split.change(self._list_rules(self._context))  # the last one: heads are looked at again

    def _open_keys(self) -> None:
        """Read the file of keys, and watch it. Raises ConfigError."""
        settings = self.settings
        self._shares = KeyShares(self.number, settings.front_count)
        self.state.add(KeyShares.PART, self._shares)
        audit = None
        if settings.audit_log:
            counts = self.registry if self.number == 0 else None
            audit = self._audit = AuditLog(Path(settings.audit_log), counts)
            audit.open()
        gate = self.gate = ApiKeyGate(
            Path(settings.keys),
            opens_health=not settings.keys_health,
            make_compartment=self._make_compartment,
            make_usage=self._make_usage,
            strangers=self._count_key(""),
            audit=None if audit is None else audit.note,
        )
        self.engine.find_account = gate.find_usage
        gate.load()
        self._watch(
            FileWatch(
                "API keys", gate.renew, lambda: min(settings.keys_poll_s, gate.seconds_to_expiry() + SOON_S)
            )
        )

    def _count_key(self, name: str) -> KeyUsage:
        counters = self.registry.counters
        counts = KeyCounts(
            counters(names.KEY_REQUESTS).of(name),
            error_of=lambda code: counters(names.KEY_ERRORS).of(name, code),
        )
        if name:  # who has no key is let in to no model
            counts = counts._replace(
                rows=counters(names.KEY_ROWS).of(name),
                tokens=counters(names.KEY_TOKENS).of(name),
                compute_ns=counters(names.KEY_COMPUTE).of(name),
            )
        usage = KeyUsage(name, counts)
        usage.board = self._shares.board
        return usage

    def _make_usage(self, entry: KeyEntry, known: KeyUsage | None) -> KeyUsage:
        """Return the usage of a key, which goes on from `known`, with the limits of its entry."""
        usage, shares = known or self._count_key(entry.name), self._shares
        rates = entry.requests_per_second, entry.rows_per_second, entry.tokens_per_second
        usage.hold(KeyLimits(*rates, entry.concurrency), shares.find, self.settings.front_count)
        usage.weight = entry.weight
        if usage.limited:
            shares.find(entry.name)  # the first front makes room for it
        return usage

    def _watch(self, watch: FileWatch) -> None:
        watch.open()
        self.watches.append(watch)

    def renew_files(self) -> None:
        """Read certificates and keys now."""
        for watch in self.watches:
            watch.look()

    def set_ready(self, readiness: Readiness) -> None:
        """Take over what the owner knows about readiness."""
        self.readiness.ready = readiness.ready
        self.readiness.reason = readiness.reason
        self.readiness.models = readiness.models
        self.readiness.state = readiness.state
        for listener in self.grpc:
            for service in ("", *listener.services):
                listener.set_health(service, readiness.ready)

    def listeners(self) -> dict[str, list[HttpListener]]:
        """Return the open listeners by kind: HTTP (gRPC may share them), and gRPC alone."""
        return {"http": self.http, "grpc": [one.listener for one in self.grpc if one.listener is not None]}

    def look_twice_a_second(self) -> None:
        """Trim the heap after a burst of large requests or replies, and count what keys have used."""
        self._trim.look()
        if self.gate is not None:
            self.gate.flush()

    def addresses(self) -> tuple[tuple[Listener, ...], tuple[Listener, ...]]:
        """Return the HTTP and gRPC listeners with their real ports."""
        http = [_listed(o.address, s) for o, s in zip(self.http, self._asked_http, strict=True)]
        grpc = [_listed(o.address, s) for o, s in zip(self.grpc, self._asked_grpc, strict=True)]
        return tuple(http), tuple(grpc)

    async def drain(self, grace_s: float) -> int:
        """Finish what is in flight; returns how many connections had to be cut off."""
        if self.balancer is not None:
            self.balancer.retire()
        closing = asyncio.gather(*(listener.drain(grace_s) for listener in self.http))
        await asyncio.gather(closing, *(listener.drain(grace_s) for listener in self.grpc))
        self.http, self.grpc = [], []
        for watch in self.watches:
            watch.close()
        if self.gate is not None:
            self.gate.flush()
        if self._audit is not None:
            self._audit.close()
        if self.gate is not None:
            self._shares.close()
        self.regions.close()
        for dialect in self.dialects.values():
            dialect.close()
        if self.traces is not None:
            await self.traces.close()
        return sum(closing.result())

    def _make_context(self) -> ServingContext:
        """Return the context that every dialect is built from."""
        options = read_metrics_config(self.settings.metrics_config)
        metrics = NvMetrics(self.engine.catalog, self.cache, options, self.state)
        metrics.custom = lambda: [*self.custom_metrics(), *write_failures(self.readiness.models)]
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
            state=self.state,
            started_ns=self.started_ns,
        )
        self.engine.tensors = TextTensors(TextModels(context))
        return context

    async def _open_http(
        self,
        listener: Listener,
        spoken: Sequence[Spec],
        beside: Sequence[tuple[Listener, Sequence[Spec]]],
    ) -> None:
        """Open one HTTP listener; `beside` are the gRPC listeners of its port."""
        pairs = [(spec, self.dialects[spec.name]) for spec in spoken]
        opened = HttpListener(
            listener.host,
            listener.port,
            [dialect.on_listener(pairs) for _, dialect in pairs],
            self._limits(bool(beside)),
            balancer=self.balancer,
            access_log=log_http if self.settings.log.access else None,
            opening=self.opening,
            origins=self.settings.admin.origins,
            restrictions=Restrictions.over_http(self.settings.triton.restrictions_over_http),
            lifetimes=self._lifetimes(bool(beside)),
            tls=self.tls if listener.tls else None,
            budget=self.budget,
            passed_on=self.passed_on,
            gate=self.gate,
            dialects_of=lambda compartment: cast(DialectCompartment, compartment).on_listener(spoken),
            tracer=self._tracer,
            want=self.repository.want if self.settings.budget_bytes else None,
            split=self._split,
        )
        guests = [self._make_grpc(asked, specs, opened) for asked, specs in beside]
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
        """Return the lifetimes of connections; on a shared port the shorter one counts."""
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

    async def _add_grpc(self, opened: GrpcListener, asked: Listener) -> None:
        await opened.open()
        self.grpc.append(opened)
        self._asked_grpc.append(asked)

    def _make_grpc(
        self, listener: Listener, spoken: Sequence[Spec], host: HttpListener | None = None
    ) -> GrpcListener:
        from fastserve.net.grpc import GrpcListener

        return GrpcListener(
            listener.host,
            listener.port,
            [method for spec in spoken for method in spec.methods_of(self.dialects[spec.name])],
            self.settings.grpc_options,
            descriptors=[files for spec in spoken for files in spec.descriptors()],
            balancer=self.balancer,
            nameless_health=len(spoken) == 1 and spoken[0].any_health_name,
            health_names=[name for spec in spoken for name in spec.health_names],
            access_log=log_rpc if self.settings.log.access else None,
            opening=self.opening,
            restrictions=Restrictions.over_grpc(self.settings.triton.restrictions_over_grpc),
            limits=self.settings.limits,
            host=host,
            tls=self.tls if listener.tls else None,
            budget=self.budget,
            passed_on=self.passed_on,
            gate=self.gate,
            methods_of=lambda compartment: cast(DialectCompartment, compartment).methods(spoken),
            tracer=self._tracer,
            want=self.repository.want if self.settings.budget_bytes else None,
            split=self._split,
        )


def _sooner(one_s: float, other_s: float) -> float:
    """Return the shorter of two times, of which 0 means never."""
    return min(filter(None, (one_s, other_s)), default=0.0)


def is_same(one: Listener, other: Listener) -> bool:
    """Return whether two listeners are one port. Port 0 is one only within a single `listen` entry."""
    return one is other or ((one.port != 0 or one.in_file) and one.address == other.address)


def _split_rule(rules: TrafficRules) -> SplitRule:
    sticky = rules.sticky
    header = b"" if sticky is None else BY_VALUE if sticky.input else sticky.header.lower().encode()
    keys = sorted(rules.traffic)  # a file that is written in another order keeps clients where they are
    return SplitRule([rules.traffic[key] for key in keys], keys, header)


def _hear_drawn(split: TrafficSplit | None, dialect: str, word: str) -> bool:
    """Pass a message on to the dialects of requests that were drawn."""
    drawn = () if split is None else split.compartments()
    return any(cast(DialectCompartment, one).hear(dialect, word) for one in drawn)


def _listed(address: tuple[str, int], listener: Listener) -> Listener:
    return Listener(shown(*address), listener.dialects, listener.tls)
