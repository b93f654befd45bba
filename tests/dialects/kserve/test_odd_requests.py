"""Requests no capture shows: their answers follow from the source of the captured release (2.51.0)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import text_format

from fastserve.settings import AdminOptions
from tests.dialects.kserve.models import EACH, ONE, SAME, config, put, write_probe_models
from tests.dialects.kserve.replay import V2
from tests.dialects.kserve.test_options import Asked, serving
from tests.server.rig import Served, run

A = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))}
B = {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16}
BOTH = {"inputs": [A, B]}
SHM = {"shared_memory_region": "r"}
SIMPLE, SAY = "/v2/models/simple/infer", "/v2/models/params/infer"
TALK, TRACE, LOG = "/v2/models/llm/generate", "/v2/trace/setting", "/v2/logging"
LOAD, UNLOAD = "/v2/repository/models/params/load", "/v2/repository/models/params/unload"
SYSTEM, CUDA = "/v2/systemsharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/register"
ONE_FORM = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But no field is set"
)
NO_MEMBERS = "attempt to get members for non-object"
NO_STRING = "attempt to access JSON non-string as string"
FIT = "The schema can not convert input 'text_input' to tensor with proper shape"
NO_ARRAY = "attempt to access JSON non-array as array"
NO_UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NESTED = "Converting keyword: 'parameters'"
RANGES: list[dict[str, int]] = [{}, {"byte_size": 0}, {"offset": 128, "byte_size": 64}]
TYPES = "has invalid type. It should be either 'int', 'bool', or 'string'."


def missing(name: str) -> str:
    return f"attempt to access non-existing object member '{name}'"


CASES: list[tuple[str, Any, int, str]] = [
    (SIMPLE, [], 500, f"Unable to parse 'inputs': {missing('inputs')}"),
    (SIMPLE, {"inputs": [3]}, 400, ONE_FORM),
    (SIMPLE, {"inputs": [{"name": 3}]}, 400, ONE_FORM),
    (SIMPLE, {"inputs": [{"data": []}]}, 500, f"Unable to parse 'name': {missing('name')}"),
    (SIMPLE, {**BOTH, "parameters": 3}, 500, f"failed to get request params.: {NO_MEMBERS}"),
    (SIMPLE, {**BOTH, "outputs": 3}, 500, f"Unable to parse 'outputs': {NO_ARRAY}"),
    (SIMPLE, {**BOTH, "outputs": [{"parameters": {**SHM, "binary_data": 1}}]}, 500,
     "Unable to set 'binary_data': attempt to access JSON non-boolean as boolean"),
    (SIMPLE, {**BOTH, "outputs": [{"parameters": {**SHM, "classification": 0}}]}, 400,
     "Output can't set both 'shared_memory_region' and 'classification'"),
    (SIMPLE, {"inputs": [{**A, "data": [2**63] * 16}, B]}, 500,
     "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
    (TALK, [], 500, NO_MEMBERS),
    (TALK, {"text_input": [1, 2]}, 500, f"Unable to parse JSON bytes array: {NO_STRING}"),
    (TALK, {"text_input": ["a", "b"]}, 400, FIT),
    (TALK, {"text_input": "a", "parameters": {"text_input": "b"}}, 400,
     f"{NESTED}: [request id: <id_unknown>] input 'text_input' already exists in request"),
    (TALK, {"text_input": "a", "parameters": {"foo": []}}, 400, f"{NESTED}: parameter 'foo' {TYPES}"),
    (TALK, {"text_input": "a", "sequence_id": []}, 400,
     f"parameter 'sequence_id' {TYPES}"),
    (LOAD, {"parameters": {"foo": 3}}, 500, NO_STRING),
    (LOAD, {"parameters": 3}, 500, NO_MEMBERS),
    (LOAD, {"parameters": {"config": "{}", "file:1/model.py": "!"}}, 400,
     "failed to decode the file's content: it is not base64"),
    (SYSTEM, [], 400, "Shared memory register request has no 'key' field"),
    (SYSTEM, {"key": 3}, 500, NO_STRING),
    (SYSTEM, {"key": "/k", "offset": -1}, 500, NO_UINT),
    (CUDA, {"raw_handle": {}}, 500, missing("b64")),
    (CUDA, {"raw_handle": {"b64": ""}}, 500, missing("byte_size")),
    (TRACE, {"trace_file": None}, 501, "trace file location can not be updated through network protocol"),
    (TRACE, {"trace_count": "-2"}, 400, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
    (TRACE, {"trace_rate": "4294967296"}, 400,
     "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 4294967296"),
    (TRACE, {"trace_level": "OFF"}, 500, NO_ARRAY),
    (TRACE, {"trace_level": ["TENSORS"]}, 400,
     "Attempting to set invalid trace setting :trace file name is not given"),
    ("/v2/models/bad/trace/setting", {}, 400, "Request for unknown model : bad"),
    (LOG, {"log_verbose_level": -1}, 500, NO_UINT),
]  # fmt: skip
GRPC = [
    ("ModelInfer", 'model_name: "params" parameters { key: "n" value { uint64_param: 3 } }',
     "invalid value type for 'n' parameter, expected int64_param, bool_param, or string_param."),
    ("ModelInfer", 'model_name: "params" parameters { key: "timeout" value { uint64_param: 3 } }',
     "invalid value type for 'timeout' parameter, expected int64_param."),
    ("ModelInfer", 'model_name: "simple" inputs { name: "INPUT0" } inputs { name: "INPUT0" }',
     "[request id: <id_unknown>] input 'INPUT0' already exists in request"),
    ("TraceSetting", 'settings { key: "trace_count" value { value: "-2" } }',
     "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
    ("TraceSetting", 'settings { key: "log_frequency" value { value: "1" value: "2" } }',
     "expect only 1 value for 'log_frequency'"),
    ("LogSettings", 'settings { key: "log_format" value { string_param: "x" } }',
     "invalid argument for log_format, got: x"),
]  # fmt: skip


async def ask_all(asked: Asked) -> list[Any]:
    found: list[Any] = [await asked.http(path, body) for path, body, _, _ in CASES]
    for name, text, _ in GRPC:
        request = text_format.Parse(text, getattr(V2, f"{name}Request")())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.rpc(name, request)
        found.append((caught.value.code().name, caught.value.details()))
    return found


async def ask_odd_lengths(asked: Asked) -> list[Any]:
    """The header's number ends where its digits do."""
    body = json.dumps(BOTH)
    lengths = (f"{len(body)}; really", "-1x", "9" * 5000, "x")
    return [await asked.http(SIMPLE, body, **{"Inference-Header-Content-Length": said}) for said in lengths]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("odd")
    write_probe_models(folder)
    found: dict[str, Any] = {}
    models = {
        "model_control": "explicit",
        "load_models": ("simple", "params", "llm", "ens"),
        "allow_client_shm": True,
        "admin": AdminOptions(log_settings=True),
    }

    async def work() -> None:
        async with serving(folder, models) as asked:
            found["cases"] = await ask_all(asked)
            found["lengths"] = await ask_odd_lengths(asked)
            found["passed over"] = [
                (
                    await asked.http(
                        TRACE, {"trace_level": ["NO"], "trace_mode": "x", "trace_rate": "5 apples"}
                    )
                )[1],
                await asked.http(LOG, {"nope": 3}),
            ]
            found["no objects"] = [
                await asked.http(path, body) for path in (TRACE, LOG) for body in ("[]", "1", '"x"', "null")
            ]
            found["regions"] = await ask_regions(asked)
            found["generated"] = await asked.http(
                "/v2/models/params/generate", {"IN": "x", "id": "7", "timeout": 5}
            )
            found["config"] = await asked.http("/v2/models/ens/config", method="GET")
            health = await exchange_health(asked)
            found["health"] = health
            found["unloads"] = [
                await asked.http(UNLOAD.replace("params", model), body)
                for model in ("nope", "params")
                for body in ("{", "[]", '{"parameters": {"unload_dependents": 3}}')
            ]
            found["unloaded"] = (await asked.http("/v2/models/params/ready", method="GET"))[0]

    run(work())
    return found


