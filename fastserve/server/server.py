"""One server: opens listeners, loads models, and runs until a signal or a client ends it.

A dry run loads the same models in worker processes without listening.

`judge` derives the server's readiness from the catalog and the workers each time one of them changes:
/healthz/ready, every dialect's own health calls and grpc.health.v1 show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import uvloop

from fastserve.engine.engine import Engine
from fastserve.engine.loader import VersionLoader
from fastserve.engine.schedulers.rate_limiter import RateLimiter, read_pools
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.metrics import LoadFailure, ModelReadiness, Readiness, Registry, ServerState, names
from fastserve.net import InheritedSockets, take_inherited
from fastserve.net.accept_balance import AcceptBalancer
from fastserve.net.access_control import Opening
from fastserve.repository.catalog import Catalog
from fastserve.repository.repository import Repository, ensemble_needs
from fastserve.repository.storage import Mirror
from fastserve.repository.version import Model, Version, VersionState
from fastserve.server.banner import advise, announce, banner_text, fill_standard_streams, is_terminal
from fastserve.server.dialect_selection import (
    all_listeners,
    recorded_reader,
    refuse_open_places,
    warn_of_exposures,
)
from fastserve.server.front import Front, FrontGauges
from fastserve.server.front_messages import CachePart, FailuresPart, OwnerModelControl
from fastserve.server.front_pool import FrontPool
from fastserve.server.progress import ServiceManager, StartProgress, find_terminal
from fastserve.server.sizing import size_fronts
from fastserve.server.storage_watch import StorageWatch
from fastserve.serving.dialect import refuse_to_stop
from fastserve.serving.model_control import DORMANT
from fastserve.settings import ModelEntry, Settings, TFServingOptions
from fastserve.settings.fields import convert
from fastserve.settings.tensorflow import StartFault, read_models
from fastserve.util.cpus import read_topology
from fastserve.util.logs import log_uncaught, setup_logs
from fastserve.util.memory import gc_freeze, keep_freed_memory, share_heap
from fastserve.workers.control import exit_now
from fastserve.workers.pinning import PinningPlan, pin
from fastserve.workers.remote.placer_process import PlacerProcess

log = logging.getLogger(__name__)

BEAT_S = 0.5
STOP_S = 30.0  # after requests have ended or been cut off, everything else has so long to stop
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class DryRun:
    """Result of a dry run: problems by model, and the versions that loaded."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    served: dict[str, list[Version]] = field(default_factory=dict)


def dry_run(settings: Settings) -> DryRun:
    """Load everything once, and unload it. Blocks. Raises ConfigError as a start does."""
    once = msgspec.structs.replace(size_fronts(settings).settings, model_control="none", memory_budget=0)
    return uvloop.run(_dry_run(once))


async def _dry_run(settings: Settings) -> DryRun:
    catalog, registry = Catalog(), Registry(sections=settings.front_count)
    host = make_loader(settings, registry, catalog, place=False)
    repository = Repository(settings, catalog, host)
    try:
        problems = await repository.load_all()
        served = {name: model.available() for name, model in catalog.models.items()}
        return DryRun(problems, served)
    finally:
        await repository.close()
        await host.close()
        registry.close()


def make_loader(
    settings: Settings,
    registry: Registry,
    catalog: Catalog,
    on_health: Callable[[], None] = lambda: None,
    *,
    place: bool = True,
) -> VersionLoader:
    """Make the loader of a server's versions. Raises ConfigError."""
    limited = settings.rate_limit == "execution_count"
    host = VersionLoader(
        registry,
        fronts=settings.front_count,
        on_health=on_health,
        catalog=catalog,
        cache_bytes=settings.response_cache_bytes,
        request_log_folder=settings.request_log_folder,
        device_share=settings.device_memory_share,
        in_process=settings.in_process,
        place=place,
        on_demand=settings.budget_bytes > 0,
        limiter=RateLimiter(read_pools(settings.rate_limit_resources)) if limited else None,
    )
    host.read_recorded = recorded_reader(settings)
    return host


