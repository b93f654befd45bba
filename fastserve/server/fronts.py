"""The owner's view of the other front processes: it tells them what there is, they share its ports.

    owner -> front   start {settings, front, listeners} + metrics memory     open {version} + arena
                     catalog {models}    ready {...}    close {id}    drain {grace_s}
    front -> owner   listening    opened {id}    closed {id}    drained

A front that dies is replaced; what it held in the arenas is swept first, so that no batch waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from fastserve.config import Listener, Settings
from fastserve.engine.hosting import Host, Hosted
from fastserve.errors import Kind, ServeError
from fastserve.metrics import Readiness, Registry, names
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import config_json
from fastserve.server.mirror import catalog_message
from fastserve.workers.process import WorkerProcess, worker_environment

log = logging.getLogger(__name__)

ENTRY = (sys.executable, "-m", "fastserve.server.follower")
START_TIMEOUT_S = 60.0
FIRST_RESTART_S, LONGEST_RESTART_S = 0.2, 10.0
# A front may die between claiming rows and saying whose they are; the row table settles within this.
SWEEP_AGAIN_S = 0.2


class Fronts:
    """All front processes but the owner itself; none of them with `frontends: 1`."""

    def __init__(self, settings: Settings, catalog: Catalog, host: Host, registry: Registry) -> None:
        self._links = [FrontLink(i, settings, catalog, host, registry) for i in range(1, settings.frontends)]
        self._catalog = catalog
        if self._links:
            host.on_opened.append(self._open_version)
            host.on_closing.append(self._close_version)

    async def open(self, http: tuple[Listener, ...], grpc: tuple[Listener, ...]) -> None:
        """Start every front on the owner's own ports. Raises ServeError when one does not come up."""
        for link in self._links:
            link.listeners = (http, grpc)
        await asyncio.gather(*(link.start() for link in self._links))

    async def drain(self, grace_s: float) -> None:
        """Let every front finish and exit."""
        await asyncio.gather(*(link.drain(grace_s) for link in self._links))

    def tell_catalog(self) -> None:
        """Something moved: every front gets the whole picture, a few hundred bytes a model."""
        if self._links:
            message = catalog_message(self._catalog)
            for link in self._links:
                link.tell(message)

    def tell_readiness(self, readiness: Readiness) -> None:
        """What /healthz/ready says on every front."""
        for link in self._links:
            link.tell({"op": "ready", "readiness": msgspec.to_builtins(readiness)})

    async def _open_version(self, hosted: Hosted) -> None:
        await asyncio.gather(*(link.open_version(hosted) for link in self._links))

    async def _close_version(self, hosted: Hosted) -> None:
        await asyncio.gather(*(link.close_version(hosted) for link in self._links))


class FrontLink:
    """One other front process: its life, and the questions it has yet to answer."""

    def __init__(self, front: int, settings: Settings, catalog: Catalog, host: Host, registry: Registry) -> None:
        self.front = front
        self.listeners: tuple[tuple[Listener, ...], tuple[Listener, ...]] = ((), ())
        self._settings, self._catalog, self._host, self._registry = settings, catalog, host, registry
        self._process: WorkerProcess | None = None
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._restart_s = FIRST_RESTART_S
        self._draining = False
        self._revival: asyncio.Task[None] | None = None
        self._last_ready: Mapping[str, Any] | None = None

    async def start(self) -> None:
        """Spawn the process, give it everything there is, wait until it listens."""
        process = WorkerProcess(worker_environment(1, {}), self._hear, self._end, entry=ENTRY)
        process.spawn()
        self._process = process
        http, grpc = self.listeners
        start = {
            "op": "start",
            "front": self.front,
            "settings": msgspec.to_builtins(self._settings),
            "http": msgspec.to_builtins(http),
            "grpc": msgspec.to_builtins(grpc),
        }
        process.send(start, [self._registry.fd])
        for hosted in list(self._host.hosted.values()):
            await self.open_version(hosted)
        self.tell(catalog_message(self._catalog))
        if self._last_ready is not None:
            self.tell(self._last_ready)
        await self._ask("listening", 0, {"op": "listen"})
        self._restart_s = FIRST_RESTART_S

    async def open_version(self, hosted: Hosted) -> None:
        """The front opens its lane on the version's arena; returns when it has."""
        if self._process is None or not self._process.running:
            return  # it gets everything there is when it comes back
        version = hosted.version
        message, fds = hosted.arena.fds_for_front(self.front)
        message |= {
            "op": "open",
            "id": id(version),
            "model": version.model,
            "number": version.number,
            "folder": str(version.folder),
            "config": config_json(version.config),
            "inputs": {n: [s.dtype.name, s.shape] for n, s in version.inputs.items()},
            "outputs": {n: [s.dtype.name, s.shape] for n, s in version.outputs.items()},
        }
        await self._ask("opened", id(version), message, fds)

    async def close_version(self, hosted: Hosted) -> None:
        """The front drains and closes its lane."""
        if self._process is not None and self._process.running:
            await self._ask("closed", id(hosted.version), {"op": "close", "id": id(hosted.version)})

    async def drain(self, grace_s: float) -> None:
        """Ask the process to finish, and end it when it does not."""
        self._draining = True
        if self._revival is not None:
            self._revival.cancel()
        process = self._process
        if process is None or not process.running:
            return
        self.tell({"op": "drain", "grace_s": grace_s})
        await process.stop(grace_s + 5.0)

    def tell(self, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
        """Send without waiting; a front that is gone is replaced and told then."""
        if message["op"] == "ready":
            self._last_ready = message
        if self._process is not None and self._process.running:
            self._process.send(dict(message), fds or [])

    async def _ask(self, answer: str, key: int, message: dict[str, Any], fds: list[int] | None = None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[answer, key] = future
        self.tell(message, fds)
        try:
            await asyncio.wait_for(future, START_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ServeError(Kind.UNAVAILABLE, f"front process {self.front} does not answer") from None
        finally:
            self._waiting.pop((answer, key), None)

    def _hear(self, message: dict[str, Any]) -> None:
        future = self._waiting.get((str(message.get("op")), int(message.get("id", 0))))
        if future is not None and not future.done():
            future.set_result(None)

    def _end(self, words: str) -> None:
        for (answer, _), future in self._waiting.items():
            if future.done():
                continue
            if answer == "closed":
                future.set_result(None)  # what it held is swept below
            else:
                future.set_exception(ServeError(Kind.UNAVAILABLE, f"front process {self.front} ended: {words}"))
        self._sweep()
        if self._draining:
            return
        log.error("front process %d ended: %s; starting another", self.front, words)
        self._registry.counters(names.FRONT_RESTARTS).of().add()
        self._registry.bury(self.front)
        self._revival = asyncio.get_running_loop().create_task(self._revive())

    async def _revive(self) -> None:
        while True:
            await asyncio.sleep(max(self._restart_s, SWEEP_AGAIN_S))
            self._sweep()  # before the new one claims the same number
            self._restart_s = min(self._restart_s * 2, LONGEST_RESTART_S)
            try:
                return await self.start()
            except ServeError as error:
                log.error("front process %d could not be started: %s", self.front, error.message)

    def _sweep(self) -> None:
        for hosted in self._host.hosted.values():
            hosted.lane.ring.sweep_front(self.front)
