"""The log of a running server: one form for every line, the fields of the access log, failed loads."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.running import Running, until

CONFIG = """
backend: python
inputs: {x: {dtype: float32, shape: []}}
outputs: {y: {dtype: float32, shape: []}}
warmup: "off"
"""
MODEL = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        if inputs["x"][0] < 0:
            raise ValueError("x is below zero")
        return {"y": inputs["x"]}
"""
TRITON = """
class TritonPythonModel:
    def execute(self, requests):
        print("about to fail")
        raise ValueError("no such row")
"""
PBTXT = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
CHOOSY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        xs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        if any((x < 0).any() for x in xs):
            raise ValueError("x is below zero")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in xs]
"""
# Two that arrive within the delay are one batch.
TOGETHER = """
max_batch_size: 2
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 20000000 }
"""
LIVE = "/inference.GRPCInferenceService/ServerLive"


def write_model(
    root: Path, name: str, code: str, config: str = CONFIG, versions: tuple[int, ...] = (1,)
) -> None:
    for number in versions:
        folder = root / name / str(number)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(code)
    (root / name / "model.yaml").write_text(config)


def predict(server: Running, x: float, request_id: str) -> int:
    body = json.dumps({"instances": [x]}).encode()
    url = f"http://{server.http}/v1/models/m:predict"
    asked = urllib.request.Request(url, body, {"X-Request-Id": request_id})
    try:
        with urllib.request.urlopen(asked, timeout=60) as reply:
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def lines_of(log: Path) -> list[dict[str, Any]]:
    whole, _, _ = log.read_text().rpartition("\n")  # one may be being written
    return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("logs")
    write_model(folder / "models", "m", MODEL)
    write_model(folder / "models", "t", TRITON, "")
    (folder / "models" / "t" / "model.yaml").rename(folder / "models" / "t" / "config.pbtxt")
    (folder / "models" / "t" / "config.pbtxt").write_text(PBTXT)
    (folder / "models" / "pair" / "1").mkdir(parents=True)
    (folder / "models" / "pair" / "1" / "model.py").write_text(CHOOSY)
    (folder / "models" / "pair" / "config.pbtxt").write_text(PBTXT + TOGETHER)
    options = ["--log-format", "json", "--log-access"]
    with Running(folder / "models", folder / "log", *options) as running:
        yield running


def under(server: Running, request_id: str, logger: str) -> dict[str, Any]:
    """The line of a request, once it is there."""

    def found() -> list[dict[str, Any]]:
        own = [line for line in lines_of(server.log) if line.get("request_id") == request_id]
        return [line for line in own if line["logger"] == logger]

    until(found, f"a line of {request_id}")
    (line,) = found()
    return line


def test_the_access_log_of_http_has_fields(server: Running) -> None:
    assert predict(server, 1.0, "ok-1") == 200
    line = under(server, "ok-1", "fastserve.access")
    assert line["message"] == "POST /v1/models/m:predict"
    assert (line["protocol"], line["status"]) == ("http", 200)
    assert line["address"].startswith("127.0.0.1:")
    assert line["bytes"] > 10
    assert 0 < line["duration_ms"] < 20_000


def test_the_access_log_of_grpc_has_fields(server: Running) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        reply = channel.unary_unary(LIVE)(b"", metadata=(("x-request-id", "rpc-1"),), timeout=60)
    line = under(server, "rpc-1", "fastserve.access")
    assert (line["message"], line["protocol"], line["status"]) == (LIVE, "grpc", "OK")
    assert line["bytes"] == len(reply)
    assert 0 < line["duration_ms"] < 20_000


def test_what_a_request_failed_of_is_logged_under_its_id(server: Running) -> None:
    assert predict(server, -1.0, "bad-1") == 500
    assert under(server, "bad-1", "fastserve.access")["status"] == 500
    line = under(server, "bad-1", "fastserve.net.request")
    assert line["level"] == "warning"
    assert "x is below zero" in line["message"]


def test_a_traceback_of_a_worker_has_the_ids_of_its_requests(server: Running) -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    body = json.dumps({"id": "body-1", "inputs": [tensor]}).encode()
    asked = urllib.request.Request(
        f"http://{server.http}/v2/models/t/infer", body, {"X-Request-Id": "http-1"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=60)
    refused.value.close()
    assert "no such row" in under(server, "http-1", "fastserve.net.request")["message"]
    (line,) = [line for line in lines_of(server.log) if line.get("request_ids") == "body-1"]
    assert (line["worker"], line["trace"][-1]) == ("t/1#0", "ValueError: no such row")
    printed = [line for line in lines_of(server.log) if line["logger"] == "model.stdout"]
    assert [(line["message"], line["worker"]) for line in printed] == [("about to fail", "t/1#0")]


def test_the_one_request_of_a_batch_that_failed_is_logged_under_its_id(server: Running) -> None:
    def ask(id: str, x: float) -> int:
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [x]}
        body = json.dumps({"id": id, "inputs": [tensor]}).encode()
        try:
            urllib.request.urlopen(f"http://{server.http}/v2/models/pair/infer", body, timeout=60).close()
        except urllib.error.HTTPError as refused:
            refused.close()
            return refused.code
        return 200

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, ["good-1", "worse-1"], [1.0, -1.0])) == [200, 500]
    (line,) = [line for line in lines_of(server.log) if "on one request of 2" in line["message"]]
    assert (line["request_ids"], line["worker"]) == ("worse-1", "pair/1#0")


FAILS = """
import logging