class ModelsFile:
    """TensorFlow Serving's file of models, read again every `models_file_poll_s` seconds (spec 6.2).

    Its models replace those served, as a client's HandleReloadConfigRequest does. A file that cannot be used
    changes nothing, and is logged once.
    """

    def __init__(self, options: TFServingOptions, repository: Repository) -> None:
        self._options = options
        self._repository = repository
        self._told = ""
        self._watch: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to watch, if there is a file."""
        if self._options.models_file and self._options.models_file_poll_s:
            self._watch = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def look(self) -> None:
        """Read the file once. An unchanged file asks for nothing: failed models are retried as all are."""
        path = self._options.models_file
        try:
            entries = await asyncio.to_thread(read_entries, path)
            if entries != self._repository.entries:
                await self._repository.reload_config(entries)
                log.info("%s: %d models are asked for", path, len(entries))
            self._told = ""
        except (ConfigError, OSError, ServeError) as fault:
            self._say(f"{path}: {_words(fault)}")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._options.models_file_poll_s)
            try:
                await self.look()
            except Exception:  # what nobody foresaw must not end the watch
                log.exception("%s could not be looked at", self._options.models_file)

    def _say(self, text: str) -> None:
        if text != self._told:
            log.error("%s", text)
        self._told = text


def read_entries(path: str) -> tuple[ModelEntry, ...]:
    """Return the models that a file lists. Raises ConfigError, OSError."""
    entries, _ = read_models(path)
    return convert(entries, tuple[ModelEntry, ...], "model_config_list.config")


def _words(fault: Exception) -> str:
    if isinstance(fault, StartFault) and fault.detail:
        return fault.detail
    return str(getattr(fault, "strerror", None) or fault)


class Server:
    """A server for one configuration. Call `open`, then `drain`; `front` has the listeners' addresses."""

    def __init__(
        self,
        settings: Settings,
        passed_on: InheritedSockets | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.sizing = size_fronts(settings)
        self.settings = settings = self.sizing.settings
        self.catalog = Catalog()
        self.registry = Registry(sections=settings.front_count)
        self.host = make_loader(settings, self.registry, self.catalog, self._health_changed)
        pinning = "none" if settings.in_process else settings.pinning  # models' threads would be on one core
        self.host.pinning = PinningPlan(pinning, read_topology(), settings.front_count)
        self._affinity: set[int] = set()  # before this thread was pinned
        self.repository = Repository(settings, self.catalog, self.host)
        self.host.callbacks.repository = self.repository
        self.placer = PlacerProcess(settings.ray) if settings.ray else None
        self.host.placer = self.placer.name if self.placer is not None else ""
        self._models_file = ModelsFile(settings.tfserving, self.repository)
        self._storage = StorageWatch(mirror, settings.storage.poll_s, self.catalog, self.registry)
        self.loads = loads = OwnerModelControl(self.repository)
        self.front = Front(
            settings,
            Engine(self.catalog),
            self.registry,
            loads,
            self.host.cache,
            opening=Opening(done=False),
            balancer=AcceptBalancer.create(settings.front_count) if settings.front_count > 1 else None,
            state=loads.state,
        )
        cache = CachePart(self.host.cache_memory, lambda opened: None)
        self.loads.state.add(CachePart.NAME, cache)
        self.loads.state.add(FailuresPart.NAME, FailuresPart(self.registry.failures))
        self.front.custom_metrics = self.host.callbacks.metrics.write
        self.front.close_lent = self.host.close_lent
        self.on_stop: Callable[[bool], None] | None = None
        """Called when a client has asked for the end, with whether to wait for what is under way."""
        self.front.stop = loads.stop = self.stop_asked
        self.fronts = FrontPool(
            settings,
            self.catalog,
            self.host,
            self.registry,
            loads,
            self.front.balancer,
            self.front.started_ns,
        )
        self.front.spread, self.fronts.hear = self.fronts.spread, self.front.hear
        self.fronts.on_silent = self._health_changed
        self.front.passed_on = passed_on or InheritedSockets()
        self.manager = ServiceManager({})
        self._gauges = FrontGauges(self.registry)
        self._starting, self._draining, self._stop_asked, self._may_judge_s = True, False, False, 0.0
        self._judging: asyncio.TimerHandle | None = None
        self.progress = StartProgress()
        self.repository.on_listed, self.repository.on_settled = self._models_listed, self._model_settled
        self._beat: asyncio.TimerHandle | None = None
        self.catalog.on_change.append(self._version_changed)
        self.catalog.on_blame.append(lambda model: self._health_changed())

    async def open(self) -> None:
        """Listen and load the models, each of which answers as soon as it is loaded.

        Raises ConfigError, ServeError, OSError; all is stopped then.
        """
        self._beat_on()
        if own := self.host.pinning.front(0):
            self._affinity = os.sched_getaffinity(0)
            pin(own)
        try:
            if self.placer is not None:
                self.placer.open()
            await self.front.open(*all_listeners(self.settings))
            if self.front.traces is not None:
                self.front.traces.open()
                self.host.engine.send_span = self.front.traces.outbox.put
            self.host.engine.tensors = self.front.engine.tensors
            await self.repository.open()
            await self.front.accept()
            await self.fronts.open(*self.front.addresses())
            self._models_file.open()
            self._storage.open()
        except BaseException:
            self.progress.end()
            await self.drain(0)
            raise
        self.progress.end()
        self._starting = False
        self.front.opening.finish()
        self._judge()
        await self.fronts.settle()  # every front answers by the time that the start is reported
        http, grpc = (" ".join(one.address for one in found) for found in self.front.addresses())
        warn_of_exposures(self.settings)
        start_s = round(self.progress.seconds, 2)
        log.info("serving", extra={"http": http, "grpc": grpc, "start_s": start_s})

    async def drain(self, grace_s: float, delay_s: float = 0.0) -> None:
        """Be not ready for `delay_s` seconds, so that load balancers turn away; then stop.

        No connection is accepted any more, and requests in flight have `grace_s` seconds to finish.
        """
        self._draining = True
        self._judge()
        await asyncio.sleep(delay_s)
        await self._models_file.close()
        await self._storage.close()
        await asyncio.gather(self.front.drain(grace_s), self.fronts.drain(grace_s))
        self.loads.state.fronts_ended()
        if self.front.balancer is not None:
            self.front.balancer.close()
        await self.repository.close()
        await self.host.close()
        if self.placer is not None:
            await self.placer.close()
        if self._beat is not None:
            self._beat.cancel()
        if self._affinity:
            pin(tuple(self._affinity))
            self._affinity = set()
        self.registry.close()

    async def stop_asked(self, force: bool) -> None:
        """Stop for a client. Raises ServeError."""
        if self._draining or self._stop_asked:
            raise ServeError(Kind.FAILED_PRECONDITION, "The service has been stopped")
        if self.on_stop is None:
            await refuse_to_stop(force)
        else:
            self._stop_asked = True
            self.on_stop(force)

    def renew_files(self) -> None:
        """Have all front processes read their certificates and API keys again."""
        self.front.renew_files()
        self.fronts.tell_renewal()

    def _models_listed(self) -> None:
        self.progress.begin(self.catalog.starting)
        self.front.opening.list_models()

    def _model_settled(self, name: str) -> None:
        model = self.catalog.models[name]
        self.progress.settle(name, failed=model.error is not None or model.latest is None)

    def _version_changed(self, version: Version) -> None:
        self.fronts.tell_catalog(version.model)
        self._health_changed()

    def _health_changed(self) -> None:
        """Judge the server again, at once. While models come and go with the requests, in at most a twentieth
        of the loop's time: a judgement looks at all of them."""
        if self._judging is not None:
            return
        wait_s = self._may_judge_s - time.monotonic()
        if wait_s <= 0 or self._starting or self._draining or not self.settings.budget_bytes:
            self._judge()
        else:
            self._judging = asyncio.get_running_loop().call_later(wait_s, self._judge)

    def _judge(self) -> None:
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None
        began_s = time.monotonic()
        settings = self.settings
        found = judge(
            self.catalog,
            self.host,
            strict=settings.strict_readiness,
            may_be_empty=settings.model_control == "explicit",
        )
        if found.ready and self.fronts.trouble:
            found = Readiness(False, self.fronts.trouble, found.models, ServerState.SERVING)
        if self._starting:
            loading = "the server is starting: its models are loading"
            found = Readiness(False, loading, found.models, ServerState.STARTING)
        if self._draining:
            found = Readiness(False, "the server is stopping", found.models, ServerState.STOPPING)
        self.front.set_ready(found)
        self.fronts.tell_catalog()  # which versions have no worker that answers
        self.fronts.tell_readiness(found)
        self.registry.gauges(names.READY).of().set(found.ready)
        now_s = time.monotonic()
        self._may_judge_s = now_s + JUDGE_PAUSES * (now_s - began_s)

    def _beat_on(self) -> None:
        # First: a beat that fails is not the last.
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._beat_on)
        self.front.heartbeat.beat()
        self.front.look_twice_a_second()
        self.progress.look()
        self.manager.beat()
        self._gauges.beat(self.front.listeners(), BEAT_S)
        self._gauges.show_memory(self.front.budget)
        self._gauges.show_certificate(self.front.tls)
        self._gauges.show_keys(self.front.gate)
        self._gauges.show_queues(self.host.hosted.values())
        self._gauges.show_workers(self.host.hosted.values())
        if self.repository.residency is not None:
            self._gauges.show_residency(self.repository.residency)
        self.host.show_waiting()
        self.fronts.tell_custom_metrics(self.host.callbacks.metrics.write())
        self.fronts.tell_catalog()  # labels move without a version that does


