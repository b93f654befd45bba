"""The response cache in a whole server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import ask_one, run, serving

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
        async with serving(tmp_path) as at:  # no bytes, no cache
            assert [await ask_one(at, "cached", 5) for _ in range(3)] == [1, 2, 3]

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
