"""One server inside the tests' own loop, with every model there is, for all tests of a process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest
import uvloop

from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.engine import scheduler_of
from fastserve.server import Server
from fastserve.settings import Limits, Listener, Settings
from tests.conformance import models
from tests.conformance.ways import KEY, REGION, SLOT_BYTES, SLOTS, Answer, Line, Way, region_path
from tests.conftest import Descriptors
from tests.engine.rig import deadlines_pass

WAIT_S = 60.0
Found = TypeVar("Found")


FileId = tuple[int, int]  # device and inode: files of two devices may have the same inode


def file_id(found: os.stat_result) -> FileId:
    return found.st_dev, found.st_ino


class Rig:
    """An open server. Everything of it runs inside `run`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = uvloop.new_event_loop()
        # Of many threads each test that makes one more would leave it behind.
        self.loop.set_default_executor(ThreadPoolExecutor(1))
        here = (Listener("127.0.0.1:0", ("app", "tfserving", "kserve_v2", "triton_v1", "grps")),)
        rpcs = (Listener("127.0.0.1:0", ("tfserving", "kserve_v2", "triton_v1", "grps")),)
        names = [f"{form}-{path}" for form in (*models.FORMS, *models.LIKE) for path in models.PATHS]
        paths = {f"/{name}": name for name in names}
        self.server = Server(
            Settings(
                repository=str(folder),
                http=here,
                grpc=rpcs,
                dialects=("fastserve.app.json_api:SPEC",),
                dialect_options={"app": {"paths": paths}},
                model_control="explicit",
                load_models=("*",),
                drain_s=5.0,
                limits=Limits(idle_timeout_s=3600),  # or a test opens the channel's connection anew
                allow_client_shm=True,
                response_cache_bytes=1 << 20,
                model_defaults={
                    "max_queue_rows": models.QUEUE_ROWS,
                    "restart_backoff_s": 0.01,
                    "restart_backoff_max_s": 0.02,  # workers are killed by the dozen
                },
            )
        )
        self.general = 0  # requests the general path was asked for
        self.lines: list[Line] = []  # opened and perhaps not closed
        self._numbers = itertools.count(10)
        self._learned: set[tuple[str, Any, int]] = set()

    def run(self, work: Coroutine[Any, Any, Found], limit_s: float = 200.0) -> Found:
        """Run a test; afterwards nothing may be outstanding, and its connections are closed."""
        return self.loop.run_until_complete(self._run(work, limit_s))

    async def _run(self, work: Coroutine[Any, Any, Found], limit_s: float) -> Found:
        before = Descriptors()
        try:
            found = await asyncio.wait_for(work, limit_s)
        finally:
            self.leave()
        await self.settled()
        with contextlib.suppress(TimeoutError):  # what is a leak, conftest.py tells
            await self.until(lambda: not before.gained())
        return found

    def leave(self) -> None:
        """Every client goes."""
        for line in self.lines:
            line.leave()
        self.lines.clear()

    async def open(self) -> None:
        """Also what grpcio opens for good."""
        await self.server.open()
        self.http = self.server.front.http[0].address
        self.channel = grpc.aio.insecure_channel("{}:{}".format(*self.server.front.grpc[0].address))
        self.server.front.regions.register(REGION, f"{KEY}-{os.getpid()}", 0, SLOTS * SLOT_BYTES)
        await self.channel.channel_ready()
        await self.channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
        self.standing = len(self.server.front.http[0].connections)  # gRPC's may be one of them
        self._note_general_requests()
        for form in (*models.FORMS, *models.LIKE):
            self.take_fast_path_away(f"{form}-slow")

    async def close(self) -> None:
        await self.channel.close()
        await self.server.drain(5)

    def _note_general_requests(self) -> None:
        engine: Any = self.server.front.engine
        infer = engine.infer

        async def noting(*args: Any) -> Any:
            self.general += 1
            return await infer(*args)

        engine.infer = noting

    def take_fast_path_away(self, model: str) -> None:
        scheduler: Any = scheduler_of(self.version(model))
        scheduler.fast_queue = scheduler.cache_stage = lambda: None

    def connection_from(self, address: tuple[str, int]) -> Any:
        """The server's end of a client's connection, None until it has one."""
        for connection in self.server.front.http[0].connections:
            transport: Any = getattr(connection, "_transport", None)
            if transport is not None and transport.get_extra_info("peername") == address:
                return connection
        return None

    def version(self, model: str) -> Any:
        found = self.server.catalog.available(model)
        assert found is not None
        return found

    def queue(self, model: str) -> BatchQueue:
        (found,) = [h.queue for h in self.server.host.hosted.values() if h.version is self.version(model)]
        return found

    def memory(self, model: str) -> FileId:
        """The arena of its version."""
        return file_id(os.fstat(self.queue(model).arena.memory_fd))

    async def reload(self, model: str) -> None:
        """Load it anew, as clients do whose files have changed."""
        file = self.folder / model / "1" / "model.py"
        file.write_text(file.read_text() + "\n# changed\n")
        await self.server.repository.load(model)

    def is_settled(self) -> bool:
        """Nothing is outstanding in any arena, nobody waits, no connection is open."""
        queues = [hosted.queue for hosted in self.server.host.hosted.values()]
        return (
            all(
                q.ring.outstanding() == 0 and q.ring.slab_pages_used() == 0 and q.waiting == q.unreleased == 0
                for q in queues
            )
            and len(self.server.front.http[0].connections) <= self.standing
        )

    async def settled(self) -> None:
        try:
            await self.until(self.is_settled)
        except TimeoutError:
            raise AssertionError(f"never given back: {self.holds()}") from None

    def holds(self) -> dict[str, Any]:
        """Return all that is outstanding, by model."""
        found: dict[str, Any] = {"connections": len(self.server.front.http[0].connections)}
        for hosted in self.server.host.hosted.values():
            queue = hosted.queue
            held = queue.ring.outstanding(), queue.ring.slab_pages_used(), queue.waiting, queue.unreleased
            if any(held):
                found[hosted.version.model] = held
        return found

    async def until(self, true: Callable[[], object], limit_s: float = WAIT_S) -> None:
        """Let the loop turn until something is so."""
        end = self.loop.time() + limit_s
        while not true():
            if self.loop.time() > end:
                raise TimeoutError
            await asyncio.sleep(0.001)  # below, uvloop does not wait at all

    # --- what the models do --------------------------------------------------------------------------

    def seen(self, model: str) -> list[list[float]]:
        """The first number of each row, for every batch that the worker began to run."""
        path = self.folder / model / "seen"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[float(value) for value in line.split(",")] for line in lines]

    @contextlib.contextmanager
    def holding(self, model: str) -> Iterator[Callable[[], None]]:
        """Batches with HOLD run until the block ends, or what it gives is called."""
        go = self.folder / model / "go"
        go.unlink(missing_ok=True)
        try:
            yield go.touch
        finally:
            go.touch()

    async def until_running(self, model: str, value: float) -> None:
        """A batch with this number has begun, and no other since."""
        await self.until(lambda: value in [v for batch in self.seen(model)[-1:] for v in batch])

    async def until_workers(self, model: str, count: int) -> None:
        """So many are alive."""
        version = self.version(model)
        await self.until(lambda: self.server.host.alive(version) == count)

    async def until_told(self, model: str, value: float) -> None:
        """The model knows that nobody waits for the row with this number."""
        path = self.folder / model / "gone"
        await self.until(lambda: path.exists() and str(value) in path.read_text().split(","))

    def forget_seen(self, model: str) -> None:
        (self.folder / model / "seen").unlink(missing_ok=True)

    def kill(self, model: str) -> None:
        """End the worker that began a batch last."""
        os.kill(int((self.folder / model / "runner").read_text()), signal.SIGKILL)

    def deadlines_pass(self) -> contextlib.AbstractContextManager[None]:
        return deadlines_pass(hosted.queue for hosted in self.server.host.hosted.values())

    @contextlib.contextmanager
    def policy_runs_out(self, model: str) -> Iterator[None]:
        """Let the time pass that a queue policy gives."""
        scheduler: Any = scheduler_of(self.version(model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "_clock", _an_hour_later)
            scheduler._look()
            yield

    def fresh(self) -> float:
        """A number no request has had."""
        return float(next(self._numbers))

    def fresh_hold(self) -> float:
        """A number no request has had, at which the model holds its batch."""
        return models.HOLD - next(self._numbers)

    def forget_learned(self) -> None:
        self._learned.clear()

    async def learn(self, way: Way, model: str, slots: int = 1) -> None:
        """Ask until a fast path would know such requests."""
        for slot in range(slots):
            known = (way.name, self.version(model), slot if way.outside else 0)
            if known not in self._learned:
                self._learned.add(known)
                for _ in range(2):
                    rows = [self.fresh()]
                    answer = await way.ask(self, way.build(model, rows, slot=slot))
                    assert is_right(answer, way, rows), answer


def _an_hour_later() -> int:
    return time.monotonic_ns() + 3600 * 10**9


@contextlib.contextmanager
def open_rig(folder: Path) -> Iterator[Rig]:
    models.write_all(folder)
    with open(region_path(), "wb") as file:
        file.truncate(SLOTS * SLOT_BYTES)
    rig = Rig(folder)
    try:
        rig.loop.run_until_complete(rig.open())
        try:
            yield rig
        finally:
            rig.loop.run_until_complete(rig.close())
            rig.loop.run_until_complete(rig.loop.shutdown_default_executor())
    finally:
        rig.loop.close()
        os.unlink(region_path())


def is_right(answer: Answer, way: Way, rows: list[float]) -> bool:
    """Whether this answers those rows."""
    return (answer.status, answer.rows) == (way.status("OK"), [2 * row for row in rows])
