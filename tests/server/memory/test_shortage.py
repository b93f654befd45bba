"""Memory of the host that runs out, for real, in models of every kind: each request is told 503 and when to
come again, the batch is counted, and the worker answers the next one. Shared memory that is not given stops a
load or a start, in words that say so, and nothing that runs."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton_grpc
import yaml
from onnx import TensorProto, helper

from tests import proc
from tests.running import Running, until
from tests.torture.test_front_kills import fronts_of

HUGE = 1 << 44  # bytes; no machine has them
PLAIN = """
import numpy as np
class Model:
    def __init__(self, config):
        pass
    def run(self, inputs):
        x = inputs["x"]
        return {"y": np.ones(int(x.reshape(-1)[0]), np.float32)[: x.size].reshape(x.shape)}
"""
TORCH = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ones(int(x.reshape(-1)[0]))[: x.numel()].reshape(x.shape)
"""
TRITON = """
import numpy as np, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(r, "x").as_numpy()) for r in requests]
    def one(self, x):
        made = np.ones(int(x.reshape(-1)[0]), np.float32)[: x.size].reshape(x.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", made)])
"""
MODELS = ("columns", "slabs", "single", "torch", "triton", "onnx")


def write(models: Path, name: str, source: str, shape: list[int], **config: object) -> None:
    folder = models / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(source)
    tensor = {"dtype": "float32", "shape": shape}
    whole = {"backend": "python", "inputs": {"x": tensor}, "outputs": {"y": tensor}, "max_batch_size": 4}
    (models / name / "model.yaml").write_text(yaml.safe_dump({**whole, "warmup": "off", **config}))


def write_triton(models: Path) -> None:
    write(models, "triton", TRITON, [1])
    (models / "triton" / "model.yaml").unlink()
    (models / "triton" / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }'
        'output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
    )


def write_onnx(models: Path) -> None:
    """Of [n, 1] as long a row as its number says, and of that the first element."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["whole", "zero"], ["length"]),
        helper.make_node("Expand", ["one", "length"], ["long"]),
        helper.make_node("ReduceMax", ["long"], ["first"], keepdims=1),
        helper.make_node("Mul", ["x", "first"], ["y"]),
    ]
    constants = [
        helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]),
        helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in "xy")
    graph = helper.make_graph(nodes, "long", [x], [y], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    folder = models / "onnx" / "1"
    folder.mkdir(parents=True)
    onnx.save(made, folder / "model.onnx")
    (models / "onnx" / "model.yaml").write_text(yaml.safe_dump({"backend": "onnx", "max_batch_size": 4}))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("shortage")
    models = root / "models"
    write(models, "columns", PLAIN, [1])
    write(models, "slabs", PLAIN, [-1])
    write(models, "single", PLAIN, [-1], max_batch_size=0)
    write(models, "torch", TORCH, [-1], backend="torch")
    write_triton(models)
    write_onnx(models)
    with Running(models, root / "log", torch=True) as running:
        yield running


def ask(served: Running, path: str, body: bytes, **headers: str) -> tuple[int, dict, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{served.http}{path}", body, named, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, dict(reply.headers), reply.read()
    except urllib.error.HTTPError as fault:
        return fault.code, dict(fault.headers), fault.read()


def infer(served: Running, model: str, value: float) -> tuple[int, dict, bytes]:
    shape = [1] if model == "single" else [1, 1]
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [value]}
    return ask(served, f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())


def counted(served: Running, model: str) -> float:
    with urllib.request.urlopen(f"http://{served.http}/metrics", timeout=60) as reply:
        page = reply.read().decode()
    found = re.search(rf'fastserve_device_out_of_memory_total\{{[^}}]*"{model}"[^}}]*\}} (\S+)', page)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("model", MODELS)
def test_503_and_counted_and_well_again(served, model):
    before = counted(served, model)
    status, headers, body = infer(served, model, HUGE)
    # A MemoryError of the model's own code is its failure; a framework may have memory again later.
    wanted = (503, "1") if model in ("torch", "onnx") else (500, None)
    assert (status, headers.get("Retry-After")) == wanted, body
    text = json.loads(body)["error"]
    assert re.search("no memory for a batch of 1 rows: |Unable to allocate", text), text
    assert "/" not in text.replace("onnxruntime/", "") or model == "triton", text
    until(lambda: counted(served, model) == before + 1, "the batch is counted")
    status, _, body = infer(served, model, 1.0)
    assert status == 200, body
    assert json.loads(body)["outputs"][0]["data"] == [1.0]
    assert f"{model}/1: worker 0 died" not in served.log.read_text()


@pytest.mark.parametrize("model", ["columns", "slabs"])
def test_in_every_dialects_words(served, model):
    """A model's MemoryError is its failure. Triton V1 says 400 of everything, and in a header what it is."""
    row = json.dumps({"instances": [[HUGE]]}).encode()
    status, headers, body = ask(served, f"/v1/models/{model}:predict", row)
    assert (status, headers.get("Retry-After")) == (500, None), body
    head = 'batch_size: 1 input { name: "x" dims: [1] } output { name: "y" }'
    data = np.array([HUGE], np.float32).tobytes()
    status, headers, body = ask(served, f"/api/infer/{model}", data, NV_InferRequest=head)
    assert status == 400, body
    assert 'code: INTERNAL msg: "there is no memory for a batch of 1 rows' in headers["NV-Status"]


