"""Loads and unloads versions: workers, arena and queue, in the order that loses no request.

    load:    workers load -> the arena is made for their tensors -> workers attach and warm up -> queue opens
    unload:  (the catalog has hidden the version) -> queue drains -> workers stop -> the arena goes

Only the process that owns the workers has a VersionLoader; other front processes mirror what it did. Recorded
requests of a version are checked like any request, one at a time, and handed to its workers in a file
(workers/warmup.py), or run by its ensemble.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic_ns
from typing import Any, BinaryIO

import msgspec

from fastserve.backends.registry import find_backend
from fastserve.devices.inventory import MACHINE, VisibleDevice
from fastserve.engine.batch_queue import BatchQueue, QueueMetrics, Specs
from fastserve.engine.counters import COUNTERS, RequestCounters, WarmUp, counters_of
from fastserve.engine.device_memory import NO_DEVICE, lending_device
from fastserve.engine.engine import SCHEDULER, Engine, find_scheduler
from fastserve.engine.input_checks import check_inputs
from fastserve.engine.model_callbacks import ModelCallbacks, ModelCalls, SendToWorker
from fastserve.engine.request_log import RequestLogs
from fastserve.engine.schedulers.cache import CacheMemory, ResponseCache
from fastserve.engine.schedulers.ensemble import EnsembleScheduler, check_models, make_plan
from fastserve.engine.schedulers.rate_limiter import RateLimiter
from fastserve.engine.schedulers.schedule import Schedule, open_queue
from fastserve.engine.shared_counts import CountsMemory
from fastserve.engine.supervision import LOST, DeathPolicy, Maintenance
from fastserve.errors import ConfigError, Kind, ServeError, invalid
from fastserve.metrics import names
from fastserve.metrics.registry import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.placement import Placement
from fastserve.repository.version import Version
from fastserve.request import RECORDED_LENGTH as LENGTH
from fastserve.request import Recorded
from fastserve.tensor import TensorSpec
from fastserve.util.memory import proportional_bytes
from fastserve.util.offload import outlast
from fastserve.workers.arena import Arena, plan_geometry
from fastserve.workers.forked_worker import ForkServers
from fastserve.workers.group import LOAD_TIMEOUT_S, CompletedError, WorkerGroup
from fastserve.workers.pinning import PinningPlan, WorkerPins
from fastserve.workers.remote.placer_process import NOT_GIVEN
from fastserve.workers.shared_worker import SharedWorkers

MOST_BYTES = 1 << 29

"""Of all recorded inputs that a version's workers are handed, as tensors."""

ReadRecorded = Callable[[Version], Iterator[Recorded]]


def no_records(version: Version) -> Iterator[Recorded]:
    """Return no recorded requests: for servers whose dialects have none."""
    return iter(())


class Recording:
    """Recorded requests of one version, run before it is available and counted as its warm-up."""

    def __init__(self, version: Version, read: ReadRecorded) -> None:
        self._version, self._read = version, read
        self._took_ns = self._records = 0
        self._origin = ""

    async def write(self) -> int:
        """Write the requests to a file for the version's workers. Return its descriptor, -1 for no requests.
        Raises ServeError for an invalid request, ConfigError for a file that cannot be read."""
        began_ns = monotonic_ns()
        writing = asyncio.ensure_future(asyncio.to_thread(self._write))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_drop)  # the thread goes on
            raise
        except ServeError as fault:
            self._count(fault.kind.name, monotonic_ns() - began_ns)
            raise
        finally:
            self._took_ns = monotonic_ns() - began_ns

    def ran(self, took_ns: int) -> None:
        """Record that the version's workers have run the requests in `took_ns`."""
        if self._records:
            self._count("OK", self._took_ns + took_ns)

    async def run(self, engine: Engine, limit_s: float) -> None:
        """Run the requests in this process, on a version that has no workers. Raises ServeError."""
        began_ns = monotonic_ns()
        deadline_ns = began_ns + int(limit_s * 1e9)
        with closing(self._each()) as found:
            while (one := await outlast(asyncio.to_thread(next, found, None))) is not None:
                one.request.deadline_ns = deadline_ns
                await self._infer(engine, one)
        self.ran(monotonic_ns() - began_ns)

    async def _infer(self, engine: Engine, one: Recorded) -> None:
        try:
            for _ in range(one.times):
                (await engine.infer(self._version, one.request)).release()
        except ServeError as fault:
            raise ServeError(fault.kind, f"{one.origin}: {fault.message}") from fault

    def _each(self) -> Generator[Recorded, None, None]:
        for one in self._read(self._version):
            if not self._records:
                _must_be_plain(self._version)
            self._records += one.origin != self._origin  # a record may be several requests
            self._origin = one.origin
            yield one

    def _write(self) -> int:
        with closing(self._each()) as found:
            first = next(found, None)
            if first is None:
                return -1
            fd = os.memfd_create("recorded")
            try:
                with open(fd, "wb", closefd=False) as file:
                    _write_all(self._version, chain([first], found), file)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _count(self, status: str, ns: int) -> None:
        counters_of(self._version).warm_ups.append(WarmUp(status, ns, self._records))


