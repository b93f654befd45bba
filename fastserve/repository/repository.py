"""The repository: decides when folders are read and which models are wanted.

The reconciler brings a model from one set of versions to another; `layout` reads the folders. An ensemble is
loaded once the models of its steps are available, and withdrawn when one of them goes. Disk work runs in a
thread, so that a slow disk never delays requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError, invalid
from fastserve.repository.catalog import Catalog
from fastserve.repository.layout import Layout, ModelFolder, Override, is_model_name
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.reconciler import NO_LABEL, Reconciler, VersionHooks
from fastserve.repository.residency import Residency
from fastserve.repository.version import Version, VersionState
from fastserve.settings import ModelEntry, RepositorySettings
from fastserve.settings.model_options import TrafficRules
from fastserve.util.offload import cancel_all, gather_or_cancel


def ensemble_needs(config: ModelConfig | None) -> dict[str, set[int | None]]:
    """Return the models an ensemble's steps name -> versions they ask for, None for the latest; empty for
    other models."""
    found: dict[str, set[int | None]] = {}
    if config is None or config.options.ensemble is None:
        return found
    for step in config.options.ensemble.steps:
        found.setdefault(step.model, set()).add(step.version)
    return found


def with_steps(names: Iterable[str], folders: Mapping[str, ModelFolder]) -> set[str]:
    """Return these models, and for ensembles among them the existing models of their steps."""
    found, left = set[str](), list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            config = folders[name].config if name in folders else None
            left += [step for step in ensemble_needs(config) if step in folders]
    return found


def load_waves(folders: Iterable[ModelFolder]) -> list[list[ModelFolder]]:
    """Return folders in the order to load them: each wave needs only what is in the waves before.

    Ensembles that depend on each other in a circle make up the last wave; loading them fails and says so.
    """
    left = {folder.name: folder for folder in folders}
    waves = []
    while left:
        wave = [f for f in left.values() if not any(n in left for n in ensemble_needs(f.config))] or list(
            left.values()
        )
        waves.append(wave)
        for folder in wave:
            del left[folder.name]
    return waves


def dependent_ensembles(catalog: Catalog, version: Version) -> list[str]:
    """Return the names of the ensembles that have a step on the version's model."""
    return [name for name, model in catalog.models.items() if version.model in ensemble_needs(model.config)]


def available_ensembles(catalog: Catalog, name: str) -> list[str]:
    """Return the names of the available ensembles that have a step on the model."""
    return [
        ensemble
        for ensemble, model in catalog.models.items()
        if model.latest is not None and name in ensemble_needs(model.config)
    ]


def missing_dependency(catalog: Catalog, name: str) -> ServeError | None:
    """Return why the ensemble cannot serve now; None when all it needs is available."""
    model = catalog.models.get(name)
    for needed, numbers in ensemble_needs(model.config if model is not None else None).items():
        for number in numbers:
            if catalog.available(needed, number) is None:
                gone = "which has no loaded version"
                if number is not None and catalog.available(needed) is not None:
                    gone = f"whose required version {number} is not loaded"
                return invalid(f"ensemble '{name}' depends on '{needed}' {gone}")
    return None


log = logging.getLogger(__name__)
NO_TRAFFIC = "the latest version"

EVERY_MODEL = "*"

MODEL_NAME_CHARS = 128

LEND_S = 0.0005
"""Shortest pause of a look at the folders after each model."""


