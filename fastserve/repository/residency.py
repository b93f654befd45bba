"""The models in memory: they are loaded when they are asked for, and others unloaded to stay within a budget.

    residency = Residency(settings, catalog, hooks, loads, clock)     of a repository that has a budget
    await residency.want("m")                                         returns when `m` answers requests

    dormant --wanted--> waits for room --> loading --> resident --least recently used--> unloading --> dormant

Loads get their room first come, first served: the turn that makes room unloads the models whose last request
is longest ago, but none that is pinned, in use, asked for within `keep_alive_s`, or needed by a load.
A model counts with its estimate while it loads, and with what its workers were measured to take from then on.
Any number of requests wait for one load. A load that fails answers them all, and until its back-off is over
the requests that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fastserve.errors import Kind, ServeError, internal
from fastserve.repository.catalog import Catalog
from fastserve.repository.layout import ModelFolder
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.reconciler import VersionHooks
from fastserve.repository.version import Model, Version, VersionState, wanted_versions
from fastserve.settings import RepositorySettings
from fastserve.util.offload import cancel_all

log = logging.getLogger(__name__)

WORKER_BYTES = 64 << 20
"""Estimate of what a worker takes beside its model's files, before one of its backend was measured."""
LOOK_S = 5.0
"""Seconds between two measurements of the models in memory."""
PAUSE_S = 0.1
"""Longest time between two looks for a model that may be unloaded."""
AGAIN_S = 1.0
LONGEST_BACKOFF_S = 60.0


class ModelLoads(Protocol):
    """The repository's side: loads and unloads whole models."""

    async def scan(self, name: str) -> ModelFolder | None:
        """Return what the folder of a model says now."""

    def needs(self, folder: ModelFolder) -> list[str]:
        """Return the models that an ensemble runs, without itself."""

    def busy(self, name: str) -> bool:
        """Return whether the model is being loaded or unloaded."""

    async def bring(self, folder: ModelFolder) -> list[str]:
        """Load the wanted versions of a model. Returns the problems."""

    async def put_away(self, name: str) -> None:
        """Unload every version of a model; the model stays listed."""

    def users(self, name: str) -> list[Version]:
        """Return the available versions of ensembles that run the model."""


class LoadWaiters:
    """The requests that wait for models in one process: at most `most` of them, each `wait_s` seconds."""

    def __init__(self, most: int = 1024, wait_s: float = 30.0) -> None:
        self.most, self.wait_s = most, wait_s
        self.count = 0
        self.refused = 0

    def enter(self, name: str) -> None:
        """Count a request. Raises ServeError UNAVAILABLE where there are too many."""
        if self.count >= self.most:
            self.refused += 1
            many = f"{self.most} requests wait for models (setting load_waiting)"
            text = f"model {name} is not loaded, and {many}"
            raise ServeError(Kind.UNAVAILABLE, text, retry_after_s=AGAIN_S)
        self.count += 1

    def leave(self) -> None:
        """Stop counting a request."""
        self.count -= 1


@dataclass(slots=True)
class _Resident:
    """A model that takes memory, or has room kept for it. `since_s`: when it was available first."""

    nbytes: int
    since_s: float
    loading: bool = True
    leaving: bool = False


@dataclass(slots=True)
class _Load:
    """One load that requests wait for. `result` is its error, None when the model is there."""

    waiters: int = 0
    result: asyncio.Future[ServeError | None] = field(default_factory=asyncio.Future)


@dataclass(slots=True)
class _Failure:
    error: ServeError
    stamp: object
    tries: int
    due_s: float


