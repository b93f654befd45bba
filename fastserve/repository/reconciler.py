"""Rolls one model out: from the versions that are loaded to those that are wanted, without a gap.

    load what is wanted and missing  ->  move labels  ->  unload what is no longer wanted

A version that is no longer wanted is unloaded only when another takes its place: for each wanted version that
could not be loaded, one old version stays. When no version is wanted all are unloaded.

Problems are logged once, when they are new, and each traceback once: a load is tried again and again, by
several workers and for several versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from fastserve.errors import ConfigError, Kind, RemoteTrace, ServeError, internal, invalid
from fastserve.repository.catalog import Catalog
from fastserve.repository.folder_config import Stamp
from fastserve.repository.layout import ModelFolder, VersionFolder
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.version import Model, Version, VersionState, missing_versions, wanted_versions
from fastserve.settings import DEFAULT_POLICY, RepositorySettings
from fastserve.settings.model_options import NO_RULES

log = logging.getLogger(__name__)

NO_LABEL = "Request to assign label to version"

LONGEST_RETRY_S = 60.0


class VersionHooks(Protocol):
    """The engine's side of a version's life: what loading and unloading do."""

    async def load(self, version: Version) -> None:
        """Make the version answer requests. Raises ServeError; cleans up after itself, cancelled or not."""

    async def unload(self, version: Version) -> None:
        """Let requests under way finish, then free everything."""

    def memory_bytes(self, versions: Sequence[Version]) -> list[int]:
        """Return the memory of each version's workers. Called in a thread."""

    def in_use(self, version: Version) -> bool:
        """Return whether requests are under way, in any front process."""

    def last_used_s(self, version: Version) -> float:
        """Return when the last request ended, as time.monotonic counts; 0.0 for never."""


@dataclass(slots=True)
class _Origin:
    """The config and files a version was made of: it is loaded afresh when either changes."""

    config: ModelConfig
    stamp: Stamp


@dataclass(slots=True)
class _Failure:
    origin: _Origin
    tries: int
    due: float  # by the clock of the reconciler
    error: ServeError


