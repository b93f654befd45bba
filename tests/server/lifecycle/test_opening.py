"""A server's answers before its models are there, and its words when it cannot have its address."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastserve.protos import load
from tests.running import free_port, run_command, started, until
from tests.server.rig import write_model

SLOW = """
import pathlib, time

class Model:
    def __init__(self, config):
        folder = pathlib.Path(config["parameters"]["folder"])
        (folder / "loading").touch()
        while not (folder / "go").exists():
            time.sleep(0.005)

    def run(self, inputs):
        return {"y": inputs["x"] * 2}
"""
WRITES = (
    SLOW
    + """
    info = {"max_tokens": 64}

    def generate(self, request):
        yield 1, "a"
"""
)
BODY = json.dumps({"instances": [[1.0, 2.0]]})
EVERY = "tfserving,kserve_v2,triton_v1,textgen,grps"
STARTING = "The server is starting: its models are loading"
V2_BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})
CHAT = '{"model": "%s", "messages": [{"role": "user", "content": "a"}]}'
MODELS = ("twice", "writes")
# Asked for a model that is loading -> which model the answer names.
ASKED = {
    "tfserving predict": ("POST", "/v1/models/twice:predict", BODY, "twice"),
    "tfserving metadata": ("GET", "/v1/models/twice/metadata", None, "twice"),
    "v2 infer": ("POST", "/v2/models/twice/infer", V2_BODY, "twice"),
    "v2 metadata": ("GET", "/v2/models/twice", None, "twice"),
    "v2 version": ("GET", "/v2/models/twice/versions/1", None, "twice"),
    "v2 statistics": ("GET", "/v2/models/twice/stats", None, "twice"),
    "v2 load": ("POST", "/v2/repository/models/quick/load", "{}", ""),
    "v1 infer": ("POST", "/api/infer/twice", "", "twice"),
    "openai chat": ("POST", "/v1/chat/completions", CHAT % "writes", "writes"),
    "openai any": ("POST", "/v1/chat/completions", CHAT % "gpt", "writes"),
    "tgi generate": ("POST", "/generate", '{"inputs": "a"}', "writes"),
    "mindie infer": ("POST", "/infer", '{"inputs": "a"}', "writes"),
    "grps predict": ("POST", "/grps/v1/infer/predict?model=twice-1", '{"ndarray": [[1, 2]]}', "twice"),
}
HEADERS = {
    "v1 infer": {"NV-InferRequest": 'batch_size: 1 input { name: "x" } output { name: "y" }'},
    "grps predict": {"Content-Type": "application/json"},
}
# TGI has one status for what cannot be had now; V1 says the code in NV-Status.
STATUS = {"tgi generate": 429, "v1 infer": 400}
ANSWERED = {
    "/healthz/live": 200, "/v2/health/live": 200, "/api/health/live": 200, "/metrics": 200,
    "/healthz/ready": 503, "/v2/health/ready": 400, "/api/health/ready": 400,
    "/v2/models/quick/ready": 200, "/v2/models/twice/ready": 400, "/v2": 200, "/api/status": 200,
    "/v1/models/absent/metadata": 404, "/v2/models/absent": 404,
}  # fmt: skip


def command(folder: Path, http: int, *options: str) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "fastserve.cli",
        "serve",
        str(folder),
        "--http",
        f"127.0.0.1:{http}={EVERY}",
    ]
    return [*words, "--drain-delay-s", "0", *options]


def write_slow(folder: Path, name: str, source: str, **config: Any) -> None:
    """Write a model that loads until there is a file `go` in a folder of its own."""
    (folder / "held" / name).mkdir(parents=True)
    model = write_model(folder / "models", name, parameters={"folder": str(folder / "held" / name)}, **config)
    (model / "1" / "model.py").write_text(source)


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_each_model_answers_once_it_is_loaded_and_others_say_that_they_load(tmp_path, fronts):
    write_slow(tmp_path, "twice", SLOW)
    text = {"tokenizer": "words", "max_new_tokens": 8, "max_tokens": 64}
    no_tensors = {"inputs": {}, "outputs": {}, "max_batch_size": 0}
    write_slow(tmp_path, "writes", WRITES, backend="text_python", text=text, **no_tensors)
    write_model(tmp_path / "models", "quick")
    http_port, grpc_port = free_port(), free_port()
    options = ("--grpc", f"127.0.0.1:{grpc_port}={EVERY}", "--frontends", fronts)
    words = command(tmp_path / "models", http_port, *options)
    with started(*words[words.index("serve") :]) as server:
        try:
            for name in MODELS:
                until((tmp_path / "held" / name / "loading").exists, f"{name} loads", limit_s=30)
            links = {name: http.client.HTTPConnection("127.0.0.1", http_port, timeout=60) for name in ASKED}
            plain = links["v2 metadata"]
            until(lambda: ask(plain, "/v2/models/quick/ready")[0] == 200, "the quick model is ready")
            check_quick(plain, grpc_port)
            for name, (method, target, body, model) in ASKED.items():
                for _ in range(2):  # the second time the head is known
                    links[name].request(method, target, body, HEADERS.get(name, {}))
                    reply = links[name].getresponse()
                    text = reply.read().decode() or reply.getheader("NV-Status")
                    status = STATUS.get(name, 503)
                    assert (reply.status, reply.getheader("retry-after")) == (status, "1"), (name, text)
                    assert (f"The server is starting: model {model} is" if model else STARTING) in text, name
            for target, status in ANSWERED.items():
                assert ask(plain, target)[0] == status, target
            assert b'"LOADING"' in ask(plain, "/v1/models/twice")[1]
            told = json.loads(ask(plain, "/healthz/ready")[1])["models"]
            assert {name: told[name]["reason"] for name in told} == {
                "quick": "", "twice": "loading", "writes": "loading"
            }  # fmt: skip
            check_grpc(grpc_port)
            (tmp_path / "held" / "twice" / "go").touch()
            until(lambda: ask(plain, "/v2/models/twice/ready")[0] == 200, "one more is ready")
            assert json.loads(ask(plain, "/v1/models/twice:predict", BODY)[1]) == {
                "predictions": [[2.0, 4.0]]
            }
            assert ask(plain, "/v2/health/ready")[0] == 400
            (tmp_path / "held" / "writes" / "go").touch()
            assert b"ready" in server.stdout.readline()
            assert ask(plain, "/v2/health/ready")[0] == 200
            assert ask(plain, "/v2/repository/models/quick/load", "{}")[0] == 503  # model_control is poll
            for link in links.values():
                link.close()
        finally:
            server.terminate()
        assert server.wait(120) == 0


def ask(link: http.client.HTTPConnection, target: str, body: str | None = None) -> tuple[int, bytes]:
    """Status and body of a reply: to a GET, or to a POST of `body`."""
    link.request("GET" if body is None else "POST", target, body)
    reply = link.getresponse()
    return reply.status, reply.read()


def check_quick(link: http.client.HTTPConnection, grpc_port: int) -> None:
    """A model that is loaded answers in several dialects, over both transports."""
    for _ in range(3):  # the first request is understood, the next ones are recognised
        assert json.loads(ask(link, "/v1/models/quick:predict", BODY)[1]) == {"predictions": [[2.0, 4.0]]}
        assert json.loads(ask(link, "/v2/models/quick/infer", V2_BODY)[1])["outputs"][0]["data"] == [2.0, 4.0]
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert np.array([2, 4], "<f4").tobytes() in infer(v2_message("quick"), timeout=60)


def v2_message(model: str) -> bytes:
    """A ModelInferRequest of one row."""
    messages = load("kserve_v2")
    request = messages.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(np.array([1, 2], "<f4").tobytes())
    return request.SerializeToString()


def check_grpc(port: int) -> None:
    tfs_types = load("tfserving")
    spec = tfs_types.ModelSpec(name="twice")
    predict = tfs_types.PredictRequest(model_spec=spec).SerializeToString()
    metadata = tfs_types.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
    sent = load("grps").GrpsMessage(model="twice-1").SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        v2 = "/inference.GRPCInferenceService/"
        assert channel.unary_unary(v2 + "ServerLive")(b"", timeout=60) == b"\x08\x01"
        assert channel.unary_unary(v2 + "ServerReady")(b"", timeout=60) == b""
        assert channel.unary_unary(v2 + "ModelReady")(b"\x0a\x05quick", timeout=60) == b"\x08\x01"
        assert channel.unary_unary(v2 + "ModelReady")(b"\x0a\x05twice", timeout=60) == b""
        tfs = "/tensorflow.serving.PredictionService/"
        asked = {
            v2 + "ModelInfer": v2_message("twice"),
            v2 + "ModelMetadata": b"\x0a\x05twice",
            tfs + "Predict": predict,
            tfs + "GetModelMetadata": metadata.SerializeToString(),
        }
        for path, data in asked.items():
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(data, timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, path
            assert caught.value.details() == "The server is starting: model twice is loading"
        status = channel.unary_unary("/tensorflow.serving.ModelService/GetModelStatus")
        told = tfs_types.GetModelStatusResponse.FromString(status(b"\x0a\x07\x0a\x05twice", timeout=60))
        assert [one.state for one in told.model_version_status] == [20]
        predict_grps = channel.unary_unary("/grps.protos.v1.GrpsService/Predict")
        assert b"model twice is loading" in predict_grps(sent, timeout=60)  # its errors are messages
        load_model = v2 + "RepositoryModelLoad"
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(load_model)(b"\x12\x05quick", timeout=60)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, STARTING)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_an_address_in_use_is_named_before_any_model_loads(tmp_path, transport, fronts, shares):
    """Also one that another server of several front processes listens at, which would share it."""
    (write_model(tmp_path) / "1" / "model.py").write_text(SLOW)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        options = {
            "http": ("--http", place, "--grpc", "off"),
            "grpc": ("--grpc", place, "--http", "127.0.0.1:0"),
        }
        done = run_command("serve", str(tmp_path), "--frontends", fronts, *options[transport])
    assert (done.returncode, done.stdout) == (1, "")
    port, said = place.rpartition(":")[2], done.stderr.splitlines()[-1]
    assert said == (
        f"fastserve: cannot listen on {place}: Address already in use; stop what listens there (`ss -ltnp "
        f"sport = :{port}` names it), or choose another: --{transport} HOST:PORT"
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "loading").exists()


@pytest.mark.parametrize("place", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_that_cannot_be_had(tmp_path, place):
    write_model(tmp_path)
    done = run_command("serve", str(tmp_path), "--http", place, "--grpc", "off", "--insecure-public")
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"fastserve: cannot listen on {place}: ")
    assert "--http HOST:PORT, where HOST is 127.0.0.1" in said
