"""What three front processes tell of requests: each tells of all, and one that dies takes nothing along."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fastserve.dialects.admin import console
from fastserve.dialects.admin import numbers as console_numbers
from fastserve.errors import Kind, ServeError
from fastserve.protos import load
from fastserve.settings import Listener, TFServingOptions
from tests.dialects.kserve.grpc_rig import serving as serving_grpc
from tests.dialects.kserve.models import write_probe_models
from tests.server.observability.test_console import FAILS
from tests.server.processes.test_fronts import connect_to_each, total
from tests.server.rig import WAIT_S, Client, Served, run, serving, write_model

FRONTS = 3
V2 = load("kserve_v2")
SPOKEN = ("kserve_v2", "tfserving", "triton_v1", "ops", "console")
MODELS = ("simple", "cached", "boom", "repeat", "ens")
PAGE = "/monitoring/prometheus/metrics"
PAIR = [{"name": n, "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for n in ("INPUT0", "INPUT1")]
ROW = {"name": "X", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
NOT_A_SUM = re.compile(  # of this moment, or of a clock that goes on
    r"^(nv_cpu_|nv_gpu|nv_energy|nv_cpu|fastserve_(loop_delay|connections|memory|worker_memory|metrics_series))"
)


async def use(client: Client) -> None:
    """Each kind of request once, some of which fail."""
    whole = {"inputs": PAIR}
    infer = "/v2/models/{}/infer"
    assert (await client.post(infer.format("simple"), json.dumps(whole).encode()))[0] == 200
    for _ in range(2):
        assert (await client.post(infer.format("cached"), json.dumps(whole).encode()))[0] == 200
    assert (await client.post(infer.format("ens"), json.dumps({"inputs": [ROW]}).encode()))[0] == 200
    one = {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [99]}]}
    assert (await client.post(infer.format("boom"), json.dumps(one).encode()))[0] == 500
    asked = json.dumps({"IN": [5, -1, 6]}).encode()
    assert (await client.post("/v2/models/repeat/generate_stream", asked))[0] == 200
    assert await asyncio.wait_for(client.reader.readuntil(b"\r\n0\r\n\r\n"), 60)
    rows = {"inputs": {name: [[1] * 16] for name in ("INPUT0", "INPUT1")}}
    assert (await client.post("/v1/models/simple:predict", json.dumps(rows).encode()))[0] == 200
    assert (await client.post("/v1/models/nobody:predict", b"{}"))[0] == 404
    assert (await client.get("/api/health/ready"))[0] == 200
    head = 'NV-InferRequest: batch_size: 1 input { name: "INPUT0" } input { name: "INPUT1" }'
    head += ' output { name: "OUTPUT0" }\r\nContent-Length: 128\r\n\r\n'
    client.writer.write(f"POST /api/infer/simple HTTP/1.1\r\nHost: t\r\n{head}".encode() + bytes(128))
    assert (await client.page())[0] == 200


async def statistics(client: Client, model: str = "") -> Any:
    status, body = await client.get(f"/v2/models/{model}/stats" if model else "/v2/models/stats")
    assert status == 200
    shown = json.loads(body)["model_stats"]
    return shown[0] if model else shown


async def see(client: Client) -> Mapping[str, Any]:
    """Everything that a front process tells of requests, without what changes by itself."""
    pages = {path: (await client.get(path))[1].decode() for path in (PAGE, "/metrics", "/api/status")}
    pages["/metrics"] = "\n".join(
        sorted(line for line in pages["/metrics"].splitlines() if not NOT_A_SUM.match(line))
    )
    return {
        **pages,
        "/api/status": re.sub(
            r"uptime_ns: \d+|status_stats \{[^}]*\{[^}]*\}[^}]*\}", "", pages["/api/status"]
        ),
        "/v2/models/stats": await statistics(client),
        "/healthz/ready": (await client.get("/healthz/ready"))[1],
    }


def counts_of(shown: Mapping[str, Any]) -> dict[str, int]:
    return {name: took["count"] for name, took in shown["inference_stats"].items() if took["count"]}


def test_every_front_tells_of_all_requests(tmp_path: Path) -> None:
    write_probe_models(tmp_path)
    settings: dict[str, Any] = {
        "load_models": MODELS,
        "response_cache_bytes": 1 << 20,
        "http": (Listener("127.0.0.1:0", SPOKEN),),
        "tfserving": TFServingOptions(monitoring=True),
        "metrics_config": ("histogram_latencies=true",),
        "frontends": FRONTS,
    }

    async def work() -> None:
        async with serving(tmp_path, **settings) as served:
            clients = await connect_to_each(served, FRONTS)
            for client in clients.values():
                await use(client)
            end = time.monotonic() + WAIT_S
            seen = [await see(client) for client in clients.values()]
            while seen[1:] != seen[:1] * (FRONTS - 1):  # requests may be counted after their replies
                assert time.monotonic() < end, seen
                seen = [await see(client) for client in clients.values()]
            client = clients[1]
            simple, cached, boom, repeat, ens = [await statistics(client, model) for model in MODELS]
            assert counts_of(simple)["success"] == 4 * FRONTS  # V2, TensorFlow Serving, V1, the ensemble's
            assert (counts_of(cached)["cache_hit"], counts_of(cached)["cache_miss"]) == (2 * FRONTS - 1, 1)
            assert counts_of(cached)["success"] == 2 * FRONTS
            assert counts_of(boom) == {"fail": FRONTS}
            assert repeat["response_stats"]["0"]["success"]["count"] == FRONTS
            assert (ens["inference_count"], counts_of(ens)["success"]) == (FRONTS, FRONTS)
            assert ens["batch_stats"][0]["compute_infer"]["count"] == FRONTS
            page = seen[0][PAGE]
            assert f':tensorflow:serving:request_count{{model_name="simple",status="OK"}} {FRONTS}\n' in page
            assert f':tensorflow:serving:request_count{{model_name="",status="NOT_FOUND"}} {FRONTS}\n' in page
            assert (
                f'request_latency_count{{model_name="simple",API="predict",entrypoint="REST"}} {FRONTS}'
                in page
            )
            metrics = seen[0]["/metrics"]
            assert (
                f'nv_inference_first_response_histogram_ms_count{{model="repeat",version="1"}} {FRONTS}'
                in metrics
            )
            assert "_tfserving" not in metrics
            health = re.search(r"health_stats \{\s*success \{\s*count: (\d+)", seen[0]["/api/status"])
            assert health is not None
            assert int(health[1]) == FRONTS

    run(work())


def test_over_grpc_too(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving_grpc(tmp_path, frontends=FRONTS) as served:
            clients = await connect_to_each(served, FRONTS)
            for number, client in clients.items():
                assert (await client.predict(float(number + 1)))[0] == 200
            own = [("grpc.use_local_subchannel_pool", 1)]
            found = []
            for _ in range(FRONTS):  # connections go to the fronts in turns
                async with grpc.aio.insecure_channel(served.target, options=own) as channel:
                    call = channel.unary_unary(
                        "/inference.GRPCInferenceService/ModelStatistics",
                        request_serializer=lambda message: message.SerializeToString(),
                        response_deserializer=V2.ModelStatisticsResponse.FromString,
                    )
                    found.append(await call(V2.ModelStatisticsRequest(), timeout=60))
            assert found[1:] == found[:1] * (FRONTS - 1)
            assert found[0].model_stats[0].inference_stats.success.count == FRONTS

    run(work())


@pytest.mark.logs_errors
def test_a_front_that_is_killed_under_load_takes_no_counts_along(tmp_path: Path) -> None:
    """The request under way when it died may have been counted or not, answered or not."""
    write_probe_models(tmp_path)
    settings: dict[str, Any] = {
        "load_models": ("simple", "cached", "ens"),
        "response_cache_bytes": 1 << 20,
        "http": (Listener("127.0.0.1:0", SPOKEN),),
        "tfserving": TFServingOptions(monitoring=True),
        "frontends": FRONTS,
    }
    body = json.dumps({"inputs": PAIR}).encode()
    rows = json.dumps({"inputs": {name: [[1] * 16] for name in ("INPUT0", "INPUT1")}}).encode()
    paths = {"/v2/models/cached/infer": body, "/v1/models/simple:predict": rows}

    async def ask(client: Client, answered: dict[str, int], enough: asyncio.Event) -> int:
        """Ask until the connection is lost. Returns how many requests were under way then: 1 or 0."""
        try:
            while True:
                for path, body in paths.items():
                    assert (await client.post(path, body))[0] == 200
                    answered[path] += 1
                if answered[path] >= 200:
                    enough.set()
        except (ConnectionError, asyncio.IncompleteReadError, IndexError):
            return 1

    async def count(client: Client) -> list[int]:
        cached, simple = [await statistics(client, model) for model in ("cached", "simple")]
        _, page = await client.get(PAGE)
        told = re.search(rb'request_count\{model_name="simple",status="OK"\} (\d+)', page)
        assert told is not None
        return [counts_of(cached)["cache_hit"] + 1, counts_of(simple)["success"], int(told[1])]

    async def work() -> None:
        async with serving(tmp_path, **settings) as served:
            client = (await connect_to_each(served, FRONTS))[1]
            answered, enough = dict.fromkeys(paths, 0), asyncio.Event()
            asking = asyncio.ensure_future(ask(client, answered, enough))
            await asyncio.wait_for(enough.wait(), 60)
            link = served.links[0]
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            under_way = await asyncio.wait_for(asking, 60)
            await served.until(lambda: link.pid not in (0, victim) and link._listening)
            hits, runs = answered.values()
            clients = await connect_to_each(served, FRONTS)
            seen = [await count(one) for one in clients.values()]
            assert seen[1:] == seen[:1] * (FRONTS - 1)
            for told, least in zip(seen[0], (hits, runs, runs), strict=True):
                assert abs(told - least) <= under_way
            for path, body in paths.items():  # the replacement goes on in the dead one's rows
                assert (await clients[1].post(path, body))[0] == 200
            after = [await count(one) for one in clients.values()]
            assert after == [[told + 1 for told in seen[0]]] * FRONTS

    run(work())


def test_a_reload_begins_anew_and_the_pages_of_counters_do_not_fall(tmp_path: Path) -> None:
    write_model(tmp_path)
    settings: dict[str, Any] = {"tfserving": TFServingOptions(monitoring=True), "frontends": FRONTS}

    async def runs(served: Served, client: Client) -> int:
        _, page = await client.get(PAGE)
        told = re.search(rb"wrapped_run_count\{\} (\d+)", page)
        return int(told[1]) if told else 0

    async def work() -> None:
        async with serving(tmp_path, **settings) as served:
            clients = await connect_to_each(served, FRONTS)
            for client in clients.values():
                assert (await client.predict(1.0))[0] == 200
            assert [await runs(served, client) for client in clients.values()] == [FRONTS] * FRONTS
            write_model(tmp_path, parameters={"add": 10})
            await served.server.loads.load("twice", None)
            ended = await statistics(clients[2], "twice")
            assert ended["inference_count"] == 0
            assert (await clients[2].predict(1.0)) == (200, [12.0])
            await served.until(lambda: len(served.server.host.hosted) == 1)
            for client in clients.values():
                assert (await statistics(client, "twice"))["inference_count"] == 1
                assert await runs(served, client) == FRONTS + 1
                _, page = await client.get("/metrics")
                assert total(page, "fastserve_requests_total") == FRONTS + 1
            await served.server.loads.unload("twice", False)
            for client in clients.values():
                assert await runs(served, client) == FRONTS + 1

    run(work())


async def numbers(client: Client, query: str = "numbers") -> Any:
    status, body = await client.get(f"/console/{query}")
    assert status == 200, body
    return json.loads(body)


@pytest.mark.logs_errors
def test_the_console_is_the_same_on_every_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers, failures and history outlive a front; one that takes its place knows them all."""
    for module in (console, console_numbers):
        monkeypatch.setattr(module, "INTERVAL_S", 0.05)
    (write_model(tmp_path, warmup="off") / "1" / "model.py").write_text(FAILS)

    async def ids(client: Client) -> list[str]:
        (model,) = (await numbers(client))["models"]
        return [one["request_id"] for one in model["failures"]]

    async def ask(client: Client, request_id: str) -> None:
        body = json.dumps({"instances": [[1.0, 2.0]]}).encode()
        head = f"POST /v1/models/twice:predict HTTP/1.1\r\nHost: a\r\nX-Request-Id: {request_id}\r\n"
        client.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert (await client.reply())[0] == 500

    async def know(clients: list[Client], wanted: list[str]) -> None:
        """Wait until each shows these failures, which the others hand over twice a second."""
        for client in clients:
            while await ids(client) != wanted:
                await asyncio.sleep(0.02)

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS) as served:
            clients = await connect_to_each(served, FRONTS)
            for number, client in clients.items():
                await ask(client, f"r-{number}")
            asked = [f"r-{number}" for number in clients]
            await asyncio.wait_for(know([*clients.values()], asked[::-1]), WAIT_S)
            shown = [await numbers(client, "model?name=twice") for client in clients.values()]
            (history,) = {one["history"] for one in shown}
            for client in clients.values():
                details = await numbers(client, "model?name=twice")
                assert (details["backend"], details["examples"] != []) == ("python", True)
                assert (await client.get("/console/model?name=nobody"))[0] == 404
                (cause,) = (await numbers(client, "rows"))["causes"]
                assert (cause["cause"], cause["total"]) == ("INTERNAL", FRONTS)
            link = served.links[0]
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            await served.until(lambda: link.pid not in (0, victim) and link._listening)
            replaced = (await connect_to_each(served, FRONTS))[1]
            assert await ids(replaced) == asked[::-1]
            found = await numbers(replaced, "rows")
            assert found["history"] == history
            assert found["next_point"] == len(found["points"]["p50_ms"]) > 0
            assert found["up_s"] > 0

    run(work())