def _drop(writing: asyncio.Future[int]) -> None:
    if not writing.cancelled() and writing.exception() is None and writing.result() >= 0:
        os.close(writing.result())


def _write_all(version: Version, found: Iterable[Recorded], file: BinaryIO) -> None:
    total = 0
    for one in found:
        total += sum(memoryview(tensor.data).nbytes for tensor in one.request.inputs.values())
        if total > MOST_BYTES:
            raise invalid(f"{one.origin}: recorded inputs are over the limit of {MOST_BYTES} bytes")
        entry = msgspec.msgpack.encode([one.origin, one.times, _checked(version, one)])
        file.write(LENGTH.pack(len(entry)) + entry)


def _must_be_plain(version: Version) -> None:
    options = version.config.options
    kind = "" if options.ensemble is not None else find_backend(version.config.backend).takes
    special = {
        "generates text": kind == "text",
        "answers several times": options.decoupled,
        "has sequences": options.sequences is not None,
        "is told where requests begin": options.tells_requests,
        "takes inputs in another shape than clients send": bool(options.reshaped_inputs),
    }
    for what, so in special.items():
        if so:
            raise invalid(f"recorded requests are not run on a model that {what}")


def _checked(version: Version, one: Recorded) -> dict[str, list[object]]:
    try:
        rows = check_inputs(version, one.request.inputs)
        most = version.config.most_rows
        if version.batching and 0 < most < rows:
            raise invalid(f"Task size {rows} is larger than maximum input batch size {most}")
    except ServeError as fault:
        raise ServeError(fault.kind, f"{one.origin}: {fault.message}") from None
    return {
        name: [tensor.dtype.name, tensor.shape, tensor.data] for name, tensor in one.request.inputs.items()
    }


class DeviceBudget:
    """Accounts for claims of device memory, up to `share` of every device."""

    def __init__(self, devices: Callable[[], Sequence[VisibleDevice]], share: float = 1.0) -> None:
        self._devices, self._share = devices, share
        self._taken: dict[int, int] = {}

    def take(self, places: Sequence[Placement]) -> None:
        """Claim the memory of these places; all or nothing. Raises ServeError RESOURCE_EXHAUSTED."""
        wanted = _sums(places)
        for gpu, nbytes in wanted.items():
            device, taken = self._devices()[gpu], self._taken.get(gpu, 0)
            most = int(device.memory_bytes * self._share)
            if taken + nbytes > most:
                raise ServeError(
                    Kind.RESOURCE_EXHAUSTED,
                    f"its workers claim {nbytes >> 20} MB of {device.title} (device_memory_mb), of whose "
                    f"{most >> 20} MB for models {taken >> 20} are claimed already (device_memory_share)",
                )
        for gpu, nbytes in wanted.items():
            self._taken[gpu] = self._taken.get(gpu, 0) + nbytes

    def give_back(self, places: Sequence[Placement]) -> None:
        """Release the claims of these places."""
        for gpu, nbytes in _sums(places).items():
            self._taken[gpu] -= nbytes


