"""Messages between the owner of the models and the other front processes: catalog and model control.

front -> owner   ask {id, do: names | load | unload | replace | rules | want | stop | spread | change | ...}
owner -> front   reply {id, names | meant | shown | error}       when all fronts have applied the change
owner -> front   catalog {models, gone | whole}          the models that have changed, or all of them

Texts of clients are ASCII JSON within a message: they need not be Unicode.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fastserve.engine.schedulers.cache import CacheMemory, ResponseCache, open_shared_cache
from fastserve.errors import Kind, ServeError
from fastserve.metrics.registry import FailedRequest, FailedRequests
from fastserve.repository.catalog import Catalog
from fastserve.repository.layout import Override
from fastserve.repository.repository import Repository
from fastserve.repository.residency import LoadWaiters
from fastserve.repository.version import Model, Version, VersionState
from fastserve.serving.dialect import Stop, refuse_to_stop
from fastserve.serving.exchange import internal_error
from fastserve.serving.model_control import LoadOverride
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState, StateRecord
from fastserve.settings import ModelEntry
from fastserve.settings.model_options import TrafficRules


def catalog_message(catalog: Catalog) -> dict[str, Any]:
    """Return a message of every model, its labels and the state of every version it ever had."""
    models = {name: write_model(model) for name, model in catalog.models.items()}
    return {"op": "catalog", "models": models, "gone": [], "whole": True}


class CatalogChanges:
    """Changes of a catalog for the other fronts, which get all of it at their start.

    Each front's channel keeps the order of messages, so they need no numbers.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._told: dict[str, dict[str, Any]] = {}

    def take(self, *names: str) -> dict[str, Any] | None:
        """Return a message of the models that have changed since the last one, of those names or of all; None
        where none has."""
        models, changed = self._catalog.models, {}
        for name in names or models:
            if name in models and self._told.get(name) != (written := write_model(models[name])):
                changed[name] = written
        gone = [name for name in names or self._told if name in self._told and name not in models]
        if not changed and not gone:
            return None
        self._told |= changed
        for name in gone:
            del self._told[name]
        return {"op": "catalog", "models": changed, "gone": gone, "whole": False}


def write_model(model: Model) -> dict[str, Any]:
    """Return what other fronts show and look up of a model."""
    versions = [
        [v.number, id(v), v.state.value, _write_error(v.error), v.down, v.dormant]
        for v in model.versions.values()
    ]
    return {
        "labels": dict(model.labels),
        "rules": msgspec.to_builtins(model.rules),
        "set": model.set_rules is not None,
        "versions": versions,
        "latest": model.latest.number if model.latest else None,
        "error": _write_error(model.error),
        "failed_at": model.failed_at,
        "on_demand": model.on_demand,
    }


def _write_error(error: ServeError | None) -> list[Any] | None:
    return [error.kind.value, error.message] if error else None


def _read_error(written: list[Any] | None) -> ServeError | None:
    return ServeError(Kind(written[0]), written[1]) if written else None


def apply_catalog(catalog: Catalog, message: dict[str, Any], opened: dict[int, Version]) -> None:
    """Make `catalog` what the message says of models that have changed, or of all. `opened` are the versions
    this process has a queue for, by the owner's id; others are listed with their state and cannot serve."""
    gone = set(catalog.models) - set(message["models"]) if message["whole"] else message["gone"]
    for name in gone:
        if name in catalog.models:
            catalog.remove(name)
    for name, written in message["models"].items():
        model = catalog.model(name)
        model.labels = {label: int(number) for label, number in written["labels"].items()}
        model.rules = msgspec.convert(written["rules"], TrafficRules)
        model.set_rules = model.rules if written["set"] else None
        model.versions = {row[0]: _read_version(name, row, opened, model) for row in written["versions"]}
        model.error, model.failed_at = _read_error(written["error"]), written["failed_at"]
        model.on_demand = written["on_demand"]
        latest = written["latest"]
        model.latest = model.versions.get(latest) if latest is not None else None
    catalog.tell_rules()


