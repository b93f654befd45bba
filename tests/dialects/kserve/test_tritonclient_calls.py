"""The unmodified tritonclient: every public method of its four clients, found by introspection.

A method that a later release adds has no entry in CALLS, and fails here until it has one.
"""

from __future__ import annotations

import base64
import json
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.dialects.kserve.client_rig import (
    COUNT,
    FLAVOURS,
    ONES,
    Answers,
    Client,
    Refused,
    connected,
    methods_of,
    region,
    run,
    shared_memory,
)
from tests.running import Running

TWICE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * a)]) for a in arrays]
"""


# --- health, metadata ------------------------------------------------------------------------------


async def is_server_live(client: Client) -> None:
    assert await client.is_server_live() is True


async def is_server_ready(client: Client) -> None:
    assert await client.is_server_ready() is True


async def is_model_ready(client: Client) -> None:
    assert await client.is_model_ready("simple") is True
    assert await client.is_model_ready("simple", "1") is True
    assert await client.is_model_ready("simple", "2") is False
    assert await client.is_model_ready("nope") is False


async def get_server_metadata(client: Client) -> None:
    told = await client.told("get_server_metadata")
    assert told["name"] == "triton"
    assert {"binary_tensor_data", "system_shared_memory", "statistics"} <= set(told["extensions"])


async def get_model_metadata(client: Client) -> None:
    told = await client.told("get_model_metadata", "simple", "1")
    assert (told["name"], told["versions"], told["platform"]) == ("simple", ["1"], "python")
    shapes = [(one["name"], one["datatype"], [int(n) for n in one["shape"]]) for one in told["inputs"]]
    assert shapes == [("INPUT0", "INT32", [-1, 16]), ("INPUT1", "INT32", [-1, 16])]
    with pytest.raises(Refused, match="unknown model: 'nope' is not found"):
        await client.get_model_metadata("nope")


async def get_model_config(client: Client) -> None:
    told = await client.told("get_model_config", "simple")
    config = told if client.kind == "http" else told["config"]
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("simple", "python", 8)
    assert [one["data_type"] for one in config["input"]] == ["TYPE_INT32"] * 2
    assert "dynamic_batching" in config


# --- inference -------------------------------------------------------------------------------------


def right(result: Any) -> None:
    assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT + ONES)
    assert np.array_equal(result.as_numpy("OUTPUT1"), COUNT - ONES)


async def infer(client: Client) -> None:
    result = await client.infer("simple", client.pair(), request_id="r7")
    right(result)
    response = result.get_response()
    assert (response["id"] if client.kind == "http" else response.id) == "r7"
    assert result.get_output("OUTPUT0") is not None
    assert result.get_output("nope") is None


async def async_infer(client: Client) -> None:
    if client.kind == "http":
        asked = [await client.async_infer("simple", client.pair()) for _ in range(4)]
        for one in asked:
            right(one.get_result())
        refused = await client.async_infer("nope", client.pair())
        with pytest.raises(Refused, match="is not found"):
            refused.get_result()
        return
    answers = Answers()
    for _ in range(4):
        await client.async_infer("simple", client.pair(), answers)
    found = [answers.next() for _ in range(4)]
    assert [error for _, error in found] == [None] * 4
    for result, _ in found:
        right(result)


async def generate_request_body(client: Client) -> None:
    """Bodies written by the client and read by it, carried by somebody else."""
    wanted = [client.output("OUTPUT0", binary_data=True), client.output("OUTPUT1", binary_data=False)]
    body, header_bytes = await client.generate_request_body(client.pair(), outputs=wanted)
    url = f"http://{client.served.http}/v2/models/simple/infer"
    request = urllib.request.Request(url, body, {"Inference-Header-Content-Length": str(header_bytes)})
    with urllib.request.urlopen(request, timeout=60) as reply:
        length, coding = (
            reply.headers[name] for name in ("Inference-Header-Content-Length", "Content-Encoding")
        )
        right(await client.parse_response_body(reply.read(), False, int(length), coding))


async def start_stream(client: Client) -> None:
    answers = Answers()
    await client.start_stream(answers)
    with pytest.raises(Refused, match="cannot start another stream"):
        await client.start_stream(answers)
    for number in range(4):
        model = "nope" if number == 2 else "simple"
        await client.async_stream_infer(model, client.pair(), request_id=str(number))
    found = [answers.next() for _ in range(4)]
    assert [error is None for _, error in found] == [True, True, False, True]
    assert [result.get_response().id for result, _ in found if result is not None] == ["0", "1", "3"]
    await client.stop_stream()


async def stream_infer(client: Client) -> None:
    async def asking() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "simple", "inputs": client.pair(), "request_id": "a"}
        yield {"model_name": "repeat", "inputs": client.numbers(5, -1, 6), "request_id": "b"}

    found = [answer async for answer in await client.stream_infer(asking())]
    assert sum(error is not None for _, error in found) == 1
    results = [result for result, _ in found if result is not None]
    right(next(result for result in results if result.get_response().id == "a"))
    numbers = [int(r.as_numpy("OUT")[0]) for r in results if r.get_response().id == "b"]
    assert numbers == [5, 6]


# --- repository, statistics, settings --------------------------------------------------------------


async def get_model_repository_index(client: Client) -> None:
    told = await client.told("get_model_repository_index")
    models = {one["name"]: one for one in (told if client.kind == "http" else told["models"])}
    assert {"sums", "simple", "kinds", "types", "digits", "double", "repeat"} <= set(models)
    assert models["double"] == {"name": "double", "version": "1", "state": "READY"}


async def load_model(client: Client) -> None:
    """From the folder, under another config, from files a client brings along, and what cannot be."""
    name = f"brought-{uuid.uuid4().hex[:8]}"
    config = {"backend": "python", "max_batch_size": 0, **inputs_and_outputs()}
    files = {"file:1/model.py": TWICE.encode(), "file:notes/read.me": b"\0\xff"}
    await client.load_model(name, config=json.dumps(config), files=files)
    result = await client.infer(name, client.numbers(4, 5))
    assert result.as_numpy("OUT").tolist() == [8, 10]
    await client.unload_model(name)
    with pytest.raises(Refused, match=f"failed to load '{name}'"):
        await client.load_model(name)
    await client.load_model("told", config=json.dumps(await shown_config(client, "told")))
    await client.load_model("told")
    assert await client.is_model_ready("told")
    with pytest.raises(Refused, match="failed to load 'simple'"):
        await client.load_model("simple", files=files)
    assert await client.is_model_ready("simple")


def inputs_and_outputs() -> dict[str, Any]:
    number = {"data_type": "TYPE_INT32", "dims": [-1]}
    return {"input": [{"name": "IN", **number}], "output": [{"name": "OUT", **number}]}


async def shown_config(client: Client, name: str) -> dict[str, Any]:
    """Return the result of the config call, which goes back in as it is."""
    told = await client.told("get_model_config", name)
    found: dict[str, Any] = told if client.kind == "http" else told["config"]
    return found


async def unload_model(client: Client) -> None:
    await client.unload_model("total")
    assert not await client.is_model_ready("total")
    with pytest.raises(Refused, match="'total' has no available versions"):
        await client.infer("total", client.numbers(1))
    await client.unload_model("nope", unload_dependents=True)
    await client.load_model("total")
    assert await client.is_model_ready("total")


async def get_inference_statistics(client: Client) -> None:
    async def counts() -> tuple[int, int, int]:
        told = await client.told("get_inference_statistics", "simple", "1")
        (one,) = told["model_stats"]
        success = int(one["inference_stats"]["success"]["count"])
        return int(one.get("inference_count", 0)), int(one.get("execution_count", 0)), success

    before = await counts()
    rows = np.tile(COUNT, (3, 1))
    await client.infer("simple", client.pair(rows, rows))
    after = await counts()
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 1, 1]
    everything = await client.told("get_inference_statistics")
    assert {"simple", "sums", "digits"} <= {one["name"] for one in everything["model_stats"]}
    with pytest.raises(Refused, match="requested model 'nope' is not available"):
        await client.get_inference_statistics("nope")


def value_of(told: Any, name: str, kind: str) -> Any:
    found = told[name] if kind == "http" else told["settings"][name]["value"]
    return found[0] if isinstance(found, list) else found


async def get_trace_settings(client: Client) -> None:
    for model in (None, "simple"):
        told = await client.told("get_trace_settings", model)
        assert value_of(told, "trace_level", client.kind) == "OFF"
        assert value_of(told, "trace_count", client.kind) == "-1"


async def update_trace_settings(client: Client) -> None:
    change = {"trace_rate": "7", "log_frequency": "3"}
    told = await client.told("update_trace_settings", "simple", change)
    assert value_of(told, "trace_rate", client.kind) == "7"
    assert value_of(await client.told("get_trace_settings"), "trace_rate", client.kind) == "1000"
    told = await client.told("update_trace_settings", "simple", dict.fromkeys(change))
    assert value_of(told, "trace_rate", client.kind) == "1000"
    with pytest.raises(Refused, match="Unable to parse 'trace_rate', got: x"):
        await client.update_trace_settings(None, {"trace_rate": "x"})


async def get_log_settings(client: Client) -> None:
    told = await client.told("get_log_settings")
    settings = told if client.kind == "http" else told["settings"]
    assert {"log_info", "log_warning", "log_error", "log_verbose_level", "log_format"} <= set(settings)


async def update_log_settings(client: Client) -> None:
    for level in (1, 0):
        told = await client.told("update_log_settings", {"log_verbose_level": level, "log_info": True})
        if client.kind == "http":
            assert (told["log_verbose_level"], told["log_info"]) == (level, True)
        else:
            assert told["settings"]["log_verbose_level"] == {"uint32_param": level}
    with pytest.raises(Refused, match="log file location can not be updated"):
        await client.update_log_settings({"log_file": "x"})


# --- shared memory ---------------------------------------------------------------------------------


async def register_system_shared_memory(client: Client) -> None:
    with region(4096 + 256) as (handle, name, key):
        shared_memory.set_shared_memory_region(handle, [COUNT, ONES], 4096)
        await client.register_system_shared_memory(name, key, 256, offset=4096)
        told = await client.told("get_system_shared_memory_status", name)
        shown = told[0] if client.kind == "http" else told["regions"][name]
        assert (shown["name"], shown["key"]) == (name, key)
        assert (int(shown["offset"]), int(shown["byte_size"])) == (4096, 256)
        given = client.pair()
        for index, one in enumerate(given):
            one.set_shared_memory(name, 64, offset=64 * index)
        wanted = client.output("OUTPUT0")
        wanted.set_shared_memory(name, 64, offset=128)
        await client.infer("simple", given, outputs=[wanted, client.output("OUTPUT1")])
        found = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16], 4096 + 128)
        assert np.array_equal(found, COUNT + ONES)
        with pytest.raises(Refused, match="already in manager"):
            await client.register_system_shared_memory(name, key, 256)
        await client.unregister_system_shared_memory(name)
        with pytest.raises(Refused, match="Unable to find shared memory region"):
            await client.infer("simple", given)


async def unregister_system_shared_memory(client: Client) -> None:
    with region(64) as (_, name, key):
        for number in range(3):
            await client.register_system_shared_memory(f"{name}{number}", key, 64)
        await client.unregister_system_shared_memory("nope")
        await client.unregister_system_shared_memory(f"{name}1")
        told = await client.told("get_system_shared_memory_status")
        shown = [one["name"] for one in told] if client.kind == "http" else list(told["regions"])
        assert sorted(shown) == [f"{name}0", f"{name}2"]
        await client.unregister_system_shared_memory()
        assert await client.told("get_system_shared_memory_status") in ([], {})


async def register_cuda_shared_memory(client: Client) -> None:
    handle = base64.b64encode(bytes(64)) if client.kind == "http" else bytes(64)
    with pytest.raises(Refused, match="failed to register shared memory region: invalid args"):
        await client.register_cuda_shared_memory("c", handle, 0, 64)


async def get_cuda_shared_memory_status(client: Client) -> None:
    assert await client.told("get_cuda_shared_memory_status") in ([], {})
    with pytest.raises(Refused, match="Unable to find cuda shared memory region: 'c'"):
        await client.get_cuda_shared_memory_status("c")


async def unregister_cuda_shared_memory(client: Client) -> None:
    await client.unregister_cuda_shared_memory()
    await client.unregister_cuda_shared_memory("c")


# --- the client itself -----------------------------------------------------------------------------


async def register_plugin(client: Client) -> None:
    class Noting(client.module.InferenceServerClientPlugin):  # type: ignore[misc,name-defined]
        asked = 0

        def __call__(self, request: Any) -> None:
            request.headers["authorization"] = "Bearer of-no-interest-here"
            self.asked += 1

    plugin = Noting()
    await client.register_plugin(plugin)
    assert client.real.plugin() is plugin
    right(await client.infer("simple", client.pair(), headers={"x-more": "1"}))
    await client.get_server_metadata()
    assert plugin.asked == 2
    with pytest.raises(Refused, match="plugin is already registered"):
        await client.register_plugin(plugin)
    await client.unregister_plugin()
    assert await client.plugin() is None
    await client.get_server_metadata()
    assert plugin.asked == 2


async def close(client: Client) -> None:
    await client.is_server_live()
    await client.close()
    with pytest.raises(Exception, match="closed"):
        await client.is_server_live()


CALLS: dict[str, Callable[[Client], Awaitable[None]]] = {
    **{
        exercise.__name__: exercise
        for exercise in (
            is_server_live, is_server_ready, is_model_ready, get_server_metadata, get_model_metadata,
            get_model_config, infer, async_infer, generate_request_body, start_stream, stream_infer,
            get_model_repository_index, load_model, unload_model, get_inference_statistics,
            get_trace_settings, update_trace_settings, get_log_settings, update_log_settings,
            register_system_shared_memory, unregister_system_shared_memory, register_cuda_shared_memory,
            get_cuda_shared_memory_status, unregister_cuda_shared_memory, register_plugin, close,
        )
    },
    "parse_response_body": generate_request_body,
    "async_stream_infer": start_stream,
    "stop_stream": start_stream,
    "get_system_shared_memory_status": register_system_shared_memory,
    "plugin": register_plugin,
    "unregister_plugin": register_plugin,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flavour", "method"), [(flavour, name) for flavour in FLAVOURS for name in methods_of(flavour)]
)
def test_every_call(served: Running, flavour: str, method: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            await CALLS[method](client)
            assert method in client.called

    run(work())
