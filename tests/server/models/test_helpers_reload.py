"""Modules beside model.py: each version has its own, and a load reads them again."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.running import Running

MODEL = """
import helper

class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"y": inputs["x"] * helper.FACTOR}
"""
CONFIG = """
backend: python
version_policy: all
inputs: {x: {dtype: float32, shape: [1]}}
outputs: {y: {dtype: float32, shape: [1]}}
"""


def post(server: Running, path: str, body: object) -> bytes:
    request = urllib.request.Request(f"http://{server.http}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: bytes = reply.read()
    return found


def factor(server: Running, version: int) -> float:
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
    answer = json.loads(post(server, f"/v2/models/m/versions/{version}/infer", body))
    found: float = answer["outputs"][0]["data"][0]
    return found


def test_each_version_has_its_own_and_a_load_reads_them_again(tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / "models" / "m" / str(version)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(MODEL)
        (folder / "helper.py").write_text(f"FACTOR = {version}.0\n")
    (tmp_path / "models" / "m" / "model.yaml").write_text(CONFIG)
    explicit = ("--model-control", "explicit", "--load-model", "m")
    with Running(tmp_path / "models", tmp_path / "log", *explicit) as server:
        assert [factor(server, version) for version in (1, 2)] == [1.0, 2.0]
        (tmp_path / "models" / "m" / "1" / "helper.py").write_text("FACTOR = 5.0\n")
        post(server, "/v2/repository/models/m/load", {})
        assert [factor(server, version) for version in (1, 2)] == [5.0, 2.0]
