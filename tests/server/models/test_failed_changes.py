"""A change of a served model that cannot be loaded: the old version answers, every page says what failed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from fastserve.cli.client import models
from fastserve.errors import Kind, ServeError
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.settings import Listener
from fastserve.workers import liveness
from fastserve.workers.group import WorkerGroup
from tests import proc
from tests.repository.folders import replace
from tests.server.processes.test_fronts import connect_to_each
from tests.server.processes.test_silent import BRISK
from tests.server.rig import SOURCE, Client, Served, run, serving, write_model

pytestmark = pytest.mark.logs_errors


def arenas() -> list[str]:
    """Return the descriptors of arenas that this process has."""
    links = {fd: Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")}
    return [fd for fd, link in links.items() if link.is_symlink() and "fastserve-arena" in os.readlink(link)]


BROKEN = SOURCE + "\nraise ValueError('the weights are gone')\n"
REASON = "the weights are gone"


async def ready(client: Client) -> tuple[int, dict]:
    status, body = await client.get("/healthz/ready")
    return status, json.loads(body)["models"]["twice"]


async def command(served: Served) -> str:
    """Return the output of `fastserve models`."""
    arguments = ["--url", f"http://127.0.0.1:{served.port}"]
    result = await asyncio.to_thread(CliRunner().invoke, models, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("fronts", [1, 2])
@pytest.mark.parametrize("what", ["code", "config"])
def test_every_page_says_what_failed_and_since_when(tmp_path: Path, what: str, fronts: int):
    folder = write_model(tmp_path)
    code, config = folder / "1" / "model.py", folder / "model.yaml"
    good = code.read_text(), config.read_text()
    more = {"model_control": "poll", "poll_s": 0.05, "load_retry_s": 0.05}

    async def work() -> None:
        async with serving(tmp_path, frontends=fronts, load_models=(), **more) as served:
            clients = await connect_to_each(served, fronts) if fronts > 1 else {0: await served.client()}
            client = clients[max(clients)]
            assert (await ready(client))[1]["failed"] is None
            if what == "code":
                replace(code, BROKEN)
            else:
                replace(config, good[1].replace("max_batch_size: 4", "max_batch_size: many"))
            reason = REASON if what == "code" else "max_batch_size"
            while (await ready(client))[1]["failed"] is None:
                await asyncio.sleep(0.01)
            status, found = await ready(client)
            assert (status, found["ready"]) == (200, True), "the old version answers"
            assert reason in found["failed"]["reason"]
            assert found["failed"]["since"].startswith("20")
            assert await served.ask(2.0) == (200, [4.0])
            page = (await client.get("/metrics"))[1].decode()
            name = "fastserve_model_load_failed_since_seconds{"
            (line,) = [row for row in page.splitlines() if row.startswith(name)]
            assert 'model="twice"' in line
            assert reason in line
            assert float(line.split()[-1]) == pytest.approx(found["failed"]["at"], abs=1)
            numbers = json.loads((await client.get("/console/numbers"))[1])
            (shown,) = numbers["models"]
            assert (shown["ready"], shown["failed"]) == (True, found["failed"])
            told = await command(served)
            assert "AVAILABLE" in told
            assert f"failed to load, since {found['failed']['since']}" in told
            assert reason in told
            replace(code, good[0])
            replace(config, good[1])
            while (await ready(client))[1]["failed"] is not None:
                await asyncio.sleep(0.01)
            assert b"model_load_failed_since" not in (await client.get("/metrics"))[1]
            assert "failed" not in await command(served)

    run(work())


@pytest.mark.parametrize("what", ["unload", "failed load"])
def test_a_server_that_stops_ends_the_cleanup_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The loader's list has no such version, before or after: only this cleanup can close its memory."""
    write_model(tmp_path)

    def fail(*_: object) -> None:
        raise ServeError(Kind.INTERNAL, "it cannot be opened")

    async def work() -> None:
        stopping, released, stop = asyncio.Event(), asyncio.Event(), WorkerGroup.stop

        async def stop_when_released(group: WorkerGroup, grace_s: float) -> None:
            stopping.set()
            await released.wait()
            await stop(group, grace_s)

        async with serving(tmp_path) as served:
            host = served.server.host
            (hosted,) = host.hosted.values()
            served_before, version = set(arenas()), hosted.version
            monkeypatch.setattr(WorkerGroup, "stop", stop_when_released)
            if what == "unload":
                work = host.unload(version)
            else:
                monkeypatch.setattr(host, "_open", fail)
                work = host.load(Version("twice", 1, version.folder, version.config))
            cleanup = asyncio.create_task(work)
            await stopping.wait()
            assert arenas()
            cleanup.cancel()
            await asyncio.wait({cleanup}, timeout=0.01)
            released.set()
            with pytest.raises(asyncio.CancelledError):
                await cleanup
            if what == "unload":
                assert hosted.arena.memory_fd == -1
            else:
                assert set(arenas()) == served_before

    run(work())


def model_ready_over_grpc(address: str) -> bool:
    messages = load("kserve_v2")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
        data = call(messages.ModelReadyRequest(name="twice").SerializeToString(), timeout=30)
    return bool(messages.ModelReadyResponse.FromString(data).ready)


def test_a_model_without_a_worker_is_not_ready_by_its_own_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its server said so, the model itself did not."""
    monkeypatch.setattr(liveness, "SILENCE_LIMITS", BRISK)
    write_model(tmp_path, restart_backoff_s=0.01)

    async def work() -> None:
        async with serving(tmp_path, http=(), listen=(Listener("127.0.0.1:0"),)) as served:
            client, address = await served.client(), f"127.0.0.1:{served.port}"
            assert (await client.get("/v2/models/twice/ready"))[0] == 200
            assert await asyncio.to_thread(model_ready_over_grpc, address)
            code = tmp_path / "twice" / "1" / "model.py"
            good = code.read_text()
            replace(code, BROKEN)  # who is started again does not come up
            proc.stop(served.pids[0])
            while (await client.get("/v2/models/twice/ready"))[0] == 200:
                await asyncio.sleep(0.01)
            status, body = await client.get("/v2/models/twice/versions/1/ready")
            assert status == 400, body
            assert not await asyncio.to_thread(model_ready_over_grpc, address)
            status, page = await client.get("/api/status/twice?format=json")
            assert b"UNAVAILABLE" in page, page
            replace(code, good)
            while (await client.get("/v2/models/twice/ready"))[0] != 200:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(model_ready_over_grpc, address)

    run(work())
