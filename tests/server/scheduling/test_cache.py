"""The response cache in a whole server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from fastserve.settings import Listener
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import HOLD, KILL_ONCE, ask_one, release, run, seen, serving, write_model

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
response_cache { enable: true }
"""
SOURCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        self.count += 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[self.count]], np.int32))])
"""


def test_the_same_is_asked_once_until_the_model_is_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "cached" / "1").mkdir(parents=True)
    (tmp_path / "cached" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "cached" / "1" / "model.py").write_text(SOURCE)

    async def work() -> None:
        async with serving(tmp_path, response_cache_bytes=1 << 20) as at:
            assert [await ask_one(at, "cached", n) for n in (5, 6, 5, 6)] == [1, 2, 1, 2]
            await at.server.repository.unload("cached")
            assert at.server.host.cache is not None
            assert len(at.server.host.cache) == 0
            await at.server.repository.load("cached")
            assert await ask_one(at, "cached", 6) == 1
        async with serving(tmp_path, response_cache_bytes=0) as at:  # no bytes, no cache
            assert [await ask_one(at, "cached", 5) for _ in range(3)] == [1, 2, 3]

    run(work())


@pytest.mark.logs_errors
@pytest.mark.parametrize("asked", [4, 64])
def test_a_native_model_runs_once_for_equal_requests(tmp_path: Path, asked: int) -> None:
    write_model(tmp_path, cache=True, max_batch_size=64)

    async def work() -> None:
        async with serving(tmp_path) as at:
            for number in (HOLD, KILL_ONCE):
                clients = [await at.client() for _ in range(asked)]
                for client in clients:
                    client.send(number)
                if number == HOLD:
                    cache: Any = at.server.host.cache
                    await at.until(lambda: seen(tmp_path))
                    await at.until(lambda c=cache: sum(map(len, c.waiting().values())) == asked - 1)
                    clients.pop(0).close()  # the one that runs, of whom the others are to get no error
                    await at.until(lambda c=cache: sum(map(len, c.waiting().values())) == asked - 2)
                    release(tmp_path)
                replies = [await client.reply() for client in clients]
                if number == KILL_ONCE:
                    replies.remove((503, "the worker process died while it ran this request"))
                assert replies == [(200, [2 * number])] * (asked - 1)
                runs = sum(row == number for batch in seen(tmp_path) for row in batch)
                assert runs == 2, "once, and once more since the client had left, or the worker had died"
                assert await at.ask(number) == (200, [2 * number])
                assert sum(row == number for batch in seen(tmp_path) for row in batch) == runs

    run(work())


@pytest.mark.lingers  # the client of gRPC
@pytest.mark.parametrize("shape", [[2], [-1]])
def test_dialects_share_the_answers_of_a_native_model(tmp_path: Path, shape: list[int]) -> None:
    """Of fixed rows and of others, over HTTP and gRPC, on the general path and on the fast one."""
    tensor = {"dtype": "float32", "shape": shape}
    write_model(tmp_path, cache=True, inputs={"x": tensor}, outputs={"y": tensor}, warmup="off")

    def ask_triton(kind: Any, port: int, binary: dict[str, bool]) -> list[list[float]]:
        with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
            given = kind.InferInput("x", [1, 2], "FP32")
            given.set_data_from_numpy(np.array([[3.0, 0.5]], np.float32), **binary)
            told: list[list[float]] = client.infer("twice", [given]).as_numpy("y").tolist()
            return told

    async def work() -> None:
        async with serving(tmp_path, grpc=(Listener("127.0.0.1:0"),)) as at:
            rpc_port = at.server.front.grpc[0].address[1]
            client = await at.client()
            for _ in range(3):
                for body in (b'{"instances": [[3.0, 0.5]]}', b'{"inputs": [[3.0, 0.5]]}'):
                    status, told = await client.post("/v1/models/twice:predict", body)
                    assert status == 200
                    assert [[6.0, 1.0]] in json.loads(told).values()
                for kind, port, binary in (
                    (tritonclient.http, at.port, {"binary_data": True}),
                    (tritonclient.http, at.port, {"binary_data": False}),
                    (tritonclient.grpc, rpc_port, {}),
                ):
                    assert await asyncio.to_thread(ask_triton, kind, port, binary) == [[6.0, 1.0]]
            assert seen(tmp_path) == [[3.0]]
            assert at.server.host.cache is not None
            assert (at.server.host.cache.hits, at.server.host.cache.misses) == (14, 1)

    run(work())


def test_answers_in_parts_are_not_kept(tmp_path: Path) -> None:
    model = write_model(tmp_path, cache=True)
    run_in_parts = "def run(self, inputs):\n        yield {'y': inputs['x']}\n"
    source = f"class Model:\n    def __init__(self, config): ...\n    {run_in_parts}"
    (model / "1" / "model.py").write_text(source)

    async def work() -> None:
        async with serving(tmp_path, keep_going=True) as at:
            _, body = await (await at.client()).get("/v1/models/twice")
            assert b"cache: given true, allowed: false with a model that answers in parts" in body, body

    run(work())


FRONTS = 3


async def infer(client: Any, number: int) -> bytes:
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    status, body = await client.post("/v2/models/cached/infer", json.dumps({"inputs": [tensor]}).encode())
    assert status == 200, body
    return body


def count_of(body: bytes) -> int:
    """The number of the run that gave the answer."""
    return json.loads(body)["outputs"][0]["data"][0]


def write_cached(folder: Path) -> None:
    (folder / "cached" / "1").mkdir(parents=True)
    (folder / "cached" / "config.pbtxt").write_text(CONFIG)
    (folder / "cached" / "1" / "model.py").write_text(SOURCE)


def test_an_answer_is_kept_for_all_fronts(tmp_path: Path) -> None:
    write_cached(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, response_cache_bytes=1 << 20, frontends=FRONTS) as at:
            clients = await connect_to_each(at, FRONTS)
            for number, first in enumerate(clients.values()):
                told = await infer(first, number)
                assert count_of(told) == number + 1
                for client in (*clients.values(), *clients.values()):
                    assert await infer(client, number) == told
            await at.server.loads.unload("cached", False)
            assert at.server.host.cache is not None
            assert len(at.server.host.cache) == 0
            await at.server.loads.load("cached", None)
            assert {count_of(await infer(client, 0)) for client in clients.values()} == {1}

    run(work())


@pytest.mark.logs_errors
def test_the_cache_outlives_fronts_that_are_killed(tmp_path: Path) -> None:
    """Clients ask for few numbers while fronts die; in the end every front has one answer for each."""
    write_cached(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, response_cache_bytes=1 << 20, frontends=FRONTS) as at:
            cache: Any = at.server.host.cache
            over, found = asyncio.Event(), set[int]()

            async def ask(own: int) -> None:
                turn = 0
                while not over.is_set():
                    client = await at.client()
                    try:
                        for _ in range(20):
                            turn += 1
                            await infer(client, turn % 40)
                            found.add(turn % 40)
                    except (OSError, asyncio.IncompleteReadError):
                        continue  # its front was killed
                    finally:
                        client.close()

            asking = [asyncio.ensure_future(ask(number)) for number in range(4)]
            for turn in range(4):
                link = at.links[turn % 2]
                victim = link.pid
                os.kill(victim, signal.SIGKILL)
                await at.until(
                    lambda link=link, victim=victim: link.pid not in (0, victim) and link._listening
                )
            over.set()
            await asyncio.gather(*asking)
            assert len(found) == 40
            assert cache.audit() == 0
            assert cache.hits > cache.misses
            clients = await connect_to_each(at, FRONTS)
            for number in range(40):
                assert len({await infer(client, number) for client in clients.values()}) == 1

    run(work())
