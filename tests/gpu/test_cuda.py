"""Promises that only a real device can show: DMA out of a registered arena, graphs, memory that runs out,
sticky errors. Not run where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastserve.backends import create
from fastserve.repository.model_config import config_json, parse_model_config
from fastserve.workers.arena import WorkerContext
from fastserve.workers.device.cuda import CudaDevice
from fastserve.workers.loop import make_device_runner
from tests.backends.frameworks.torch_models import CONFIG, net, save_class, save_script
from tests.workers.pair import Pair

why = "built without CUDA" if not torch.version.cuda else "no GPU is seen"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.lingers,  # CUDA keeps threads and descriptors
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"PyTorch {torch.__version__}: {why}"),
]
ROWS = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)


NET = """
from tests.backends.frameworks.torch_models import net
class Model:
    def load(self):
        return net()
"""


class CudaPair(Pair):
    """A worker with the real device, in this process."""

    def __init__(self, folder: Path, **changes) -> None:
        config = {**config_json(parse_model_config({**CONFIG, **changes})), "device": "cuda:0"}
        backend = create(config, folder, 0)
        backend.load()
        super().__init__(backend, **{k: v for k, v in config.items() if k not in ("instances", "backend")})
        self.runner.close()
        self.runner = make_device_runner(
            WorkerContext(self.arena, self.worker, backend, config), CudaDevice("cuda:0")
        )

    def ask(self, rows: np.ndarray) -> np.ndarray:
        place = self.put(x=rows)
        slot = self.worker.take()
        assert self.runner.run(slot)
        self.runner.drain()
        return self.get(*place)["y"]

    def close(self) -> None:
        self.runner.close()
        self.arena.close()


def wanted() -> np.ndarray:
    return net()(torch.from_numpy(ROWS)).detach().numpy()


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}, {"compile": "reduce-overhead"}])
def test_a_batch_goes_there_and_back_by_dma(tmp_path, options):
    save = save_class if "compile" in options else save_script
    model = NET if "compile" in options else net()
    it = CudaPair(save(tmp_path, model), torch=options, allowed_batch_sizes=[2, 4, 8])
    try:
        assert it.runner.report.pinned, "the arena could not be registered"
        for _ in range(20):
            np.testing.assert_allclose(it.ask(ROWS), wanted(), rtol=1e-3, atol=1e-4)
    finally:
        it.close()


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}, {"compile": "reduce-overhead"}])
def test_several_in_flight_answer_their_own(tmp_path, options):
    """Also where each run writes its outputs where the one before had its own."""
    save = save_class if "compile" in options else save_script
    model = NET if "compile" in options else net()
    it = CudaPair(save(tmp_path, model), torch=options, allowed_batch_sizes=[4, 8])
    try:
        for _ in range(50):
            places = [it.put(x=ROWS + number) for number in range(3)]
            for _ in range(it.worker.pending() and 3):
                slot = it.worker.take()
                if slot >= 0:
                    it.runner.run(slot)
            it.runner.drain()
            for number, place in enumerate(places):
                got = it.get(*place)["y"]
                exact = net()(torch.from_numpy(ROWS + number)).detach().numpy()
                np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-3)
    finally:
        it.close()


def test_memory_that_runs_out_is_tried_by_halves(tmp_path):
    source = """
        import torch
        class Model(torch.nn.Module):
            def forward(self, x):
                if len(x) > 2:
                    torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
                return x[:, :3] * 2
    """
    it = CudaPair(save_class(tmp_path, source))
    try:
        np.testing.assert_allclose(it.ask(ROWS), ROWS[:, :3] * 2)
    finally:
        it.close()


def test_a_device_side_assert_is_known_as_lost():
    """In a process of its own, whose context is gone afterwards."""
    code = """
import torch
from fastserve.backends.model_errors import DeviceLost
from fastserve.workers.device.base import COMPUTE
from fastserve.workers.device.cuda import CudaDevice
device = CudaDevice("cuda:0")
x = torch.zeros(4, device="cuda")
device.enqueue(COMPUTE, lambda: x[torch.tensor([1 << 20], device="cuda")])
mark = device.mark(COMPUTE)
try:
    while not device.reached(mark):
        pass
except DeviceLost as lost:
    print("lost:", lost)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "lost: its GPU has failed" in done.stdout, done.stderr