class Model:
    def __init__(self, config):
        print("about to fail")
        raise ValueError("no weights \\d here")

    def run(self, inputs):
        return {}
"""


def start(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "fastserve.cli", "serve", str(folder / "models"), *options]
    listeners = ["--http", "127.0.0.1:0", "--grpc", "off"]
    done = subprocess.run([*command, *listeners], capture_output=True, text=True, timeout=120, cwd=folder)
    return done.returncode, done.stderr


def test_a_failed_load_is_a_line_and_its_traceback_comes_once(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", FAILS, CONFIG + "instances: 2\nversion_policy: all\n", (1, 2))
    status, told = start(tmp_path)
    assert status == 1
    errors = [line for line in told.splitlines() if " ERROR " in line]
    assert [line.partition("reconciler: ")[2] for line in errors] == [
        f"model m: version {number}: ValueError: no weights \\\\d here" for number in (2, 1)
    ]
    assert told.count("Traceback") == 1
    assert told.count('raise ValueError("no weights \\\\d here")') == 1
    assert told.splitlines()[-1].startswith("fastserve: 1 model(s) did not become available: m: version 1:")


def test_the_json_log_of_a_start_that_fails_is_json_to_its_last_line(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", FAILS)
    status, told = start(tmp_path, "--log-format", "json")
    assert status == 1
    lines = [json.loads(line) for line in told.splitlines()]
    printed = next(line for line in lines if line["logger"] == "model.stdout")
    assert (printed["message"], printed["worker"]) == ("about to fail", "m/1#0")
    (failed,) = [line for line in lines if "trace" in line]
    assert failed["trace"][-1] == "ValueError: no weights \\\\d here"
    assert lines[-1]["level"] == "critical"


def test_retries_say_nothing_new(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "good", MODEL)
    write_model(tmp_path / "models", "m", FAILS)
    options = ["--keep-going", "--poll-s", "0.05", "--load-retry-s", "0.05"]
    log = tmp_path / "log"
    with Running(tmp_path / "models", log, *options):
        until(lambda: log.read_text().count("about to fail") >= 3, "a third try")
        said = log.read_text()
        assert said.count("model m: version 1: ValueError") == 1
        assert said.count("Traceback") == 1
        other = tmp_path / "other.py"
        other.write_text(FAILS.replace("no weights", "no file"))
        other.replace(tmp_path / "models" / "m" / "1" / "model.py")  # at once: half of it is a third problem
        until(lambda: "ValueError: no file" in log.read_text(), "the new problem")
    assert log.read_text().count("Traceback") == 2
