"""ONNX models on a device: bound by pointer, several batches in flight. One body, run over the simulated
device everywhere, and on a real one that both PyTorch and ONNX Runtime see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from fastserve.backends import create
from fastserve.backends.frameworks.onnx import CUDA
from tests.backends.models import FLOAT, INT64, affine, helper, save, value
from tests.devices.simulated_worker import simulated
from tests.workers.pair import Pair

torch = pytest.importorskip("torch")

HERE = torch.cuda.is_available() and CUDA in onnxruntime.get_available_providers()
REAL = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="no GPU that PyTorch and ONNX Runtime both see"),
]
pytestmark = pytest.mark.lingers  # CUDA keeps threads and descriptors
DEVICES = pytest.mark.parametrize("device", ["simulated", pytest.param("cuda:0", marks=REAL)])


@pytest.fixture(autouse=True)
def on_simulated_devices() -> Iterator[None]:
    with simulated():
        yield


@DEVICES
def test_batches_in_flight_answer_their_own(tmp_path: Path, device: str) -> None:
    """A result that was read before its run, or a run before its copy, would be of another batch."""
    backend = create({"backend": "onnx", "max_batch_size": 4, "device": device}, affine(tmp_path), 0)
    backend.load()
    assert backend.takes_device_tensors, "its log says why its batches are run one at a time"
    it = Pair(backend, device=device)
    try:
        for turn in range(100):
            sent = [np.full((4, 3), 3 * turn + n, np.float32) for n in range(3)]
            places = [it.put(x=array) for array in sent]
            for _ in places:
                assert it.runner.run(it.worker.take())
            it.runner.drain()
            for place, array in zip(places, sent, strict=True):
                np.testing.assert_array_equal(it.get(*place)["y"], 2 * array + 1)
    finally:
        it.runner.close()
        it.arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not HERE, reason="no GPU that PyTorch and ONNX Runtime both see")
def test_an_input_that_is_wanted_on_the_host_is_known(tmp_path: Path) -> None:
    """A shape: bound on the device it would be copied before it is there."""
    version_dir = save(
        tmp_path,
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [value("x", FLOAT, [6]), value("shape", INT64, [2])],
        [value("y", FLOAT, [2, 3])],
    )
    backend = create({"backend": "onnx", "max_batch_size": 0, "device": "cuda:0"}, version_dir, 0)
    backend.load()
    assert not backend.takes_device_tensors
    x = np.arange(6, dtype=np.float32)
    found = backend.run({"x": x, "shape": np.array([2, 3])})
    np.testing.assert_array_equal(found["y"], x.reshape(2, 3))