@pytest.mark.lingers  # the first client of grpc's opens a loop, for good
@pytest.mark.parametrize("model", ["columns", "slabs"])
def test_over_grpc(served, model):
    given = triton_grpc.InferInput("x", [1, 1], "FP32")
    given.set_data_from_numpy(np.array([[HUGE]], np.float32))
    with (
        triton_grpc.InferenceServerClient(served.grpc) as client,
        pytest.raises(
            triton_grpc.InferenceServerException, match="there is no memory for a batch of 1"
        ) as told,
    ):
        client.infer(model, [given])
    assert told.value.status() == "StatusCode.INTERNAL"


BACK = """
class Model:
    def __init__(self, config):
        pass
    def run(self, inputs):
        return {"y": inputs["x"]}
"""


NO_ROOM = r"no shared memory of \d+ bytes for fastserve-(\w+): File too large"


def limit_files(pid: int, nbytes: int) -> None:
    """Let no file of a process and its children be larger: a full disk, and no room for shared memory."""
    for one in (pid, *proc.children_of(pid)):
        resource.prlimit(one, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_no_shared_memory_at_run_time(tmp_path, nbytes):
    """A load, and a front process that has died, say what is missing, and come once there is room; nothing
    that runs is affected. The least limit stops the first file of a load, the other the arena."""
    models, logs = tmp_path / "models", tmp_path / "requests"
    write(models, "here", BACK, [1], cache=True, request_log={"sample": 1.0})
    write(models, "later", BACK, [-1])
    options = ["--frontends", "2", "--model-control", "explicit", "--load-model", "here"]
    with Running(models, tmp_path / "log", *options, "--request-log-folder", str(logs)) as served:
        until(lambda: len(fronts_of(served)) == 1, "every front is there")
        assert infer(served, "here", 1.0)[0] == 200
        until(lambda: list(logs.glob("here*.jsonl")), "the request is logged")
        limit_files(served.pid, nbytes)
        what = "counts" if nbytes == 4096 else "arena"
        held = []
        for _ in range(8):
            status, _, body = ask(served, "/v2/repository/models/later/load", b"{}")
            assert (status, re.search(NO_ROOM, body.decode())[1]) == (400, what)
            held.append(len(os.listdir(f"/proc/{served.pid}/fd")))
        assert held[-1] < held[0] + 4, held  # an arena has three
        os.kill(fronts_of(served)[0], signal.SIGKILL)
        words = "front process 1 could not be started: no shared memory of"
        until(lambda: words in served.log.read_text(), "the front finds no room")
        for value in range(40):
            status, _, body = infer(served, "here", float(value))
            assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [value])
        limit_files(served.pid, resource.RLIM_INFINITY)
        until(lambda: len(fronts_of(served)) == 1, "the front is back")
        assert ask(served, "/v2/repository/models/later/load", b"{}")[0] == 200
        assert infer(served, "later", 3.0)[0] == 200
        assert "loading failed" not in served.log.read_text(), "that is said of faults of the server's own"


def test_no_shared_memory_at_the_start(tmp_path):
    write(tmp_path / "models", "here", BACK, [1])
    command = [sys.executable, "-m", "fastserve.cli", "serve", str(tmp_path / "models"), "--frontends", "2"]
    shell = ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *command, "--http", "127.0.0.1:0", "--grpc", "off"]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(f"fastserve: {NO_ROOM}\n", done.stderr)
