"""A whole server with a GPU: every form of model, clients' device memory in every API, and every fault. Each
test has one body, run on the simulated device everywhere and on a real one where there is one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from fastserve import BatchedService, VectorTransformer
from tests.backends.frameworks.torch_models import CONFIG, net, save_class, save_program, save_script
from tests.devices.simulated import FakeGpus, client_library
from tests.devices.simulated_worker import simulated_services
from tests.devices.speakers import ALL, speaker
from tests.running import CLI, WITH_SIMULATED_DEVICES, Running, until
from tests.server.raw_clients import ask

WHY = "was built without CUDA" if not torch.version.cuda else "sees no GPU"
REAL = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"PyTorch {torch.__version__} {WHY}"),
]
DEVICES = ["simulated", pytest.param("cuda:0", marks=REAL)]
ROWS = np.random.default_rng(7).standard_normal((8, 4)).astype(np.float32)
WANTED = net()(torch.from_numpy(ROWS)).detach().numpy()  # once: what makes it seeds the whole process
# Here one process imports torch for all that do not break it; on a device each has a context of its own.
BREAK = ("sticky", "held")
pytestmark = [
    pytest.mark.lingers,  # CUDA, and the first client of grpc's, keep threads and descriptors
    pytest.mark.timeout(300),
]

CLASS = """
from tests.backends.frameworks.torch_models import net
class Model:
    def load(self):
        return net()
"""
# Each asks for what no device has, or breaks its own; on the host's memory the same is said in CUDA's words.
LARGE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        if len(x) > {most}:
            torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
        return x[:, :3] * 2
"""
STICKY = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        if (x == -7).any():
            if x.device.type == "cpu":
                raise RuntimeError("CUDA error: device-side assert triggered")
            x = x[torch.tensor([1 << 20], device=x.device)]
        return x[:, :3] * 2
"""
# Called when copy-in has been enqueued, and before anything computes.
HELD = """
import os, pathlib, time, torch
class Model(torch.nn.Module):
    def forward(self, x):
        mark = pathlib.Path({mark!r})
        if (x == -7).any() and not mark.exists():
            mark.write_text(str(os.getpid()))
            time.sleep(60)
        return x[:, :3] * 2
"""
DLPACK = """
import torch
class Model:
    def __init__(self, config):
        self.device = str(config["device"]).partition(":")[0]
    def run(self, inputs):
        x = torch.from_dlpack(inputs["x"])
        assert x.device.type == ("cuda" if self.device == "cuda" else "cpu"), x.device
        return {"y": x[:, :3] * 2}
