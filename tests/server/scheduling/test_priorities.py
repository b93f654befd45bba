"""Priorities and queue policies in a whole server, with a worker that runs as long as the test lets it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fastserve.errors import ServeError
from fastserve.request import InferRequest
from fastserve.tensor import DTYPES, Tensor
from tests.server.rig import Served, run, serving

RELAYED = True
CONFIG = """
backend: "python"
max_batch_size: 1
dynamic_batching { priority_levels: 2 default_priority_level: 2
  default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 60000000
                         allow_timeout_override: true max_queue_size: 2 } }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SOURCE = """
import pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        (self.folder / "begun").touch()
        while x.ravel()[0] == 0 and not (self.folder / "go").exists():
            time.sleep(0.001)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)])
"""


async def ask(at: Served, number: int, order: list[int], priority: int = 0, timeout_us: int = 0) -> None:
    version = at.server.catalog.available("slow")
    assert version is not None
    tensor = Tensor(DTYPES["int32"], (1, 1), np.array([number], np.int32).tobytes())
    request = InferRequest({"IN": tensor}, priority=priority, timeout_us=timeout_us)
    response = await at.engine.infer(version, request)
    order.append(int(np.frombuffer(response.outputs["OUT"].data, np.int32)[0]))
    response.release()


def test_priorities_and_policies(tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(SOURCE)

    async def work() -> None:
        async with serving(tmp_path) as at:
            order: list[int] = []
            asking = [asyncio.ensure_future(ask(at, 0, order))]
            await at.until((folder / "begun").exists)
            asking += [asyncio.ensure_future(ask(at, n, order, p)) for n, p in ((1, 0), (2, 2), (3, 1))]
            await asyncio.sleep(0)
            with pytest.raises(ServeError, match="Exceeds maximum queue size"):
                await ask(at, 4, order)
            with pytest.raises(ServeError, match="Request timeout expired"):
                await ask(at, 5, order, priority=1, timeout_us=1000)
            (folder / "go").touch()
            await asyncio.gather(*asking)
            assert order == [0, 3, 1, 2]

    run(work())