class Residency:
    """The models of one repository that are in memory. Only the process that owns the workers has one."""

    def __init__(
        self,
        settings: RepositorySettings,
        catalog: Catalog,
        hooks: VersionHooks,
        loads: ModelLoads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = settings.budget_bytes
        self.waiters = LoadWaiters(settings.load_waiting, settings.load_wait_s)
        self.evictions: Counter[str] = Counter()
        """Models that were unloaded for others, since this was last read."""
        self._settings, self._catalog, self._hooks, self._loads = settings, catalog, hooks, loads
        self._clock = clock
        self._residents: dict[str, _Resident] = {}
        self._wanted: dict[str, _Load] = {}
        self._running: dict[str, asyncio.Task[ServeError | None]] = {}  # loads that have their room
        self._held: dict[str, int] = {}  # models that loads under way need
        self._failures: dict[str, _Failure] = {}
        self._measured: dict[str, tuple[object, int]] = {}  # stamp and bytes when it was last in memory
        self._laid: dict[str, ModelFolder] = {}  # as models were listed last that were not in memory
        self._spare: dict[str, int] = {}  # bytes of a worker beside its files, by backend
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._unloading: set[Version] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.Task[None] | None = None
        catalog.on_change.append(self._version_changed)

    @property
    def used(self) -> int:
        """Return the bytes of all models in memory, and of those that are being loaded."""
        return sum(one.nbytes for one in self._residents.values())

    def open(self) -> None:
        """Measure the models from now on."""
        self._look = asyncio.get_running_loop().create_task(self._keep_looking())

    async def close(self) -> None:
        """Stop loading; what is loaded stays."""
        tasks = [*self._tasks, *self._running.values(), *([self._look] if self._look else [])]
        await cancel_all(*tasks)
        gone = ServeError(Kind.UNAVAILABLE, "the server is stopping")
        for load in self._wanted.values():
            if not load.result.done():
                load.result.set_result(gone)

    # -- requests

    async def want(self, name: str) -> None:
        """Return when the model answers requests. Raises ServeError with the reason why it does not."""
        if self._catalog.available(name) is not None:
            return
        self._check_failure(name)
        self.waiters.enter(name)
        try:
            load = self._wanted.get(name)
            if load is None:
                load = self._wanted[name] = _Load()
                self._start(self._answer(name, load))
            load.waiters += 1
            try:
                await asyncio.wait({load.result}, timeout=self.waiters.wait_s)
            finally:
                load.waiters -= 1
            if not load.result.done():
                text = f"model {name} was not loaded within {self.waiters.wait_s:g} s (setting load_wait_s)"
                raise ServeError(Kind.UNAVAILABLE, text, retry_after_s=AGAIN_S)
            error = load.result.result()
            if error is not None:  # one for each: their tracebacks are different
                again_s = error.retry_after_s
                raise ServeError(error.kind, error.message, retry_after_s=again_s, reason=error.reason)
        finally:
            self.waiters.leave()

    def _check_failure(self, name: str) -> None:
        failure = self._failures.get(name)
        if failure is None:
            return
        left_s = failure.due_s - self._clock()
        if left_s > 0:
            raise ServeError(Kind.UNAVAILABLE, failure.error.message, retry_after_s=max(1.0, left_s))

    async def _answer(self, name: str, load: _Load) -> None:
        """Run the load that requests wait for, and tell them how it ended."""
        error: ServeError | None = ServeError(Kind.UNAVAILABLE, "the server is stopping")
        try:
            error = await self._bring(name, lambda: load.waiters > 0)
        except ServeError as fault:
            error = fault
        except Exception as fault:
            log.exception("model %s: loading on demand failed", name)
            error = internal(f"Loading failed with {type(fault).__name__}.")
        finally:
            del self._wanted[name]
            if not load.result.done():
                load.result.set_result(error)

    async def _bring(self, name: str, wanted: Callable[[], bool]) -> ServeError | None:
        """Load a model and those that it runs, once there is room for all of them. Return why it failed."""
        folder = await self._loads.scan(name)
        if folder is None:
            raise ServeError(Kind.NOT_FOUND, f"There is no model {name} in the repository.")
        group = await self._group(folder)
        with self._hold(one.name for one in group):
            missing = await self.reserve(group, wanted)
            tasks = {one.name: self._run(one) for one in missing}
            for one in group:
                task = tasks.get(one.name) or self._running.get(one.name)
                error = None if task is None else await asyncio.shield(task)
                if error is not None:
                    return error
        return None

    async def _group(self, folder: ModelFolder) -> list[ModelFolder]:
        """Return the folder behind those of the models that it runs, each behind its own."""
        found: dict[str, ModelFolder] = {}
        await self._collect(folder, found, {folder.name})
        found[folder.name] = folder
        return list(found.values())

    async def _collect(self, folder: ModelFolder, found: dict[str, ModelFolder], seen: set[str]) -> None:
        for name in self._loads.needs(folder):
            if name in seen:
                continue
            seen.add(name)
            step = await self._loads.scan(name)
            if step is not None:
                await self._collect(step, found, seen)
                found[name] = step

    @contextlib.contextmanager
    def _hold(self, names: Iterable[str]) -> Iterator[None]:
        held = list(names)
        for name in held:
            self._held[name] = self._held.get(name, 0) + 1
        try:
            yield
        finally:
            for name in held:
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]
            self._changed.set()

    # -- loads that have their room

    def _run(self, folder: ModelFolder) -> asyncio.Task[ServeError | None]:
        task = asyncio.get_running_loop().create_task(self._load(folder))
        self._running[folder.name] = task
        return task

    async def _load(self, folder: ModelFolder) -> ServeError | None:
        """Load a model whose room is reserved. Return why it failed."""
        name = folder.name
        try:
            for step in self._loads.needs(folder):
                if (running := self._running.get(step)) is not None and running is not asyncio.current_task():
                    await asyncio.shield(running)
            problems = await self._loads.bring(folder)
            if self._catalog.available(name) is None:
                return self._fail(folder, "; ".join(problems) or "no version is available")
            self._failures.pop(name, None)
            return None
        finally:
            self._running.pop(name, None)
            await self.settle(folder)

    def _fail(self, folder: ModelFolder, why: str) -> ServeError:
        before = self._failures.get(folder.name)
        stamp = _stamp(folder)
        tries = before.tries + 1 if before is not None and before.stamp == stamp else 1
        wait_s = min(self._settings.load_retry_s * 2 ** (tries - 1), LONGEST_BACKOFF_S)
        error = ServeError(Kind.UNAVAILABLE, f"model {folder.name} could not be loaded: {why}")
        error.retry_after_s = max(AGAIN_S, wait_s)
        self._failures[folder.name] = _Failure(error, stamp, tries, self._clock() + wait_s)
        asyncio.get_running_loop().call_later(wait_s, self._offer_again, folder)
        return error

    def note_failure(self, folder: ModelFolder, problems: Sequence[str]) -> None:
        """Answer requests with the reason of a load that none of them waited for, until its next try."""
        model = self._catalog.models.get(folder.name)
        if model is not None and not model.available() and folder.config is not None and not folder.error:
            model.on_demand = True
            self._fail(folder, "; ".join(problems))

    def _offer_again(self, folder: ModelFolder) -> None:
        """List a model whose back-off is over: clients that look before they ask would never ask again."""
        model = self._catalog.models.get(folder.name)
        if model is not None and model.on_demand and not self.is_resident(folder.name):
            self.lay_down(folder)

    # -- room

    async def reserve(
        self, group: Sequence[ModelFolder], wanted: Callable[[], bool] = lambda: True
    ) -> list[ModelFolder]:
        """Keep room for the models of a group that have none, and return those. `settle` ends that. Raises
        ServeError UNAVAILABLE where there is no room, also when nobody wants them any more."""
        names = [one.name for one in group]
        with self._hold(names):
            async with self._turn:
                until_s = self._clock() + self.waiters.wait_s
                while any(one.leaving for name, one in self._residents.items() if name in names):
                    await self._wait_for_change(names[-1], until_s)
                missing = [one for one in group if self._is_missing(one.name)]
                for one in missing:  # one that has ended otherwise takes no room
                    if (known := self._residents.get(one.name)) is not None and not known.loading:
                        del self._residents[one.name]
                sizes = [await asyncio.to_thread(self._estimate, one) for one in missing]
                least, most = (sum(size) for size in zip(*sizes, strict=True)) if sizes else (0, 0)
                room = await self._make_room(names, least, most, wanted, until_s)
                for one, (_, nbytes) in zip(missing, sizes, strict=True):
                    self._residents[one.name] = _Resident(min(nbytes, room), self._clock())
                return missing

    def _is_missing(self, name: str) -> bool:
        return self._catalog.available(name) is None and name not in self._running

    async def takes(self, folder: ModelFolder) -> bool:
        """Return whether there is room for one more model, and keep it if there is."""
        _, nbytes = await asyncio.to_thread(self._estimate, folder)
        if self.used + nbytes > self.budget or not all(map(self.is_resident, self._loads.needs(folder))):
            return False
        self._residents[folder.name] = _Resident(nbytes, self._clock())
        return True

    async def hold_pinned(self, folder: ModelFolder) -> None:
        """Keep room for a pinned model, whether there is some or not."""
        _, nbytes = await asyncio.to_thread(self._estimate, folder)
        self._residents[folder.name] = _Resident(nbytes, self._clock())
        if self.used > self.budget:
            text = "model %s is pinned: pinned models need about %d MiB, and memory_budget is %d MiB"
            log.warning(text, folder.name, self.used >> 20, self.budget >> 20)

    async def settle(self, folder: ModelFolder) -> None:
        """Count a model with what it takes now that its load has ended, well or not."""
        name = folder.name
        model = self._catalog.models.get(name)
        available = model.available() if model is not None else []
        if not available:
            self._residents.pop(name, None)
        else:
            assert model is not None
            model.on_demand = True
            nbytes = sum(await asyncio.to_thread(self._hooks.memory_bytes, available))
            before = self._residents.get(name)
            since_s = self._clock() if before is None or before.loading else before.since_s
            self._residents[name] = _Resident(nbytes, since_s, loading=False)
            self._measured[name] = (_stamp(folder), nbytes)
            self._learn(folder, nbytes)
        self._changed.set()

    def _learn(self, folder: ModelFolder, nbytes: int) -> None:
        workers = _workers(folder)
        if folder.config is not None and workers:
            spare = max(0, nbytes - workers * _files(folder)) // workers
            known = self._spare.get(folder.config.backend, 0)
            self._spare[folder.config.backend] = max(known * 7 // 8, spare)

    def _estimate(self, folder: ModelFolder) -> tuple[int, int]:
        """Return the least and the likely bytes that a model takes: what it took before, else its files, and
        with them what other models of its backend took beside theirs, for each worker."""
        stamp, nbytes = self._measured.get(folder.name, (None, 0))
        if nbytes and stamp == _stamp(folder):
            return nbytes, nbytes
        if folder.config is None:
            return 0, 0
        workers, files = _workers(folder), _files(folder)
        return workers * files, workers * (files + self._spare.get(folder.config.backend, WORKER_BYTES))

    async def _make_room(
        self, names: Sequence[str], least: int, most: int, wanted: Callable[[], bool], until_s: float
    ) -> int:
        """Unload models until there is room for `most` bytes, and return them; fewer, but not under `least`,
        where models that stay leave no room for a mere estimate: only a load can tell."""
        name, need = names[-1], most
        while self.used + need > self.budget:
            if not wanted():
                raise ServeError(Kind.CANCELLED, f"no request waits for model {name} any more")
            stays = {other for other in self._residents if other in names or self.is_pinned(other)}
            fixed = sum(self._residents[other].nbytes for other in stays)
            need = max(least, min(most, self.budget - fixed))
            if need + fixed > self.budget:
                raise ServeError(
                    Kind.UNAVAILABLE,
                    f"model {name} needs {need >> 20} MiB beside {fixed >> 20} MiB of models that stay, and "
                    f"memory_budget is {self.budget >> 20} MiB",
                    retry_after_s=AGAIN_S,
                )
            victim = self._choose() if self.used - self._leaving + need > self.budget else None
            if victim is not None:
                self._put_away(victim)
            elif self.used + need > self.budget:
                await self._wait_for_change(name, until_s)
        return need

    @property
    def _leaving(self) -> int:
        """Return the bytes of models that are being unloaded."""
        return sum(one.nbytes for one in self._residents.values() if one.leaving)

    async def _wait_for_change(self, name: str, until_s: float) -> None:
        """Wait a moment, or until a model has come or gone. Raises ServeError when the time is up."""
        if self._clock() >= until_s:
            text = f"there is no room for model {name}: every model in memory is in use (memory_budget)"
            raise ServeError(Kind.UNAVAILABLE, text, retry_after_s=AGAIN_S)
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), PAUSE_S)

    def is_pinned(self, name: str) -> bool:
        """Return whether a model is never unloaded for others: by its config or the server's, or as a step of
        such an ensemble."""
        users = [version.model for version in self._loads.users(name)]
        return any(map(self._named_pinned, (name, *users)))

    def _named_pinned(self, name: str) -> bool:
        model = self._catalog.models.get(name)
        return self._names(name, None if model is None else model.config)

    def names_pinned(self, folder: ModelFolder) -> bool:
        """Return whether the settings or the config of a model say that it is pinned."""
        return self._names(folder.name, folder.config)

    def _names(self, name: str, config: ModelConfig | None) -> bool:
        return name in self._settings.keep_loaded or (config is not None and config.pin)

    def _choose(self) -> str | None:
        """Return the model whose last request is longest ago, of those that may be unloaded now."""
        now_s = self._clock()
        found: tuple[float, str] | None = None
        for name, one in self._residents.items():
            model = self._catalog.models.get(name)
            if one.loading or one.leaving or not one.nbytes or model is None or self._loads.busy(name):
                continue
            used_s = self._last_used_s(model, one)
            if now_s - used_s < self._settings.keep_alive_s or (found is not None and found[0] <= used_s):
                continue
            if name not in self._held and not self.is_pinned(name) and not self._in_use(model):
                found = used_s, name
        return None if found is None else found[1]

    def _last_used_s(self, model: Model, one: _Resident) -> float:
        return max([one.since_s, *map(self._hooks.last_used_s, model.available())])

    def _in_use(self, model: Model) -> bool:
        users = [*model.available(), *self._loads.users(model.name)]
        return any(map(self._hooks.in_use, users))

    def _put_away(self, name: str) -> None:
        self._residents[name].leaving = True
        self._start(self._unload(name))

    async def _unload(self, name: str) -> None:
        """Unload a model. Requests that had come before anybody could see it leave are answered first."""
        try:
            await self._loads.put_away(name)
            self.evictions[name] += 1
            log.info("model %s is unloaded to make room", name)
        finally:
            one = self._residents.get(name)
            if self._catalog.available(name) is None:
                self._residents.pop(name, None)
            elif one is not None:
                one.leaving = False
            self._changed.set()

    # -- models that are listed without being in memory

    def lay_down(self, folder: ModelFolder) -> None:
        """List a model that is not in memory, with the versions that its next request loads."""
        name, model = folder.name, self._catalog.model(folder.name)
        assert folder.config is not None
        self._laid[name] = folder
        failure = self._failures.get(name)
        if failure is not None and failure.stamp != _stamp(folder):
            del self._failures[name]
        elif failure is not None and failure.due_s > self._clock():
            return
        model.config = folder.config
        model.on_demand = True
        self._catalog.blame(model, None)
        wanted = wanted_versions(folder.config.version_policy, folder.versions)
        for number, version in list(model.versions.items()):
            if version.dormant and version.state is VersionState.START and number not in wanted:
                self._catalog.move(version, VersionState.END)
        for number in wanted:
            known = model.versions.get(number)
            if known is None or known.state is VersionState.END:
                self._list(Version(name, number, folder.versions[number].folder, folder.config_of(number)))

    def _list(self, version: Version) -> None:
        version.dormant = True
        self._catalog.put(version)

    def rests(self, folder: ModelFolder) -> bool:
        """Return whether a model is listed as its folder says, and not in memory: there is nothing to do."""
        name = folder.name
        return (
            name not in self._residents
            and name not in self._failures
            and self._laid.get(name) == folder
            and (model := self._catalog.models.get(name)) is not None
            and model.waits_for_demand
            and model.config is folder.config
        )

    def forget(self, name: str) -> None:
        """Stop loading a model on demand: it is gone, or was unloaded by a client."""
        self._laid.pop(name, None)
        model = self._catalog.models.get(name)
        self._residents.pop(name, None)
        self._failures.pop(name, None)
        if model is not None and model.on_demand:
            model.on_demand = False
            for version in list(model.versions.values()):
                if version.dormant and version.state is VersionState.START:
                    self._catalog.move(version, VersionState.END)

    def is_resident(self, name: str) -> bool:
        """Return whether a model is in memory, or on its way into it or out of it."""
        return name in self._residents or self._catalog.available(name) is not None

    def _version_changed(self, version: Version) -> None:
        """List a version that was unloaded again, since its next request loads it."""
        if version.state is VersionState.UNLOADING:
            self._unloading.add(version)
        if version.state is not VersionState.END or version not in self._unloading:
            return
        self._unloading.discard(version)
        model = self._catalog.models.get(version.model)
        if model is None or not model.on_demand or model.latest is not None:
            return
        if model.versions.get(version.number) is version:
            self._list(Version(version.model, version.number, version.folder, version.config))

    # -- measuring

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:
                log.exception("models could not be measured")

    async def look(self) -> None:
        """Measure the models in memory, and unload the least recently used while they take too much."""
        models = [
            self._catalog.models[name]
            for name, one in self._residents.items()
            if not one.loading and name in self._catalog.models
        ]
        versions = [version for model in models for version in model.available()]
        sizes = await asyncio.to_thread(self._hooks.memory_bytes, versions)
        sums: dict[str, int] = {}
        for version, nbytes in zip(versions, sizes, strict=True):
            sums[version.model] = sums.get(version.model, 0) + nbytes
        for name, nbytes in sums.items():
            one = self._residents.get(name)
            if one is not None and not one.loading:
                one.nbytes = nbytes
                if name in self._measured:
                    self._measured[name] = self._measured[name][0], nbytes
        while not self._turn.locked():
            victim = self._choose() if self.used - self._leaving > self.budget else None
            if victim is None:
                break
            self._put_away(victim)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a change of the models in memory failed", exc_info=task.exception())


def _stamp(folder: ModelFolder) -> object:
    return folder.config, tuple((number, one.stamp) for number, one in sorted(folder.versions.items()))


def _wanted_folders(folder: ModelFolder) -> list[Path]:
    if folder.config is None:
        return []
    numbers = wanted_versions(folder.config.version_policy, folder.versions)
    return [folder.versions[number].folder for number in numbers]


def _workers(folder: ModelFolder) -> int:
    """Return how many worker processes a model has; 0 for an ensemble."""
    config = folder.config
    if config is None or config.options.ensemble is not None:
        return 0
    return max(1, len(config.places) or config.instances) * len(_wanted_folders(folder))


def _files(folder: ModelFolder) -> int:
    """Return the mean bytes of the files of the wanted versions."""
    folders = _wanted_folders(folder)
    total = sum(
        os.path.getsize(os.path.join(place, name))
        for one in folders
        for place, _, names in os.walk(one)
        for name in names
        if os.path.isfile(os.path.join(place, name))
    )
    return total // len(folders) if folders else 0
