"""Processes that are stopped or stuck: noticed, told of by readiness, replaced; requests are answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ServeError
from fastserve.server import front_process
from fastserve.workers import liveness
from fastserve.workers.liveness import SilenceLimits
from tests import proc
from tests.backends.triton_api.rig import model, repeating
from tests.backends.triton_api.rig import serving as serving_triton
from tests.batching import models
from tests.batching.test_batched_service import Service
from tests.server.models import test_text
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import HOLD, SOURCE, Served, release, run, seen, serving, write_model

pytestmark = [pytest.mark.logs_errors, pytest.mark.waits]
BRISK = SilenceLimits(ping_s=0.2, silent_s=1.0, computing_s=2.0, starved_s=60.0)
COLUMNS = {"dtype": "float32", "shape": [2]}
SLABS = {"dtype": "float32", "shape": [-1]}
# A thread of the model that takes the interpreter's lock when the test says so, and does not give it back.
TAKES_THE_LOCK = """
import ctypes, re, threading
{source}
class Taking(Model):
    def __init__(self, config):
        super().__init__(config)
        threading.Thread(target=self.take, daemon=True).start()

    def take(self):
        while not (self.folder / "take").exists():
            time.sleep(0.01)
        if (self.folder / "taken").exists():
            return
        (self.folder / "taken").touch()
        {take}

