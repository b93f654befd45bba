"""One server: listeners first, then models, then signals until it is told to stop.

open:   registry -> listeners, which tell clients to come again -> repository (workers, queues)
        -> other front processes -> every call is answered
stop:   not ready, and everything still accepted for drain_delay_s -> listeners and fronts drain
        -> versions unload -> workers stop -> exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable

import uvloop

from fastserve.allocator import keep_freed_memory, share_heap
from fastserve.config import Settings
from fastserve.engine.engine import Engine
from fastserve.engine.hosting import Host
from fastserve.engine.rate import RateLimiter, read_pools
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.garbage import keep_what_is
from fastserve.logs import log_uncaught, setup_logs
from fastserve.metrics import Readiness, Registry, names
from fastserve.repository.catalog import Catalog
from fastserve.repository.repository import Repository
from fastserve.repository.version import Version
from fastserve.server.exposure import warn_of_exposures
from fastserve.server.fronts import Fronts
from fastserve.server.gauges import FrontGauges
from fastserve.server.health import judge
from fastserve.server.listening import Front, all_listeners
from fastserve.server.loads import ClientLoads
from fastserve.server.models_file import ModelsFile
from fastserve.server.speaking import recorded_reader
from fastserve.server.welcome import announce, fill_standard_streams, welcome_text
from fastserve.serving.dialect import refuse_to_stop
from fastserve.wire.opening import Opening
from fastserve.workers.tie import leave

log = logging.getLogger(__name__)

BEAT_S = 0.5
STOP_S = 30.0  # after requests have ended or been cut off, everything else has so long to stop
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server:
    """Everything one configuration asks for. `open`, then `drain`; every listener's address is in `front`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.catalog = Catalog()
        self.registry = Registry(sections=settings.frontends)
        self.host = Host(
            self.registry,
            fronts=settings.frontends,
            on_health=self._health_changed,
            catalog=self.catalog,
            cache_bytes=settings.response_cache_bytes,
            device_share=settings.device_memory_share,
            limiter=RateLimiter(read_pools(settings.rate_limit_resources))
            if settings.rate_limit == "execution_count"
            else None,
        )
        self.host.read_recorded = recorded_reader(settings)
        self.repository = Repository(settings, self.catalog, self.host)
        self.host.wishes.repository = self.repository
        self._models_file = ModelsFile(settings.tfserving, self.repository)
        self.loads = loads = ClientLoads(self.repository)
        self.front = Front(
            settings,
            Engine(self.catalog),
            self.registry,
            loads,
            self.host.cache,
            opening=Opening(done=False),
            owner=True,
        )
        self.front.custom_metrics = self.host.wishes.metrics.write
        self.front.close_lent = self.host.close_lent
        self.on_stop: Callable[[bool], None] | None = None
        """Called when a client has asked for the end, with whether to wait for what is under way."""
        self.front.stop = loads.stop = self.stop_asked
        self.fronts = Fronts(settings, self.catalog, self.host, self.registry, loads)
        self.front.spread, self.fronts.hear = self.fronts.spread, self.front.hear
        self._gauges = FrontGauges(self.registry)
        self._draining = self._stop_asked = False
        self._beat: asyncio.TimerHandle | None = None
        self.catalog.on_change.append(self._version_changed)

    async def open(self) -> None:
        """Listen, load what is wanted, answer. Raises ConfigError, ServeError, OSError, all stopped again."""
        self._beat_on()
        try:
            shared = self.settings.frontends > 1
            await self.front.open(*all_listeners(self.settings), shared=shared)
            self.host.engine.tensors = self.front.engine.tensors
            await self.repository.open()
            await self.fronts.open(*self.front.addresses())
            self._models_file.open()
        except BaseException:
            await self.drain(0)
            raise
        self.front.begin()
        self._health_changed()
        await self.fronts.settle()  # whoever is told that it serves, and asks any front, hears so
        http, grpc = (" ".join(one.address for one in found) for found in self.front.addresses())
        warn_of_exposures(self.settings)
        log.info("serving", extra={"http": http, "grpc": grpc})

    async def drain(self, grace_s: float, delay_s: float = 0.0) -> None:
        """Be not ready for `delay_s` seconds, so that load balancers look elsewhere; then stop accepting,
        finish what is in flight for at most `grace_s` seconds, stop everything."""
        self._draining = True
        self._health_changed()
        await asyncio.sleep(delay_s)
        await self._models_file.close()
        await asyncio.gather(self.front.drain(grace_s), self.fronts.drain(grace_s))
        await self.repository.close()
        await self.host.close()
        if self._beat is not None:
            self._beat.cancel()
        self.registry.close()

    async def stop_asked(self, force: bool) -> None:
        """A client wants the server to end. Raises ServeError."""
        if self._draining or self._stop_asked:
            raise ServeError(Kind.FAILED_PRECONDITION, "The service has been stopped")
        if self.on_stop is None:
            await refuse_to_stop(force)
        else:
            self._stop_asked = True
            self.on_stop(force)

    def renew_certificates(self) -> None:
        """Of all front processes."""
        self.front.renew_certificates()
        self.fronts.tell_renewal()

    def _version_changed(self, version: Version) -> None:
        self.fronts.tell_catalog()
        self._health_changed()

    def _health_changed(self) -> None:
        settings = self.settings
        found = judge(
            self.catalog,
            self.host,
            strict=settings.strict_readiness,
            may_be_empty=settings.model_control == "explicit",
        )
        if not self.front.opening.done:
            found = Readiness(False, "the server is starting: its models are loading", found.models)
        if self._draining:
            found = Readiness(False, "the server is stopping", found.models)
        self.front.set_ready(found)
        self.fronts.tell_readiness(found)
        self.registry.gauges(names.READY).of().set(found.ready)

    def _beat_on(self) -> None:
        # First: a beat that fails is not the last.
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._beat_on)
        self.front.heartbeat.beat()
        self._gauges.beat(self.front.http, BEAT_S)
        self._gauges.show_certificate(self.front.tls)
        self._gauges.show_queues(self.host.hosted.values())
        self.fronts.tell_custom_metrics(self.host.wishes.metrics.write())
        self.fronts.tell_catalog()  # labels move without a version that does