class Reconciler:
    """Loads and unloads the versions of models. Calls for one model must not overlap."""

    def __init__(
        self,
        settings: RepositorySettings,
        catalog: Catalog,
        hooks: VersionHooks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._hooks = hooks
        self._clock = clock
        self._loading = asyncio.Semaphore(settings.parallel_loads)
        self._origins: dict[Version, _Origin] = {}  # of every version not yet ended
        self._failures: dict[tuple[str, int], _Failure] = {}
        self.problems = ProblemLog()

    async def apply(self, folder: ModelFolder, *, eager: bool = False) -> list[str]:
        """Bring the model to what its folder says. Returns the problems of wanted versions; never raises.

        `eager` tries failed versions again at once, whatever their back-off.
        """
        model = self._catalog.model(folder.name)
        if folder.config is None or folder.error:
            return self._blame(model, folder.error)
        config = folder.config
        wanted = wanted_versions(config.version_policy, folder.versions)
        self._forget_failures(model.name, keep=wanted)
        for number in reversed(wanted):  # the newest first: it is what most clients wait for
            own = folder.config_of(number)
            if eager or self._is_due(model, folder.versions[number], own):
                await self._load(model, folder.versions[number], own)
        self._adopt(model, folder, wanted)
        problems = self._problems(model, folder, wanted)
        self.problems.settle(model.name, problems)
        await self._unload_displaced(
            model, wanted, len(missing_versions(config.version_policy, folder.versions))
        )
        return problems

    async def end(self, name: str) -> None:
        """Unload every version of the model; its labels go, its ended versions stay listed."""
        model = self._catalog.models.get(name)
        if model is None:
            return
        model.labels, model.config = {}, None
        model.rules = model.config_rules = NO_RULES
        model.set_rules = None
        self._catalog.blame(model, None)
        self.problems.forget(name)
        self._forget_failures(name, keep=[])
        await asyncio.gather(*(self._unload(version) for version in model.available()))

    def judge(self, folder: ModelFolder) -> None:
        """Blame a model that cannot be loaded as its folder is."""
        model = self._catalog.model(folder.name)
        self._blame(model, folder.error or no_version_text(folder.notes))

    async def withdraw(self, name: str, reason: ServeError | None) -> None:
        """Unload every version of the model because a dependency has gone, or for want of memory; they end
        with the reason, None where their next request loads them again."""
        model = self._catalog.models.get(name)
        if model is not None:
            await asyncio.gather(*(self._unload(version, reason) for version in model.available()))

    # -- loading

    def _is_current(self, model: Model, folder: VersionFolder, config: ModelConfig) -> bool:
        version = model.versions.get(folder.number)
        if version is None or version.state is not VersionState.AVAILABLE:
            return False
        return self._origins.get(version) == _origin(config, folder)

    def _is_due(self, model: Model, folder: VersionFolder, config: ModelConfig) -> bool:
        if self._is_current(model, folder, config):
            return False
        failure = self._failures.get((model.name, folder.number))
        if failure is None or failure.origin != _origin(config, folder):
            return True
        return failure.tries <= self._settings.load_retries and self._clock() >= failure.due

    async def _load(self, model: Model, folder: VersionFolder, config: ModelConfig) -> None:
        """Load one version unless it is current. While it loads, an older instance goes on serving."""
        if self._is_current(model, folder, config):
            return
        origin, asked = _origin(config, folder), time.monotonic()
        try:
            version = Version(model.name, folder.number, folder.folder, config)
        except ConfigError as fault:  # a signature that fits no tensor
            self._remember(model, folder.number, origin, invalid(str(fault)))
            return
        served = model.versions.get(folder.number)
        replaces = served is not None and served.state is VersionState.AVAILABLE
        if not replaces:
            self._catalog.put(version)
        self._catalog.move(version, VersionState.LOADING)
        error = await self._run_load(version)
        if error is not None:
            self._catalog.move(version, VersionState.END, error)
            self._remember(model, folder.number, origin, error)
            return
        self._failures.pop((model.name, folder.number), None)
        self._origins[version] = origin
        self._catalog.move(version, VersionState.AVAILABLE)
        after_s = round(time.monotonic() - asked, 2)
        log.info("model %s version %d is available", model.name, version.number, extra={"after_s": after_s})
        if replaces and served is not None:
            self._catalog.put(version)
            await self._unload(served)

    @contextlib.asynccontextmanager
    async def release_slot(self) -> AsyncIterator[None]:
        """Release this load's slot while it waits for another load, which may use it."""
        self._loading.release()
        try:
            yield
        finally:
            await self._loading.acquire()

    async def _run_load(self, version: Version) -> ServeError | None:
        if version.config.fault:
            return invalid(version.config.fault)
        try:
            async with self._loading:
                await self._hooks.load(version)
        except asyncio.CancelledError:
            stopped = ServeError(Kind.CANCELLED, "The server stopped while the version was loading.")
            self._catalog.move(version, VersionState.END, stopped)
            raise
        except ServeError as error:
            return error
        except ConfigError as fault:
            return invalid(str(fault))
        except Exception as fault:
            log.exception("model %s version %d: loading failed", version.model, version.number)
            return internal(f"Loading failed with {type(fault).__name__}.")
        return None

    def _remember(self, model: Model, number: int, origin: _Origin, error: ServeError) -> None:
        known = self._failures.get((model.name, number))
        tries = known.tries + 1 if known is not None and known.origin == origin else 1
        wait_s = min(self._settings.load_retry_s * 2 ** (tries - 1), LONGEST_RETRY_S)
        self._failures[model.name, number] = _Failure(origin, tries, self._clock() + wait_s, error)
        self.problems.say(model.name, _load_problem(number, error), error)

    def _forget_failures(self, name: str, keep: list[int]) -> None:
        for key in [key for key in self._failures if key[0] == name and key[1] not in keep]:
            del self._failures[key]

    # -- labels, config and blame

    def _adopt(self, model: Model, folder: ModelFolder, wanted: list[int]) -> None:
        """Apply policy and labels, which need no fresh instance, also to versions already loaded."""
        model.config = folder.config
        for number in wanted:
            config = folder.config_of(number)
            version = model.versions.get(number)
            origin = self._origins.get(version) if version is not None else None
            if version is not None and origin is not None and origin.config == _instance_config(config):
                # The rest is equal, but for what the loaded model has said itself: that stays.
                fields = {name: getattr(config, name) for name in _OF_MODELS}
                version.config = msgspec.structs.replace(version.config, **fields)

    def _problems(self, model: Model, folder: ModelFolder, wanted: list[int]) -> list[str]:
        assert folder.config is not None
        problems = []
        for number in wanted:
            failure = self._failures.get((model.name, number))
            if failure is not None and not self._is_current(
                model, folder.versions[number], folder.config_of(number)
            ):
                problems.append(_load_problem(number, failure.error))
        problems += [
            f"version {number}: wanted by version_policy, but there is no such version"
            for number in missing_versions(folder.config.version_policy, folder.versions)
        ]
        if not folder.versions:
            problems.append(no_version_text(folder.notes))
        problems += self._move_labels(model, folder.config)
        error = ServeError(Kind.FAILED_PRECONDITION, "; ".join(problems)) if problems else None
        self._catalog.blame(model, error)
        return problems

    def _move_labels(self, model: Model, config: ModelConfig) -> list[str]:
        """Move labels as the config says; one whose version is not available stays where it was (spec 5)."""
        labels: dict[str, int] = {}
        problems = []
        for label, number in config.labels.items():
            before = model.labels.get(label)
            may_be_new = before is None and self._settings.allow_labels_for_unavailable
            if number == before or may_be_new or self._catalog.available(model.name, number) is not None:
                labels[label] = number
                continue
            if before is not None:
                labels[label] = before
            problems.append(
                f"{NO_LABEL} {number} of model {model.name}, which is not currently available for inference"
            )
        model.labels = labels
        if model.config_rules != config.rules:  # what a client has set holds until the config says another
            model.config_rules, model.set_rules = config.rules, None
        model.rules = model.set_rules or config.rules
        self._catalog.settle_rules(model)
        return problems

    def _blame(self, model: Model, reason: str) -> list[str]:
        self._catalog.blame(model, ServeError(Kind.FAILED_PRECONDITION, reason))
        self.problems.settle(model.name, [reason])
        return [reason]

    # -- unloading

    async def _unload_displaced(self, model: Model, wanted: list[int], absent: int) -> None:
        displaced = [v for v in model.available() if v.number not in wanted]
        unfilled = absent + sum(self._catalog.available(model.name, n) is None for n in wanted)
        leaving = displaced[: max(0, len(displaced) - unfilled)]
        await asyncio.gather(*(self._unload(version) for version in leaving))

    async def _unload(self, version: Version, reason: ServeError | None = None) -> None:
        self._origins.pop(version, None)
        self._catalog.move(version, VersionState.UNLOADING)
        try:
            await self._hooks.unload(version)
        except Exception:
            log.exception("model %s version %d: unloading failed", version.model, version.number)
        finally:
            self._catalog.move(version, VersionState.END, reason)
        log.info("model %s version %d is unloaded", version.model, version.number)


def _load_problem(number: int, error: ServeError) -> str:
    return f"version {number}: {error.message}"


def _origin(config: ModelConfig, folder: VersionFolder) -> _Origin:
    return _Origin(_instance_config(config), folder.stamp)


_OF_MODELS: dict[str, Any] = {
    **{"version_policy": DEFAULT_POLICY, "labels": {}, "pin": False},
    **{"traffic": {}, "sticky": None, "shadow": None},
}
"""Fields that are a model's, with values that stand for any: an instance is the same whatever they say."""


def _instance_config(config: ModelConfig) -> ModelConfig:
    """Return the part of a config that an instance is made with."""
    return msgspec.structs.replace(config, **_OF_MODELS)


def no_version_text(notes: Iterable[str]) -> str:
    """Return the problem of a model without versions; `notes` say why its version folders were passed
    over."""
    told = "".join(f"; {note}" for note in notes) or ": there is no folder with a number for its name, say 1"
    return f"no version that can be loaded{told}"


class ProblemLog:
    """Logs each problem once. Problems are by model; "" is the repository itself."""

    def __init__(self) -> None:
        self._said: dict[str, set[str]] = {}
        self._traced: dict[str, set[str]] = {}  # reasons whose traceback has been logged

    def say(self, name: str, text: str, error: ServeError | None = None) -> None:
        """Log a problem of the model unless it is known; `error` is its cause."""
        said = self._said.setdefault(name, set())
        if text in said:
            return
        said.add(text)
        trace = None if error is None else self._trace(name, error)
        log.error("%s: %s", f"model {name}" if name else "repository", text, exc_info=trace)

    def settle(self, name: str, now: Iterable[str]) -> None:
        """Log the new ones of a model's problems, and forget those that are gone."""
        for text in now:
            self.say(name, text)
        left = set(now)
        if not left:
            self.forget(name)
        elif name in self._said:
            self._said[name] &= left

    def forget(self, name: str) -> None:
        """Forget a model's problems: the next one is logged."""
        self._said.pop(name, None)
        self._traced.pop(name, None)

    def _trace(self, name: str, error: ServeError) -> RemoteTrace | None:
        traced = self._traced.setdefault(name, set())
        if not isinstance(error.__cause__, RemoteTrace) or error.message in traced:
            return None
        traced.add(error.message)
        return error.__cause__
