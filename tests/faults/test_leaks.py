"""Thousands of broken requests, always the same ones: the answers tell nothing of the server's insides.

Each is a good request with some of its parts changed: a value, a name, a header, a byte. The server must
answer every one of them, and must not have lost a worker or kept memory afterwards.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest

from tests.faults.rig import CLOSED, Answer, Grpc, Http, ints, leaks, message, mixed, pair, tensor
from tests.running import Running

MB = 1 << 20
ROW = ints(*range(16))
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 1e308),
    *("", "x", "INT32", "FP99", "\u0000", "\ud7ff", "a" * 1000, float("nan")),
    *([], {}, [[]], [{}], {"": {}}, [1] * 17, ["1"], [None]),
)
NAMES = ("", "name", "data", "shape", "parameters", "triton_x", "\u00e4")
PLACE = {"shared_memory_region": "r", "shared_memory_offset": 0, "shared_memory_byte_size": 4}
LABELS = {"name": "OUTPUT0", "parameters": {"classification": 3}}
HANDLE = {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 8}
GOOD: tuple[tuple[str, Any], ...] = (
    ("/v2/models/sums/infer", pair(id="i", parameters={"p": 1}, outputs=[{"name": "OUTPUT0"}])),
    ("/v2/models/simple/infer", pair(parameters={"priority": 0, "timeout": 1, "sequence_id": 0})),
    ("/v2/models/simple/infer", pair(outputs=[LABELS])),
    ("/v2/models/types/infer", {"inputs": [tensor("IN_BYTES", [2], ["a", "b"], "BYTES")]}),
    ("/v2/models/types/infer", {"inputs": [tensor("IN_FP32", [1], datatype="FP32", **PLACE)]}),
    ("/v2/models/simple/generate", {"INPUT0": [1] * 16, "INPUT1": [2] * 16, "parameters": {"p": 1}}),
    ("/v2/models/repeat/generate_stream", {"IN": [1, 2], "q": "r"}),
    ("/v2/trace/setting", {"trace_level": ["OFF"], "trace_rate": "9", "log_frequency": None}),
    ("/v2/logging", {"log_info": True, "log_verbose_level": 0, "log_format": "default"}),
    ("/v2/repository/index", {"ready": False}),
    ("/v2/repository/models/nope/load", {"parameters": {"config": "{}", "file:/x": "eA=="}}),
    ("/v2/repository/models/nope/unload", {"parameters": {"unload_dependents": False}}),
    ("/v2/systemsharedmemory/region/r/register", {"key": "/nope", "offset": 0, "byte_size": 8}),
    ("/v2/cudasharedmemory/region/r/register", HANDLE),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def change(value: Any, rng: random.Random) -> None:
    """One place of it, in one of five ways."""
    container, key = rng.choice(places(value))
    way = rng.randrange(5)
    if way == 0:
        del container[key]
    elif way == 1 and isinstance(container, dict):
        container[rng.choice(("", "name", "data", "shape", "parameters", "triton_x", "\u00e4"))] = (
            container.pop(key)
        )
    elif way == 2 and isinstance(container, list):
        container += [container[key]] * rng.randrange(1, 3)
    else:
        container[key] = deepcopy(rng.choice(STRANGE))  # what is put in may itself be changed later


def spoil(data: bytes, rng: random.Random) -> bytes:
    """One byte turned, left out or put in."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice((b"", bytes([rng.randrange(256)]))) + data[at + rng.randrange(2) :]