def _read_version(name: str, row: list[Any], opened: dict[int, Version], model: Model) -> Version:
    number, key, state, error, down, dormant = row
    version = opened.get(key) or model.versions.get(number) or Version.unloaded(name, number)
    version.state = VersionState(state)
    version.error, version.down, version.dormant = _read_error(error), down, dormant
    return version


async def _alone() -> None:
    """Settle where there is no other front."""


SHOW_TIMEOUT_S = 10.0
MOST_WAITING = 256  # questions: what a silent owner has not read must fit into the channel
NO_ANSWER = "the server's first process does not answer"


class FailuresPart(ReplicatedPart):
    """The last failed requests: the owner keeps those of all front processes, which hand theirs over."""

    NAME = "failures"

    def __init__(self, kept: FailedRequests) -> None:
        self._kept = kept

    async def carry_out(self, change: Content) -> None:
        for model, *failed in change["failed"]:
            self._kept.keep(model, FailedRequest(*failed))


class CachePart(ReplicatedPart):
    """The memory of the response cache: the owner makes it, and every other front opens it."""

    NAME = "cache"

    def __init__(self, memory: CacheMemory | None, opened: Callable[[ResponseCache], None]) -> None:
        self._memory, self._opened = memory, opened

    def apply(self, content: Content, fds: list[int]) -> None:
        """Open the cache."""
        try:
            self._opened(open_shared_cache(fds[0], content["capacity"]))
        finally:
            os.close(fds[0])

    def records(self) -> Iterator[StateRecord]:
        """The cache's memory, if there is one."""
        if self._memory is not None:
            yield StateRecord({"capacity": self._memory.capacity}, (self._memory.fd,))


class OwnerModelControl:
    """Model control for clients, in the process that owns the models."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.stop: Stop = refuse_to_stop
        self.state = ReplicatedState()
        self.settle: Callable[[], Awaitable[None]] = _alone
        """Wait until every front has applied the catalog: a loaded model can be used through any of them."""

    @property
    def explicit(self) -> bool:
        return self._repository.settings.model_control == "explicit"

    async def names(self) -> list[str]:
        return await self._repository.names()

    async def load(self, name: str, override: LoadOverride | None) -> None:
        """Raises ServeError."""
        brought = None if override is None else Override(override.config or "{}", override.files)
        async with self._shown():
            await self._repository.load(name, override=brought)

    async def unload(self, name: str, dependents: bool) -> None:
        """Raises ServeError."""
        async with self._shown():
            await self._repository.unload(name, composing=dependents)

    async def replace_models(self, entries: Sequence[ModelEntry]) -> None:
        """Raises ServeError."""
        async with self._shown():
            await self._repository.reload_config(entries)

    async def set_rules(self, name: str, rules: TrafficRules | None) -> None:
        """Raises ServeError."""
        async with self._shown():
            await self._repository.set_rules(name, rules)

    async def want(self, name: str) -> None:
        """Have a model that is loaded on demand; the other fronts apply the catalog before any answer that
        follows. Raises ServeError."""
        await self._repository.want(name)

    @contextlib.asynccontextmanager
    async def _shown(self) -> AsyncIterator[None]:
        try:
            yield
        finally:  # why it failed is for all fronts to tell as well
            await self.settle()

    async def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a client of another front process asked for, and return the reply to that front."""
        told = {"op": "reply", "id": asked["id"]}
        try:
            if asked["do"] == "names":
                return {**told, "names": await self.names()}
            if asked["do"] == "load":
                await self.load(asked["name"], _read_override(asked["override"]))
            elif asked["do"] == "want":
                await self.want(asked["name"])
            elif asked["do"] == "rules":
                rules = msgspec.convert(asked["rules"], TrafficRules | None)
                await self.set_rules(asked["name"], rules)
            elif asked["do"] == "stop":
                await self.stop(asked["force"])
            elif asked["do"] == "replace":
                await self.replace_models(msgspec.convert(asked["entries"], list[ModelEntry]))
            elif asked["do"] == "change":
                await self.state.carry_out(asked["part"], json.loads(asked["change"]))
            elif asked["do"] == "show":
                shown = await self.state.show(asked["part"], json.loads(asked["question"]))
                return {**told, "shown": json.dumps(shown)}
            else:
                await self.unload(asked["name"], asked["dependents"])
        except Exception as error:  # of any kind: in the other process a client waits for the reply
            fault = error if isinstance(error, ServeError) else internal_error(self, error)
            return {**told, "error": [fault.kind.value, json.dumps(fault.message), fault.retry_after_s]}
        return told


