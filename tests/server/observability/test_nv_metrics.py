"""Triton's metrics of a whole server: names, labels, the port that shows nothing else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastserve.engine.counters import FIRST_RESPONSE, counts_of
from fastserve.errors import ServeError
from fastserve.request import InferRequest
from fastserve.server import Server, nv_metrics
from fastserve.server.dialect_selection import all_listeners
from fastserve.server.nv_metrics import NAMES, NvMetrics
from fastserve.serving.replication import ReplicatedState
from fastserve.settings import Listener, Settings
from fastserve.settings.kserve_options import MetricsConfig
from fastserve.tensor import DTYPES, Tensor
from tests.server.rig import Client, run, serving, write_model

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
metric_tags { key: "team" value: "a \\"b\\"" }
response_cache { enable: true }
"""
SOURCE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(r, "IN").as_numpy()) for r in requests]

    def one(self, values):
        if values[0, 0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("below zero"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)])
"""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def write_repository(folder: Path) -> None:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(CONFIG)
    (folder / "m" / "1" / "model.py").write_text(SOURCE)


class Page:
    """A server with a metrics port, and what that port says."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        listeners = (Listener("127.0.0.1:0"), Listener("127.0.0.1:0", ("metrics",)))
        self.server = Server(Settings(repository=str(folder), http=listeners, grpc=(), **settings))

    async def __aenter__(self) -> Page:
        await self.server.open()
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.server.drain(5)

    async def get(self, target: str, listener: int = 1) -> tuple[int, bytes]:
        address = self.server.front.http[listener].address
        client = Client(*await asyncio.open_connection(*address))
        try:
            return await client.get(target)
        finally:
            client.close()

    async def samples(self) -> Samples:
        page = (await self.get("/metrics"))[1].decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    async def ask(self, *numbers: int) -> None:
        version = self.server.catalog.available("m")
        assert version is not None
        data = b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)
        tensor = Tensor(DTYPES["int32"], (len(numbers), 1), data)
        (await self.server.front.engine.infer(version, InferRequest({"IN": tensor}))).release()


def test_every_name_of_the_specification(tmp_path: Path) -> None:
    write_repository(tmp_path)
    who = (("_team", 'a "b"'), ("model", "m"), ("version", "1"))

    async def work() -> None:
        async with Page(tmp_path, response_cache_bytes=1 << 20) as at:
            await at.ask(1, 2)
            await at.ask(1, 2)
            with pytest.raises(ServeError, match="below zero"):
                await at.ask(-1)
            found = await at.samples()
            by_model = {name: value for (name, labels), value in found.items() if labels == who}
            assert by_model["nv_inference_request_success_total"] == 2
            assert by_model["nv_inference_count_total"] == 2
            assert by_model["nv_inference_exec_count_total"] == 2
            assert by_model["nv_cache_num_hits_per_model_total"] == 1
            assert by_model["nv_cache_num_misses_per_model_total"] == 2
            assert by_model["nv_cache_miss_duration_per_model_total"] > 0
            assert by_model["nv_inference_pending_request_count"] == 0
            assert by_model["nv_model_load_duration_secs"] > 0
            parts = ("queue", "compute_input", "compute_infer", "compute_output")
            took = [by_model[f"nv_inference_{part}_duration_us_total"] for part in parts]
            whole = by_model["nv_inference_request_duration_us_total"]
            assert min(took) >= 0
            assert sum(took) <= whole + len(took)
            assert reasons(found) == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 1, "OTHER": 0}
            plain = {name: value for (name, labels), value in found.items() if not labels}
            assert (plain["nv_cache_num_entries"], plain["nv_cache_num_lookups"]) == (1, 3)
            assert 0 < plain["nv_cache_util"] < 1
            assert 0 < plain["nv_cpu_memory_used_bytes"] < plain["nv_cpu_memory_total_bytes"]
            assert 0 <= plain["nv_cpu_utilization"] <= 1
            assert plain["nv_pinned_memory_pool_total_bytes"] == 0

    run(work())


def reasons(found: Samples) -> dict[str, float]:
    name = "nv_inference_request_failure_total"
    return {dict(labels)["reason"]: value for (known, labels), value in found.items() if known == name}


def test_every_name_is_documented_and_nothing_else() -> None:
    page = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    named = set(re.findall(r"`(nv_[a-z_]+)`", page))
    written = set(re.findall(r'"(nv_[a-z_]+)"', Path(nv_metrics.__file__).read_text()))
    assert named == written | {name for name, _ in NAMES} | {FIRST_RESPONSE}


def test_the_port_answers_nothing_else(tmp_path: Path) -> None:
    write_repository(tmp_path)

    async def work() -> None:
        async with Page(tmp_path) as at:
            for target in ("/metrics", "/metrics/", "/metrics?x=1"):
                status, page = await at.get(target)
                assert (status, b"nv_inference_count" in page, b"fastserve_" in page) == (200, True, False)
            for target in ("/", "/metric", "/v2", "/healthz/live"):
                assert await at.get(target) == (200, b"")
            assert b"nv_cache" not in (await at.get("/metrics"))[1], "there is no cache"
            client = Client(*await asyncio.open_connection(*at.server.front.http[1].address))
            client.writer.write(b"POST /metrics HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n")
            assert (await client.page())[0] == 405
            client.close()
            page = (await at.get("/metrics", listener=0))[1]
            assert b"nv_inference_count" in page
            assert b"fastserve_build_info" in page

    run(work())