Model = Taking
"""
SLEEPS = "ctypes.PyDLL(None).sleep(600)"
COMPUTES = "re.match(r'(a|aa)+$', 'a' * 60 + 'b')"


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENCE_LIMITS", BRISK)


async def replaced(served: Served, pid: int) -> None:
    """Until readiness has said no and another worker is there and ready."""
    front = served.server.front
    await served.until(lambda: not front.readiness.ready)
    await served.until(lambda: front.readiness.ready and pid not in served.pids)


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": {"x": COLUMNS}, "outputs": {"y": COLUMNS}},
        {"inputs": {"x": SLABS}, "outputs": {"y": SLABS}},
        {"shared_worker": "all"},
        {"run_timeout_ms": 0},
    ],
    ids=["columns", "slabs", "shared", "no limit"],
)
def test_an_idle_worker_that_is_stopped_is_replaced(tmp_path: Path, changes: dict[str, Any]):
    write_model(tmp_path, **changes)

    async def work() -> None:
        async with serving(tmp_path) as served:
            (pid,) = served.pids
            proc.stop(pid)
            asking = served.asking(2.0)
            await replaced(served, pid)
            assert await asking == (200, [4.0])

    run(work())


def test_what_a_stopped_worker_was_woken_for_another_takes(tmp_path: Path):
    write_model(tmp_path, instances=2)

    async def work() -> None:
        async with serving(tmp_path) as served:
            first, _ = served.pids
            proc.stop(first)
            assert [status for status, _ in [await served.ask(2.0) for _ in range(4)]] == [200] * 4
            assert served.server.front.readiness.ready, "one worker answers"
            await served.until(lambda: first not in served.pids and 0 not in served.pids)

    run(work())


def test_a_worker_that_is_stopped_in_its_batch_is_replaced_and_the_batch_runs_elsewhere(tmp_path: Path):
    write_model(tmp_path, max_batch_size=1, instances=2, run_timeout_ms=0)

    async def work() -> None:
        async with serving(tmp_path) as served:
            asking = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            ring = next(iter(served.server.host.hosted.values())).queue.ring
            (worker,) = {found[3] for found in map(ring.describe, range(ring.slots)) if found[0] == "running"}
            pid = served.pids[worker]
            proc.stop(pid)
            await served.until(lambda: pid not in served.pids)
            release(tmp_path)
            assert await asking == (200, [HOLD * 2])

    run(work())


def test_a_batch_that_may_run_for_ever_is_not_ended(tmp_path: Path):
    """It computes for many times as long as an idle worker may be silent."""
    write_model(tmp_path, run_timeout_ms=0)

    async def work() -> None:
        async with serving(tmp_path) as served:
            (pid,) = served.pids
            asking = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            await asyncio.sleep(5 * BRISK.silent_s)
            release(tmp_path)
            assert await asking == (200, [HOLD * 2])
            assert served.pids == [pid]

    run(work())


@pytest.mark.parametrize("take", [SLEEPS, COMPUTES], ids=["sleeps", "computes"])
def test_a_worker_whose_model_keeps_the_interpreters_lock_is_replaced(tmp_path: Path, take: str):
    folder = write_model(tmp_path, parameters={"folder": str(tmp_path)})
    source = TAKES_THE_LOCK.format(source=SOURCE, take=take)
    (folder / "1" / "model.py").write_text(source)

    async def work() -> None:
        async with serving(tmp_path) as served:
            (pid,) = served.pids
            (tmp_path / "take").touch()
            await replaced(served, pid)
            assert await served.ask(2.0) == (200, [4.0])

    run(work())


def test_a_worker_that_is_stopped_while_it_loads_is_not_waited_for(tmp_path: Path):
    """A load that stands still ends with the reason, long before load_timeout_s."""
    folder = write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            source = "import os, signal\n" + SOURCE + "\nos.kill(os.getpid(), signal.SIGSTOP)\n"
            (folder / "2").mkdir()
            (folder / "2" / "model.py").write_text(source)
            with pytest.raises(ServeError, match="it is stopped by a signal"):
                await served.server.repository.load("twice")
            assert await served.ask(2.0) == (200, [4.0])

    run(work())


def test_a_busy_tenant_of_a_shared_process_excuses_the_others(tmp_path: Path):
    """A model that keeps the lock in its batch may; who waits for the lock is not blamed."""
    source = SOURCE.replace("time.sleep(0.001)", "__import__('ctypes').PyDLL(None).usleep(200000)")
    for name in ("twice", "other"):
        folder = write_model(tmp_path, name, shared_worker="all", run_timeout_ms=0)
        (folder / "1" / "model.py").write_text(source)

    async def work() -> None:
        async with serving(tmp_path) as served:
            before = served.pids
            asking = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            await asyncio.sleep(5 * BRISK.silent_s)
            release(tmp_path)
            assert await asking == (200, [HOLD * 2])
            assert served.pids == before

    run(work())


@pytest.mark.parametrize("config", [model("trouble", None, None), repeating()], ids=["plain", "decoupled"])
def test_an_idle_worker_of_tritons_form_that_is_stopped_is_replaced(tmp_path: Path, config: dict[str, Any]):
    async def work() -> None:
        async with serving_triton(tmp_path, config) as at:
            (hosted,) = at.host.hosted.values()
            version = at.version(config["name"])
            (pid,) = hosted.group.pids
            proc.stop(pid)
            while not at.host.stuck(version):
                await asyncio.sleep(0.005)
            assert "it is stopped by a signal" in at.host.stuck(version)
            while at.host.stuck(version) or not hosted.group.alive:
                await asyncio.sleep(0.005)
            assert pid not in hosted.group.pids

    run(work())


@pytest.mark.parametrize("streaming", [False, True], ids=["idle", "in a stream"])
def test_a_text_worker_that_is_stopped_is_replaced(tmp_path: Path, streaming: bool):
    test_text.write(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            (pid,) = served.pids
            client = await served.client()
            if streaming:
                test_text.send(client, 1, 100_000)
                await test_text.tokens(client, 10)
            proc.stop(pid)
            if streaming:
                while "error" not in await test_text.event(client):
                    pass
            await served.until(lambda: pid not in served.pids and 0 not in served.pids)
            await served.until(lambda: served.server.front.readiness.ready)
            await test_text.whole(await served.client(), 3, 50)

    run(work())


def test_a_worker_of_the_library_that_is_stopped_is_replaced():
    async def work() -> None:
        async with Service(models.Sleepy) as service:
            assert await service.do_one(3) == 9
            (pid,) = service._group.pids
            proc.stop(pid)
            assert await service.do_one(4) == 16
            assert pid not in service._group.pids

    run(work())


@pytest.mark.parametrize("fronts", [2, 3])
def test_a_front_that_is_stopped_is_replaced(tmp_path: Path, fronts: int):
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=fronts) as served:
            await connect_to_each(served, fronts)
            link = served.links[-1]
            pid, front = link.pid, served.server.front
            proc.stop(pid)
            await served.until(lambda: not front.readiness.ready)
            assert f"front process {link.front}" in front.readiness.reason
            assert "it is stopped by a signal" in front.readiness.reason
            await served.until(lambda: link.pid not in (0, pid) and front.readiness.ready)
            for client in (await connect_to_each(served, fronts)).values():
                assert await client.predict(2.0) == (200, [4.0])

    run(work())


def test_a_server_with_a_stopped_front_stops(tmp_path: Path):
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            proc.stop(served.links[0].pid)
            served.close()
            drain = served.server.drain
            served.server.drain = lambda grace_s: drain(120)  # type: ignore[method-assign]

    run(work(), limit_s=60)


def test_a_front_whose_owner_is_silent_is_not_ready(tmp_path: Path):
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            client = (await connect_to_each(served, 2))[1]
            served.server.fronts._pinging.cancel()  # an owner that is stopped says nothing
            for _ in range(400):
                status, body = await client.get("/healthz/ready")
                if status == 503:
                    break
                await asyncio.sleep(0.1)
            assert json.loads(body)["reason"] == front_process.OWNER_SILENT
            served.server.fronts._ping()
            for _ in range(200):
                if (await client.get("/healthz/ready"))[0] == 200:
                    return
                await asyncio.sleep(0.1)
            raise AssertionError("the owner speaks again")

    run(work())
