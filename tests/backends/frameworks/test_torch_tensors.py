"""Python models and transformers that ask for tensors of their device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve import BatchedService, VectorTransformer
from fastserve.backends import create
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.repository.model_config import config_json, parse_model_config
from tests.backends.frameworks.torch_models import CONFIG, save_class
from tests.devices.simulated_device import NAME
from tests.devices.simulated_worker import simulated_services
from tests.server.rig import run
from tests.warm import with_torch
from tests.workers.device_rig import device_pair

PYTHON = {**CONFIG, "backend": "python", "device_tensors": True}
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
SOURCE = """
import torch
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        x = inputs["x"]
        assert type(x) is torch.Tensor and torch.from_dlpack(x).data_ptr() == x.data_ptr()
        return {answer}
"""


@pytest.fixture(autouse=True, scope="module")
def workers_have_torch() -> Iterator[None]:
    """They import this module."""
    with with_torch():
        yield


def load(folder: Path, answer: str, **changes: Any) -> Any:
    version = save_class(folder, SOURCE.replace("{answer}", answer))
    backend = create(config_json(parse_model_config({**PYTHON, **changes})), version, 0)
    backend.load()
    return backend


def test_run_gets_tensors_and_gives_tensors(tmp_path: Path) -> None:
    backend = load(tmp_path, '{"y": x[:, :3] * 2}')
    assert backend.takes_device_tensors
    np.testing.assert_array_equal(backend.run({"x": ROWS})["y"], ROWS[:, :3] * 2)


def test_anything_with_dlpack_is_an_output(tmp_path: Path) -> None:
    backend = load(tmp_path, '{"y": (x[:, :3] * 2).numpy()}')
    np.testing.assert_array_equal(backend.run({"x": ROWS})["y"], ROWS[:, :3] * 2)


def test_batches_go_over_the_device(tmp_path: Path) -> None:
    with device_pair(load(tmp_path, '{"y": x[:, :3] + 1}'), max_batch_size=8) as it:
        place = it.put(x=ROWS)
        it.take()
        it.finish()
        assert ("copy-in", 0) in it.device.trace
        np.testing.assert_array_equal(it.get(*place)["y"], ROWS[:, :3] + 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("x", "run must return a dict of tensors by name, not Tensor"),
        ("{}", "run did not return output 'y'"),
        ('{"y": x[:, :3], "z": x}', "run returned 'z', which model.yaml does not declare"),
        ('{"y": x[:, :3].int()}', "output 'y' is int32, declared is float32"),
        ('{"y": x[:2, :3]}', "but the batch has 3 rows"),
        ('{"y": [1]}', "output 'y' must be a tensor, not list"),
        ('{"y": x[:, :3].to("meta")}', "output 'y' is on meta, this worker computes on cpu"),
    ],
)
def test_wrong_answers_are_named(tmp_path: Path, answer: str, words: str) -> None:
    with pytest.raises(ServeError, match=words):
        load(tmp_path, answer).run({"x": ROWS})


def test_what_cannot_be_on_a_device(tmp_path: Path) -> None:
    text = {"y": {"dtype": "bytes", "shape": []}}
    with pytest.raises(ConfigError, match="device_tensors: 'y' holds strings"):
        load(tmp_path, "{}", outputs=text)
    with pytest.raises(ConfigError, match="device_tensors: given true, allowed: false with backend torch"):
        parse_model_config({**CONFIG, "device_tensors": True})


class OnDevice(VectorTransformer):
    def __init__(self) -> None:
        self.seen = self.device

    def transform(self, x: Any) -> Any:
        assert (self.seen, type(x).__name__) == ("simulated", "Tensor")
        return x * 2


@simulated_services()
def test_a_transformer_gets_tensors_where_the_service_says_so() -> None:
    row = ((2,), "float32")
    service = BatchedService(4, row=row, out_row=row, device=NAME, device_tensors=True)

    async def work() -> None:
        await service.start(OnDevice)
        found = await service.do_one(np.array([1, 2], np.float32))
        np.testing.assert_array_equal(found, [2, 4])
        await service.stop()

    run(work())


@pytest.mark.parametrize("wrong", [{"device": "gpu"}, {"device": NAME}, {"device_tensors": True}])
def test_what_a_service_cannot_be_given(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        BatchedService(4, **wrong)


class Small(VectorTransformer):
    """Has room for two elements."""

    def transform(self, x: Any) -> Any:
        if len(x) > 2 or any(float(np.ravel(one)[0]) == -7 for one in x):
            raise MemoryError("the host's")
        return [one * 2 for one in x]


@pytest.mark.parametrize("row", [None, ((2,), "float32")])
def test_a_transformer_without_memory_is_given_less(row: Any) -> None:
    """And one whose element does not fit says so; the worker goes on."""
    service = BatchedService(8, timeout_seconds=1.0, row=row, out_row=row)

    async def work() -> None:
        await service.start(Small)
        for _ in range(2):
            asked = [service.do_one(np.array([n, -n], np.float32)) for n in range(8)]
            found = await asyncio.gather(*asked)
            np.testing.assert_array_equal(found, [[2 * n, -2 * n] for n in range(8)])
            with pytest.raises(ServeError, match="MemoryError: the host's") as told:
                await service.do_one(np.array([-7, 0], np.float32))
            assert told.value.kind is Kind.INTERNAL  # the model asked for it
        await service.stop()

    run(work())