def test_durations_may_be_left_out_and_metrics_switched_off(tmp_path: Path) -> None:
    write_repository(tmp_path)

    async def work() -> None:
        flags = {"metrics_config": ("counter_latencies=false",), "allow_metrics": False}
        async with Page(tmp_path, **flags) as at:
            names = {name for name, _ in await at.samples()}
            assert "nv_inference_count_total" in names
            assert not any("duration_us" in name for name in names)
            assert (await at.get("/metrics", listener=0))[0] == 404

    run(work())


def test_where_the_metrics_port_is() -> None:
    asked = Settings(http=(Listener("[::1]:80"),), metrics_port=8002)
    assert all_listeners(asked)[0][1:] == (Listener("[::1]:8002", ("metrics",)),)
    assert all_listeners(Settings(http=(), metrics_port=9))[0][0].address == "127.0.0.1:9"
    off = Settings(metrics_port=8002, allow_metrics=False)
    assert all_listeners(off)[0] == off.http


def test_families_of_models_need_a_model() -> None:
    server = Server(Settings())
    prepare = NvMetrics(server.catalog, None, MetricsConfig(), ReplicatedState()).prepare
    page = asyncio.run(prepare())().decode()
    assert page.startswith("# HELP nv_pinned_memory_pool_total_bytes"), "no model, no family of models"
    server.registry.close()


DECOUPLED = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
model_metrics { metric_control [ {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 0.001, 60000 ] } } ] }
"""
SENDS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for _ in range(int(values[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_first_responses_and_each_response_of_a_decoupled_model(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(DECOUPLED)
    (tmp_path / "m" / "1" / "model.py").write_text(SENDS)

    async def work() -> None:
        async with Page(tmp_path, metrics_config=("histogram_latencies=true",)) as at:
            version = at.server.catalog.available("m")
            assert version is not None
            for count in (2, 3):
                tensor = Tensor(DTYPES["int32"], (1,), count.to_bytes(4, "little"))
                stream = at.server.front.engine.stream(version, InferRequest({"IN": tensor}))
                async for response in stream:
                    response.release()
            found = await at.samples()
            name = "nv_inference_first_response_histogram_ms"
            who = (("model", "m"), ("version", "1"))
            buckets = {dict(labels)["le"]: n for (k, labels), n in found.items() if k == f"{name}_bucket"}
            assert buckets == {"0.001": 0, "60000": 2, "+Inf": 2}
            assert found[f"{name}_count", who] == 2
            assert found[f"{name}_sum", who] > 0
            responses = counts_of(version).responses
            assert [responses[i].success.count for i in range(3)] == [2, 2, 1]
            assert [responses[i].empty_response.count for i in range(2, 4)] == [1, 1]
            assert responses[1].compute_infer.ns > 0

    run(work())


def test_summaries_have_every_quantile(tmp_path: Path) -> None:
    write_repository(tmp_path)

    async def work() -> None:
        flags = ("summary_latencies=true,counter_latencies=false", "summary_quantiles=0.5:0.05,0.99:0.001")
        async with Page(tmp_path, metrics_config=flags, response_cache_bytes=1 << 20) as at:
            await at.ask(1)
            await at.ask(1)
            found = await at.samples()
            quantiles: dict[str, list[float]] = {}
            for (name, labels), value in found.items():
                if "quantile" in dict(labels):
                    quantiles.setdefault(name, []).append(value)
            parts = ("queue", "compute_input", "compute_infer", "compute_output")
            assert set(quantiles) == {
                *(f"nv_inference_{part}_summary_us" for part in parts),
                "nv_cache_hit_summary_per_model",
                "nv_cache_miss_summary_per_model",
            }
            assert all(len(pair) == 2 and 0 < pair[0] <= pair[1] for pair in quantiles.values())
            assert (await at.get("/metrics"))[1].count(b" Nan\n") == 0
        async with Page(tmp_path, metrics_config=flags, response_cache_bytes=0) as at:
            assert (
                b'nv_inference_request_summary_us{_team="a \\"b\\"",model="m",version="1",quantile="0.5"} Nan'
                in (await at.get("/metrics"))[1]
            )

    run(work())


def test_every_front_process_tells_of_all(tmp_path: Path) -> None:
    write_model(tmp_path)
    wanted = b'nv_inference_request_success{model="twice",version="1"} 20\n'

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as at:
            assert [(await at.ask(float(n)))[0] for n in range(20)] == [200] * 20
            loads: set[bytes] = set()
            for _ in range(40):
                client = await at.client()
                status, page = await client.get("/metrics")
                client.close()
                assert (status, wanted in page) == (200, True)
                [load] = [
                    line for line in page.splitlines() if line.startswith(b"nv_model_load_duration_secs{")
                ]
                loads.add(load)
            assert len(loads) == 1
            assert not loads.pop().endswith(b" 0")

    run(work())
