"""Models that are loaded when they are asked for, by every API, and what the server says of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from fastserve.engine.loader import VersionLoader
from fastserve.server import Server
from fastserve.server import server as server_module
from fastserve.server.server import judge
from fastserve.settings import Listener, Settings
from fastserve.workers import process
from tests.server.listeners.test_key_models import ANSWERED, WORDS, bodies, call, spoken
from tests.server.rig import WAIT_S, run, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe

DIALECTS = ("tfserving", "kserve_v2", "triton_v1", "grps", "textgen", "mlflow")
STREAMS = ("ModelStreamInfer", "StreamInfer")
STATES = ("ModelStatistics", "Status", "GetModelStatus", *STREAMS)
"""RPCs that load nothing, or tell their errors in a message."""
BAD = "class Model:\n    def __init__(self, config):\n        raise ValueError('the weights are torn')\n"

PAIR = """platform: "ensemble"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
ensemble_scheduling { step [
  { model_name: "m1" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "once" } },
  { model_name: "m2" model_version: -1
    input_map { key: "x" value: "once" } output_map { key: "y" value: "y" } } ] }
"""
CALLER = """backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
"""
CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.ask(request) for request in requests]

    def ask(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        asked = pb_utils.InferenceRequest(model_name="m1", requested_output_names=["y"], inputs=[x])
        found = asked.exec()
        if found.has_error():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(found.error().message()))
        return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(found, "y")])
"""


@contextlib.asynccontextmanager
async def serving(folder: Path, **changes: Any) -> AsyncIterator[Server]:
    """Every dialect on one port, over HTTP and gRPC, for models within a budget."""
    place = Listener("127.0.0.1:0", DIALECTS)
    given = {"memory_budget": "1GiB", "keep_alive_s": 0.0, "keep_going": True, **changes}
    server = Server(Settings(repository=str(folder), http=(place,), grpc=(place,), **given))
    await server.open()
    try:
        yield server
    finally:
        await server.drain(5)


async def put_away(server: Server, name: str) -> None:
    """Unload a model as another one's load does, where it is loaded."""
    assert server.repository.residency is not None
    await server.repository.residency._loads.put_away(name)
    assert server.catalog.available(name) is None
    await server.fronts.settle()


async def withdrawn(server: Server, ensemble: str) -> None:
    while server.catalog.available(ensemble) is not None:
        await asyncio.sleep(0.002)


def root_of(server: Server) -> str:
    return "http://{}:{}".format(*server.front.http[0].address)


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
def test_http_requests_wait_for_their_models(tmp_path: Path, http2: bool) -> None:
    write_model(tmp_path, "m")
    shutil.copytree(WORDS, tmp_path / "m-talks")

    async def work() -> None:
        async with (
            serving(tmp_path, in_process=True) as server,
            httpx.AsyncClient(http1=not http2, http2=http2, timeout=60) as client,
        ):
            root, wrong = root_of(server), []
            for name in ("m", "m-talks"):
                for target, body in bodies(name):
                    await put_away(server, name)
                    first = await client.post(root + target, json=body)
                    warm = await client.post(root + target, json=body)
                    await put_away(server, name)
                    again = await client.post(root + target, json=body)
                    for cold in (first, again):
                        numbers = name == "m" and cold.content != warm.content
                        if (cold.status_code, warm.status_code) != (200, 200) or numbers:
                            wrong.append(f"{target}: {cold.status_code} {cold.text}, warm {warm.text}")
            for target in ("/v2/models/m", "/v2/models/m/config", "/v1/models/m/metadata"):
                await put_away(server, "m")
                cold = await client.get(root + target)
                if cold.status_code != 200:
                    wrong.append(f"{target}: {cold.status_code} {cold.text}")
            assert not wrong, "\n".join(wrong)

    run(work())


