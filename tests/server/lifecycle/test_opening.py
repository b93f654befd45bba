"""A server's answers before its models are there, and its words when it cannot have its address."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.running import free_port, until
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
BODY = json.dumps({"instances": [[1.0, 2.0]]})
EVERY = "tfserving,kserve_v2,triton_v1,textgen,grps"
STARTING = "The server is starting: its models are loading"
ASKED = {
    "tfserving predict": ("POST", "/v1/models/twice:predict", BODY),
    "tfserving status": ("GET", "/v1/models/twice", None),
    "v2 infer": ("POST", "/v2/models/twice/infer", "{}"),
    "v2 metadata": ("GET", "/v2", None),
    "v2 load": ("POST", "/v2/repository/models/twice/load", "{}"),
    "v1 status": ("GET", "/api/status", None),
    "v1 infer": ("POST", "/api/infer/twice", ""),
    "openai chat": ("POST", "/v1/chat/completions", '{"model": "twice", "messages": []}'),
    "tgi generate": ("POST", "/generate", '{"inputs": "a"}'),
    "mindie infer": ("POST", "/infer", '{"inputs": "a"}'),
    "grps predict": ("POST", "/grps/v1/infer/predict?model=twice-1", '{"ndarray": [[1, 2]]}'),
}
OVERLOADED = ("tgi generate",)  # TGI has one status for what cannot be had now
HEALTHS = {
    "/healthz/live": 200, "/v2/health/live": 200, "/api/health/live": 200, "/metrics": 200,
    "/healthz/ready": 503, "/v2/health/ready": 400, "/api/health/ready": 400,
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


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_it_listens_while_models_load_and_says_so_in_every_dialect(tmp_path, fronts):
    model = write_model(tmp_path)
    (model / "1" / "model.py").write_text(SLOW)
    http_port, grpc_port = free_port(), free_port()
    options = ("--grpc", f"127.0.0.1:{grpc_port}={EVERY}", "--frontends", fronts)
    with subprocess.Popen(command(tmp_path, http_port, *options), stdout=subprocess.PIPE) as server:
        try:
            until((tmp_path / "loading").exists, "the model loads", limit_s=30)
            links = {name: http.client.HTTPConnection("127.0.0.1", http_port, timeout=60) for name in ASKED}
            for name, (method, target, body) in ASKED.items():
                for _ in range(2):  # the second time the head is known
                    links[name].request(method, target, body)
                    reply = links[name].getresponse()
                    text = reply.read().decode() or reply.getheader("NV-Status")
                    status = 429 if name in OVERLOADED else 503
                    assert (reply.status, reply.getheader("retry-after")) == (status, "1"), (name, text)
                    assert STARTING in text, name
            for target, status in HEALTHS.items():
                links["v2 metadata"].request("GET", target)
                reply = links["v2 metadata"].getresponse()
                reply.read()
                assert reply.status == status, target
            check_grpc(grpc_port)
            (tmp_path / "go").touch()
            assert b"ready" in server.stdout.readline()
            links["tfserving predict"].request("POST", "/v1/models/twice:predict", BODY)
            reply = links["tfserving predict"].getresponse()
            assert json.loads(reply.read()) == {"predictions": [[2.0, 4.0]]}
            for name in ("tfserving status", "v2 metadata", "v1 status"):
                links[name].request(*ASKED[name][:2])
                reply = links[name].getresponse()
                assert (reply.status, bool(reply.read())) == (200, True)
            for link in links.values():
                link.close()
        finally:
            server.terminate()
        assert server.wait(120) == 0


def check_grpc(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        v2, v1 = "/inference.GRPCInferenceService/", "/nvidia.inferenceserver.GRPCService/"
        assert channel.unary_unary(v2 + "ServerLive")(b"", timeout=60) == b"\x08\x01"
        assert channel.unary_unary(v2 + "ServerReady")(b"", timeout=60) == b""
        tfs = "/tensorflow.serving."
        prediction = [
            tfs + "PredictionService/" + name for name in ("Predict", "Classify", "GetModelMetadata")
        ]
        others = [*prediction, tfs + "ModelService/GetModelStatus", "/grps.protos.v1.GrpsService/Predict"]
        for path in (v2 + "ModelInfer", v2 + "ServerMetadata", v1 + "Status", v1 + "Infer", *others):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(b"", timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, path
            assert caught.value.details() == STARTING
        with pytest.raises(grpc.RpcError) as caught:
            next(channel.stream_stream(v2 + "ModelStreamInfer")(iter([b""]), timeout=20))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


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
        words = [sys.executable, "-m", "fastserve.cli", "serve", str(tmp_path), "--frontends", fronts]
        done = subprocess.run([*words, *options[transport]], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert (
        done.stderr.decode().splitlines()[-1]
        == f"fastserve: cannot listen on {place}: Address already in use"
    )
    assert b"Traceback" not in done.stderr
    assert not (tmp_path / "loading").exists()


@pytest.mark.parametrize("place", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_that_cannot_be_had(tmp_path, place):
    write_model(tmp_path)
    words = [sys.executable, "-m", "fastserve.cli", "serve", str(tmp_path), "--http", place, "--grpc", "off"]
    done = subprocess.run(words, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().splitlines()[-1].startswith(f"fastserve: cannot listen on {place}: ")