def broken_json(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    path, good = rng.choice(GOOD)
    made = json.loads(json.dumps(good))
    for _ in range(rng.randrange(1, 3)):
        if places(made):
            change(made, rng)
    body = json.dumps(made).encode()
    return path, spoil(body, rng) if rng.random() < 0.25 else body, {}


def broken_binary(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    inputs = [tensor(f"INPUT{n}", [1, 16], binary_data_size=64) for n in (0, 1)]
    made = pair(*inputs, outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": True}}])
    if rng.random() < 0.7:
        change(made, rng)
    body, length = mixed(made, ROW, ROW)
    if rng.random() < 0.5:
        body = body[: rng.randrange(len(body))]
    length += rng.choice((0, 0, 0, 1, -1, 64, -64, 10**6))
    path = rng.choice(("/v2/models/sums/infer", "/v2/models/simple/infer", "/v2/models/double/infer"))
    return path, body, {"Inference_Header_Content_Length": str(length)}


def fuzz_http(served: Running, count: int, seed: int) -> Counter[int]:
    """The statuses of `count` answers, each of them looked at."""
    rng, seen = random.Random(seed), Counter[int]()
    with Http(served) as http:
        for number in range(count):
            path, body, headers = rng.choice((broken_json, broken_json, broken_binary))(rng)
            answer = http.ask("POST", path, body, **headers)
            told = leaks(served, answer)
            assert not told, (seed, number, path, body[:2000], told)
            seen[answer.status] += 1
    return seen


def broken_message(rng: random.Random) -> bytes:
    given = [(f"INPUT{n}", "INT32", [1, 16], ROW) for n in (0, 1)]
    made = message(rng.choice(("sums", "simple", "types", "nope", "")), *given)
    for _ in range(rng.randrange(1, 4)):
        rng.choice(CHANGES)(made, rng)
    data: bytes = made.SerializeToString()
    return spoil(data, rng) if rng.random() < 0.4 else data


def change_parameter(made: Any, rng: random.Random) -> None:
    asked = made.outputs.add(name=rng.choice(("OUTPUT0", "x")))
    kind, value = rng.choice(VALUES)
    setattr(rng.choice((made, made.inputs[0], asked)).parameters[rng.choice(PARAMETERS)], kind, value)


def change_input(made: Any, rng: random.Random) -> None:
    one = rng.choice(made.inputs)
    way = rng.randrange(6)
    if way == 0:
        one.name = rng.choice(("", "INPUT1", "x" * 300))
    elif way == 1:
        one.datatype = rng.choice(("", "FP32", "BYTES", "FP99"))
    elif way == 2:
        one.shape.append(rng.choice((0, -1, 2**62, 1)))
    elif way == 3:
        del one.shape[-1:]
    elif way == 4:
        one.contents.int_contents.extend([1] * rng.randrange(20))
    else:
        one.contents.bytes_contents.append(b"x")


def change_raw(made: Any, rng: random.Random) -> None:
    raws = made.raw_input_contents
    way = rng.randrange(3)
    if way == 0 or not raws:
        raws.append(b"x" * rng.randrange(100))
    elif way == 1:
        raws[0] = bytes(rng.randrange(200))
    else:
        del raws[0]


def change_names(made: Any, rng: random.Random) -> None:
    made.model_version = rng.choice(("", "1", "2", "-1", "abc", "9" * 400, "1.5"))
    made.id = rng.choice(("", "x", "i" * 5000))


CHANGES = (change_parameter, change_input, change_raw, change_names)
PARAMETERS = (
    *("priority", "timeout", "sequence_id", "sequence_start", "classification", "triton_x", ""),
    *PLACE,
)
VALUES: tuple[tuple[str, Any], ...] = (
    *(("bool_param", True), ("int64_param", -1), ("int64_param", 2**63 - 1), ("string_param", "r")),
    *(("double_param", 1.5), ("uint64_param", 2**64 - 1)),
)
METHODS = (
    *("ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad"),
    *("TraceSetting", "LogSettings", "SystemSharedMemoryRegister", "CudaSharedMemoryRegister", "ModelReady"),
)


def fuzz_grpc(served: Running, count: int, seed: int) -> Counter[int]:
    rng, seen = random.Random(seed), Counter[int]()
    with Grpc(served) as grpc:
        for number in range(count):
            method = "ModelInfer" if rng.random() < 0.8 else rng.choice(METHODS)
            data = broken_message(rng) if method == "ModelInfer" else rng.randbytes(rng.randrange(40))
            answer = grpc.ask_bytes(method, data)
            told = leaks(served, answer)
            assert not told, (seed, number, method, data[:2000], told)
            seen[answer.status] += 1
    return seen


def check(seen: Counter[int], good: int, count: int) -> None:
    """Most were refused, some were still good, and none is missing."""
    assert sum(seen.values()) == count
    assert seen[CLOSED] <= count // 20
    assert 0 < seen[200] < count // 2, seen
    assert good in seen


def test_fuzzed_http(served: Running) -> None:
    fuzz_http(served, 200, seed=0)
    before = served.rss_bytes
    check(fuzz_http(served, 1500, seed=1), 400, 1500)
    assert served.rss_bytes - before < 4 * MB


def test_fuzzed_grpc(served: Running) -> None:
    fuzz_grpc(served, 200, seed=0)
    before = served.rss_bytes
    check(fuzz_grpc(served, 1000, seed=1), 3, 1000)
    assert served.rss_bytes - before < 4 * MB


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10, 20))
def test_very_many_fuzzed_requests(served: Running, seed: int) -> None:
    """100 000 of them in all."""
    before = served.rss_bytes
    check(fuzz_http(served, 6000, seed), 400, 6000)
    check(fuzz_grpc(served, 4000, seed), 3, 4000)
    assert served.rss_bytes - before < 8 * MB


def test_what_counts_as_a_leak(served: Running) -> None:
    """The judge itself: what it must see, and what it must let pass."""

    def seen(text: str) -> str:
        return leaks(served, Answer(400, json.dumps({"error": text}).encode(), {}))

    assert seen("cannot open /tmp/x/model.py")
    assert seen("line 3, in f")
    assert seen("fd 12")
    assert seen("pid=77")
    assert seen("at 0x7f12ab34cd")
    assert seen("<fastserve.engine.BatchQueue object at")
    assert seen(f"worker {served.pid} died")
    assert seen("Traceback (most recent")
    assert seen("memfd:fastserve-arena")
    for text in ("Unable to parse 'shape'", "model.py has no class", "expected [-1,16], got [1,8]", "and/or"):
        assert not seen(text)
