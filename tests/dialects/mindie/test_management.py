"""MindIE's endpoints about the server: probes, what it says of itself, its end, and what it has not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastserve.settings import TextgenOptions
from tests.dialects.text_common.rigs import RIGS
from tests.dialects.text_common.serving import Local, hosted, local, served
from tests.running import until

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def limits() -> Iterator[Local]:
    with local(RIGS["llm-limits"].engine()) as at:
        yield at


def test_probes(limits: Local) -> None:
    ready = ["/health", "/v2/health/ready", "/v1/startup", "/v1/readiness"]
    paths = [*ready, "/v2/health/live", "/v1/health", "/v2/models/m1/ready"]
    for path in paths:
        assert (limits.ask("GET", path).status, limits.ask("GET", path).body) == (200, b"")
        assert limits.ask("HEAD", path).status == 200
    limits.engine.context.readiness.ready = False
    assert [limits.ask("GET", path).status for path in paths] == [503] * 4 + [200] * 3
    limits.engine.context.readiness.ready = True
    assert limits.ask("GET", "/v2/models/m2/ready").status == 404


def test_timed_health_says_a_token(limits: Local) -> None:
    seen = limits.models["m1"].seen  # type: ignore[attr-defined]
    before = len(seen)
    for path in ("/health/timed", "/health/timed-1", "/health/timed-600"):
        assert limits.ask("GET", path).body == b'{"status":"healthy"}'
    assert len(seen) == before + 3
    for path in ("/health/timed-0", "/health/timed-601", f"/health/timed-{'9' * 5000}", "/health/timed-x"):
        assert limits.ask("GET", path).status == 404, path[:40]
    with served(RIGS["llm-eos"].engine(), pause_s=2.5) as at:
        assert at.ask("GET", "/health/timed-1").status == 500


# What a GET says, key by key.
TOLD: list[tuple[str, dict[str, Any]]] = [
    (
        "/v2",
        {
            "name": "MindIE Server",
            "version": None,
            "extensions": {
                "max_iter_times": 6,
                "prefill_policy_type": 0,
                "decode_policy_type": 0,
                "max_prefill_batch_size": 64,
                "max_prefill_tokens": 8,
            },
        },
    ),
    (
        "/v2/models/m1",
        {
            "name": "m1",
            "platform": "MindIE Server",
            "inputs": [{"name": "input0", "shape": [-1], "datatype": "UINT32"}],
            "outputs": [{"name": "output0", "shape": [-1], "datatype": "UINT32"}],
        },
    ),
    (
        "/v2/models/m1/config",
        {
            "model_name": "m1",
            "input_datatype": "UINT32",
            "output_datatype": "UINT32",
            "max_seq_len": 16,
            "npu_mem_size": 0,
            "cpu_mem_size": 0,
            "world_size": 1,
            "model_weight_path": "m1",
            "model_instance_type": "Standard",
        },
    ),
    (
        "/v1/config",
        {
            "modelName": "m1",
            "maxSeqLen": 16,
            "npuMemSize": 0,
            "cpuMemSize": 0,
            "worldSize": 1,
            "maxOutputLen": 6,
            "cacheBlockSize": 128,
        },
    ),
    (
        "/v2/models/m1/getSlotCount",
        {"total_slots": 64, "free_slots": 64, "available_tokens_length": 1024},
    ),
]


@pytest.mark.parametrize(("path", "told"), TOLD, ids=[path for path, _ in TOLD])
def test_what_is_told(limits: Local, path: str, told: dict[str, Any]) -> None:
    reply = limits.ask("GET", path)
    found = reply.json
    if "version" in found:
        found["version"] = None
    assert (reply.status, list(found.items())) == (200, list(told.items()))


def test_of_whom_nobody_knows(limits: Local) -> None:
    for path in ("/v2/models/m2", "/v2/models/m2/config", "/v2/models/m2/getSlotCount"):
        reply = limits.ask("GET", path)
        assert (reply.status, reply.json) == (
            404,
            {"error": "Model m2 not found.", "error_type": "NotFoundError"},
        )
    with Local({}, TextgenOptions(), 0.0) as at:
        assert at.ask("GET", "/v2").json["extensions"]["max_iter_times"] == 0
        assert at.ask("GET", "/v1/config").json["modelName"] == ""


def test_info_in_both_shapes(limits: Local) -> None:
    told = limits.ask("GET", "/info").json
    assert (told["model_id"], told["max_input_tokens"], told["max_total_tokens"]) == ("m1", 8, 16)
    assert (told["max_best_of"], told["max_stop_sequences"], told["max_concurrent_requests"]) == (4, 4, 64)
    with served(RIGS["llm-limits"].engine(), tgi_flavor="mindie") as at:
        told = at.ask("GET", "/info").json
        assert list(told) == [
            "docker_label", "max_batch_total_tokens", "max_best_of", "max_concurrent_requests",
            "max_stop_sequences", "max_waiting_tokens", "sha", "validation_workers", "version",
            "waiting_served_ratio", "models", "max_input_length",
        ]  # fmt: skip
        (model,) = told["models"]
        assert list(model) == [
            "model_device_type", "model_dtype", "model_id", "model_pipeline_tag", "model_sha",
            "max_total_tokens",
        ]  # fmt: skip
        assert (model["model_id"], model["max_total_tokens"], told["max_input_length"]) == ("m1", 16, 8)


def test_status(limits: Local) -> None:
    for path in ("/v1/status", "/v2/status"):
        reply = limits.ask("GET", path)
        assert list(reply.json) == ["service", "resource", "linkStatus"]
        assert reply.json["resource"] == {
            "availSlotsNum": 64,
            "totalSlotsNum": 64,
            "runningRequestNum": 0,
        }


def test_the_end_is_asked_for_where_it_may_be(limits: Local) -> None:
    reply = limits.ask("GET", "/stopService")
    assert (reply.status, "textgen.stop_service" in reply.json["error"]) == (403, True)
    asked: list[bool] = []
    with served(RIGS["llm-eos"].engine(), stop_service=True) as at:
        reply = at.ask("GET", "/stopService")  # a server of nobody's
        assert (reply.status, reply.json["error"]) == (500, "this server is not stopped by its clients")

        async def stop(force: bool) -> None:
            asked.append(force)

        at.engine.context.stop = stop
        for query in ("", "?mode=Force", "?mode=force", "?mode=x"):
            assert (at.ask("GET", "/stopService" + query).status) == 200
        from_a_page = {"Origin": "http://evil.example"}
        assert at.ask("GET", "/stopService", headers=from_a_page).status == 403
    assert asked == [False, True, True, False]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/role/prefill"),
        ("POST", "/v2/role/decode"),
        ("GET", "/dresult"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("GET", "/v1/engine-server/running-status"),
        ("POST", "/v1/engine-server/fault-handling-command"),
    ],
)
def test_what_there_is_not_is_refused_by_its_name(limits: Local, method: str, path: str) -> None:
    reply = limits.ask(method, path, b"{}" if method == "POST" else None)
    assert reply.status == 501
    assert reply.json["error"].startswith(f"{path} is not served: ")


def test_tokens_of_a_text(limits: Local) -> None:
    reply = limits.post("/v1/tokenizer", {"inputs": "one two  three"})
    assert (reply.status, list(reply.json)) == (200, ["token_number", "tokens"])
    assert reply.json["token_number"] == len(reply.json["tokens"]) == 3
    assert "".join(reply.json["tokens"]).replace(" ", "") == "onetwothree"
    short = limits.post("/v1/tokenizer", {"inputs": "one two", "do_decode": False})
    assert short.json == {"token_number": 2, "tokens": []}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "Not found inputs."),
        ({"inputs": None}, "Inputs must not be null"),
        ({"inputs": 5}, "inputs must be string type."),
        ({"inputs": ""}, "but the length of inputs is 0"),
        ({"inputs": "a", "do_decode": 1}, "do_decode must be boolean type."),
        (b"[" * 99, "Failed to parse request context to json"),
    ],
)
def test_texts_that_have_no_tokens(limits: Local, body: Any, told: str) -> None:
    reply = limits.post("/v1/tokenizer", body)
    assert (reply.status, told in json.loads(reply.body)["error"]) == (422, True)


NAMES = {
    "request_received_total", "request_success_total", "request_failed_total", "num_requests_running",
    "num_requests_waiting", "num_requests_swapped", "avg_prompt_throughput_toks_per_s",
    "avg_generation_throughput_toks_per_s", "time_to_first_token_seconds", "time_per_output_token_seconds",
    "e2e_request_latency_seconds", "failed_request_perc", "request_prompt_tokens",
    "request_generation_tokens", "prompt_tokens_total", "generation_tokens_total", "npu_cache_usage_perc",
    "cpu_cache_usage_perc", "num_preemptions_total",
}  # fmt: skip


def value_of(page: bytes, name: str) -> float:
    (family,) = [one for one in text_string_to_metric_families(page.decode()) if has(one, name)]
    (sample,) = [one for one in family.samples if one.name == name]
    assert sample.labels == {"model_name": "m1"}
    return float(sample.value)


def has(family: Any, name: str) -> bool:
    return any(sample.name == name for sample in family.samples)


def test_metrics_under_mindies_names(tmp_path: Path) -> None:
    with hosted("llm-limits", tmp_path, metrics="mindie") as at:
        for _ in range(3):
            assert at.infer("a b").status == 200
        at.settle()
        page = at.ask("GET", "/metrics").body
        families = list(text_string_to_metric_families(page.decode()))
        assert {one.name for one in families} == {name.removesuffix("_total") for name in NAMES}
        assert value_of(page, "request_received_total") == value_of(page, "request_success_total") == 3
        assert value_of(page, "generation_tokens_total") == 18
        assert value_of(page, "prompt_tokens_total") == 6
        assert value_of(page, "time_to_first_token_seconds_count") == 3
        assert value_of(page, "time_per_output_token_seconds_count") == 15
        assert value_of(page, "e2e_request_latency_seconds_count") == 3
        assert value_of(page, "request_generation_tokens_sum") == 18
        assert value_of(page, "num_requests_running") == value_of(page, "request_failed_total") == 0
        vector = at.ask("GET", "/metrics-json").json
        assert vector["resultType"] == "vector"
        told = {one["metric"]["__name__"]: one for one in vector["result"]}
        assert told["generation_tokens_total"]["metric"]["model_name"] == "m1"
        assert told["generation_tokens_total"]["value"][1] == "18"
        assert isinstance(told["time_to_first_token_seconds_sum"]["value"][0], float)


def test_what_fails_is_counted_as_failed_and_nothing_else_is(tmp_path: Path) -> None:
    with hosted("llm-slow", tmp_path, metrics="mindie") as at:
        assert at.infer("a", timeout=1).status == 500
        assert at.infer("a", top_p=2).status == 422  # never received by the engine
        at.settle()
        page = at.ask("GET", "/metrics").body
        found = {
            name: value_of(page, name)
            for name in ("request_received_total", "request_success_total", "request_failed_total")
        }
        assert list(found.values()) == [1, 0, 1]
        assert value_of(page, "failed_request_perc") == 1
        assert value_of(page, "num_requests_running") == value_of(page, "num_requests_waiting") == 0


def test_the_servers_own_page_is_there_unless_it_is_asked_otherwise(tmp_path: Path) -> None:
    with hosted("llm-limits", tmp_path) as at:
        assert b"fastserve_ready" in at.ask("GET", "/metrics").body
        assert b"fastserve" not in at.ask("GET", "/metrics-json").body


def test_slots_that_are_taken(tmp_path: Path) -> None:
    with hosted("llm-slow", tmp_path) as at, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(at.infer, "a", timeout=8)
        path = "/v2/models/m1/getSlotCount"
        assert at.ask("GET", path).json["total_slots"] == 1
        until(lambda: at.ask("GET", path).json["free_slots"] == 0, "its first token has come")
        assert at.ask("GET", "/v1/status").json["resource"]["runningRequestNum"] == 1
        assert answer.result().status == 500