class RemoteModelControl:
    """Model control for clients of a front process that does not own the models: asks the owner."""

    def __init__(
        self, explicit: bool, send: Callable[[Mapping[str, Any]], None], waiting: LoadWaiters | None = None
    ) -> None:
        self.explicit = explicit
        self.waiting = waiting or LoadWaiters()
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.owner_silent: Callable[[], bool] = lambda: False

    async def names(self) -> list[str]:
        names: list[str] = (await self._ask({"do": "names"}))["names"]
        return names

    async def load(self, name: str, override: LoadOverride | None) -> None:
        """Raises ServeError."""
        await self._ask({"do": "load", "name": name, "override": _write_override(override)})

    async def unload(self, name: str, dependents: bool) -> None:
        """Raises ServeError."""
        await self._ask({"do": "unload", "name": name, "dependents": dependents})

    async def replace_models(self, entries: Sequence[ModelEntry]) -> None:
        """Raises ServeError."""
        await self._ask({"do": "replace", "entries": msgspec.to_builtins(list(entries))})

    async def set_rules(self, name: str, rules: TrafficRules | None) -> None:
        """Raises ServeError."""
        await self._ask({"do": "rules", "name": name, "rules": msgspec.to_builtins(rules)})

    async def want(self, name: str) -> None:
        """Have the owner load a model. Raises ServeError; UNAVAILABLE at once where too many wait here."""
        if self.owner_silent():
            raise ServeError(Kind.UNAVAILABLE, NO_ANSWER)
        self.waiting.enter(name)
        try:
            wait_s = self.waiting.wait_s
            await asyncio.wait_for(self._ask({"do": "want", "name": name}), wait_s + SHOW_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ServeError(Kind.UNAVAILABLE, NO_ANSWER) from None
        finally:
            self.waiting.leave()

    async def stop(self, force: bool) -> None:
        """End the server. Raises ServeError."""
        await self._ask({"do": "stop", "force": force})

    async def spread(self, dialect: str, word: str) -> bool:
        """See ServingContext.spread. Raises ServeError."""
        told = await self._ask({"do": "spread", "dialect": dialect, "word": word})
        return bool(told["meant"])

    async def change(self, part: str, change: Content) -> None:
        """Have the owner change what all front processes have alike. Raises ServeError."""
        await self._ask({"do": "change", "part": part, "change": json.dumps(change)})

    async def show(self, part: str, question: Content) -> str:
        """Have the owner answer a question. Raises ServeError, UNAVAILABLE when it takes too long."""
        asked = {"do": "show", "part": part, "question": json.dumps(question)}
        if self.owner_silent() or len(self._waiting) >= MOST_WAITING:  # it may read no more of them
            raise ServeError(Kind.UNAVAILABLE, NO_ANSWER)
        try:
            told = await asyncio.wait_for(self._ask(asked), SHOW_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ServeError(Kind.UNAVAILABLE, NO_ANSWER) from None
        shown: str = json.loads(told["shown"])
        return shown

    def hear(self, told: dict[str, Any]) -> None:
        """An answer of the owner's."""
        waiting = self._waiting.get(told["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(told)

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"op": "ask", "id": number, **question})
            told: dict[str, Any] = await answer
        finally:
            del self._waiting[number]
        if "error" in told:
            kind, message, again_s = told["error"]
            raise ServeError(Kind(kind), json.loads(message), retry_after_s=again_s)
        return told


def _write_override(override: LoadOverride | None) -> dict[str, Any] | None:
    if override is None:
        return None
    files = {path: base64.b64encode(data).decode() for path, data in override.files.items()}
    return {"config": override.config, "files": files}


def _read_override(written: Mapping[str, Any] | None) -> LoadOverride | None:
    if written is None:
        return None
    files = {path: base64.b64decode(text) for path, text in written["files"].items()}
    return LoadOverride(written["config"], files)
