"""Where the table is measured: on a CUDA device, or, to see that the script runs, on one made of the host's
memory, whose numbers say nothing of a GPU."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.gpu.models import SHAPES, TINY
from fastserve.devices.cuda import Cuda
from tests.running import CLI, WITH_SIMULATED_DEVICES

BATCHES_AT_ONCE = 10


def driver_version(said: Path = Path("/proc/driver/nvidia/version")) -> str:
    """As the kernel's module says it; "unknown" where it is none of NVIDIA's for Linux."""
    found = re.search(r"Module(?: for \S+)?\s+([\d.]+)", said.read_text()) if said.exists() else None
    return found[1] if found else "unknown"


class Real:
    """The first CUDA device of this process."""

    devices, shapes, picture, scale = "cuda:0", SHAPES, 600_000, 1
    server = CLI
    options: dict[str, Any] = {"torch": {"autocast": "bfloat16", "cuda_graphs": True}}
    sharing: dict[str, Any] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        yield

    def title(self) -> str:
        versions = f"CUDA {torch.version.cuda}, PyTorch {torch.__version__}, {platform.platform()}"
        return f"{torch.cuda.get_device_name()}, driver {driver_version()}, {versions}"

    def device(self) -> Any:
        from fastserve.workers.device.cuda import CudaDevice

        return CudaDevice("cuda:0")

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)

    def bare_s(self, kind: Any, x: torch.Tensor, seconds: float) -> float:
        """Seconds of one batch in a loop that replays it with its inputs on the device."""
        model, x = kind().cuda().eval(), x.cuda()
        with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
            aside = torch.cuda.Stream()
            with torch.cuda.stream(aside):
                for _ in range(3):
                    model(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=aside):
                model(x)
        return loop_s(graph.replay, torch.cuda.synchronize, seconds)


class Simulated:
    """See tests/devices/simulated.py."""

    devices, shapes, picture, scale = "simulated", TINY, 6_000, 100
    server = WITH_SIMULATED_DEVICES
    options: dict[str, Any] = {}
    sharing: dict[str, Any] = {"shared_worker": "bench"}  # one process that imports torch

    @contextmanager
    def opened(self) -> Iterator[None]:
        """With a driver's library that this process and the server it starts find by its name."""
        from tests.devices.simulated import FakeGpus

        with tempfile.TemporaryDirectory() as folder:
            gpus = FakeGpus(Path(folder))
            ctypes.CDLL(str(gpus.libraries / "libcuda.so.1"))
            with gpus.here():
                yield

    def title(self) -> str:
        return "SIMULATED: a dry run of the script on the host's memory. None of these is a number of a GPU."

    def device(self) -> Any:
        from tests.devices.simulated_device import SimulatedDevice

        return SimulatedDevice()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)

    def bare_s(self, kind: Any, x: torch.Tensor, seconds: float) -> float:
        model = kind().eval()
        with torch.inference_mode():
            return loop_s(lambda: model(x), lambda: None, seconds)


def loop_s(run: Any, synchronize: Any, seconds: float) -> float:
    """Seconds that one of many runs takes."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(BATCHES_AT_ONCE):
            run()
        synchronize()
        count += BATCHES_AT_ONCE
    return (time.perf_counter() - began) / count


class ClientMemory:
    """Memory of the device that this process allocates and lends, as a client does, by the driver alone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._at = nbytes, ctypes.c_uint64()
        cuda = Cuda.load()
        if cuda is None:
            raise RuntimeError("the driver's library cannot be loaded")
        cuda.enter(0)
        self._library = ctypes.CDLL("libcuda.so.1")
        self._do("cuMemAlloc_v2", ctypes.byref(self._at), ctypes.c_size_t(nbytes))
        handle = (ctypes.c_ubyte * 64)()
        self._do("cuIpcGetMemHandle", handle, self._at)
        self.handle = bytes(handle)
        cuda.to_device(self._at.value, bytes(nbytes))

    def free(self) -> None:
        self._do("cuMemFree_v2", self._at)

    def _do(self, call: str, *arguments: Any) -> None:
        code = getattr(self._library, call)(*arguments)
        if code:
            raise RuntimeError(f"{call}: error {code}")


def add_repository_path() -> None:
    """Models of the benchmark are imported by the workers."""
    os.environ["PYTHONPATH"] = os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
