"""Helpers of the worker tests: a model on disk, and an arena that is a socket."""

from __future__ import annotations

import asyncio
import socket
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from fastserve.tensor import TensorSpec
from fastserve.workers.forked_worker import ForkServers
from fastserve.workers.group import WorkerGroup
from fastserve.workers.process import ENTRY

FAKE_ENTRY = (*ENTRY[:-1], "tests.workers.fake_worker")
CONFIG: dict[str, Any] = {
    "backend": "python",
    "inputs": {"x": {"dtype": "float32", "shape": [2]}},
    "outputs": {"y": {"dtype": "float32", "shape": [2]}},
    "max_batch_size": 4,
    "instances": 1,
    "threads": 1,
}
PLAIN = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs): return {"y": inputs["x"] + 1}
"""


# libuv opens one pipe per process, at first use and for good: before any test counts descriptors.
uvloop.run(asyncio.sleep(0))


def write_model(folder: Path, source: str, name: str = "demo") -> Path:
    """Writes NAME/1/model.py; the version's folder."""
    version_dir = folder / name / "1"
    version_dir.mkdir(parents=True, exist_ok=True)
    (version_dir / "model.py").write_text(textwrap.dedent(source))
    return version_dir


class FakeArena:
    """Gives each worker one end of a stream; the test holds the other."""

    def __init__(self, **layout: Any) -> None:
        self.layout = layout
        self.ours: dict[int, socket.socket] = {}
        self.theirs: dict[int, socket.socket] = {}

    def make(self, inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec]) -> FakeArena:
        return self

    def pulse(self) -> None:
        """Its workers have no such word."""

    def fds_for_worker(self, worker: int) -> tuple[dict[str, Any], list[int]]:
        self._close(worker)
        self.ours[worker], self.theirs[worker] = socket.socketpair()
        self.ours[worker].setblocking(False)
        return self.layout, [self.theirs[worker].fileno()]

    async def ask(self, worker: int) -> str:
        """One batch, answered."""
        self.ring(worker)
        return (await asyncio.get_running_loop().sock_recv(self.ours[worker], 4096)).decode()

    def ring(self, worker: int) -> None:
        self.ours[worker].send(b"!")

    def close(self) -> None:
        for worker in list(self.ours):
            self._close(worker)

    def _close(self, worker: int) -> None:
        for ends in (self.ours, self.theirs):
            if worker in ends:
                ends.pop(worker).close()


class Watched:
    """A group, its arena, and a record of what it reported. Restarts wait for `retry()`, not for time."""

    def __init__(
        self,
        version_dir: Path,
        *,
        arena: FakeArena | None = None,
        forks: ForkServers | None = None,
        **config: Any,
    ) -> None:
        self.arena = arena or FakeArena()
        self.events: list[tuple[str, int]] = []
        self.waits: list[float] = []
        self.now = 0.0
        self._news = asyncio.Event()
        self._retry = asyncio.Semaphore(0)
        self.group = WorkerGroup(
            version_dir,
            {**CONFIG, **config},
            self.arena.make,
            lambda worker: self._note("death", worker),
            lambda worker: self._note("alive", worker),
            entry=FAKE_ENTRY,
            forks=forks,
            sleep=self._sleep,
            clock=lambda: self.now,
        )

    async def __aenter__(self) -> Watched:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.group.stop(2)
        self.arena.close()

    def retry(self) -> None:
        self._retry.release()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits, event by event, until the condition holds."""
        while not condition():
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 30)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._news.set()
        await self._retry.acquire()

    def _note(self, what: str, worker: int) -> None:
        self.events.append((what, worker))
        self._news.set()


def run(coroutine: Coroutine[Any, Any, None], loop: str = "asyncio") -> None:
    """Runs a test on a loop of its own."""
    if loop == "uvloop":
        uvloop.run(coroutine)
    else:
        asyncio.run(coroutine)