async def serve(settings: Settings) -> int:
    """Serve until a signal; the exit status. A second signal ends it at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in STOP_SIGNALS:  # before the models load: a stop during a long load is a stop
        loop.add_signal_handler(number, _on_signal, stop)
    server = Server(settings)
    forced = asyncio.Event()

    def stop_for_client(force: bool) -> None:
        if force:
            forced.set()
        stop.set()

    server.on_stop = stop_for_client
    if settings.tls.cert:  # else a terminal that hangs up ends the server, as it always has
        loop.add_signal_handler(signal.SIGHUP, server.renew_certificates)
    opening = asyncio.ensure_future(server.open())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        return 0
    opening.result()
    keep_freed_memory()
    keep_what_is()
    announce(welcome_text(settings, *server.front.addresses(), server.front.readiness))
    await stopping
    return await _stop(server, forced=forced.is_set())


async def _stop(server: Server, *, forced: bool) -> int:
    """Drain and stop; the exit status. In bounded time, whatever a model or a client does."""
    delay_s, grace_s = (0.0, 0.0) if forced else (server.settings.drain_delay_s, server.settings.drain_s)
    log.info("stopping", extra={"drain_delay_s": delay_s, "drain_s": grace_s})
    stopped = asyncio.ensure_future(server.drain(grace_s, delay_s))
    await asyncio.wait({stopped}, timeout=delay_s + grace_s + STOP_S)
    if not stopped.done():
        log.error("the server did not stop within %g s after draining: it is ended", STOP_S)
        leave(1)
    stopped.result()
    return 0


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(130)
    stop.set()


def run(settings: Settings, *, give_up: Callable[[Exception], None] | None = None) -> int:
    """Run a server in this process; the exit status. Why it could not start goes to `give_up`, else to
    standard error."""
    fill_standard_streams()
    share_heap()
    setup_logs(settings.log.level, settings.log.format, access=settings.log.access)
    log_uncaught()
    try:
        return uvloop.run(serve(settings))
    except (ConfigError, ServeError, OSError) as error:
        if give_up is not None:
            give_up(error)
        else:
            _give_up(settings, error)
    return 1


def _give_up(settings: Settings, error: Exception) -> None:
    reason = getattr(error, "strerror", None) or str(error)
    if settings.log.format == "json":
        log.critical("the server could not start: %s", reason)
    else:
        print(f"fastserve: {reason}", file=sys.stderr)