async def serve(
    settings: Settings,
    passed_on: InheritedSockets | None = None,
    manager: ServiceManager | None = None,
    mirror: Mirror | None = None,
) -> int:
    """Serve until a signal and return the exit status. A second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in STOP_SIGNALS:  # before the models load: a stop during a long load is a stop
        loop.add_signal_handler(number, _on_signal, stop)
    server = Server(settings, passed_on, mirror)
    if manager is not None:
        server.manager = manager
    if settings.log.format == "text":
        server.progress = StartProgress(find_terminal())
    forced = asyncio.Event()

    def stop_for_client(force: bool) -> None:
        if force:
            forced.set()
        stop.set()

    server.on_stop = stop_for_client
    if settings.tls.cert or settings.keys:  # else a terminal that hangs up ends the server, as it always has
        loop.add_signal_handler(signal.SIGHUP, server.renew_files)
    opening = asyncio.ensure_future(server.open())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        return 0
    opening.result()
    keep_freed_memory()
    gc_freeze()
    places, readiness = server.front.addresses(), server.front.readiness
    text = banner_text(settings, *places, readiness, at_terminal=is_terminal(1), sizing=server.sizing.reason)
    announce(text)
    server.manager.ready(f"serving {len(readiness.models)} models")
    await stopping
    server.manager.stopping()
    return await _stop(server, forced=forced.is_set())


async def _stop(server: Server, *, forced: bool) -> int:
    """Drain and stop in bounded time, and return the exit status."""
    delay_s, grace_s = (0.0, 0.0) if forced else (server.settings.drain_delay_s, server.settings.drain_s)
    log.info("stopping", extra={"drain_delay_s": delay_s, "drain_s": grace_s})
    stopped = asyncio.ensure_future(server.drain(grace_s, delay_s))
    await asyncio.wait({stopped}, timeout=delay_s + grace_s + STOP_S)
    if not stopped.done():
        log.error("the server did not stop within %g s after draining: it is ended", STOP_S)
        exit_now(1)
    stopped.result()
    return 0


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(130)
    stop.set()


def run(
    settings: Settings,
    *,
    give_up: Callable[[Exception], None] | None = None,
    mirror: Mirror | None = None,
) -> int:
    """Run a server in this process and return the exit status. `mirror` is that of the object store whose
    files the settings name.

    `give_up` is called with the error of a failed start; without it the error goes to standard error.
    """
    fill_standard_streams()
    share_heap()
    setup_logs(settings.log.level, settings.log.format, access=settings.log.access)
    log_uncaught()
    try:
        refuse_open_places(settings)
        passed_on = take_inherited(os.environ)
        status = uvloop.run(serve(settings, passed_on, ServiceManager(os.environ), mirror))
        _leave_threads(settings, status)
        return status
    except (ConfigError, ServeError, OSError) as error:
        if give_up is not None:
            give_up(error)
        else:
            _give_up(settings, error)
    return 1


def _leave_threads(settings: Settings, status: int) -> None:
    """End the process at once where a model's thread will not end, which may hold standard input."""
    if settings.in_process:
        from fastserve.workers.in_process import thread_remains

        if thread_remains():
            exit_now(status)


