"""Text models on real workers, and whoever listens to their tokens: no sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from fastserve.codec.generation import Finish, GenerationRun, Record, Sampling, TextNote, read_extra
from fastserve.engine.engine import Engine, scheduler_of
from fastserve.engine.loader import VersionLoader
from fastserve.engine.text_queue import TextQueue, TextScheduler
from fastserve.metrics.registry import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.version import Version, VersionState
from fastserve.settings.config_files import read_yaml

uvloop.run(asyncio.sleep(0))  # libuv opens a pipe with the process's first loop, for good
RIGS = Path(__file__).parent / "rigs"


class Heard:
    """One sequence of a test: what came of it. `keep` says how much of it is read at once."""

    def __init__(self, *, reads: bool = True) -> None:
        self.records: list[Record] = []
        self.calls: list[int] = []  # how many came at a time
        self.run: GenerationRun | None = None
        self.reads = reads
        self.ended = asyncio.Event()
        self.news = asyncio.Event()

    def __call__(self, records: list[Record]) -> None:
        assert not self.ended.is_set(), "a record after the last one"
        self.records += records
        self.calls.append(len(records))
        if self.reads and self.run is not None:
            self.run.taken(len(records))
        if records[-1][1]:
            self.ended.set()
        self.news.set()

    async def until(self, count: int) -> None:
        """So many records have come."""
        while len(self.records) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)

    async def end(self) -> Finish:
        await asyncio.wait_for(self.ended.wait(), 60)
        return Finish(self.records[-1][1])

    @property
    def ids(self) -> list[int]:
        return [token for token, _, _, _ in self.records if token >= 0]

    @property
    def text(self) -> str:
        return "".join(read_extra(extra).text or "" for _, _, _, extra in self.records if extra)

    @property
    def error(self) -> str:
        return read_extra(self.records[-1][3]).message


class Served:
    """A host, its catalog and its engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.registry, self.catalog = Registry(), Catalog()
        self.host = VersionLoader(self.registry, catalog=self.catalog)
        self.engine = Engine(self.catalog)

    async def load_rig(self, rig: str, **fields: Any) -> Version:
        """One of the scripted engines; `fields` over its model.yaml."""
        folder = RIGS / rig / "m1"
        return await self._load(folder / "1", {**read_yaml(folder / "model.yaml", "model.yaml"), **fields})

    async def load_code(self, code: str, name: str = "m1", **fields: Any) -> Version:
        """A model.py of the test's own."""
        folder = self._folder / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(code)
        return await self._load(folder, {"backend": "text_python", **fields})

    async def _load(self, folder: Path, config: dict[str, Any]) -> Version:
        parsed = parse_model_config({"restart_backoff_s": 0.01, "restart_backoff_max_s": 0.02, **config})
        version = Version(folder.parent.name, 1, folder, parsed)
        self.catalog.put(version)
        self.catalog.move(version, VersionState.LOADING)
        await self.host.load(version)
        self.catalog.move(version, VersionState.AVAILABLE)
        return version

    def ask(self, version: Version, ids: Sequence[int] = (1,), *, reads: bool = True, **fields: Any) -> Heard:
        """Start a sequence; `fields` are those of Sampling and TextNote."""
        sampling = {key: fields.pop(key) for key in list(fields) if key in Sampling.__struct_fields__}
        heard = Heard(reads=reads)
        note = TextNote(sampling=Sampling(**sampling), **fields)
        heard.run = self.engine.generate(version, ids, note, heard)
        return heard

    async def unload(self, version: Version) -> None:
        """As the repository does it."""
        self.catalog.move(version, VersionState.UNLOADING)
        await self.host.unload(version)

    def queue(self, version: Version) -> TextQueue:
        scheduler = scheduler_of(version)
        assert isinstance(scheduler, TextScheduler)
        return scheduler.queue

    def left(self, version: Version) -> tuple[int, ...]:
        """Return all that is still held: nothing, when nobody is left."""
        queue = self.queue(version)
        ring = queue.ring
        return ring.outstanding(), ring.slab_pages_used(), queue.waiting, queue.unreleased, queue.prompt_pages

    def pids(self, version: Version) -> list[int]:
        hosted = next(h for h in self.host.hosted.values() if h.version is version)
        return hosted.group.pids


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    """A host; nothing of its text models may be held when the test is done."""
    served = Served(folder)
    try:
        yield served
        for hosted in list(served.host.hosted.values()):
            await until(lambda version=hosted.version: not any(served.left(version)))
    finally:
        await served.host.close()
        served.registry.close()


async def until(true: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, [c.cell_contents for c in true.__closure__ or ()]
        await asyncio.sleep(0.002)


def run(work: Awaitable[None]) -> None:
    uvloop.run(asyncio.wait_for(work, 200))
