"""`fastserve tritonserver` as a script runs it."""

from __future__ import annotations

import base64
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fastserve.settings.key_file import changing, make_key
from tests.running import START_S, free_port, run_command, started
from tests.server.rig import write_model

COMMAND = "tritonserver"


def start(*flags: str) -> tuple[int, str, str]:
    """A start that ends by itself: exit status, standard output, standard error."""
    done = run_command(COMMAND, *flags)
    return done.returncode, done.stdout, done.stderr


def test_a_command_line_of_tritons_serves(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    http, grpc, metrics = free_port(), free_port(), free_port()
    ports = [f"--http-port={http}", "--grpc-port", str(grpc), f"--metrics-port={metrics}"]
    local = ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
    flags = ["--model-repository", str(tmp_path / "models"), *ports, *local, "--log-verbose=1"]
    with started(COMMAND, *flags) as server:
        assert server.stdout is not None
        assert b"ready" in server.stdout.readline()
        body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{http}/v2/models/twice/infer", json.dumps(body).encode()
        )
        with urllib.request.urlopen(asked, timeout=60) as reply:
            assert json.load(reply)["outputs"][0]["data"] == [2.0, 4.0]
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=60) as reply:
            assert b'nv_inference_count{model="twice",version="1"} 1' in reply.read()
        server.send_signal(signal.SIGTERM)
        assert server.wait(START_S) == 0


def test_what_cannot_be_taken_ends_the_start() -> None:
    status, said, told = start("--model-repository=/m", "--allow-sagemaker=true", "--nonsense=1")
    assert (status, said) == (1, "")
    assert told == (
        'error: --allow-sagemaker: given "true", allowed: false: this flag is not built\n'
        "error: unknown argument: --nonsense=1, allowed: flags of tritonserver\n"
    )
    assert start("--http-port=1") == (1, "", "error: --model-repository must be specified\n")


SENT = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request.inputs()[0].as_numpy()) for request in requests]

    def one(self, x):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""
LOCAL = (
    "--http-address=127.0.0.1",
    "--grpc-address=127.0.0.1",
    "--allow-grpc=false",
    "--allow-metrics=false",
)


@pytest.mark.parametrize(
    ("more", "keyed", "status", "told"),
    [
        ({}, False, 501, "Files in a load are disabled"),
        ({"FASTSERVE_ADMIN_FILE_OVERRIDES": "true"}, False, 200, ""),
        ({}, True, 200, ""),
        ({"FASTSERVE_ADMIN_FILE_OVERRIDES": "false"}, True, 501, "Files in a load are disabled"),
    ],
)
def test_files_of_a_load_ask_for_a_key_or_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], keyed: bool, status: int, told: str
) -> None:
    """A load under explicit control may bring a model.py in the original."""
    write_model(tmp_path / "models")
    headers = {"content-type": "application/json"}
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    if keyed:
        key, entry = make_key("op", ("admin", "health"))
        with changing(tmp_path / "keys.yaml") as entries:
            entries.append(entry)
        monkeypatch.setenv("FASTSERVE_KEYS", str(tmp_path / "keys.yaml"))
        headers["authorization"] = f"Bearer {key}"
    port = free_port()
    flags = [f"--model-repository={tmp_path / 'models'}", f"--http-port={port}", *LOCAL]
    source = base64.b64encode(SENT.encode()).decode()
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {"backend": "python", "max_batch_size": 4}
    config |= {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]}
    body = {"parameters": {"config": json.dumps(config), "file:1/model.py": source}}
    url = f"http://127.0.0.1:{port}/v2/repository/models/sent/load"
    with started(COMMAND, *flags, "--model-control-mode=explicit") as server:
        assert server.stdout is not None
        assert b"ready" in server.stdout.readline()
        asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                found, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            found, text = error.code, error.read().decode()
        assert (found, told in text) == (status, True), text


def test_help_names_the_flags() -> None:
    status, said, _ = start("--help")
    assert status == 0
    assert "--model-repository" in said