def _give_up(settings: Settings, error: Exception) -> None:
    reason = f"{getattr(error, 'strerror', None) or error}{advise(settings, error)}"
    if settings.log.format == "json":
        log.critical("the server could not start: %s", reason)
    else:
        print(f"fastserve: {reason}", file=sys.stderr)


_COMING = (VersionState.START, VersionState.LOADING)


JUDGE_PAUSES = 19.0
"""Time between two judgements of a server that loads models on demand, in times of the first."""


def judge(catalog: Catalog, host: VersionLoader, *, strict: bool, may_be_empty: bool) -> Readiness:
    """Return ready if every wanted model has an available version with a live, warm, responsive worker.

    Not `strict`: a model that could not be loaded is reported and does not count. A server without any
    model is ready only where models are loaded on demand (`may_be_empty`).
    """
    _look_at_workers(catalog, host)
    models = {
        name: _judge_model(model, host, starting=name in catalog.starting)
        for name, model in sorted(catalog.models.items())
        if name in catalog.starting or _wanted(model)
    }
    failed = [
        f"{name}: {state.reason}"
        for name, state in models.items()
        if not (state.ready or _is_on_demand(catalog.models[name]))
        and (strict or catalog.models[name].latest is not None or _loading(catalog.models[name]))
    ]
    if failed:
        return Readiness(False, "; ".join(failed), models, ServerState.SERVING)
    if not any(state.ready for state in models.values()) and not may_be_empty:
        return Readiness(False, "no model is loaded", models, ServerState.SERVING)
    return Readiness(True, "", models, ServerState.SERVING)


