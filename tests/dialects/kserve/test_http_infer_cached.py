"""The fast path of a model whose responses are kept: what it answers and keeps, and for whom it lets go."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects.kserve.http_infer import HttpTemplates
from tests.dialects.kserve.client_models import PAIR, SIMPLE, write_sums, write_triton
from tests.dialects.kserve.test_http_infer import Maker, Served, shared
from tests.server.rig import run

KEPT = "response_cache { enable: true }\n"
# Counts its runs; 13 is an error, 0 waits for the file `go`.
COUNTS = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.go = pathlib.Path(args["model_repository"]) / "go"
        self.runs = 0

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        self.runs += 1
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if value[0, 0] == 13:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky"))
        while value[0, 0] == 0 and not self.go.exists():
            time.sleep(0.001)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", np.full((1, 1), self.runs, np.int32))],
            parameters={"said": 1} if value[0, 0] == 7 else None,
        )
"""
COUNTS_CONFIG = (
    """max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
    + KEPT
)
COUNTS_PATH = "/v2/models/counts/infer"


class ServedCached(Served):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, response_cache_bytes=1 << 20)

    async def count(self, number: int, id: str = "") -> Any:
        """Return the answer of `counts` to a number."""
        body = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [number]}]}
        if id:
            body = {"id": id, **body}
        head, said = await self.client.post(COUNTS_PATH, json.dumps(body).encode(), None)
        found = json.loads(said)
        assert found.get("id", "") == id or " 200 " not in head
        return found["outputs"][0]["data"][0] if " 200 " in head else found["error"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether the fast path took each request."""
    said: list[bool] = []
    start = HttpTemplates.start

    def noting(self: HttpTemplates, call: Any, header_bytes: int) -> bool:
        said.append(start(self, call, header_bytes))
        return said[-1]

    monkeypatch.setattr(HttpTemplates, "start", noting)
    return said


def test_answers_as_without_a_cache(tmp_path: Path, taken: list[bool]) -> None:
    write_sums(tmp_path)
    write_triton(tmp_path, "kept", SIMPLE, PAIR + KEPT, "".join(f"label{n}\n" for n in range(10)))
    maker = Maker("simple", seed=5)

    async def work() -> None:
        async with ServedCached(tmp_path) as served:
            good = 0
            for _ in range(200):
                body, length = maker.request()
                plain = await served.client.post("/v2/models/simple/infer", body, length)
                for _ in range(3):
                    head, said = await served.client.post("/v2/models/kept/infer", body, length)
                    assert said.replace(b'"kept"', b'"simple"').replace(b"'kept'", b"'simple'") == plain[1]
                    assert head.split("\r\n")[0] == plain[0].split("\r\n")[0]
                good += " 200 " in plain[0]
            assert good > 40
            assert sum(taken) > 0.4 * good

    run(work())


def test_what_lies_in_client_memory_is_looked_at_each_time(tmp_path: Path) -> None:
    write_triton(tmp_path, "counts", COUNTS, COUNTS_CONFIG)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "parameters": place}
    body = json.dumps({"inputs": [tensor]}).encode()

    key = f"fastserve-paths-{os.getpid()}-kept"

    async def work() -> None:
        with shared(key) as memory:
            async with ServedCached(tmp_path) as served:
                await served.register("r", key)
                runs = []
                for number in (1, 2, 1, 2, 3, 3):
                    memory[:4] = number.to_bytes(4, "little")
                    _, said = await served.client.post(COUNTS_PATH, body, None)
                    runs.append(json.loads(said)["outputs"][0]["data"][0])
                assert runs == [1, 2, 1, 2, 3, 3]

    run(work())


def test_hits_run_nothing_and_errors_are_not_kept(tmp_path: Path, taken: list[bool]) -> None:
    write_triton(tmp_path, "counts", COUNTS, COUNTS_CONFIG)

    async def work() -> None:
        async with ServedCached(tmp_path) as served:
            assert [await served.count(n) for n in (1, 2, 1, 2, 3, 1)] == [1, 2, 1, 2, 3, 1]
            assert taken == [False, True, True, True, True, True]
            assert [await served.count(1, id="a"), await served.count(1, id="bc")] == [1, 1]
            assert [await served.count(n) for n in (13, 13, 4, 3)] == ["unlucky", "unlucky", 6, 3]
            assert [await served.count(n) for n in (7, 7)] == [7, 7]
            counts = served.server.host.cache
            assert counts is not None
            assert (counts.misses, counts.hits) == (7, 7)

    run(work())


def test_a_client_that_leaves_keeps_nobody_waiting(tmp_path: Path, taken: list[bool]) -> None:
    write_triton(tmp_path, "counts", COUNTS, COUNTS_CONFIG)

    async def work() -> None:
        async with ServedCached(tmp_path) as served:
            assert await served.count(5) == 1  # teaches the fast path
            leaving = ServedCached.__new__(ServedCached)
            leaving.client = type(served.client)(
                *await asyncio.open_connection(*served.server.front.http[0].address)
            )
            first = asyncio.ensure_future(leaving.count(0))
            cache = served.server.host.cache
            assert cache is not None
            while not cache.waiting():
                await asyncio.sleep(0.001)
            second = asyncio.ensure_future(served.count(0))
            while not any(cache.waiting().values()):  # until the second waits for the first
                await asyncio.sleep(0.001)
            assert taken == [False, True, False]
            leaving.client.writer.close()
            while any(cache.waiting().values()):  # until the second runs by itself
                await asyncio.sleep(0.001)
            (tmp_path / "counts" / "go").touch()
            assert await second in (2, 3)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert await served.count(6) > 2
            assert not cache.waiting()

    run(work())


@pytest.mark.parametrize("queue", ["", "dynamic_batching { priority_levels: 2 default_priority_level: 1 }\n"])
def test_parameters_of_a_response_are_kept(tmp_path: Path, queue: str) -> None:
    """Also where the batches are formed before the queue."""
    write_triton(tmp_path, "counts", COUNTS, COUNTS_CONFIG + queue)
    body = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [7]}]}

    async def work() -> None:
        async with ServedCached(tmp_path) as served:
            for _ in range(3):
                _, said = await served.client.post(COUNTS_PATH, json.dumps(body).encode(), None)
                assert json.loads(said)["parameters"] == {"said": 1}
                assert json.loads(said)["outputs"][0]["data"] == [1]

    run(work())
