"""Two models that share a resource in a whole server: never two batches at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.server.rig import ask_one, run, serving

RELAYED = True
CONFIG = """
backend: "python"
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 2 rate_limiter { resources [ { name: "r" count: 1 } ] } } ]
"""
SOURCE = """
import os, pathlib
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.lock = pathlib.Path(args["model_repository"]).parent / "lock"

    def execute(self, requests):
        os.close(os.open(self.lock, os.O_CREAT | os.O_EXCL))  # fails where another batch is running
        for _ in range(200):
            os.stat(self.lock)
        self.lock.unlink()
        take = pb_utils.get_input_tensor_by_name
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", take(r, "IN").as_numpy())]) for r in requests
        ]
"""


def test_never_two_at_a_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG)
        (tmp_path / name / "1" / "model.py").write_text(SOURCE)

    async def work() -> None:
        async with serving(tmp_path, rate_limit="execution_count") as at:
            asking = [ask_one(at, name, n) for n in range(40) for name in ("one", "two")]
            assert await asyncio.gather(*asking) == [n for n in range(40) for _ in "12"]

    run(work())
