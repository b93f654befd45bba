"""The placer as its server sees it: started with it, started again when it ends, ended with it. One that can
place nothing any more says that it leaves: another is started beside it.

No part of Ray is imported here. A placer is known by a name without a file (an abstract socket), which its
runners get with the model's config, and which stays when it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from fastserve.errors import ConfigError, install_text
from fastserve.settings.model_options import RayPlacement
from fastserve.util.logs import current_logs
from fastserve.workers.control import ControlFault
from fastserve.workers.group import Backoff
from fastserve.workers.process import ENTRY, WorkerProcess, worker_environment
from fastserve.workers.remote.places import PlacerLink

log = logging.getLogger(__name__)

OLDEST_RAY = (2, 40)
STOP_S = 10.0  # actors have half of it to end by themselves
ENTRY_PLACER = (*ENTRY[:-1], "fastserve.workers.remote.placer")
NOT_GIVEN = "placement.ray: the server was given no cluster, allowed: with --ray HOST:PORT, auto or local"


def check_ray() -> None:
    """Raise ConfigError where Ray or pyzmq is not installed here, or Ray is too old."""
    for package in ("ray", "pyzmq"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            hint = install_text("'ray>=2.40' pyzmq", "ray")
            raise ConfigError(f"--ray: {package} is not installed: {hint}") from None
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if package == "ray" and numbers < OLDEST_RAY:
            oldest = ".".join(map(str, OLDEST_RAY))
            raise ConfigError(f"--ray: ray is {version} here, allowed: {oldest} or later")


class PlacerProcess:
    """The placer of one server, on its loop. `name` is what runners connect to."""

    def __init__(self, ray: str) -> None:
        """Choose a name. Raises ConfigError where Ray cannot be used."""
        check_ray()
        self.name = f"fastserve-placer-{os.getpid()}-{secrets.token_hex(16)}"
        self._ray, self._backoff, self._started_s = ray, Backoff(), 0.0
        self._process: WorkerProcess | None = None
        self._leaving: list[WorkerProcess] = []
        self._again: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def pid(self) -> int:
        """The process's id, 0 where none is."""
        return self._process.pid if self._process is not None else 0

    def open(self) -> None:
        """Start the process; it connects to Ray by itself. Raises OSError."""
        made = WorkerProcess(
            worker_environment(0, {}),
            lambda message: self._hear(made, message),
            lambda words: self._ended(made, words),
            entry=ENTRY_PLACER,
            trusted=True,
        )
        made.spawn()
        self._process, self._started_s = made, time.monotonic()
        with contextlib.suppress(ControlFault):  # it has ended already, and is started again
            made.send({"op": "begin", "ray": self._ray, "listen": self.name, "logs": current_logs()})

    async def close(self) -> None:
        """End it, and what it has placed."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        placers = [*self._leaving, *([self._process] if self._process is not None else [])]
        await asyncio.gather(*(placer.stop(STOP_S) for placer in placers))

    def _hear(self, placer: WorkerProcess, message: Mapping[str, Any]) -> None:
        if message["op"] == "leaving" and placer is self._process and not self._closing:
            self._leaving.append(placer)
            self._process = None
            self._open_again()

    def _ended(self, placer: WorkerProcess, words: str) -> None:
        if placer in self._leaving:
            self._leaving.remove(placer)
            log.info("the placer that left has ended (%s)", words)
            return
        if self._closing:
            return
        self._start_later(words)

    def _start_later(self, words: str) -> None:
        wait_s = self._backoff.after_death(time.monotonic() - self._started_s)
        log.error(
            "the placer ended (%s), and with it all workers on Ray; it starts again in %g s", words, wait_s
        )
        self._again = asyncio.get_running_loop().call_later(wait_s, self._open_again)

    def _open_again(self) -> None:
        try:
            self.open()
        except OSError as error:
            self._start_later(str(error.strerror))


def find_shortages(ray: str, placements: Mapping[str, RayPlacement]) -> dict[str, str]:
    """Return, by model, why its workers cannot be placed on the cluster as it is now. Blocks; starts a placer
    for it. Raises ConfigError where Ray cannot be used."""
    return asyncio.run(_find_shortages(PlacerProcess(ray), placements)) if placements else {}


async def _find_shortages(placer: PlacerProcess, placements: Mapping[str, RayPlacement]) -> dict[str, str]:
    placer.open()
    try:
        return await asyncio.to_thread(_ask, placer.name, placements)
    finally:
        await placer.close()


def _ask(name: str, placements: Mapping[str, RayPlacement]) -> dict[str, str]:
    link, found = PlacerLink(name), dict[str, str]()
    try:
        for model, placement in placements.items():
            link.send({"op": "fits", "demand": placement.demand, "count": placement.workers.min})
            found[model] = str(link.wait()["reason"])
    finally:
        link.close()
    return {model: reason for model, reason in found.items() if reason}
