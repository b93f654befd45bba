"""The status page: counts by batch size, versions and why they are down, the whole configuration, forms."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from fastserve.metrics import ServerState
from tests.dialects.triton_v1 import models
from tests.dialects.triton_v1.rig import V1, Rig, rig, write_dense
from tests.server.rig import run

ROW = struct.pack("<16i", *range(16))
PAIR = 'batch_size: %d input { name: "INPUT0" } input { name: "INPUT1" } output { name: "OUTPUT0" }'
ECHO = 'batch_size: 1 input { name: "IN" } output { name: "OUT" }'
STAGES = ("success", "queue", "compute", "compute_input", "compute_infer", "compute_output")


async def status_of(served: Rig, model: str = "") -> Any:
    response = await served.grpc.Status(V1.StatusRequest(model_name=model))
    assert response.request_status.code == 1
    return response.server_status


@pytest.mark.parametrize(("dense", "frontends"), [(False, 1), (True, 1), (True, 3)])
def test_counters(tmp_path: Path, dense: bool, frontends: int) -> None:
    write_dense(tmp_path) if dense else models.write(tmp_path, "simple")

    async def ask() -> None:
        async with rig(tmp_path, frontends=frontends) as served:
            fresh = (await status_of(served, "simple")).model_status["simple"].version_status[1]
            assert (fresh.ready_state, fresh.model_inference_count, len(fresh.infer_stats)) == (1, 0, 0)
            assert fresh.last_inference_timestamp_milliseconds == 0
            before = time.time_ns() // 1_000_000
            for ask in served.ways:
                for size in (1, 3, 3):
                    assert (await ask("simple", PAIR % size, ROW * size, ROW * size)).status == "SUCCESS"
                assert (await ask("simple", PAIR % 2, ROW)).status.startswith("INVALID_ARG")
                assert (await ask("simple", PAIR % 4_000_000, ROW)).status.startswith("INVALID_ARG")
            shown = (await status_of(served, "simple")).model_status["simple"].version_status[1]
            check_counts(shown)
            assert before - 1000 <= shown.last_inference_timestamp_milliseconds <= time.time_ns() // 1_000_000
            for action in ("unload", "load"):  # loaded again it begins at nothing
                assert (await served.ask("POST", f"/api/modelcontrol/{action}/simple"))[0] == 200
            again = (await status_of(served, "simple")).model_status["simple"].version_status[1]
            assert (again.ready_state, again.model_inference_count, len(again.infer_stats)) == (1, 0, 0)

    run(ask())


def check_counts(shown: Any) -> None:
    """Nine good requests, of one row and of three, each way; and three of two rows that were refused."""
    assert sorted(shown.infer_stats) == [1, 2, 3]  # 4000000 is no batch size of this model
    for size, count in ((1, 3), (3, 6)):
        stats = shown.infer_stats[size]
        assert {name: getattr(stats, name).count for name in STAGES} == dict.fromkeys(STAGES, count)
        assert stats.failed.count == 0
        assert 0 < stats.compute_infer.total_time_ns <= stats.compute.total_time_ns
        assert stats.compute.total_time_ns + stats.queue.total_time_ns < 10**10
        assert stats.success.total_time_ns > 0
    assert (shown.infer_stats[2].failed.count, shown.infer_stats[2].HasField("success")) == (3, False)
    assert (shown.model_inference_count, shown.model_execution_count) == (3 + 18, 9)


def test_executions_are_batches_that_ran(tmp_path: Path) -> None:
    """Requests that wait for a busy worker run together."""
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            asked = [served.over_http("simple", PAIR % 2, ROW * 2, ROW * 2) for _ in range(40)]
            assert {result.status for result in await asyncio.gather(*asked)} == {"SUCCESS"}
            shown = (await status_of(served)).model_status["simple"].version_status[1]
            assert shown.model_inference_count == 80
            assert 10 <= shown.model_execution_count <= 40
            assert shown.infer_stats[2].success.count == 40

    run(ask())


def test_versions_and_why_they_are_down(tmp_path: Path) -> None:
    models.write(tmp_path, "bad", "refusing")

    async def ask() -> None:
        async with rig(tmp_path, load_models=("refusing",)) as served:
            await served.ask("POST", "/api/modelcontrol/load/bad")
            shown = await status_of(served)
            assert sorted(shown.model_status) == ["bad", "refusing"]
            down = shown.model_status["bad"].version_status[1]
            assert (down.ready_state, down.ready_state_reason.message) == (2, "RuntimeError: no weights")
            await served.ask("POST", "/api/modelcontrol/unload/refusing")
            down = (await status_of(served)).model_status["refusing"].version_status[1]
            assert (down.ready_state, down.ready_state_reason.message) == (2, "unloaded")

    run(ask())


def test_the_configuration_is_whole(tmp_path: Path) -> None:
    names = ("queued", "seq", "labelled", "reshaped", "later")
    models.write(tmp_path, *names)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            shown = (await status_of(served)).model_status
            for name in names:
                written = V1.ModelConfig()
                text = models.MODELS[name][0].replace("TYPE_BF16", "TYPE_INVALID")
                text_format.Parse(text + " instance_group [ { kind: KIND_CPU } ]", written)
                config = shown[name].config
                assert (config.name, config.platform) == (name, "custom")
                if name == "queued":  # filled in where nothing is given
                    written.dynamic_batching.preferred_batch_size.append(1)
                for field in ("max_batch_size", "input", "output", "dynamic_batching", "sequence_batching"):
                    assert (name, field, getattr(config, field)) == (name, field, getattr(written, field))
                assert [group.kind for group in config.instance_group] == [2]
            result = await served.over_http(
                "later", ECHO, b"\1\2\3\4"
            )  # raw bytes need no name for their type
            assert result.raws == [b"\1\2\3\4"]

    run(ask())


def test_forms(tmp_path: Path) -> None:
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            asked = "/api/status/simple"
            _, headers, body = await served.ask("GET", asked + "?format=binary")
            assert headers["content-type"] == "application/octet-stream"
            binary = V1.ServerStatus.FromString(body)
            _, headers, body = await served.ask("GET", asked)
            text = text_format.Parse(body.decode(), V1.ServerStatus())
            assert body.startswith(b'id: "inference:0"\nversion: "1.15.0"\nuptime_ns: ')
            plain = [await served.ask("GET", asked + "?format=json")]
            plain.append(await served.ask("GET", asked, Accept="application/json"))
            for _, headers, body in plain:
                assert headers["content-type"] == "application/json"
                found = json.loads(body)
                assert (found["ready_state"], found["uptime_ns"].isdigit()) == ("SERVER_READY", True)
                assert found["model_status"]["simple"]["config"]["input"][0]["dims"] == ["16"]
            for one in (binary, text):
                assert one.model_status == binary.model_status
                assert not one.HasField("status_stats")  # of one model alone, nothing of the server
            for format in ("binary", "text"):
                _, headers, body = await served.ask(
                    "GET", f"/api/status?format={format}", Accept="application/json"
                )
                assert "json" not in headers["content-type"]

    run(ask())


@pytest.mark.parametrize("frontends", [1, 3])
def test_the_servers_own_counts(tmp_path: Path, frontends: int) -> None:
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path, frontends=frontends) as served:
            for _ in range(2):
                await served.ask("GET", "/api/health/live")
                await served.ask("GET", "/api/repository/index")
                await served.grpc.Health(V1.HealthRequest(mode="ready"))
                await served.grpc.Health(V1.HealthRequest(mode="who"))  # no success
                await served.ask("POST", "/api/modelcontrol/load/simple")
                await served.ask("GET", "/api/status/simple")
                await served.grpc.Repository(V1.RepositoryRequest(index=True))
            shown = await status_of(served)
            assert shown.health_stats.success.count == 4
            assert shown.repository_stats.success.count == 4
            assert shown.model_control_stats.success.count == 2
            assert shown.status_stats.success.count == 2
            assert shown.status_stats.success.total_time_ns > 0

    run(ask())


def test_a_server_that_stops_says_so(tmp_path: Path) -> None:
    """By its state: no word of a reason makes it one."""
    models.write(tmp_path, "simple")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            readiness = served.server.front.readiness
            assert (readiness.state, (await status_of(served)).ready_state) == (ServerState.SERVING, 2)
            readiness.ready, readiness.reason = False, "the server is stopping"
            assert (await status_of(served)).ready_state == 2
            served.server._draining = True
            served.server._health_changed()
            assert readiness.state is ServerState.STOPPING
            assert (await status_of(served)).ready_state == 3
            served.server._draining = False
            served.server._health_changed()

    run(ask())
