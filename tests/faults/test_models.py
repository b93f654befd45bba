"""Models that are wrong, that hang, and whose callers leave: the others are served as ever."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc as grpcio
import pytest

from tests.dialects.kserve import client_models
from tests.faults.rig import MESSAGES, SERVICE, Grpc, Http, ints, leaks, message, pair, request_bytes, tensor
from tests.running import WAIT_S, Running, until

STREAM = f"{SERVICE}ModelStreamInfer"
WAITS = -2  # `repeat` sends nothing until its caller has left


def index(http: Http) -> dict[str, Any]:
    return {one["name"]: one for one in http.post("/v2/repository/index", {}).json()}


@pytest.mark.logs_errors
def test_a_config_with_unknown_fields(served: Running, http: Http) -> None:
    """The others are up, and the reason names the line, the field, and what there is instead."""
    answer = http.post("/v2/repository/models/odd/load", {})
    assert answer.status in (400, 500)
    assert not leaks(served, answer)
    shown = index(http)
    assert shown["sums"]["state"] == "READY"
    assert shown["odd"]["state"] == "UNAVAILABLE"
    said = "line 8, column 1: unknown field 'max_batchsize', did you mean max_batch_size? allowed: name, "
    assert said in shown["odd"]["reason"]
    assert http.post("/v2/models/odd/infer", pair()).status in (400, 404)
    assert http.post("/v2/models/sums/infer", pair()).status == 200


CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [-1]}],
}
MODEL = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        {}
    def execute(self, requests):
        {}
"""
SOURCES = {
    "no syntax": "class TritonPythonModel(:",
    "no class": "x = 1",
    "no module": "import no_such_module_at_all",
    "raises": MODEL.format("raise RuntimeError('cannot start')", "pass"),
    "needs a file": MODEL.format("open('weights.bin')", "pass"),
    "exits": MODEL.format("import os; os._exit(3)", "pass"),
    "is killed": MODEL.format("import os; os.kill(os.getpid(), 9)", "pass"),
    "crashes": MODEL.format("import ctypes; ctypes.string_at(0)", "pass"),
    "recurses": MODEL.format("f = lambda: f(); f()", "pass"),
}


def brought(http: Http, source: str) -> Any:
    files = {"file:1/model.py": base64.b64encode(source.encode()).decode()}
    given = {"parameters": {"config": json.dumps(CONFIG), **files}}
    return http.post("/v2/repository/models/brought/load", given)


@pytest.fixture
def unloaded(http: Http) -> Iterator[None]:
    yield
    http.post("/v2/repository/models/brought/unload", {})


@pytest.mark.logs_errors
@pytest.mark.parametrize("how", SOURCES)
def test_models_that_cannot_be_loaded(served: Running, http: Http, unloaded: None, how: str) -> None:
    answer = brought(http, SOURCES[how])
    assert answer.status == 400
    assert answer.error.startswith("load failed for model 'brought': version 1 is at UNAVAILABLE state: ")
    assert not leaks(served, answer)
    assert http.post("/v2/models/sums/infer", pair()).status == 200


