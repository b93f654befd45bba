"""ONNX models whose batches lie on a device: bound where they are, several in flight, on the worker's stream.

The session is ONNX Runtime's own, on its CPU provider; the device is simulated, and its results are noise
until its streams have come so far.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest

from fastserve.backends import create
from fastserve.backends.frameworks import onnx
from fastserve.backends.frameworks.onnx import CUDA, DevicePlace, find_device_place
from fastserve.backends.frameworks.torch_tensors import CAPTURING
from tests.backends.models import FLOAT, INT64, affine, helper, save, strings, value
from tests.devices.simulated_device import Fault, Script
from tests.devices.simulated_worker import simulated
from tests.workers.device_rig import device_pair

torch = pytest.importorskip("torch")

SIMULATED = {"device": "simulated"}


def load(version_dir: Path, **config: Any) -> Any:
    backend = create({"backend": "onnx", "max_batch_size": 4, **SIMULATED, **config}, version_dir, 0)
    backend.load()
    return backend


def rows(*values: float) -> Any:
    return np.array([[v, v + 0.5, -v] for v in values], np.float32)


@pytest.fixture(autouse=True)
def on_simulated_devices() -> Iterator[None]:
    with simulated():
        yield


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pins", [True, False])
def test_batches_in_flight_are_bound_where_they_lie(tmp_path: Path, seed: int, pins: bool) -> None:
    backend = load(affine(tmp_path))
    assert backend.takes_device_tensors
    with device_pair(backend, Script(seed=seed, pins=pins), allowed_batch_sizes=[2, 4]) as it:
        for round_ in range(5):
            sent = [rows(*range(10 * round_ + n, 10 * round_ + 2 * n)) for n in (3, 4, 1)]
            places = []
            for array in sent:
                places.append(it.put(x=array))
                it.take()
            assert it.runner.in_flight == 3
            it.finish()
            for place, array in zip(places, sent, strict=True):
                found = it.get(*place)
                np.testing.assert_array_equal(found["y"], 2 * array + 1)
                np.testing.assert_allclose(found["z"], (2 * array + 1).sum(axis=1), rtol=1e-6)


def test_without_a_batch_axis(tmp_path: Path) -> None:
    backend = load(affine(tmp_path, batch=2), max_batch_size=0)
    assert backend.takes_device_tensors
    with device_pair(backend, max_batch_size=0) as it:
        place = it.put(x=rows(1, 2))
        it.take()
        it.finish()
        np.testing.assert_array_equal(it.get(*place)["y"], 2 * rows(1, 2) + 1)


@pytest.mark.lingers  # the logged traceback keeps the arena
def test_what_the_device_has_no_memory_for_is_run_in_parts(tmp_path: Path) -> None:
    fault = Fault(stage="compute", what="out of memory", every=True, larger=2)
    with device_pair(load(affine(tmp_path)), Script(faults=[fault])) as it:
        place = it.put(x=rows(1, 2, 3, 4))
        it.take()
        it.finish()
        np.testing.assert_array_equal(it.get(*place)["y"], 2 * rows(1, 2, 3, 4) + 1)


@pytest.mark.lingers  # what is logged keeps the traceback, and that the arena
def test_an_output_of_another_shape_than_was_made_for_it(tmp_path: Path) -> None:
    """An output that ONNX Runtime refuses to write is not answered: the reason is the plain run's."""
    version_dir = save(
        tmp_path,
        [helper.make_node("NonZero", ["x"], ["at"]), helper.make_node("Transpose", ["at"], ["y"])],
        [value("x", FLOAT, ["n", 3])],
        [value("y", INT64, ["m", 2])],
    )
    backend = load(version_dir)
    assert backend.takes_device_tensors
    with device_pair(backend) as it:
        place = it.put(x=rows(1, 2))
        it.take()
        it.finish()
        kind, text = it.get(*place)
        assert kind
        assert "output 'y'" in text