def _wanted(model: Model) -> bool:
    versions = model.versions.values()
    return model.error is not None or any(
        v.state is not VersionState.END or v.error is not None for v in versions
    )


def _is_on_demand(model: Model) -> bool:
    """Return whether a model is not in memory, for its next request to load."""
    return model.on_demand and model.latest is None


def _loading(model: Model) -> bool:
    return any(version.state in _COMING for version in model.versions.values())


def _say_loading(model: Model, host: VersionLoader) -> str:
    waits = next(filter(None, map(host.waits_for, model.versions.values())), "")
    return f"loading: {waits}" if waits else "loading"


def _judge_model(model: Model, host: VersionLoader, *, starting: bool) -> ModelReadiness:
    failed = LoadFailure.of(model.failed_at, model.error.message) if model.error else None
    latest = model.latest
    if latest is not None:
        alive, wanted = host.alive(latest), latest.config.instances
        return ModelReadiness(not latest.down, latest.down, alive, wanted, failed)
    if not starting and model.waits_for_demand:
        return ModelReadiness(True, DORMANT, failed=failed)
    if starting or _loading(model):
        return ModelReadiness(False, _say_loading(model, host), failed=failed)
    errors = [v.error for v in model.versions.values() if v.error is not None]
    error = model.error or (errors[-1] if errors else None)
    return ModelReadiness(False, error.message if error else "no version is available", failed=failed)


def _look_at_workers(catalog: Catalog, host: VersionLoader) -> None:
    """Set `down` of each available version. An ensemble is down while one of its steps is."""
    available = [version for model in catalog.models.values() for version in model.available()]
    ensembles = [version for version in available if version in host.ensembles]
    for version in available:
        alive = host.alive(version)
        version.down = host.stuck(version) if alive else host.trouble(version) or "no worker is alive"
    for _ in ensembles:  # one may be a step of another: the longest chain has them all
        for version in ensembles:
            version.down = _down_step(catalog, version)


def _down_step(catalog: Catalog, ensemble: Version) -> str:
    for name in ensemble_needs(ensemble.config):
        step = catalog.available(name)
        if step is not None and step.down:
            return f"{name}: {step.down}"
    return ""
