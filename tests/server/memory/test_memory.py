"""Memory of all processes of a server, under load and after it.

Counted as PSS (/proc/PID/smaps_rollup): a page that n processes share counts as an nth in each, so the
sum over all processes counts it once. The blocks of an arena's memfd are what that arena holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastserve.engine import supervision
from tests import proc
from tests.running import Running, run_command
from tests.server.rig import Client, run, serving, write_model

MOST_MB = 130
PBTXT = """
backend: "python"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
"""
TRITON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x * 2)]) for x in found]
"""


def test_a_server_holds_no_framework_of_its_models() -> None:
    code = "import sys, fastserve.server; print({'numpy', 'onnxruntime', 'torch'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout == b"set()\n"


def pss_mb(served: Running) -> float:
    """Of all processes of a server."""
    told = [proc.read(pid, "smaps_rollup") for pid in (served.pid, *served.workers)]
    return sum(int(n) for text in told for n in re.findall(r"^Pss:\s+(\d+) kB", text, re.M)) / 1024


def load(served: Running, model: str, protocol: str, seconds: float) -> int:
    """Answers to 32 connections, all of them good."""
    places = ["--url", f"http://{served.http}", "--grpc", served.grpc, "--protocol", protocol]
    sizes = ["-c", "32", "-d", str(seconds), "--warm-up", "0"]
    done = run_command("bench", model, *places, "--json", *sizes)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == {}
    return int(report["requests"])


def test_a_small_model_stays_small_under_load(tmp_path: Path):
    """Slabs leased one behind the other had the whole pool resident after 65 000 requests: 8 KB for each."""
    (tmp_path / "models/small/1").mkdir(parents=True)
    (tmp_path / "models/small/config.pbtxt").write_text(PBTXT)
    (tmp_path / "models/small/1/model.py").write_text(TRITON_MODEL)
    with Running(tmp_path / "models", tmp_path / "log") as served:
        sent = 0
        while sent < 15_000:
            sent += load(served, "small", "v2-binary", 1.0) + load(served, "small", "v2", 1.0)
        load(served, "small", "v2-grpc", 0.5)
        assert pss_mb(served) < MOST_MB


@pytest.mark.parametrize("shape", [[1 << 18], [-1]], ids=["columns", "slabs"])
def test_what_a_burst_took_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: list[int]):
    monkeypatch.setattr(supervision, "TRIM_S", 3600.0)
    tensor = {"dtype": "float32", "shape": shape}
    write_model(tmp_path, inputs={"x": tensor}, outputs={"y": tensor})
    body = b'{"instances": [%b]}' % json.dumps([0.0] * (1 << 18)).encode()

    async def work() -> None:
        async with serving(tmp_path) as at:
            hosted = next(iter(at.server.host.hosted.values()))

            def held() -> int:
                return os.fstat(hosted.arena.memory_fd).st_blocks * 512

            before = held()
            clients = [await at.client() for _ in range(8)]

            async def ask(client: Client) -> None:
                status, answer = await client.post("/v1/models/twice:predict", body)
                assert status == 200
                assert np.array(json.loads(answer)["predictions"]).shape == (1, 1 << 18)

            await asyncio.gather(*(ask(client) for client in clients))
            assert held() > before + (2 << 20)

            def small() -> bool:
                hosted.maintenance.give_back()
                return held() <= before + (64 << 10)

            await at.until(small)
            await ask(clients[0])

    run(work())