TROUBLE = {
    "raises": "raise ValueError('kaboom')",
    "needs a file": "open('/etc/no-such-file')",
    "fails inside": "import json; json.loads('x')",
    "returns nothing": "return None",
    "returns too few": "return []",
    "returns rubbish": "return ['x' for _ in requests]",
    "exits": "import os; os._exit(3)",
    "crashes": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.logs_errors
@pytest.mark.parametrize("how", TROUBLE)
def test_models_that_go_wrong(served: Running, http: Http, grpc: Grpc, unloaded: None, how: str) -> None:
    """An error that tells nothing of the server; the next request finds a worker again."""
    assert brought(http, MODEL.format("pass", TROUBLE[how])).status == 200
    for _ in range(2):
        answer = http.post("/v2/models/brought/infer", {"inputs": [tensor("IN", [1], [1])]})
        assert answer.status in (500, 503)
        assert not leaks(served, answer)
    answer = grpc.infer(message("brought", ("IN", "INT32", [1], ints(1))))
    assert answer.status in (13, 14)
    assert not leaks(served, answer)
    assert http.post("/v2/models/sums/infer", pair()).status == 200


def test_models_that_hang(tmp_path: Path) -> None:
    """run_timeout_ms: the worker is killed, its caller told, and the next batch runs on a new one. A model of
    Triton's form has it from model_defaults."""
    number = {"dtype": "int32", "shape": [1]}
    hangs = "        while {}.any(): pass\n        return"
    native = client_models.SAME.replace("        return", hangs.format("inputs['IN']"))
    sides = {"inputs": {"IN": number}, "outputs": {"IN": number}}
    models = tmp_path / "models"
    client_models.write_native(models, "native", native, max_batch_size=1, **sides)
    triton = client_models.HELD.replace("if request.is_cancelled():", "if False:")
    client_models.write_triton(models, "triton", triton, "max_batch_size: 1\n" + client_models.NUMBERS % 1)
    settings = tmp_path / "settings.yaml"
    settings.write_text("model_defaults: {run_timeout_ms: 2000}\n")
    with Running(models, tmp_path / "log", "--config", str(settings)) as served, Http(served) as http:
        for model in ("native", "triton"):
            answers = []
            for sent in (1, 0):
                given = {"inputs": [tensor("IN", [1, 1], [sent])]}
                answers.append(http.post(f"/v2/models/{model}/infer", given))
                assert not leaks(served, answers[-1])
            assert [answer.status for answer in answers] == [503, 200], model
        assert served.alive


class Stream:
    """A decoupled request under way over gRPC."""

    def __init__(self, served: Running, *numbers: int) -> None:
        self._channel = grpcio.insecure_channel(served.grpc)
        self._over = threading.Event()
        self._sent = message("repeat", ("IN", "INT32", [len(numbers)], ints(*numbers))).SerializeToString()
        self._call = self._channel.stream_stream(STREAM)(self._requests(), timeout=WAIT_S)

    def _requests(self) -> Iterator[bytes]:
        yield self._sent
        self._over.wait(WAIT_S)

    def next(self) -> list[int]:
        found = MESSAGES.ModelStreamInferResponse.FromString(next(self._call))
        assert not found.error_message
        return list(memoryview(found.infer_response.raw_output_contents[0]).cast("i"))

    def leave(self) -> None:
        """Without a word: the connection is closed."""
        self._over.set()
        self._channel.close()


def test_the_caller_of_a_decoupled_model_leaves(served: Running) -> None:
    """The model sees is_cancelled, stops, and takes the next request; its one worker is the proof."""
    for _ in range(5):
        stream = Stream(served, 1, WAITS, 2)
        assert stream.next() == [1]
        stream.leave()
    stream = Stream(served, 3, 4)
    assert [stream.next(), stream.next()] == [[3], [4]]
    stream.leave()


def test_the_caller_of_generate_stream_leaves(served: Running) -> None:
    for _ in range(5):
        with Http(served) as http:
            body = json.dumps({"IN": [1, WAITS, 2]}).encode()
            http.send(request_bytes("POST", "/v2/models/repeat/generate_stream", body))
            http.wait_for(b'"OUT":1')
    with Http(served) as http:
        answer = http.post("/v2/models/repeat/generate_stream", {"IN": [3]})
        assert (answer.status, b'"OUT":3' in answer.body) == (200, True)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_the_caller_of_a_model_leaves(served: Running, held: Path, kind: str) -> None:
    """Of one with one answer: it is told as well."""
    if kind == "http":
        with Http(served) as http:
            body = json.dumps({"inputs": [tensor("IN", [1], [1])]}).encode()
            http.send(request_bytes("POST", "/v2/models/held/infer", body))
            until((held / "began").exists, "the model runs")
    else:
        channel = grpcio.insecure_channel(served.grpc)
        sent = message("held", ("IN", "INT32", [1], ints(1))).SerializeToString()
        asking = channel.unary_unary(f"{SERVICE}ModelInfer").future(sent, timeout=WAIT_S)
        until((held / "began").exists, "the model runs")
        channel.close()
        assert asking.code() is grpcio.StatusCode.CANCELLED
    until((held / "left").exists, "the model sees that its caller has left")