@pytest.mark.logs_errors
def test_the_console_says_so_when_the_owner_does_not_answer(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS) as served:
            client = (await connect_to_each(served, FRONTS))[1]

            async def nobody(name: str, question: object) -> str:
                raise ServeError(Kind.UNAVAILABLE, "busy")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(served.server.loads.state, "show", nobody)
                status, body = await client.get("/console/rows")
            assert (status, json.loads(body)) == (503, {"error": "busy"})
            assert (await client.get("/console/rows"))[0] == 200

    run(work())


def test_quantiles_of_the_last_minute_are_the_same_on_every_front(tmp_path: Path) -> None:
    write_model(tmp_path)
    flags = ("summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001")

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS, metrics_config=flags) as served:
            clients = await connect_to_each(served, FRONTS)
            for client in clients.values():
                assert (await client.predict(1.0))[0] == 200
            pages = [(await client.get("/metrics"))[1].decode() for client in clients.values()]
            shown = [[line for line in page.splitlines() if "_summary_us" in line] for page in pages]
            assert shown[1:] == shown[:1] * (FRONTS - 1)
            told = dict(line.rsplit(" ", 1) for line in shown[0] if line[0] != "#")
            head = 'nv_inference_request_summary_us{model="twice",quantile="0.99",version="1"}'
            named = {name: value for name, value in told.items() if "request_summary" in name}
            assert int(named['nv_inference_request_summary_us_count{model="twice",version="1"}']) == FRONTS
            assert all(float(value) > 0 for value in named.values()), head

    run(work())