def _sums(places: Sequence[Placement]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for place in places:
        if place.bytes:
            sums[place.gpu] = sums.get(place.gpu, 0) + place.bytes
    return sums


log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0

REMOTE_SPARE_MS = 10_000

DIED = "the worker process died while it ran this request"

NOBODY = "no worker of this model is alive"


@dataclass
class LoadedPart:
    """Resources of one queue of an available version, in the owner."""

    version: Version
    group: WorkerGroup
    arena: Arena
    queue: BatchQueue
    calls: ModelCalls
    maintenance: Maintenance
    deaths: DeathPolicy
    part: int = 0  # which of the version's queues, where each instance has one
    relayed: bool = False  # other front processes send their requests to this one
    closing: bool = False
    claims: list[Placement] = field(default_factory=list)  # of device memory
    pins: WorkerPins | None = None


@dataclass(eq=False)
class LoadedEnsemble:
    """An available ensemble, which has no queue: other front processes relay its requests."""

    version: Version
    scheduler: EnsembleScheduler
    closing: bool = False


OnPart = Callable[["LoadedPart | LoadedEnsemble"], Awaitable[None]]


class VersionLoader:
    """The repository's hooks (`load`, `unload`) over worker groups. `mirrors` are notified of every version
    opened, and awaited before one is closed. Unless it may `place` workers, all of them are on this
    machine. `on_demand`: models come and go beside others that serve."""

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
        in_process: bool = False,
        place: bool = True,
        request_log_folder: str = "",
        on_demand: bool = False,
    ) -> None:
        self._in_process = in_process
        self.request_logs = RequestLogs(request_log_folder, registry, 0, fronts)
        self._place = place and not in_process
        self.placer = ""  # the name of the process that places workers on Ray; "" for none
        self._limiter = limiter
        self._budget = DeviceBudget(MACHINE.devices, device_share)
        self._shared = SharedWorkers(registry.gauges(names.SHARED_WORKERS))
        self._forks = ForkServers(on_wait=on_health, on_demand=on_demand)
        self._starting: dict[Version, WorkerGroup] = {}  # the last of each
        self.pinning = PinningPlan("none", (), fronts)
        self.cache_memory = CacheMemory(cache_bytes) if cache_bytes and fronts > 1 else None
        self.cache = self.cache_memory.open() if self.cache_memory is not None else None
        if cache_bytes and fronts == 1:
            self.cache = ResponseCache(cache_bytes)
        self.ensembles: dict[Version, LoadedEnsemble] = {}  # they have no workers
        self._catalog = catalog or Catalog()
        self.callbacks = ModelCallbacks(self._catalog, self._overdue)  # what models ask of the server
        self.engine = Engine(self._catalog)  # for what models ask of other models
        self.hosted: dict[tuple[str, int, int, int], LoadedPart] = {}
        self.on_opened: list[OnPart] = []
        self.on_closing: list[OnPart] = []
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
        counters = COUNTERS.put(version, RequestCounters(CountsMemory(self._fronts)))
        try:
            if version.config.options.ensemble is None:
                await self._load_parts(version, began_ns)
            else:
                await self._load_ensemble(version)
                counters.load_s = (time.monotonic_ns() - began_ns) / 1e9
        except BaseException:
            counters.seal()
            raise

    async def _load_parts(self, version: Version, began_ns: int) -> None:
        parts: list[LoadedPart] = []
        try:
            schedule = Schedule(version, self.cache, self._limiter)
            while len(parts) < schedule.queues:
                parts.append(await self._start(version, schedule, len(parts)))
            scheduler = schedule.open_scheduler([hosted.queue for hosted in parts])
            SCHEDULER.put(version, self.request_logs.wrap(version, scheduler))
            counters_of(version).load_s = (time.monotonic_ns() - began_ns) / 1e9
            for hosted in parts:
                for mirror in self.on_opened:
                    await mirror(hosted)
            self._count_load(version, "ok")
        except BaseException as error:
            if not isinstance(error, CompletedError):
                self._count_load(version, "failed")
            self.callbacks.forget(version)
            await self._close_all(version, parts)
            if isinstance(error, ConfigError):
                raise invalid(str(error)) from error
            raise

    async def _start(self, version: Version, schedule: Schedule, part: int) -> LoadedPart:
        """Start one queue of the version and its workers."""
        made: list[tuple[Arena, Specs, Specs]] = []

        def make_arena(inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec]) -> Arena:
            seen_inputs, seen_outputs = schedule.describe(inputs, outputs)
            version.describe(seen_inputs, seen_outputs, group.signatures)
            version.text = group.text
            parted = bool(version.config.options.signature_inputs)
            geometry = plan_geometry(config, inputs, outputs, fronts=self._fronts, parted=parted)
            arena = Arena.create(geometry, pins.node)
            made.append((arena, inputs, outputs))
            return arena

        config = schedule.worker_config(part)
        if self._in_process:
            config = {**config, "run_timeout_ms": 0}  # a thread cannot be killed
        if not self._place:  # `check` finds out here whether the model is sound
            config = {**config, "placement": None}
        elif version.config.placement is not None and version.config.placement.ray is not None:
            if not self.placer:
                raise ConfigError(NOT_GIVEN)
            config = {**config, "placement": {**config["placement"], "placer": self.placer}}
        recording = Recording(version, self.read_recorded)
        claims = version.config.places[part : part + 1] if schedule.extras else version.config.places
        self._budget.take(claims)
        pins = self.pinning.take(int(config.get("instances") or 1), int(config.get("threads", 1)))
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
            forks=self._forks,
            in_process=self._in_process,
            pins=pins,
            others=self.pinning.others,
            on_silent=lambda: self._silence_changed(version, part),
        )
        self._starting[version] = group
        try:
            await group.start()
            recording.ran(group.recorded_ns)
            hosted = self._open(version, part, group, *made[0])
            hosted.claims, hosted.pins, hosted.relayed = claims, pins, schedule.relayed
            return hosted
        except BaseException:
            self._budget.give_back(claims)
            self.pinning.give_back(pins)
            await outlast(_close_unopened(group, [arena for arena, _, _ in made]))
            raise
        finally:
            self._starting.pop(version, None)

    async def unload(self, version: Version) -> None:
        """Drain the version's queue, then stop its workers and give the memory back."""
        for ensemble in list(self.ensembles.values()):
            await ensemble.scheduler.let_go(version)
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
        """Stop everything at once; requests that still wait get an error."""
        for ensemble in self.ensembles.values():
            ensemble.scheduler.close()
        await self.callbacks.close()
        hosted, self.hosted = list(self.hosted.values()), {}
        await asyncio.gather(*(self._close(one) for one in hosted))
        await asyncio.to_thread(self.request_logs.close)
        await self._shared.close()
        await self._forks.close()
        if self.cache_memory is not None:
            self.cache_memory.close()

    async def close_lent(self, handle: bytes) -> None:
        """Return when all workers that have opened this client memory on a GPU have closed it."""
        number = self.callbacks.lent.begin()
        message = {"op": "close_lent", "handle": handle.hex(), "number": number}
        asked = [
            (id(hosted.version), hosted.part, worker)
            for hosted in self.hosted.values()
            if lending_device(hosted.version) != NO_DEVICE
            for worker in range(hosted.queue.workers)
            if hosted.group.notify_attached(worker, message)
        ]
        await self.callbacks.lent.all_closed(asked, number)

    def memory_bytes(self, versions: Sequence[Version]) -> list[int]:
        """Return the memory of each version's workers, of one that models share its part. Called in a
        thread."""
        pids = {version: [] for version in versions}  # type: dict[Version, list[int]]
        shares: Counter[int] = Counter()
        for hosted in list(self.hosted.values()):
            found = [pid for pid in hosted.group.pids if pid and pid != os.getpid()]
            shares.update(found)
            if hosted.version in pids:
                pids[hosted.version] += found
        return [sum(proportional_bytes(pid) // shares[pid] for pid in pids[version]) for version in versions]

    def in_use(self, version: Version) -> bool:
        """Return whether requests of the version are under way, in any front process."""
        scheduler = find_scheduler(version)
        queues = [hosted.queue for hosted in self._parts(version)]
        return (
            (scheduler is not None and scheduler.busy)
            or any(queue.busy or queue.ring.outstanding() for queue in queues)
            or counters_of(version).pending > 0
        )

    def last_used_s(self, version: Version) -> float:
        """Return when the version's last request ended, as time.monotonic counts; 0.0 for never."""
        return counters_of(version).last_ns / 1e9

    def alive(self, version: Version) -> int:
        """Return how many workers of the version are ready; 1 for an ensemble, which needs none."""
        if version in self.ensembles:
            return 1
        return sum(hosted.group.alive for hosted in self._parts(version))

    def stuck(self, version: Version) -> str:
        """Return why no worker of the version can take a batch, though some are alive; "" while one can."""
        parts = self._parts(version)
        stuck = sum(len(hosted.maintenance.stuck | hosted.group.silent) for hosted in parts)
        if not stuck or self.alive(version) > stuck:
            return ""
        silent = [hosted.group.silence(worker) for hosted in parts for worker in sorted(hosted.group.silent)]
        if silent:
            return f"no worker answers; {silent[0]}"
        return f"every worker has been in one batch for more than {parts[0].maintenance.stuck_s:g} s"

    def waits_for(self, version: Version) -> str:
        """Return the reason why the load of a version cannot begin yet; "" for none."""
        group = self._starting.get(version)
        return group.waits_for if group is not None else ""

    def trouble(self, version: Version) -> str:
        """Return why a worker of the version is missing, as a text for clients."""
        return next((h.group.trouble for h in self._parts(version) if h.group.trouble), "")

    def loaded(self) -> list[LoadedPart | LoadedEnsemble]:
        """Return all that other front processes open, ensembles after the models that they run."""
        return [*self.hosted.values(), *self.ensembles.values()]

    def show_waiting(self) -> None:
        """Tell the other front processes how many requests wait in the schedulers here. Called in turns."""
        for hosted in self.loaded():
            counters_of(hosted.version).show_waiting()

    def _parts(self, version: Version) -> list[LoadedPart]:
        return [hosted for key, hosted in self.hosted.items() if key[2] == id(version)]

    async def _load_ensemble(self, version: Version) -> None:
        assert version.config.options.ensemble is not None
        plan = make_plan(version.model, version.config.options.ensemble)
        check_models(version, plan, self._catalog)
        ensemble = self.ensembles[version] = LoadedEnsemble(version, EnsembleScheduler(plan))
        SCHEDULER.put(version, ensemble.scheduler)
        try:
            limit_s = version.config.load_timeout_s or LOAD_TIMEOUT_S
            await Recording(version, self.read_recorded).run(self.engine, limit_s)
            for mirror in self.on_opened:
                await mirror(ensemble)
        except BaseException as error:
            await self._unload_ensemble(version)
            if isinstance(error, ConfigError):
                raise invalid(str(error)) from error
            raise

    async def _unload_ensemble(self, version: Version) -> None:
        ensemble = self.ensembles[version]
        await ensemble.scheduler.drain()
        ensemble.closing = True
        for mirror in self.on_closing:
            await mirror(ensemble)
        await ensemble.scheduler.drain()
        ensemble.scheduler.close()
        SCHEDULER.drop(version)
        self.ensembles.pop(version, None)
        counters_of(version).seal()

    def _open(
        self, version: Version, part: int, group: WorkerGroup, arena: Arena, inputs: Specs, outputs: Specs
    ) -> LoadedPart:
        geometry = arena.geometry
        metrics = QueueMetrics(
            self._registry, version.model, version.number, geometry.max_delay_ns, geometry.max_rows
        )
        queue = open_queue(arena, 0, inputs, outputs, metrics)
        queue.on_device = group.on_device
        counters_of(version).queues.append(queue)
        limit_ms = 0 if self._in_process else _limit_of(version.config)  # a thread cannot be killed
        maintenance = Maintenance(queue, group.kill, lambda: self._stuck_changed(hosted), limit_ms=limit_ms)
        maintenance.open()
        calls = ModelCalls(self.engine, queue, group.tell, self.callbacks.want)
        deaths = DeathPolicy(repr(version), queue, lambda: group.alive, DIED, lambda: NOBODY)
        deaths.open()
        hosted = LoadedPart(version, group, arena, queue, calls, maintenance, deaths, part)
        self.hosted[_key(version, part)] = hosted
        self._report(hosted)
        return hosted

    async def _close_all(self, version: Version, parts: list[LoadedPart]) -> None:
        """Close all parts concurrently: each hanging instance is waited for, and a stop has a time limit. A
        server that stops cancels the caller: the parts are closed all the same, nobody else has them."""
        held = [one for one in parts if self.hosted.pop(_key(version, one.part), None) is not None]
        await outlast(asyncio.gather(*(self._close(hosted) for hosted in held)))

    async def _close(self, hosted: LoadedPart) -> None:
        hosted.maintenance.close()
        hosted.deaths.close()
        await hosted.calls.close()
        await hosted.group.stop(STOP_GRACE_S)
        scheduler = find_scheduler(hosted.version)
        SCHEDULER.drop(hosted.version)
        if scheduler is not None:
            scheduler.close()
        hosted.queue.close()
        counters_of(hosted.version).close(hosted.queue)
        hosted.arena.close()
        self._budget.give_back(hosted.claims)
        if hosted.pins is not None:
            self.pinning.give_back(hosted.pins)
        self.callbacks.forget(hosted.version)
        self._report(hosted)

    def _worker_died(self, version: Version, part: int, worker: int) -> None:
        hosted = self.hosted.get(_key(version, part))
        if hosted is None:
            return
        hosted.calls.forget(worker)
        self.callbacks.forget_worker(version, part, worker)
        retried, failed = hosted.deaths.worker_died(worker, hosted.maintenance.ended(worker))
        if (scheduler := find_scheduler(version)) is not None:
            if scheduler.died_with_it:
                failed += hosted.queue.ring.fail_ready(LOST, scheduler.died_with_it)
            scheduler.instance_lost(part)
        log.warning("%r: worker %d died; %d batches retried, %d failed", version, worker, retried, failed)
        self._registry.counters(names.RETRIES).of(version.model, version.number).add(retried)
        self._report(hosted)

    def _stuck_changed(self, hosted: LoadedPart) -> None:
        stuck = self.stuck(hosted.version)
        if stuck:
            log.error("%r: %s", hosted.version, stuck)
        self._report(hosted)

    def _overdue(self, version: Version, part: int, worker: int) -> None:
        hosted = self.hosted.get(_key(version, part))
        if hosted is not None:
            hosted.maintenance.end(worker)

    def _silence_changed(self, version: Version, part: int) -> None:
        hosted = self.hosted.get(_key(version, part))
        if hosted is not None:
            self._report(hosted)

    def _called(
        self, version: Version, part: int, worker: int, message: Mapping[str, Any], tell: SendToWorker
    ) -> None:
        if message["op"] == "callback":
            self.callbacks.hear(version, part, worker, message, tell)
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
            hosted.deaths.worker_back()
            self._report(hosted)

    def _count_load(self, version: Version, result: str) -> None:
        self._registry.counters(names.MODEL_LOADS).of(version.model, version.number, result).add()

    def _report(self, hosted: LoadedPart) -> None:
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


def _limit_of(config: ModelConfig) -> int:
    """Return the milliseconds after which a batch's worker is killed. A remote runner ends the remote worker
    instead, and is itself given the time in which it runs a batch twice, each behind another."""
    if config.placement is None:
        return config.run_timeout_ms
    return 4 * config.run_timeout_ms + REMOTE_SPARE_MS if config.run_timeout_ms else 0


async def _close_unopened(group: WorkerGroup, made: list[Arena]) -> None:
    await group.stop(STOP_GRACE_S)
    for arena in made:
        arena.close()