def test_grpc_requests_wait_for_their_models(tmp_path: Path) -> None:
    write_model(tmp_path, "m")

    async def work() -> None:
        async with serving(tmp_path, in_process=True) as server:
            place, wrong = "{}:{}".format(*server.front.grpc[0].address), []
            async with grpc.aio.insecure_channel(place) as channel:
                for path, message in spoken("m"):
                    await put_away(server, "m")
                    first = await call(channel, path, message, {})
                    warm = await call(channel, path, message, {})
                    await put_away(server, "m")
                    again = await call(channel, path, message, {})
                    loaded = server.catalog.available("m") is not None
                    if (first, again) != (warm, warm) and path.rpartition("/")[2] not in STATES:
                        wrong.append(f"{path}: {first}, {again}, warm {warm}")
                    if (path in ANSWERED or path.endswith(STREAMS)) and not loaded:
                        wrong.append(f"{path} has not loaded it: {again}")
                    if path in ANSWERED and again != "OK":
                        wrong.append(f"{path}: {again}")
            assert not wrong, "\n".join(wrong)

    run(work())


def test_a_load_that_fails_is_answered_in_each_api_s_form(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    write_model(tmp_path, "bad")
    (tmp_path / "bad" / "1" / "model.py").write_text(BAD)

    async def work() -> None:
        async with (
            serving(tmp_path, memory_budget="60MB", in_process=True, load_retry_s=60) as server,
            httpx.AsyncClient(timeout=60) as client,
        ):
            root = root_of(server)
            cold, _ = await asyncio.gather(
                client.get(f"{root}/v2/models/bad/ready"), client.get(f"{root}/v2/health/ready")
            )
            assert cold.status_code == 200  # as far as anybody knows
            for target, body in bodies("bad"):
                reply = await client.post(root + target, json=body)
                assert reply.status_code == 503, target
                assert "the weights are torn" in reply.text
                assert int(reply.headers["retry-after"]) >= 1
            assert (await client.get(f"{root}/v2/models/bad/ready")).status_code == 400
            assert (await client.get(f"{root}/v2/health/ready")).status_code == 200
            place = "{}:{}".format(*server.front.grpc[0].address)
            async with grpc.aio.insecure_channel(place) as channel:
                for path, message in spoken("bad"):
                    if path in ANSWERED:
                        told = await call(channel, path, message, {})
                        assert told.startswith("UNAVAILABLE"), told
                        assert "the weights are torn" in told

    run(work())


KILLED = """
import os, pathlib, signal

class Model:
    def __init__(self, config):
        with open(pathlib.Path(config["parameters"]["folder"], "born"), "a") as file:
            file.write(".")
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.logs_errors
def test_a_worker_that_the_kernel_kills_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = itertools.count()  # as if memory had run out meanwhile
    monkeypatch.setattr(process, "count_oom_kills", lambda: next(kills))
    write_model(tmp_path, "bad")
    (tmp_path / "bad" / "1" / "model.py").write_text(KILLED)

    async def work() -> None:
        async with (
            serving(tmp_path, load_retry_s=20.0, poll_s=3600.0) as server,
            httpx.AsyncClient(timeout=60) as client,
        ):
            residency = server.repository.residency
            assert residency is not None
            for tries, due_s in ((1, 20), (1, 20), (2, 40)):
                if tries > len((tmp_path / "born").read_text()):
                    residency._failures["bad"].due_s = 0.0  # the time of its back-off is over
                reply = await client.post(
                    f"{root_of(server)}/v1/models/bad:predict", json={"instances": [[1, 2]]}
                )
                assert reply.status_code == 503
                assert "killed by SIGKILL, while the kernel killed processes because memory ran" in reply.text
                assert due_s - 19 < int(reply.headers["retry-after"]) <= due_s
                assert (tmp_path / "born").read_text() == "." * tries
                assert residency.used == 0

    run(work())


@pytest.mark.parametrize("fronts", [1, 3])
def test_models_take_turns_in_memory(tmp_path: Path, fronts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real workers, on connections to several front processes."""
    # What forked workers share with others that come and go is no matter here.
    monkeypatch.setattr(VersionLoader, "memory_bytes", lambda host, versions: [20_000_000] * len(versions))
    for number in range(4):
        write_model(tmp_path, f"m{number}", parameters={"add": number}, pin=number == 0)

    async def work() -> None:
        async with (
            serving(tmp_path, memory_budget="75MB", frontends=fronts) as server,
            httpx.AsyncClient(timeout=60) as client,
        ):
            root, residency = root_of(server), server.repository.residency
            assert residency is not None
            assert any(model.latest is None for model in server.catalog.models.values())

            async def ask(number: int) -> None:
                async with httpx.AsyncClient(timeout=60) as one:
                    for _ in range(2):
                        target = f"{root}/v1/models/m{number}:predict"
                        reply = await one.post(target, json={"instances": [[3, 4]]})
                        assert reply.status_code == 200, reply.text
                        assert reply.json() == {"predictions": [[6.0 + number, 8.0 + number]]}

            pinned = server.catalog.available("m0")
            await asyncio.gather(*(ask(number % 4) for number in range(16)))
            for number in (3, 2, 1, 3):
                await put_away(server, f"m{number}")
                await ask(number)
            assert server.catalog.available("m0") is pinned
            assert residency.used <= residency.budget
            await put_away(server, "m1")
            told: list[dict[str, str]] = [{"reason": ""}] * 4
            end = time.monotonic() + WAIT_S
            while "first request loads it" not in told[1]["reason"]:  # other fronts hear of it a little later
                assert time.monotonic() < end, told
                told = (await client.post(f"{root}/v2/repository/index")).json()
            assert [one["state"] for one in told] == ["READY"] * 4
            status = (await client.get(f"{root}/v1/models/m1")).json()["model_version_status"]
            assert [one["state"] for one in status] == ["AVAILABLE"]
            assert (await client.get(f"{root}/v2/models/m1/ready")).status_code == 200
            assert (await client.get(f"{root}/v2/models/m1/versions/7/ready")).status_code == 400
            page = (await client.get(f"{root}/metrics")).text
            assert 'fastserve_models_memory_bytes{state="budget"} 75000000' in page

    run(work())


@pytest.mark.parametrize("fronts", [1, 3])
def test_models_come_with_those_that_they_use(tmp_path: Path, fronts: int) -> None:
    """An ensemble with its steps, and a model with the one that it calls."""
    for number in (1, 2):
        write_model(tmp_path, f"m{number}", parameters={"add": number})
    for name, config in (("pair", PAIR), ("caller", CALLER)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    (tmp_path / "caller" / "1" / "model.py").write_text(CALLS)

    async def work() -> None:
        async with serving(tmp_path, in_process=True, frontends=fronts) as server:
            root = root_of(server)

            async def ask(name: str) -> list[float]:
                body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}]}
                async with httpx.AsyncClient(timeout=60) as client:
                    reply = await client.post(f"{root}/v2/models/{name}/infer", json=body)
                assert reply.status_code == 200, reply.text
                data: list[float] = reply.json()["outputs"][0]["data"]
                return data

            for gone in ((), ("m1",), ("m2",), ("m1", "m2"), ("caller", "m1")):
                for name in gone:
                    await put_away(server, name)
                if {"m1", "m2"} & {*gone}:  # also where it was being loaded while its step went
                    await asyncio.wait_for(withdrawn(server, "pair"), 60)
                else:
                    assert server.catalog.available("pair") is not None
                assert await ask("caller") == [7.0, 9.0]
                for name in gone:
                    await put_away(server, name)
                assert await ask("pair") == [16.0, 20.0]

    run(work())


def test_readiness_is_judged_in_a_part_of_the_time_while_models_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, name="m0")
    judged: list[bool] = []

    def count(*given: Any, **options: Any) -> Any:
        found = judge(*given, **options)
        judged.append(found.ready)
        return found

    async def work() -> None:
        async with serving(tmp_path) as server:
            monkeypatch.setattr(server_module, "judge", count)
            for _ in range(1000):
                server._health_changed()
            assert len(judged) < 100
            before = len(judged)
            while len(judged) == before and server._judging is not None:
                await asyncio.sleep(0.001)
            assert server._judging is None, "the last change was judged"
            assert server.front.readiness.ready
            server._may_judge_s = time.monotonic() + 3600
            server._health_changed()
            assert server._judging is not None
        assert server._judging is None, "a server that stops says so at once"

    run(work())