"""


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Doubler(VectorTransformer):
    """Sees tensors of its device."""

    def transform(self, x: Any) -> Any:
        assert x.device.type == ("cuda" if self.device.startswith("cuda") else "cpu")
        return x * 2


class Rig(NamedTuple):
    """A server with models on a device."""

    served: Running
    device: str
    folder: Path
    gpus: FakeGpus | None


def write(models: Path, name: str, device: str, **changes: Any) -> None:
    shared = {"shared_worker": "most"} if device == "simulated" and name not in BREAK else {}
    config = {**CONFIG, "devices": device, "max_queue_delay_us": 500, **shared, **changes}
    (models / name / "model.yaml").write_text(yaml.safe_dump(config))


def write_models(folder: Path, device: str) -> Path:
    models = folder / "models"
    graphs = {"cuda_graphs": True}
    made = {
        "script": (save_script(models, net(), "script"), {}),
        "program": (save_program(models, net(), torch.zeros(2, 4), name="program"), {}),
        "class": (save_class(models, CLASS, "class"), {}),
        "graphs": (save_script(models, net(), "graphs"), {"torch": graphs, "allowed_batch_sizes": [1, 4, 8]}),
        "halves": (save_class(models, LARGE.format(most=2), "halves"), {}),
        "starved": (save_class(models, LARGE.format(most=0), "starved"), {"warmup": "off"}),
        "sticky": (save_class(models, STICKY, "sticky"), {}),
        "held": (save_class(models, HELD.format(mark=str(folder / "held")), "held"), {"instances": 2}),
        "dlpack": (save_class(models, DLPACK, "dlpack"), {"backend": "python", "device_tensors": True}),
    }
    for name, (_, changes) in made.items():
        outputs = {"OUTPUT__0": CONFIG["outputs"]["y"]} if name == "program" else CONFIG["outputs"]
        write(models, name, device, outputs=outputs, **changes)
    save_script(models, Sum(), "sums")
    sides = [
        {name: {"dtype": "float32", "shape": [16]} for name in names} for names in (("x", "y"), ("sum",))
    ]
    write(models, "sums", device, inputs=sides[0], outputs=sides[1])
    return models


@pytest.fixture(scope="module", params=DEVICES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("gpu")
    gpus = None if request.param.startswith("cuda") else FakeGpus(folder)
    models = write_models(folder, request.param)
    with contextlib.ExitStack() as stack:
        with gpus.here() if gpus is not None else contextlib.nullcontext():
            options = ("--allow-client-shm",)
            module = CLI if gpus is None else WITH_SIMULATED_DEVICES
            served = stack.enter_context(Running(models, folder / "log", *options, module=module))
        yield Rig(served, request.param, folder, gpus)
    assert gpus is None or gpus.broken == ""


@pytest.mark.parametrize("model", ["script", "program", "class", "graphs"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_answers_are_torchs(rig: Rig, model: str, rows: int) -> None:
    y = "OUTPUT__0" if model == "program" else "y"

    def one(_: int) -> None:
        status, found = ask(rig.served.http, model, "x", ROWS[:rows], y)
        assert status == 200, found
        np.testing.assert_allclose(found, WANTED[:rows], rtol=1e-3, atol=1e-3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(16)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"PyTorch {torch.__version__} {WHY}")
def test_onnx_runtime_on_cuda(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has no CUDA (onnxruntime-gpu has)")
    folder = tmp_path / "models" / "net" / "1"
    folder.mkdir(parents=True)
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    torch.onnx.export(net(), (torch.zeros(2, 4),), str(folder / "model.onnx"), dynamo=False, **names)
    config = {"backend": "onnx", "max_batch_size": 8, "devices": "cuda:0"}
    (tmp_path / "models" / "net" / "model.yaml").write_text(yaml.safe_dump(config))
    with Running(tmp_path / "models", tmp_path / "log") as served:
        status, found = ask(served.http, "net", "x", ROWS, "y")
        assert status == 200, found
        np.testing.assert_allclose(found, WANTED, rtol=1e-3, atol=1e-3)


def test_a_python_model_has_tensors_by_dlpack(rig: Rig) -> None:
    status, found = ask(rig.served.http, "dlpack", "x", ROWS, "y")
    assert status == 200, found
    np.testing.assert_array_equal(found, ROWS[:, :3] * 2)


def test_out_of_memory_is_run_by_halves(rig: Rig) -> None:
    for _ in range(3):
        status, found = ask(rig.served.http, "halves", "x", ROWS, "y")
        assert status == 200, found
        np.testing.assert_array_equal(found, ROWS[:, :3] * 2)
    assert "halves/1: worker 0 died" not in rig.served.log.read_text()


def test_two_models_compete_for_memory(rig: Rig) -> None:
    """One finds none, the other goes on, and neither loses its worker."""

    def one(number: int) -> tuple[str, int, Any]:
        model = ("starved", "script")[number % 2]
        return model, *ask(rig.served.http, model, "x", ROWS[:1], "y")

    with ThreadPoolExecutor(4) as pool:
        for model, status, found in pool.map(one, range(40)):
            assert status == (503 if model == "starved" else 200), found
            assert model == "script" or "there is no memory for a batch of 1 rows" in found
    assert "starved/1: worker 0 died" not in rig.served.log.read_text()


def test_a_sticky_error_costs_the_worker(rig: Rig) -> None:
    bad = np.full((1, 4), -7, np.float32)
    status, words = ask(rig.served.http, "sticky", "x", bad, "y")
    assert status == 503, words
    until(lambda: ask(rig.served.http, "sticky", "x", ROWS, "y")[0] == 200, "a fresh worker", 120)
    np.testing.assert_array_equal(ask(rig.served.http, "sticky", "x", ROWS, "y")[1], ROWS[:, :3] * 2)
    assert "its GPU has failed, and it answers no more" in rig.served.log.read_text()


def test_a_worker_killed_between_copy_in_and_compute(rig: Rig) -> None:
    """Another has the batch."""
    asked, mark = np.full((1, 4), -7, np.float32), rig.folder / "held"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, rig.served.http, "held", "x", asked, "y")
        until(lambda: mark.exists() and mark.read_text(), "a batch that waits for its run", 60)
        assert int(mark.read_text()) in rig.served.workers
        os.kill(int(mark.read_text()), signal.SIGKILL)
        status, found = held.result(120)
    assert status == 200, found
    np.testing.assert_array_equal(found, asked[:, :3] * 2)


@pytest.mark.parametrize(("dialect", "transport"), ALL)
def test_clients_memory_on_the_device(rig: Rig, dialect: str, transport: str) -> None:
    """By tritonclient's own module, unmodified; the model reads and writes it where it lies."""
    x, y = np.arange(32, dtype=np.float32).reshape(2, 16), np.ones((2, 16), np.float32)
    with contextlib.ExitStack() as stack:
        if rig.gpus is not None:
            cuda = stack.enter_context(client_library(rig.gpus))
        else:
            cuda = pytest.importorskip("tritonclient.utils.cuda_shared_memory")
        region = cuda.create_shared_memory_region("r", 4096, 0)
        stack.callback(cuda.destroy_shared_memory_region, region)
        gap = np.zeros(96, np.float32)
        cuda.set_shared_memory_region(region, [x, gap, y])
        say = stack.enter_context(speaker(dialect, transport, rig.served))
        handle = base64.b64decode(cuda.get_raw_handle(region))
        assert say.register("r", handle, 0, 4096).good
        for _ in range(3):
            told = say.infer("sums", "r", 2).told()
            assert told.good, told
            found = cuda.get_contents_as_numpy(region, np.float32, [1024])
            np.testing.assert_array_equal(found[256:288].reshape(2, 16), x + y)
            x = x + 1
            cuda.set_shared_memory_region(region, [x, gap, y])
        assert not say.infer("sums", "r", 2, size=32).told().good
        assert say.unregister("r").good
        assert not say.infer("sums", "r", 2).told().good


@pytest.mark.parametrize("device", DEVICES)
@simulated_services()
def test_a_transformer_on_its_device(device: str) -> None:
    row = ((2,), "float32")
    service = BatchedService(4, row=row, out_row=row, device=device, device_tensors=True)

    async def work() -> None:
        await service.start(Doubler)
        found = await asyncio.gather(*(service.do_one(np.array([n, -n], np.float32)) for n in range(6)))
        await service.stop()
        np.testing.assert_array_equal(found, [[2 * n, -2 * n] for n in range(6)])

    asyncio.run(work())
