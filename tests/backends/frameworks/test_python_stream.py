"""Python models whose `run` yields: answers one by one, over the APIs that stream."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.running import Running, until

MODEL = """
import asyncio
import os
import time
import numpy as np

class Model:
    def __init__(self, config):
        pass

    def load(self):
        self.loaded = 1

    def run(self, inputs):
        text, to = inputs["text"][0].decode(), int(inputs["n"][0])
        try:
            for number in range(to):
                if text == "fails" and number == 1:
                    raise ValueError("no further")
                if text == "wrong":
                    yield {"word": np.zeros(1, np.float32), "left": np.zeros(1, np.int32)}
                if text == "pid":
                    text = str(os.getpid())
                yield {
                    "word": np.array([f"{text}{number}"], object),
                    "left": np.array([to - number - self.loaded], np.int32),
                }
        finally:
            if text.startswith("/"):
                open(text, "w").close()

class Beside(Model):
    async def run(self, inputs):
        for number in range(int(inputs["n"][0])):
            await asyncio.sleep(0.001)
            yield {"word": np.array([str(number)], object), "left": np.array([0], np.int32)}
"""
CONFIG = """
backend: python
inputs: {text: {dtype: bytes, shape: []}, n: {dtype: int32, shape: []}}
outputs: {word: {dtype: bytes, shape: []}, left: {dtype: int32, shape: []}}
restart_backoff_s: 0.01
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("streams")
    for name, more in (("talk", "shared_worker: all\n"), ("beside", "class: Beside\n")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.py").write_text(MODEL)
        (root / name / "model.yaml").write_text(CONFIG + more)
    with Running(root, root / "log") as running:
        yield running


def ask(server: Running, path: str, body: Any) -> tuple[int, bytes]:
    host, _, port = server.http.partition(":")
    peer = http.client.HTTPConnection(host, int(port), timeout=60)
    peer.request("POST", path, json.dumps(body).encode())
    reply = peer.getresponse()
    said = reply.status, reply.read()
    peer.close()
    return said


def events(server: Running, text: str, n: int, model: str = "talk") -> list[dict[str, Any]]:
    status, said = ask(server, f"/v2/models/{model}/generate_stream", {"text": text, "n": n})
    assert status == 200, said
    return [json.loads(line[6:]) for line in said.split(b"\n\n")[:-1]]


def test_answers_come_one_by_one_as_events(server: Running) -> None:
    said = [(one["word"], one["left"]) for one in events(server, "a", 3)]
    assert said == [("a0", 2), ("a1", 1), ("a2", 0)]
    assert events(server, "a", 0) == []
    assert [one["word"] for one in events(server, "a", 3, "beside")] == ["0", "1", "2"]


def test_failures(server: Running) -> None:
    first, last = events(server, "fails", 3)
    assert (first["word"], last) == ("fails0", {"error": "ValueError: no further"})
    status, said = ask(server, "/v2/models/talk/generate_stream", {"text": "wrong", "n": 1})
    assert (status, b"word" in said, b"float32" in said) == (400, True, True)  # as Triton has it for a model


def test_one_answer_where_an_api_has_one(server: Running) -> None:
    one, two = ({"instances": [{"text": "a", "n": n}]} for n in (1, 2))
    status, said = ask(server, "/v1/models/talk:predict", one)
    assert (status, json.loads(said)) == (200, {"predictions": [{"word": "a0", "left": 0}]})
    assert ask(server, "/v1/models/talk:predict", two)[0] == 500
    assert ask(server, "/v2/models/talk/generate", {"text": "a", "n": 1})[0] == 200


@pytest.mark.lingers  # grpcio keeps descriptors
def test_a_grpc_stream(server: Running) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    text, n = triton_grpc.InferInput("text", [1], "BYTES"), triton_grpc.InferInput("n", [1], "INT32")
    text.set_data_from_numpy(np.array([b"a"], object))
    n.set_data_from_numpy(np.array([2], np.int32))
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        assert client.get_model_config("talk").config.model_transaction_policy.decoupled
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("talk", [text, n], enable_empty_final_response=True)
        said = []
        for _ in range(3):
            result, error = answers.get(timeout=60)
            assert error is None
            final = result.get_response().parameters["triton_final_response"].bool_param
            said.append(
                (None if result.as_numpy("word") is None else result.as_numpy("word").tolist(), final)
            )
    assert said == [([b"a0"], False), ([b"a1"], False), (None, True)]


def test_a_generator_is_closed_when_its_client_leaves(server: Running, tmp_path: Path) -> None:
    mark = tmp_path / "closed"
    host, _, port = server.http.partition(":")
    peer = http.client.HTTPConnection(host, int(port), timeout=60)
    body = json.dumps({"text": str(mark), "n": 1_000_000}).encode()
    peer.request("POST", "/v2/models/talk/generate_stream", body)
    reply = peer.getresponse()
    assert reply.readline().startswith(b"data:")
    reply.close()
    peer.close()
    until(mark.exists, "the generator is closed")
    assert len(events(server, "a", 3)) == 3


def test_a_worker_that_is_killed_ends_its_streams(server: Running) -> None:
    host, _, port = server.http.partition(":")
    peer = http.client.HTTPConnection(host, int(port), timeout=60)
    peer.request("POST", "/v2/models/talk/generate_stream", b'{"text": "pid", "n": 1000000}')
    reply = peer.getresponse()
    worker = int(json.loads(reply.readline()[6:])["word"][:-1])
    os.kill(worker, signal.SIGKILL)
    assert b"error" in reply.read().rsplit(b"data:", 1)[1]
    peer.close()
    until(
        lambda: ask(server, "/v2/models/talk/generate_stream", {"text": "a", "n": 1})[0] == 200, "it is back"
    )


def test_a_stream_is_not_of_tensors_of_a_device(tmp_path: Path) -> None:
    from fastserve.backends.frameworks.python import PythonBackend
    from fastserve.errors import ConfigError

    (tmp_path / "model.py").write_text(MODEL)
    tensors = {"x": {"dtype": "float32", "shape": []}}
    made = PythonBackend({"inputs": tensors, "outputs": tensors, "device_tensors": True}, tmp_path, 0)
    try:
        with pytest.raises(ConfigError, match="device_tensors: given true"):
            made.load()
    finally:
        made.close()