async def ask_regions(asked: Asked) -> list[Any]:
    """Ranges of a region of 128 bytes, for an input and for an output, over both transports."""
    path = Path("/dev/shm") / f"fastserve-odd-{os.getpid()}"
    path.write_bytes(bytes(128))
    try:
        await asked.http(SYSTEM, {"key": f"/{path.name}", "byte_size": 128})
        return [answer for said in RANGES for answer in await ask_range(asked, said)]
    finally:
        path.unlink()


async def ask_range(asked: Asked, said: dict[str, int]) -> list[Any]:
    where = SHM | {f"shared_memory_{name}": value for name, value in said.items()}
    bare = {name: value for name, value in A.items() if name != "data"}
    outside = [{"name": "OUTPUT0", "parameters": where}]
    found: list[Any] = [
        await asked.http(SIMPLE, {"inputs": [bare | {"parameters": where}, B]}),
        await asked.http(SIMPLE, BOTH | {"outputs": outside}),
    ]
    for part in ("inputs", "outputs") if "byte_size" in said else ():
        request = V2.ModelInferRequest(model_name="simple", raw_input_contents=[bytes(64)] * 2)
        for name in ("INPUT0", "INPUT1"):
            request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.outputs.add(name="OUTPUT0")
        for name, value in where.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(getattr(request, part)[0].parameters[name], kind, value)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.rpc("ModelInfer", request)
        found.append((caught.value.code().name, caught.value.details()))
    return found