class Repository:
    """Keeps the catalog as the folders say. One task at a time works on each model."""

    def __init__(
        self,
        settings: RepositorySettings,
        catalog: Catalog,
        hooks: VersionHooks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.catalog = catalog
        self._layout = Layout(settings)
        self._reconciler = Reconciler(settings, catalog, hooks, clock)
        named = settings.load_models
        by_default = not named and settings.model_control != "explicit"
        self._every = by_default or EVERY_MODEL in named
        self._wanted: set[str] = set(named) - {EVERY_MODEL}
        self._asked_for: set[str] = set()  # loaded by their own names, at the start or since
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # started by the watch
        self._problems = self._reconciler.problems
        self._watch: asyncio.Task[None] | None = None
        self._closing = False
        self._reloading = asyncio.Lock()
        self.residency: Residency | None = None
        """The models in memory, where the settings have a budget."""
        if settings.budget_bytes:
            self.residency = Residency(settings, catalog, hooks, _ModelLoads(self), clock)
        self.on_listed: Callable[[], None] = lambda: None
        """Called once in `open`, when the models that it loads are listed, before the first is loaded."""
        self.on_settled: Callable[[str], None] = lambda name: None
        """Called with each of these models once it is loaded, or has failed."""
        catalog.on_change.append(self._tend_dependants)

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """The models whose folders are named outright, as in the last list that was applied."""
        return tuple(self._layout.entries)

    async def open(self) -> None:
        """Load everything wanted; with model_control poll, go on watching.

        Raises ConfigError when the settings name what does not exist, ServeError listing the models that
        failed; with keep_going, failed models are only logged.
        """
        found, problems = await self._load_all()
        if self.residency is not None:
            self.residency.open()
        if self.settings.wait_for_folders:
            problems = {name: told for name, told in problems.items() if not _may_come(found.get(name))}
        if problems and not self.settings.keep_going:
            await self.close()
            raise LoadFailures(problems)
        if self.settings.model_control == "poll":
            self._watch = asyncio.create_task(self._watch_folders())

    async def load_all(self) -> dict[str, list[str]]:
        """Load everything wanted, once. Returns the problems by model. Raises ConfigError."""
        return (await self._load_all())[1]

    async def _load_all(self) -> tuple[dict[str, ModelFolder], dict[str, list[str]]]:
        await asyncio.to_thread(self._layout.check)
        found = await asyncio.to_thread(self._layout.scan)
        self._asked_for = set(found) if self._every else set(self._wanted)
        self._wanted = with_steps(self._wanted, found)  # as a load of an ensemble does
        self._begin_start(found.values())
        problems = await self._apply(found.values(), eager=True)
        for name in sorted(self._wanted - set(found)):
            problems[name] = ["there is no such model in the repository"]
            self._problems.settle(name, problems[name])
        return found, problems

    async def poll(self) -> None:
        """Scan once and wait until everything that changed has been loaded and unloaded."""
        found = await asyncio.to_thread(self._layout.scan)
        await self._apply(found.values())
        await asyncio.gather(*(self._end(name) for name in self._gone(found)))

    async def names(self) -> list[str]:
        """Return every model that has a folder, wanted or not."""
        return sorted(await asyncio.to_thread(self._layout.scan))

    async def load(
        self, name: str, path: tuple[str, ...] = (), override: Override | None = None, *, nested: bool = False
    ) -> None:
        """Load or reload one model now, and before an ensemble the models of its steps that are missing.

        `path` are the ensembles this one is loaded for; an `override` holds until the next load. `nested`: a
        model that is itself being loaded waits for this one, and gives it its slot of parallel_loads. Raises
        ServeError: NOT_FOUND, also for an override that cannot be read, or why it could not be loaded.
        """
        self._must_be_explicit()
        if nested:
            async with self._reconciler.release_slot():
                await self.load(name, path, override)
            return
        overrides = self._layout.overrides
        async with self._lock(name):
            try:
                held = None if override is None else await asyncio.to_thread(overrides.make, name, override)
            except ConfigError as fault:
                raise ServeError(Kind.NOT_FOUND, str(fault)) from None
            before = overrides.put(name, held)
            try:
                await self._load_locked(name, path)
            except BaseException:
                overrides.put(name, before)
                raise
            await asyncio.to_thread(overrides.tidy, name)

    async def _load_locked(self, name: str, path: tuple[str, ...]) -> None:
        folder = await asyncio.to_thread(self._layout.scan_one, name)
        if folder is None:
            raise ServeError(Kind.NOT_FOUND, f"There is no model {_quoted(name)} in the repository.")
        if folder.error and self._layout.overrides.of(name) is not None:
            raise ServeError(Kind.NOT_FOUND, folder.error)
        await self._load_needed(folder, path)
        self._wanted.add(name)
        self._problems.forget(name)  # an explicit load: log its problems again
        before = self.catalog.available(name)
        if self.residency is not None:
            await self.residency.reserve([folder])
        try:
            problems = await self._reconciler.apply(folder, eager=True)
        finally:
            if self.residency is not None:
                await self.residency.settle(folder)
        if not path and self.catalog.available(name) is not before:
            self._asked_for.add(name)  # as in Triton, a load that changes nothing does not count
        if problems:
            raise ServeError(Kind.FAILED_PRECONDITION, failure_text({name: problems}))

    async def unload(self, name: str, *, composing: bool = False) -> None:
        """Unload one model now and wait until its requests have finished.

        With `composing`, models of an ensemble's steps that came along with it are unloaded too: those that
        were not loaded by their own names, and that no other ensemble uses. Raises ServeError NOT_FOUND.
        """
        self._must_be_explicit()
        if name not in self.catalog.models:
            raise ServeError(Kind.NOT_FOUND, f"There is no model {_quoted(name)} that was loaded.")
        needed = ensemble_needs(self.catalog.models[name].config) if composing else ()
        self._wanted.discard(name)
        self._asked_for.discard(name)
        if self.residency is not None:
            self.residency.forget(name)
        await self._end(name)
        self._layout.overrides.put(name, None)
        await asyncio.to_thread(self._layout.overrides.tidy, name)
        for one in needed:
            came_along = one not in self._asked_for and not available_ensembles(self.catalog, one)
            if came_along and self.catalog.available(one) is not None:
                await self.unload(one, composing=True)

    async def set_rules(self, name: str, rules: TrafficRules | None) -> None:
        """Have requests that name no version go by these rules, in place of the config's, until those change;
        None: by the config's again.

        Raises ServeError: NOT_FOUND for an unknown model, INVALID_ARGUMENT for versions that are not
        available, and for a model whose requests belong to sequences.
        """
        async with self._lock(name):
            model = self.catalog.models.get(name)
            if model is None or not model.available():
                raise ServeError(Kind.NOT_FOUND, f"There is no model {_quoted(name)} that is loaded.")
            if rules is not None:
                served = {version.number: version for version in model.available()}
                problems = list(rules.find_problems(model.labels, served))
                if any(version.config.options.sequences is not None for version in served.values()):
                    problems.append("traffic: the requests of its sequences belong to one version")
                if problems:
                    raise invalid(f"model {name}: {'; '.join(problems)}")
            model.set_rules, model.rules = rules, rules or model.config_rules
            self.catalog.settle_rules(model)
            log.info("traffic of model %s is %s", name, "; ".join(model.rules.describe()) or NO_TRAFFIC)

    async def reload_config(self, entries: Sequence[ModelEntry]) -> None:
        """Serve these models in place of the ones `models` named, and wait for them; one list at a time.

        Raises ServeError (tfserving spec 4.4): INVALID_ARGUMENT for an invalid list, and then nothing
        changes; UNKNOWN listing what could not be loaded; FAILED_PRECONDITION for nothing but labels that
        could not be moved.
        """
        async with self._reloading:  # two lists at once would end each other's models
            await self._replace(entries)

    async def _replace(self, entries: Sequence[ModelEntry]) -> None:
        layout = Layout(msgspec.structs.replace(self.settings, models=tuple(entries)))
        for entry in entries:
            if not entry.base_path.startswith("/"):
                raise invalid(
                    f"Expected model {entry.name} to have an absolute path or URI; "
                    f"got base_path()={entry.base_path}"
                )
        try:
            await asyncio.to_thread(layout.check)
        except ConfigError as fault:
            raise invalid(str(fault)) from None
        layout.overrides = self._layout.overrides
        self._layout = layout
        found = await asyncio.to_thread(layout.scan)
        problems = await self._apply(found.values(), eager=True)
        await asyncio.gather(*(self._end(name) for name in self._gone(found)))
        named = {entry.name for entry in entries}
        failed = {name: reasons for name, reasons in problems.items() if name in named}
        told = [reason for reasons in failed.values() for reason in reasons]
        if told and all(reason.startswith(NO_LABEL) for reason in told):
            raise ServeError(Kind.FAILED_PRECONDITION, "; ".join(told))
        if told:
            raise ServeError(Kind.UNKNOWN, failure_text(failed))

    async def close(self) -> None:
        """Stop watching and unload everything."""
        self._closing = True
        running = [task for task in (self._watch, *self._tasks) if task is not None]
        self._watch = None
        await cancel_all(*running)
        if self.residency is not None:
            await self.residency.close()
        await asyncio.gather(*(self._end(name) for name in list(self.catalog.models)))
        await asyncio.to_thread(self._layout.overrides.close)

    # -- one look

    def _is_wanted(self, name: str) -> bool:
        return self._every or name in self._wanted

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _apply(self, folders: Iterable[ModelFolder], *, eager: bool = False) -> dict[str, list[str]]:
        wanted = [folder for folder in folders if self._is_wanted(folder.name)]
        if self.residency is not None:
            return await self._fill(self.residency, wanted, eager=eager)
        return await self._apply_wanted(wanted, eager=eager)

    async def _fill(
        self, residency: Residency, folders: Sequence[ModelFolder], *, eager: bool
    ) -> dict[str, list[str]]:
        """Apply the folders of models that are in memory or pinned, then as many others as there is room for;
        list the rest, which are loaded on demand."""
        by_name = {folder.name: folder for folder in folders}
        pinned = with_steps((f.name for f in folders if residency.names_pinned(f)), by_name)
        for folder in folders:
            if folder.name in pinned and not residency.is_resident(folder.name):
                await residency.hold_pinned(folder)
        first = [f for f in folders if residency.is_resident(f.name) or f.error or not f.versions]
        problems = await self._apply_settled(residency, first, eager=eager)
        left = [folder for wave in load_waves(f for f in folders if f not in first) for folder in wave]
        while left:
            some: list[ModelFolder] = []
            while left and len(some) < self.settings.parallel_loads and await residency.takes(left[0]):
                some.append(left.pop(0))
            if not some:
                break
            problems |= await self._apply_settled(residency, some, eager=eager)
        for folder in left:
            self._lay_down(residency, folder)
        return problems

    async def _apply_settled(
        self, residency: Residency, folders: Sequence[ModelFolder], *, eager: bool
    ) -> dict[str, list[str]]:
        problems = await self._apply_wanted(folders, eager=eager)
        for folder in folders:
            await residency.settle(folder)
            if found := problems.get(folder.name):
                residency.note_failure(folder, found)
        return problems

    def _lay_down(self, residency: Residency, folder: ModelFolder) -> None:
        """List a model that is loaded on demand; one whose folder is at fault is blamed, and not loaded."""
        if folder.config is None or folder.error or not folder.versions:
            residency.forget(folder.name)
            self._reconciler.judge(folder)
        else:
            residency.lay_down(folder)
        self._settle_start(folder.name)

    async def want(self, name: str) -> None:
        """Return when a model that is loaded on demand answers requests. Raises ServeError."""
        if self.residency is None:
            raise ServeError(Kind.UNAVAILABLE, f"model {_quoted(name)} is not loaded")
        await self.residency.want(name)

    async def _apply_wanted(
        self, wanted: Sequence[ModelFolder], *, eager: bool = False
    ) -> dict[str, list[str]]:
        applied: dict[str, asyncio.Task[list[str]]] = {}
        for wave in load_waves(wanted):
            before = dict(applied)
            for folder in wave:
                needs = [before[name] for name in ensemble_needs(folder.config) if name in before]
                applied[folder.name] = asyncio.create_task(self._apply_after(needs, folder, eager=eager))
        results = await gather_or_cancel(applied.values())
        return {name: reasons for name, reasons in zip(applied, results, strict=True) if reasons}

    async def _apply_after(
        self, needs: Sequence[asyncio.Task[list[str]]], folder: ModelFolder, *, eager: bool
    ) -> list[str]:
        """Apply the folder once the models that it needs have been, and no sooner: others do not matter."""
        if needs:
            await asyncio.wait(needs)
        return await self._apply_one(folder, eager=eager)

    async def _apply_one(self, folder: ModelFolder, *, eager: bool = False) -> list[str]:
        try:
            async with self._lock(folder.name):
                return await self._reconciler.apply(folder, eager=eager)
        finally:
            self._settle_start(folder.name)

    def _begin_start(self, folders: Iterable[ModelFolder]) -> None:
        """List the models that the start loads, and tell that they are known."""
        for folder in folders:
            if self._is_wanted(folder.name):
                self.catalog.model(folder.name)
                self.catalog.begin_start(folder.name, may_write=_may_write(folder))
        self.on_listed()

    def _settle_start(self, name: str) -> None:
        """Take the model off the list of those that the start has not loaded yet."""
        if self.catalog.end_start(name):
            self.on_settled(name)

    async def _end(self, name: str) -> None:
        if self.residency is not None:
            self.residency.forget(name)
        async with self._lock(name):
            await self._reconciler.end(name)

    def _gone(self, found: dict[str, ModelFolder]) -> list[str]:
        """Return models that were served or blamed, and have no folder any more or are no longer wanted."""
        return [
            name
            for name, model in self.catalog.models.items()
            if (model.config is not None or model.error is not None)
            and not (name in found and self._is_wanted(name))
        ]

    # -- ensembles

    async def _load_needed(self, folder: ModelFolder, path: tuple[str, ...]) -> None:
        for name in ensemble_needs(folder.config):
            if name in (folder.name, *path):
                continue  # a circle: the load fails and says so
            if self.catalog.available(name) is None and await self._exists(name):
                await self.load(name, (*path, folder.name))

    async def _exists(self, name: str) -> bool:
        return is_model_name(name) and await asyncio.to_thread(self._layout.scan_one, name) is not None

    def _tend_dependants(self, version: Version) -> None:
        """Load or withdraw the ensembles that depend on a version that came or went, and withdraw an ensemble
        one of whose steps went while it was being loaded."""
        if self._closing or version.state not in (VersionState.AVAILABLE, VersionState.UNLOADING):
            return
        if version.state is VersionState.AVAILABLE and version.config.options.ensemble is not None:
            self._start(self._withdraw(version.model))
        for name in dependent_ensembles(self.catalog, version):
            served = self.catalog.available(name) is not None
            if served and missing_dependency(self.catalog, name) is not None:
                self._start(self._withdraw(name))
            elif not served and self._is_wanted(name) and missing_dependency(self.catalog, name) is None:
                self._start(self._bring_back(name))

    async def _withdraw(self, name: str) -> None:
        async with self._lock(name):
            reason = missing_dependency(self.catalog, name)
            if reason is not None:
                await self._reconciler.withdraw(name, reason)

    async def _bring_back(self, name: str) -> None:
        async with self._lock(name):
            folder = await asyncio.to_thread(self._layout.scan_one, name)
            steps_went = missing_dependency(self.catalog, name) is not None
            if folder is not None and self._is_wanted(name) and not steps_went:
                await self._reconciler.apply(folder, eager=True)

    # -- watching

    async def _watch_folders(self) -> None:
        while True:
            await asyncio.sleep(self.settings.poll_s)
            try:
                found = await asyncio.to_thread(self._layout.scan, _lend)
            except OSError as fault:  # a root that went away for a moment must not unload everything
                self._problems.settle("", [f"cannot be read: {fault.strerror}"])
                continue
            self._problems.settle("", [])
            self._start_changes(found)

    def _start_changes(self, found: dict[str, ModelFolder]) -> None:
        """Start a task per model that is not being worked on: a slow load delays no other model."""
        for folder in found.values():
            rests = self.residency is not None and self.residency.rests(folder)
            if not rests and self._is_wanted(folder.name) and not self._lock(folder.name).locked():
                self._start(self._apply_watched(folder))
        for name in self._gone(found):
            if not self._lock(name).locked():
                self._start(self._end(name))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a change of the repository failed", exc_info=task.exception())

    async def _apply_watched(self, folder: ModelFolder) -> None:
        if self.residency is None:
            await self._apply_one(folder)
        elif self.residency.is_resident(folder.name):
            before = self.catalog.models[folder.name].available()
            await self._apply_one(folder)
            if self.catalog.models[folder.name].available() != before:
                await self.residency.settle(folder)
        else:
            self._lay_down(self.residency, folder)

    def _must_be_explicit(self) -> None:
        control = self.settings.model_control
        if control != "explicit":
            raise ServeError(
                Kind.UNAVAILABLE,
                f"Models are loaded and unloaded on demand with model_control explicit; it is {control}.",
            )


def _lend(seconds: float) -> None:
    """Give the interpreter to other threads after so many seconds with it, for as long: the loop would wait
    5 ms at each of its turns for a thread that does not."""
    time.sleep(max(seconds, LEND_S))


def _may_write(folder: ModelFolder) -> bool:
    """Return whether the model may generate text; True for one whose config cannot be read."""
    return folder.config is None or find_backend(folder.config.backend).takes == "text"


def _may_come(folder: ModelFolder | None) -> bool:
    return folder is not None and folder.may_come


class _ModelLoads:
    """The repository as its Residency sees it."""

    def __init__(self, repository: Repository) -> None:
        self._of = repository

    async def scan(self, name: str) -> ModelFolder | None:
        return await asyncio.to_thread(self._of._layout.scan_one, name) if is_model_name(name) else None

    def needs(self, folder: ModelFolder) -> list[str]:
        return [name for name in ensemble_needs(folder.config) if name != folder.name]

    def busy(self, name: str) -> bool:
        return self._of._lock(name).locked()

    async def bring(self, folder: ModelFolder) -> list[str]:
        return await self._of._apply_one(folder, eager=True)

    async def put_away(self, name: str) -> None:
        """Unload a model, and before it the ensembles that run it: no request of theirs finds it gone."""
        for one in (*available_ensembles(self._of.catalog, name), name):
            async with self._of._lock(one):
                await self._of._reconciler.withdraw(one, None)

    def users(self, name: str) -> list[Version]:
        catalog = self._of.catalog
        names = available_ensembles(catalog, name)
        return [version for one in names for version in catalog.models[one].available()]


class LoadFailures(ServeError):
    """Models that failed to load at the start, with their problems by name."""

    def __init__(self, problems: Mapping[str, list[str]]) -> None:
        super().__init__(Kind.FAILED_PRECONDITION, failure_text(problems))
        self.problems = problems


def failure_text(problems: Mapping[str, list[str]]) -> str:
    """Return every model that failed and why, in one line a model."""
    lines = [f"{name}: {'; '.join(reasons)}" for name, reasons in sorted(problems.items())]
    return f"{len(lines)} model(s) did not become available: " + "\n".join(lines)


def _quoted(name: str) -> str:
    """Return a client's name for a model, safe to log and to send back."""
    return name if is_model_name(name) else ascii(name[:MODEL_NAME_CHARS])
