"""What is measured on a CUDA device. Not run without one; `python -m bench.gpu` is the way in."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from bench.gpu.host import HEAD, Missing, load, middle, request_bytes, row
from bench.gpu.models import SHAPES, SOURCE
from fastserve.workers.device import COPY_IN
from fastserve.workers.device_cuda import CudaDevice
from tests.running import Running

PICTURE = 600_000
BATCH, CLIENTS = 32, 64
KSERVE = {"float32": "FP32", "int64": "INT64"}


def table(seconds: float) -> Iterator[str]:
    """The lines of the table as they are measured."""
    versions = f"CUDA {torch.version.cuda}, PyTorch {torch.__version__}, {platform.platform()}"
    yield f"{torch.cuda.get_device_name()}, {versions}"
    yield from HEAD
    for rows in (8, 32, 64):
        yield _copies(rows, seconds / 5)
    with tempfile.TemporaryDirectory() as folder:
        yield from _models(Path(folder), seconds)


def _copies(rows: int, seconds: float) -> str:
    """Memory registered as an arena is, against memory that torch has pinned."""
    nbytes = rows * PICTURE
    device = CudaDevice("cuda:0")
    with mmap.mmap(-1, nbytes) as memory:
        why = device.pin(memory)
        if why:
            raise Missing(f"memory cannot be registered: {why}")
        slot = torch.frombuffer(memory, dtype=torch.uint8)
        slot.fill_(1)
        plain = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
        target = device.empty((nbytes,), torch.uint8)
        ours, theirs = (_bandwidth(device, target, source, seconds) for source in (slot, plain))
        device.close()
        del slot
    share = ours / theirs
    text = f"{ours / 1e9:.2f} GB/s of {theirs / 1e9:.2f} ({share:.1%})"
    return row(f"host to device from a slot, {rows} x 600 KB", text, "at least 90 %", share >= 0.9)


def _bandwidth(device: CudaDevice, target: Any, source: Any, seconds: float) -> float:
    until, count = time.monotonic() + seconds, 0
    times = 0
    while time.monotonic() < until:
        first = device.mark(COPY_IN)
        for _ in range(10):
            device.copy(COPY_IN, target, source)
        last = device.mark(COPY_IN)
        while not device.reached(last):
            pass
        times += device.between_ns(first, last)
        count += 10
    return float(source.nbytes * count / (times / 1e9))


def _models(folder: Path, seconds: float) -> Iterator[str]:
    for name, (_, dtype, shape, out) in SHAPES.items():
        version = folder / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(SOURCE.format(name=name))
        config = {
            "backend": "torch",
            "devices": "cuda:0",
            "max_batch_size": BATCH,
            "allowed_batch_sizes": [1, 2, 4, 8, 16, BATCH],
            "inputs": {"x": {"dtype": dtype, "shape": list(shape)}},
            "outputs": {"y": {"dtype": "float32", "shape": list(out)}},
            "torch": {"autocast": "bfloat16", "cuda_graphs": True},
        }
        (version.parent / "model.yaml").write_text(yaml.safe_dump(config))
    os.environ["PYTHONPATH"] = os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
    bare = {name: _bare(name, seconds) for name in SHAPES}
    with Running(folder / "models", folder / "log") as served:
        for name, (_, dtype, shape, _) in SHAPES.items():
            yield from _served(served.http, name, dtype, shape, bare[name], seconds)


def _bare(name: str, seconds: float) -> tuple[float, float]:
    """Rows a second at batch 32 with the inputs on the device, and seconds of one batch of one row."""
    kind, dtype, shape, _ = SHAPES[name]
    model = kind().cuda().eval()
    found = []
    for rows in (BATCH, 1):
        x = torch.zeros((rows, *shape), dtype=getattr(torch, dtype), device="cuda")
        with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
            for _ in range(10):
                model(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(x)
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < seconds / 2:
                for _ in range(10):
                    graph.replay()
                torch.cuda.synchronize()
                count += 10
            took = time.perf_counter() - began
        found.append(rows * count / took if rows == BATCH else took / count)
    return found[0], found[1]


def _served(
    address: str, name: str, dtype: str, shape: tuple[int, ...], bare: tuple[float, float], seconds: float
) -> Iterator[str]:
    data = np.zeros((1, *shape), dtype).tobytes()
    request = request_bytes(name, "x", KSERVE[dtype], (1, *shape), data, "y")
    load(address, request, CLIENTS, 1.0)
    times = load(address, request, CLIENTS, seconds)
    rate = len(times) / seconds
    share = rate / bare[0]
    text = f"{rate:.0f} rows/s of {bare[0]:.0f} ({share:.1%})"
    yield row(f"{name}, {CLIENTS} connections", text, "at least 95 %", share >= 0.95)
    added_us = (middle(load(address, request, 1, seconds / 2)) - bare[1]) * 1e6
    yield row(f"{name}, added p50 at one connection", f"{added_us:.0f} us", "under 200 us", added_us < 200)