async def exchange_health(asked: Asked) -> list[bytes]:
    async with grpc.aio.insecure_channel(asked.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        return [await check(b"\x0a\x01" + name) for name in (b"a", b"b")]


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{path}-{status}" for path, _, status, _ in CASES]
)
def test_http(number: int, told: dict[str, Any]) -> None:
    _, _, status, text = CASES[number]
    assert told["cases"][number] == (status, {"error": text})


@pytest.mark.parametrize("number", range(len(GRPC)), ids=[name for name, _, _ in GRPC])
def test_grpc(number: int, told: dict[str, Any]) -> None:
    assert told["cases"][len(CASES) + number] == ("INVALID_ARGUMENT", GRPC[number][2])


def test_lengths_of_the_header(told: dict[str, Any]) -> None:
    fine, negative, huge, none = told["lengths"]
    assert fine[0] == 200
    size = len(json.dumps(BOTH))
    for (status, reply), said in ((negative, "-1x"), (huge, "9" * 5000)):
        wanted = f"inference header size should be in range (0, {size}), got: {said}"
        assert (status, reply["error"]) == (400, wanted)
    assert none[1]["error"].endswith("but got 2 inputs in 'simple' model configuration")


def test_what_is_passed_over(told: dict[str, Any]) -> None:
    trace, (status, log) = told["passed over"]
    assert (trace["trace_level"], trace["trace_mode"], trace["trace_rate"]) == (["OFF"], "triton", "5")
    assert (status, log["log_info"]) == (200, True)


def test_settings_that_are_no_object_change_nothing(told: dict[str, Any]) -> None:
    assert [status for status, _ in told["no objects"]] == [200] * 8
    assert told["no objects"][0][1]["trace_level"] == ["OFF"]
    assert told["no objects"][4][1]["log_info"] is True


def test_an_unload_looks_at_its_body_for_dependents_alone(told: dict[str, Any]) -> None:
    assert [status for status, _ in told["unloads"]] == [200] * 6
    assert told["unloaded"] == 400


