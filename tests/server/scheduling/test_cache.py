"""The response cache in a whole server."""

from __future__ import annotations

from pathlib import Path

from tests.server.rig import ask_one, run, serving

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
response_cache { enable: true }
"""
SOURCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        self.count += 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[self.count]], np.int32))])
"""


def test_the_same_is_asked_once_until_the_model_is_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "cached" / "1").mkdir(parents=True)
    (tmp_path / "cached" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "cached" / "1" / "model.py").write_text(SOURCE)

    async def work() -> None:
        async with serving(tmp_path, response_cache_bytes=1 << 20) as at:
            assert [await ask_one(at, "cached", n) for n in (5, 6, 5, 6)] == [1, 2, 1, 2]
            await at.server.repository.unload("cached")
            assert at.server.host.cache is not None
            assert len(at.server.host.cache) == 0
            await at.server.repository.load("cached")
            assert await ask_one(at, "cached", 6) == 1
        async with serving(tmp_path) as at:  # no bytes, no cache
            assert [await ask_one(at, "cached", 5) for _ in range(3)] == [1, 2, 3]

    run(work())
