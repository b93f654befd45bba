"""Statistics of the probe models: every key perf_analyzer looks for, and numbers that follow the requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.kserve.models import write_probe_models
from tests.dialects.kserve.replay import V2, exchange
from tests.dialects.kserve.test_options import Asked, serving
from tests.server.rig import run

DURATIONS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"
)  # fmt: skip
NONE = {"count": 0, "ns": 0}


def pair(rows: int = 1) -> dict[str, Any]:
    tensor = {"datatype": "INT32", "shape": [rows, 16], "data": [1] * 16 * rows}
    return {"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]}


def one(*numbers: int) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [len(numbers)], "data": list(numbers)}]}


async def stats(asked: Asked, model: str) -> dict[str, Any]:
    status, shown = await asked.http(f"/v2/models/{model}/stats", method="GET")
    assert status == 200
    (entry,) = shown["model_stats"]
    found: dict[str, Any] = entry
    return found


@pytest.mark.parametrize("frontends", [1, 3])
def test_statistics(tmp_path: Path, frontends: int) -> None:
    """Each request has a connection of its own, and so another front process than the one before."""
    write_probe_models(tmp_path)
    models = ("simple", "cached", "boom", "repeat", "ens")
    settings = {"model_control": "explicit", "load_models": models, "response_cache_bytes": 1 << 20}
    settings |= {"frontends": frontends}

    async def work() -> None:
        async with serving(tmp_path, settings) as asked:
            await check_batches(asked)
            await check_cache(asked)
            await check_failures(asked)
            await check_responses(asked)
            await check_ensemble(asked)

    run(work())


async def check_batches(asked: Asked) -> None:
    fresh = await stats(asked, "simple")
    assert fresh == {
        "name": "simple", "version": "1", "last_inference": 0, "inference_count": 0, "execution_count": 0,
        "inference_stats": dict.fromkeys(DURATIONS, NONE),
        "response_stats": {}, "batch_stats": [], "memory_usage": [],
    }  # fmt: skip
    for rows in (1, 3, 3):
        assert (await asked.http("/v2/models/simple/infer", pair(rows)))[0] == 200
    shown = await stats(asked, "simple")
    assert (shown["inference_count"], shown["execution_count"]) == (7, 3)
    assert shown["last_inference"] > 1_600_000_000_000  # milliseconds since 1970
    times = shown["inference_stats"]
    assert [times[name]["count"] for name in DURATIONS] == [3, 0, 3, 3, 3, 3, 0, 0]
    parts = sum(times[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < times["compute_infer"]["ns"] <= parts <= times["success"]["ns"]
    batches = shown["batch_stats"]
    assert [batch["batch_size"] for batch in batches] == [1, 3]
    for name in ("compute_input", "compute_infer", "compute_output"):
        assert [batch[name]["count"] for batch in batches] == [1, 2]
        assert sum(batch[name]["ns"] for batch in batches) == times[name]["ns"]  # one request each
    over_grpc = await asked.rpc("ModelStatistics", V2.ModelStatisticsRequest(name="simple"))
    assert over_grpc.model_stats[0].inference_stats.success.ns == times["success"]["ns"]
    assert [batch.compute_infer.count for batch in over_grpc.model_stats[0].batch_stats] == [1, 2]


async def check_cache(asked: Asked) -> None:
    for _ in range(3):
        assert (await asked.http("/v2/models/cached/infer", pair()))[0] == 200
    shown = await stats(asked, "cached")
    times = shown["inference_stats"]
    assert (shown["inference_count"], shown["execution_count"]) == (1, 1)
    assert [times[name]["count"] for name in DURATIONS] == [3, 0, 1, 1, 1, 1, 2, 1]
    assert times["cache_hit"]["ns"] > 0
    assert times["cache_miss"]["ns"] > 0


async def check_failures(asked: Asked) -> None:
    assert [(await asked.http("/v2/models/boom/infer", one(n)))[0] for n in (0, 4, 99)] == [200, 400, 500]
    assert (await asked.http("/v2/models/boom/infer", one(1, 2)))[0] == 400  # never reached the model
    times = (await stats(asked, "boom"))["inference_stats"]
    assert (times["success"]["count"], times["fail"]["count"]) == (1, 2)
    assert times["fail"]["ns"] > 0


async def check_responses(asked: Asked) -> None:
    given = {"method": "POST", "path": "/v2/models/repeat/generate_stream", "headers": {}}
    body = json.dumps({"IN": [5, -1, 6]})
    status, _, _ = await exchange(asked.server.front.http[0].address, {**given, "body": body})
    assert status == 200
    responses = (await stats(asked, "repeat"))["response_stats"]
    assert sorted(responses) == ["0", "1", "2", "3"]  # the last one is the final flag alone
    for index, key in enumerate(("success", "fail", "success", "empty_response")):
        assert responses[str(index)][key]["count"] == 1
    assert responses["0"]["compute_infer"]["ns"] > 0
    assert set(responses["0"]) == {
        "compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"
    }  # fmt: skip


async def check_ensemble(asked: Asked) -> None:
    before = (await stats(asked, "simple"))["execution_count"]
    tensor = {"name": "X", "datatype": "INT32", "shape": [2, 16], "data": [1] * 32}
    assert (await asked.http("/v2/models/ens/infer", {"inputs": [tensor]}))[0] == 200
    shown = await stats(asked, "ens")
    assert (shown["inference_count"], shown["execution_count"]) == (2, 1)
    assert shown["inference_stats"]["success"]["count"] == 1
    assert (await stats(asked, "simple"))["execution_count"] == before + 1
