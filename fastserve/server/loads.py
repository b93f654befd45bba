"""The repository as dialects see it: what clients may ask of it, in the owner and in other fronts.

front -> owner   ask {id, do: names | load | unload | replace | stop | spread, name ...}
owner -> front   told {id, names | meant | error}       when all fronts have what the change has led to
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from fastserve.config import ModelEntry
from fastserve.errors import Kind, ServeError
from fastserve.repository.overrides import Override
from fastserve.repository.repository import Repository
from fastserve.serving.dialect import Stop, refuse_to_stop
from fastserve.serving.exchange import unforeseen
from fastserve.serving.model_control import LoadOverride


async def _alone() -> None:
    """There is no other front."""


class ClientLoads:
    """Loads and unloads that clients ask for, in the process that owns the models."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.stop: Stop = refuse_to_stop
        self.settle: Callable[[], Awaitable[None]] = _alone
        """Until every front has the picture as it is now: whoever hears that a model is loaded can use it, in
        whatever front."""

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

    @contextlib.asynccontextmanager
    async def _shown(self) -> AsyncIterator[None]:
        try:
            yield
        finally:  # why it failed is for all fronts to tell as well
            await self.settle()

    async def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What another front process is told about what it asked for its clients."""
        told = {"op": "told", "id": asked["id"]}
        try:
            if asked["do"] == "names":
                return {**told, "names": await self.names()}
            if asked["do"] == "load":
                await self.load(asked["name"], _read_override(asked["override"]))
            elif asked["do"] == "stop":
                await self.stop(asked["force"])
            elif asked["do"] == "replace":
                await self.replace_models(msgspec.convert(asked["entries"], list[ModelEntry]))
            else:
                await self.unload(asked["name"], asked["dependents"])
        except Exception as error:  # whatever it is: in the other process a client waits to hear of it
            fault = error if isinstance(error, ServeError) else unforeseen(self, error)
            return {**told, "error": [fault.kind.value, fault.message]}
        return told


class OthersLoads:
    """In a front process that does not own the models: it asks the one that does."""

    def __init__(self, explicit: bool, send: Callable[[Mapping[str, Any]], None]) -> None:
        self.explicit = explicit
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

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

    async def stop(self, force: bool) -> None:
        """End the server. Raises ServeError."""
        await self._ask({"do": "stop", "force": force})

    async def spread(self, dialect: str, word: str) -> bool:
        """See ServingContext.spread. Raises ServeError."""
        told = await self._ask({"do": "spread", "dialect": dialect, "word": word})
        return bool(told["meant"])

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
            kind, message = told["error"]
            raise ServeError(Kind(kind), message)
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