def test_what_cannot_be_bound_goes_one_at_a_time(tmp_path: Path) -> None:
    assert not load(strings(tmp_path)).takes_device_tensors
    free = save(
        tmp_path / "free",
        [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", FLOAT, ["n", "m"])],
        [value("y", FLOAT, ["n", "m"])],
    )
    assert not load(free).takes_device_tensors
    on_cpu = load(affine(tmp_path / "cpu"), device="cpu")
    assert not on_cpu.takes_device_tensors
    assert on_cpu.compute_stream is None


# --- with a provider of CUDA's, whose session is a stand-in ------------------------------------------------


class CudaSession:
    """A session on the CPU that says it is on a GPU, and where its runs were told to be."""

    def __init__(self, real: Any, told: Any) -> None:
        self._real, self._told = real, told
        self.options: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name == "get_input_memory_infos":
            if self._told.inputs_in is None:
                raise AttributeError(name)  # before 1.23
            return self._inputs
        return getattr(self._real, name)

    def _inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._told.inputs_in]

    def get_output_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._told.outputs_in]

    def get_providers(self) -> list[str]:
        return [CUDA, "CPUExecutionProvider"]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {
            CUDA: {"device_id": "0", "user_compute_stream": self._told.stream},
            "CPUExecutionProvider": {},
        }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ONNX Runtime with CUDA, whose sessions compute on the stream `asked.stream`."""
    real, told = onnxruntime.InferenceSession, SimpleNamespace(stream="4711", providers=None)
    told.inputs_in, told.outputs_in = ["Cuda"], ["Cuda", "Cuda"]

    def make(path: str, options: Any, providers: Any) -> CudaSession:
        told.providers = providers
        assert CAPTURING.locked(), "it may synchronise the device"
        return CudaSession(real(path, options, providers=["CPUExecutionProvider"]), told)

    monkeypatch.setattr(onnxruntime, "InferenceSession", make)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA])
    place = DevicePlace("cpu", 0, SimpleNamespace(cuda_stream=4711))
    monkeypatch.setattr(onnx, "find_device_place", lambda config: place)
    return told


def test_the_session_computes_on_the_worker_s_stream(tmp_path: Path, asked: Any) -> None:
    backend = load(affine(tmp_path), device="cuda:0", device_memory_bytes=1 << 20)
    name, told = asked.providers[0]
    assert (name, told) == (
        CUDA,
        {"device_id": 0, "gpu_mem_limit": 1 << 20, "user_compute_stream": "4711"},
    )
    assert backend.takes_device_tensors
    assert backend.compute_stream.cuda_stream == 4711
    options = backend._bound._options
    assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
    found = backend.run_on_device({"x": torch.from_numpy(rows(1, 2))})
    np.testing.assert_array_equal(found["y"].numpy(), 2 * rows(1, 2) + 1)


@pytest.mark.parametrize("other", ["0", "4712", ""])
def test_a_session_of_another_stream_is_waited_for(tmp_path: Path, asked: Any, other: str) -> None:
    """Its results would be read before they are there."""
    asked.stream = other
    backend = load(affine(tmp_path), device="cuda:0")
    assert not backend.takes_device_tensors
    assert backend.binds_outputs
    np.testing.assert_array_equal(backend.run({"x": rows(1)})["y"], 2 * rows(1) + 1)


@pytest.mark.parametrize(
    ("inputs", "outputs", "why"),
    [
        (["Cpu"], ["Cuda", "Cuda"], "takes or gives tensors on the host"),
        (["Cuda"], ["Cuda", "Cpu"], "takes or gives tensors on the host"),
        (["CudaPinned"], ["Cuda", "Cuda"], "takes or gives tensors on the host"),
        (None, ["Cuda", "Cuda"], "does not tell where it takes its inputs"),
    ],
)
def test_tensors_that_a_session_takes_on_the_host_are_not_bound_on_the_device(
    tmp_path: Path, asked: Any, caplog: pytest.LogCaptureFixture, inputs: Any, outputs: Any, why: str
) -> None:
    """Binding copies such an input at once, in the order of no stream of ours: of the batch before."""
    caplog.set_level(logging.INFO)
    asked.inputs_in, asked.outputs_in = inputs, outputs
    backend = load(affine(tmp_path), device="cuda:0")
    assert not backend.takes_device_tensors
    assert why in caplog.text
    np.testing.assert_array_equal(backend.run({"x": rows(1)})["y"], 2 * rows(1) + 1)


def test_where_batches_may_overlap(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device_place({"device": "cuda:0"}) is None
    assert "one batch at a time: the PyTorch that is installed does not see it" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch.cuda, "Stream", lambda number: ("stream", number))
    assert find_device_place({"device": "cuda:1"}) == DevicePlace("cuda", 1, ("stream", 1))
    assert find_device_place({"device": "cuda:1", "batches_in_flight": 1}) is None
    assert find_device_place({"device": "cuda:2"}) is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert find_device_place({"device": "cuda:0"}) is None
    assert "one batch at a time: there is no PyTorch" in caplog.text