@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("along", [False, True])
def test_an_unload_takes_the_models_of_an_ensemble_along_when_asked(
    tmp_path: Path, transport: str, along: bool
) -> None:
    write_probe_models(tmp_path)
    request = V2.RepositoryModelUnloadRequest(model_name="ens")
    request.parameters["unload_dependents"].bool_param = along

    async def work() -> None:
        async with serving(tmp_path, {"model_control": "explicit", "load_models": ("ens",)}) as asked:
            if transport == "grpc":
                await asked.rpc("RepositoryModelUnload", request)
            else:
                body = {"parameters": {"unload_dependents": along}}
                assert (await asked.http(UNLOAD.replace("params", "ens"), body))[0] == 200
            paths = [f"/v2/models/{name}/ready" for name in ("ens", "simple")]
            ready = [(await asked.http(path, method="GET"))[0] for path in paths]
            assert ready == [400, 400 if along else 200]

    run(work())


@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("at_start", [False, True])
def test_an_unload_leaves_the_models_that_were_loaded_by_themselves(
    tmp_path: Path, transport: str, at_start: bool
) -> None:
    write_probe_models(tmp_path)
    request = V2.RepositoryModelUnloadRequest(model_name="ens")
    request.parameters["unload_dependents"].bool_param = True
    loaded = ("ens", "simple") if at_start else ()

    async def work() -> None:
        async with serving(tmp_path, {"model_control": "explicit", "load_models": loaded}) as asked:
            for name in () if at_start else ("simple", "ens"):
                assert (await asked.http(f"/v2/repository/models/{name}/load", {}))[0] == 200
            if transport == "grpc":
                await asked.rpc("RepositoryModelUnload", request)
            else:
                body = {"parameters": {"unload_dependents": True}}
                assert (await asked.http(UNLOAD.replace("params", "ens"), body))[0] == 200
            paths = [f"/v2/models/{name}/ready" for name in ("ens", "simple")]
            assert [(await asked.http(path, method="GET"))[0] for path in paths] == [400, 200]

    run(work())


def test_ranges_that_hold_nothing(told: dict[str, Any]) -> None:
    beyond = "Invalid offset + byte size for shared memory region: 'r'"
    before = "Invalid offset for shared memory region: 'r'"
    over_http = [(400, {"error": beyond})] * 2
    over_grpc = [("INVALID_ARGUMENT", beyond)] * 2
    last = [(400, {"error": before})] * 2 + [("INVALID_ARGUMENT", before)] * 2
    assert told["regions"] == over_http + over_http + over_grpc + last


def test_a_generate_body_has_no_words_of_the_server(told: dict[str, Any]) -> None:
    """Only `id` means something besides: every key is a parameter of the model's."""
    status, reply = told["generated"]
    seen = json.loads(reply["OUT"])
    assert (status, reply["id"], seen["timeout"]) == (200, "7", 0)
    assert seen["params"] == {"id": "7", "timeout": 5}


def test_health_looks_at_no_name(told: dict[str, Any]) -> None:
    assert told["health"] == [b"\x08\x01"] * 2


def test_a_config_has_no_field_that_came_later(told: dict[str, Any]) -> None:
    step = {"model_name": "simple", "model_version": -1, "model_namespace": ""}
    maps = {"input_map": {"INPUT0": "X", "INPUT1": "X"}, "output_map": {"OUTPUT0": "Y"}}
    assert told["config"][1]["ensemble_scheduling"] == {"step": [{**step, **maps}]}


def test_what_was_unloaded_leaves_its_memory(tmp_path: Path) -> None:
    """The fast paths know its requests, and let go of it."""
    put(tmp_path, "one", config(0, ONE), EACH + SAME)
    body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [3]}]}
    request = V2.ModelInferRequest(model_name="one", raw_input_contents=[bytes(4)])
    request.inputs.add(name="IN", datatype="INT32", shape=[1])

    def arenas() -> int:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum("fastserve-arena" in os.readlink(link) for link in links if os.path.islink(link))

    async def work() -> None:
        before = arenas()
        async with serving(tmp_path, {"model_control": "explicit", "load_models": ("one",)}) as asked:
            for _ in range(2):  # the second one takes the fast path
                assert (await asked.http("/v2/models/one/infer", body))[0] == 200
                await asked.rpc("ModelInfer", request)
            assert arenas() > before
            assert (await asked.http("/v2/repository/models/one/unload", {}))[0] == 200
            await Served(asked.server).until(lambda: arenas() == before)

    run(work())
