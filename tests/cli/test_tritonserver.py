"""`fastserve tritonserver` as a script runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.running import START_S, free_port, run_command
from tests.server.rig import write_model

COMMAND = [sys.executable, "-m", "fastserve.cli", "tritonserver"]


def start(*flags: str) -> tuple[int, str, str]:
    """A start that ends by itself: exit status, standard output, standard error."""
    done = run_command("tritonserver", *flags)
    return done.returncode, done.stdout, done.stderr


def test_a_command_line_of_tritons_serves(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    http, grpc, metrics = free_port(), free_port(), free_port()
    ports = [f"--http-port={http}", "--grpc-port", str(grpc), f"--metrics-port={metrics}"]
    local = ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
    flags = ["--model-repository", str(tmp_path / "models"), *ports, *local, "--log-verbose=1"]
    server = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
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
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_what_cannot_be_taken_ends_the_start() -> None:
    status, said, told = start("--model-repository=/m", "--allow-sagemaker=true", "--nonsense=1")
    assert (status, said) == (1, "")
    assert told == (
        'error: --allow-sagemaker: given "true", allowed: false: this flag is not built\n'
        "error: unknown argument: --nonsense=1, allowed: flags of tritonserver\n"
    )
    assert start("--http-port=1") == (1, "", "error: --model-repository must be specified\n")


def test_help_names_the_flags() -> None:
    status, said, _ = start("--help")
    assert status == 0
    assert "--model-repository" in said
