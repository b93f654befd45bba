"""Brings versions up and down: workers, arena and queue, in the order that loses nothing.

    load:    workers load -> the arena is made for their tensors -> workers attach and warm up -> queue opens
    unload:  (the catalog has hidden the version) -> queue drains -> workers stop -> the arena goes

Only the process that owns the workers has a Host; other front processes mirror what it did.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastserve.devices.found import MACHINE
from fastserve.engine.batch_queue import BatchQueue, Specs
from fastserve.engine.cache import ResponseCache
from fastserve.engine.calls import Calls
from fastserve.engine.counters import counters_of
from fastserve.engine.device_budget import DeviceBudget
from fastserve.engine.engine import Engine
from fastserve.engine.ensemble import Ensemble
from fastserve.engine.ensemble_plan import check_models, make_plan
from fastserve.engine.lending import NONE, lending_device
from fastserve.engine.meters import QueueMeters
from fastserve.engine.rate import RateLimiter
from fastserve.engine.recorded import ReadRecorded, Recording, no_records
from fastserve.engine.schedule import Schedule, open_queue
from fastserve.engine.scheduler import find_scheduler
from fastserve.engine.text import TextQueue
from fastserve.engine.upkeep import Upkeep
from fastserve.engine.wishes import Tell, Wishes
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.metrics import names
from fastserve.metrics.registry import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.placement import Place
from fastserve.repository.version import Version
from fastserve.tensor import TensorSpec
from fastserve.workers.arena import Arena, plan_geometry
from fastserve.workers.group import LOAD_TIMEOUT_S, WorkerGroup
from fastserve.workers.instance import CompletedError
from fastserve.workers.shared import SharedWorkers

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
# A batch whose worker died runs once more when another worker lives; its requests fail otherwise.
MOST_ATTEMPTS = 2
DIED = "the worker process died while it ran this request"
ENDED = "the worker process that ran this request was ended: {}"
# With no worker left, requests wait this long for one to come back; those that come later as long as a look.
NOBODY_S, NOBODY_LOOK_S = 10.0, 1.0
NOBODY = "no worker of this model is alive"


@dataclass
class Hosted:
    """What one available version holds in the owner."""

    version: Version
    group: WorkerGroup
    arena: Arena
    queue: BatchQueue
    calls: Calls
    upkeep: Upkeep
    part: int = 0  # which of the version's queues, where each instance has one
    nobody: asyncio.TimerHandle | None = None  # fails what waits while no worker is alive
    closing: bool = False
    claims: list[Place] = field(default_factory=list)  # of device memory


Mirror = Callable[[Hosted], Awaitable[None]]


class Host:
    """The repository's hooks (`load`, `unload`) over worker groups. `mirrors` are told of every version
    opened, and awaited before one is closed."""

    def __init__(
        self,
        registry: Registry,
        *,
        fronts: int = 1,
        on_health: Callable[[], None] = lambda: None,
        catalog: Catalog | None = None,
        cache_bytes: int = 0,
        limiter: RateLimiter | None = None,
        device_share: float = 1.0,
    ) -> None:
        self._limiter = limiter
        self._budget = DeviceBudget(MACHINE.devices, device_share)
        self._shared = SharedWorkers(registry.gauges(names.SHARED_WORKERS))
        self.cache = ResponseCache(cache_bytes) if cache_bytes else None
        self.ensembles: dict[Version, Ensemble] = {}  # they have no workers
        self._catalog = catalog or Catalog()
        self.wishes = Wishes(self._catalog)  # what models ask of the server
        self.engine = Engine(self._catalog)  # for what models ask of other models
        self.hosted: dict[tuple[str, int, int, int], Hosted] = {}
        self.on_opened: list[Mirror] = []
        self.on_closing: list[Mirror] = []
        self.read_recorded: ReadRecorded = no_records
        self._registry = registry
        self._fronts = fronts
        self._on_health = on_health

    async def load(self, version: Version) -> None:
        """Start the version's workers and open its queue. Raises ServeError in the backend's own words."""
        began_ns = time.monotonic_ns()
        try:
            await self._load(version, began_ns)
        except CompletedError as told:  # it knows better how it is queued, and will say the same again
            version.amend(told.fields)
            await self._load(version, began_ns)

    async def _load(self, version: Version, began_ns: int) -> None:
        if version.config.options.ensemble is not None:
            await self._load_ensemble(version)
            counters_of(version).load_s = (time.monotonic_ns() - began_ns) / 1e9
            return
        parts: list[Hosted] = []
        try:
            schedule = Schedule(version, self._fronts, self.cache, self._limiter)
            while len(parts) < schedule.queues:
                parts.append(await self._start(version, schedule, len(parts)))
            version.scheduler = schedule.open_scheduler([hosted.queue for hosted in parts])
            counters_of(version).load_s = (time.monotonic_ns() - began_ns) / 1e9
            for hosted in parts:
                for mirror in self.on_opened:
                    await mirror(hosted)
            self._count_load(version, "ok")
        except BaseException as error:
            if not isinstance(error, CompletedError):
                self._count_load(version, "failed")
            self.wishes.forget(version)
            await self._close_all(version, parts)
            if isinstance(error, ConfigError):
                raise ServeError(Kind.INVALID_ARGUMENT, str(error)) from error
            raise

    async def _start(self, version: Version, schedule: Schedule, part: int) -> Hosted:
        """One queue of the version and the workers behind it."""
        made: list[tuple[Arena, Specs, Specs]] = []

        def make_arena(inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec]) -> Arena:
            seen_inputs, seen_outputs = schedule.describe(inputs, outputs)
            version.describe(seen_inputs, seen_outputs, group.signatures)
            version.text = group.text
            parted = bool(version.config.options.signature_inputs)
            arena = Arena.create(plan_geometry(config, inputs, outputs, fronts=self._fronts, parted=parted))
            made.append((arena, inputs, outputs))
            return arena

        config = schedule.worker_config(part)
        recording = Recording(version, self.read_recorded)
        claims = version.config.places[part : part + 1] if schedule.extras else version.config.places
        self._budget.take(claims)
        group = WorkerGroup(
            version.folder,
            config,
            make_arena,
            lambda worker: self._worker_died(version, part, worker),
            lambda worker: self._worker_back(version, part),
            name=version.model,
            on_call=lambda worker, message: self._called(version, part, worker, message, group.tell),
            recorded=recording.write,
            shared=self._shared,
        )
        try:
            await group.start()
            recording.ran(group.recorded_ns)
            hosted = self._open(version, part, group, *made[0])
            hosted.claims = claims
            return hosted
        except BaseException:
            self._budget.give_back(claims)
            await _close_unopened(group, [arena for arena, _, _ in made])
            raise

    async def unload(self, version: Version) -> None:
        """Drain the version's queue, then stop its workers and give the memory back."""
        for ensemble in list(self.ensembles.values()):
            await ensemble.let_go(version)
        if version in self.ensembles:
            await self._unload_ensemble(version)
        parts = self._parts(version)
        if (scheduler := find_scheduler(version)) is not None:
            await scheduler.drain()
        for hosted in parts:
            hosted.closing = True
            for mirror in self.on_closing:
                await mirror(hosted)
            while hosted.queue.busy:  # a split request may bring its next piece
                await hosted.queue.drain()
        # Until here a worker that dies is noticed and replaced: requests under way depend on it.
        await self._close_all(version, parts)

    async def close(self) -> None:
        """Stop everything at once; whoever still waits gets an error."""
        for ensemble in self.ensembles.values():
            ensemble.close()
        await self.wishes.close()
        hosted, self.hosted = list(self.hosted.values()), {}
        await asyncio.gather(*(self._close(one) for one in hosted))
        await self._shared.close()

    async def close_lent(self, handle: bytes) -> None:
        """A client takes back memory of its GPU's: returns when workers that have opened it have let go."""
        number = self.wishes.lent.begin()
        message = {"op": "close_lent", "handle": handle.hex(), "number": number}
        asked = [
            (id(hosted.version), hosted.part, worker)
            for hosted in self.hosted.values()
            if lending_device(hosted.version) != NONE
            for worker in range(hosted.queue.workers)
            if hosted.group.tell_attached(worker, message)
        ]
        await self.wishes.lent.all_closed(asked, number)

    def alive(self, version: Version) -> int:
        """Workers of the version that are ready now; 1 for an ensemble, which needs none."""
        if version in self.ensembles:
            return 1
        return sum(hosted.group.alive for hosted in self._parts(version))

    def stuck(self, version: Version) -> str:
        """Why no worker of the version can take a batch, though some are alive; "" while one can."""
        parts = self._parts(version)
        stuck = sum(len(hosted.upkeep.stuck) for hosted in parts)
        if not stuck or self.alive(version) > stuck:
            return ""
        return f"every worker has been in one batch for more than {parts[0].upkeep.stuck_s:g} s"

    def trouble(self, version: Version) -> str:
        """Why a worker of the version is missing, in words a client may read."""
        return next((h.group.trouble for h in self._parts(version) if h.group.trouble), "")

    def _parts(self, version: Version) -> list[Hosted]:
        return [hosted for key, hosted in self.hosted.items() if key[2] == id(version)]

    async def _load_ensemble(self, version: Version) -> None:
        if self._fronts > 1:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"an ensemble runs in one front process: frontends: given {self._fronts}, allowed: 1",
            )
        assert version.config.options.ensemble is not None
        plan = make_plan(version.model, version.config.options.ensemble)
        check_models(version, plan, self._catalog)
        version.scheduler = self.ensembles[version] = Ensemble(plan)
        try:
            limit_s = version.config.load_timeout_s or LOAD_TIMEOUT_S
            await Recording(version, self.read_recorded).run(self.engine, limit_s)
        except BaseException as error:
            await self._unload_ensemble(version)
            if isinstance(error, ConfigError):
                raise ServeError(Kind.INVALID_ARGUMENT, str(error)) from error
            raise

    async def _unload_ensemble(self, version: Version) -> None:
        ensemble = self.ensembles[version]
        await ensemble.drain()
        ensemble.close()
        version.scheduler = None
        self.ensembles.pop(version, None)

    def _open(
        self, version: Version, part: int, group: WorkerGroup, arena: Arena, inputs: Specs, outputs: Specs
    ) -> Hosted:
        geometry = arena.geometry
        meters = QueueMeters(
            self._registry, version.model, version.number, geometry.max_delay_ns, geometry.max_rows
        )
        queue = open_queue(arena, 0, inputs, outputs, meters)
        queue.on_device = group.on_device
        counters_of(version).queues.append(queue)
        upkeep = Upkeep(
            queue, group.kill, lambda: self._stuck_changed(hosted), limit_ms=version.config.run_timeout_ms
        )
        upkeep.open()
        hosted = Hosted(version, group, arena, queue, Calls(self.engine, queue, group.tell), upkeep, part)
        self.hosted[_key(version, part)] = hosted
        self._report(hosted)
        return hosted

    async def _close_all(self, version: Version, parts: list[Hosted]) -> None:
        """All at once: instances that hang are each waited for, and a stop has a limit."""
        held = [one for one in parts if self.hosted.pop(_key(version, one.part), None) is not None]
        await asyncio.gather(*(self._close(hosted) for hosted in held))

    async def _close(self, hosted: Hosted) -> None:
        hosted.upkeep.close()
        if hosted.nobody is not None:
            hosted.nobody.cancel()
        await hosted.calls.close()
        await hosted.group.stop(STOP_GRACE_S)
        scheduler, hosted.version.scheduler = find_scheduler(hosted.version), None
        if scheduler is not None:
            scheduler.close()
        hosted.queue.close()
        counters_of(hosted.version).close(hosted.queue)
        hosted.arena.close()
        self._budget.give_back(hosted.claims)
        self.wishes.forget(hosted.version)
        self._report(hosted)

    def _worker_died(self, version: Version, part: int, worker: int) -> None:
        hosted = self.hosted.get(_key(version, part))
        if hosted is None:
            return
        hosted.calls.forget(worker)
        self.wishes.forget_worker(version, part, worker)
        # Parts of an answer have gone out already: it is not begun again. What hung would hang the next.
        ended = hosted.upkeep.ended(worker)
        # Of text, what has begun says so itself, and the rest waits for the next worker.
        retry = (
            (hosted.group.alive or isinstance(hosted.queue, TextQueue))
            and not hosted.queue.decoupled
            and not ended
        )
        attempts = MOST_ATTEMPTS if retry else 1
        kind, text = (Kind.DEADLINE_EXCEEDED, ENDED.format(ended)) if ended else (Kind.UNAVAILABLE, DIED)
        retried, failed = hosted.queue.ring.worker_died(worker, attempts, kind.value, text)
        if (scheduler := find_scheduler(version)) is not None:
            if scheduler.died_with_it:
                failed += hosted.queue.ring.fail_ready(Kind.UNAVAILABLE.value, scheduler.died_with_it)
            scheduler.instance_lost(part)
        log.warning("%r: worker %d died; %d batches retried, %d failed", version, worker, retried, failed)
        self._registry.counters(names.RETRIES).of(version.model, version.number).add(retried)
        if not hosted.group.alive and hosted.nobody is None:
            hosted.nobody = asyncio.get_running_loop().call_later(NOBODY_S, _fail_waiting, hosted)
        self._report(hosted)

    def _stuck_changed(self, hosted: Hosted) -> None:
        stuck = self.stuck(hosted.version)
        if stuck:
            log.error("%r: %s", hosted.version, stuck)
        self._report(hosted)

    def _called(
        self, version: Version, part: int, worker: int, message: Mapping[str, Any], tell: Tell
    ) -> None:
        if message["op"] == "wish":
            self.wishes.hear(version, part, worker, message, tell)
            return
        hosted = self.hosted.get(_key(version, part))
        if hosted is not None:
            hosted.calls.hear(worker, message)

    def _worker_back(self, version: Version, part: int) -> None:
        hosted = self.hosted.get(_key(version, part))
        if hosted is not None:
            self._registry.counters(names.WORKER_RESTARTS).of(version.model, version.number).add()
            if (scheduler := find_scheduler(version)) is not None:
                scheduler.instance_back(part)
            if hosted.nobody is not None:
                hosted.nobody.cancel()
                hosted.nobody = None
            self._report(hosted)

    def _count_load(self, version: Version, result: str) -> None:
        self._registry.counters(names.MODEL_LOADS).of(version.model, version.number, result).add()

    def _report(self, hosted: Hosted) -> None:
        who = (hosted.version.model, hosted.version.number)
        alive = self.alive(hosted.version)
        ready = alive > 0 and not self.stuck(hosted.version)
        self._registry.gauges(names.MODEL_READY).of(*who).set(float(ready))
        self._registry.gauges(names.WORKERS_ALIVE).of(*who).set(alive)
        if hosted.version.text is not None:
            self._registry.gauges(names.TEXT_KV).of(*who).set(alive * hosted.version.text.kv_tokens)
        self._registry.gauges(names.WORKERS_WANTED).of(*who).set(hosted.version.config.instances)
        self._on_health()


def _key(version: Version, part: int) -> tuple[str, int, int, int]:
    return version.model, version.number, id(version), part


async def _close_unopened(group: WorkerGroup, made: list[Arena]) -> None:
    await group.stop(STOP_GRACE_S)
    for arena in made:
        arena.close()


def _fail_waiting(hosted: Hosted) -> None:
    """End what waits for a worker, again and again until one is back: nobody waits for ever."""
    failed = hosted.queue.ring.fail_ready(Kind.UNAVAILABLE.value, NOBODY)
    if failed:
        log.error("%r: %d batches failed: no worker is alive", hosted.version, failed)
    hosted.nobody = asyncio.get_running_loop().call_later(NOBODY_LOOK_S, _fail_waiting, hosted)
