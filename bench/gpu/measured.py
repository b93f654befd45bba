"""What is measured, on a CUDA device or as a dry run (place.py); `python -m bench.gpu` is the way in."""

from __future__ import annotations

import base64
import json
import mmap
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from bench.gpu.host import HEAD, Missing, load, middle, region_request, request_bytes, row
from bench.gpu.place import ClientMemory, Real, Simulated, add_repository_path
from fastserve.workers.device.base import COPY_IN
from tests.running import Running

BATCH, CLIENTS = 32, 64
KSERVE = {"float32": "FP32", "int64": "INT64"}
LENT_FLOATS = (150_000, 1_500_000)  # 600 KB and 6 MB
Place = Real | Simulated
SOURCE = """
from bench.gpu.models import {name}
class Model:
    def load(self):
        return {name}()
"""
FIRST = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x[:, :1] * 2
"""


def table(seconds: float, place: Place) -> Iterator[str]:
    """The lines of the table as they are measured."""
    with place.opened(), tempfile.TemporaryDirectory() as folder:
        yield place.title()
        yield from HEAD
        for rows in (8, 32, 64):
            yield _copies(place, rows, seconds / 5)
        yield from _models(place, Path(folder), seconds)


def _copies(place: Place, rows: int, seconds: float) -> str:
    """Memory registered as an arena is, against memory that torch has pinned."""
    nbytes = rows * place.picture
    device = place.device()
    with mmap.mmap(-1, nbytes) as memory:
        why = device.pin(memory)
        if why:
            raise Missing(f"memory cannot be registered: {why}")
        slot = torch.frombuffer(memory, dtype=torch.uint8)
        slot.fill_(1)
        target = device.empty((nbytes,), torch.uint8)
        sources = slot, place.pinned(nbytes)
        ours, theirs = (_bandwidth(device, target, source, seconds) for source in sources)
        device.close()
        del slot, sources
    share = ours / theirs
    text = f"{ours / 1e9:.2f} GB/s of {theirs / 1e9:.2f} ({share:.1%})"
    what = f"host to device from a slot, {rows} x {place.picture // 1000} KB"
    return row(what, text, "at least 90 %", share >= 0.9)


def _bandwidth(device: Any, target: Any, source: Any, seconds: float) -> float:
    until, count, times = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until or not times:
        first = device.mark(COPY_IN)
        for _ in range(10):
            device.copy(COPY_IN, target, source)
        last = device.mark(COPY_IN)
        while not device.reached(last):
            pass
        times += device.between_ns(first, last)
        count += 10
    return float(source.nbytes * count / (times / 1e9))


def _models(place: Place, folder: Path, seconds: float) -> Iterator[str]:
    models = folder / "models"
    for name, (_, dtype, shape, out) in place.shapes.items():
        source = SOURCE.format(name=name)
        sizes = {"max_batch_size": BATCH, "allowed_batch_sizes": [1, 2, 4, 8, 16, BATCH]}
        _write(place, models, name, source, dtype, shape, out, {**sizes, **place.options, **place.sharing})
    for floats in LENT_FLOATS:
        row_shape, one = (floats // place.scale,), {"max_batch_size": 1, **place.sharing}
        _write(place, models, f"lent{floats}", FIRST, "float32", row_shape, (1,), one)
    add_repository_path()
    bare = {name: [_bare_s(place, name, rows, seconds) for rows in (BATCH, 1)] for name in place.shapes}
    with Running(models, folder / "log", "--allow-client-shm", module=place.server) as served:
        for name in place.shapes:
            yield from _served(place, served.http, name, bare[name], seconds)
        yield _lent(place, served.http, seconds)


def _write(
    place: Place,
    models: Path,
    name: str,
    source: str,
    dtype: str,
    shape: tuple[int, ...],
    out: tuple[int, ...],
    more: dict[str, Any],
) -> None:
    version = models / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    config = {
        "backend": "torch",
        "devices": place.devices,
        "inputs": {"x": {"dtype": dtype, "shape": list(shape)}},
        "outputs": {"y": {"dtype": "float32", "shape": list(out)}},
        **more,
    }
    (version.parent / "model.yaml").write_text(yaml.safe_dump(config))


def _bare_s(place: Place, name: str, rows: int, seconds: float) -> float:
    kind, dtype, shape, _ = place.shapes[name]
    return place.bare_s(kind, torch.zeros((rows, *shape), dtype=getattr(torch, dtype)), seconds / 2)


def _served(place: Place, address: str, name: str, bare_s: list[float], seconds: float) -> Iterator[str]:
    _, dtype, shape, _ = place.shapes[name]
    data = np.zeros((1, *shape), dtype).tobytes()
    request = request_bytes(name, "x", KSERVE[dtype], (1, *shape), data, "y")
    load(address, request, CLIENTS, min(seconds, 1.0))
    before = _computed_s(address, name)
    times = load(address, request, CLIENTS, seconds)
    busy_s = _computed_s(address, name) - before
    rate, best = len(times) / seconds, BATCH / bare_s[0]
    text = f"{rate:.0f} rows/s of {best:.0f} ({rate / best:.1%})"
    yield row(f"{name}, {CLIENTS} connections", text, "at least 95 %", rate >= 0.95 * best)
    idle = max(1 - busy_s / seconds, 0.0)
    yield row(f"{name}, device idle between batches", f"{idle:.1%}", "below 5 %", idle < 0.05)
    added_us = (middle(load(address, request, 1, seconds / 2)) - bare_s[1]) * 1e6
    yield row(f"{name}, added p50 at one connection", f"{added_us:.0f} us", "under 200 us", added_us < 200)


def _computed_s(address: str, model: str) -> float:
    """How long batches of a model have been computed, by the device's own events: they are in one stream, one
    after the other, and what lies between them is idle. Told once a second (workers/device_report.py)."""
    time.sleep(1.2)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as reply:
        page = reply.read().decode()
    found = re.search(rf'fastserve_compute_duration_seconds_sum\{{[^}}]*model="{model}"[^}}]*\}} (\S+)', page)
    if found is None:
        raise Missing("the metrics page has no compute times")
    return float(found[1])


def _lent(place: Place, address: str, seconds: float) -> str:
    """A request whose input and output stay on the device, of two sizes."""
    found = []
    for floats in LENT_FLOATS:
        size = floats // place.scale
        memory = ClientMemory(4 * size + 64)
        asked = {
            "raw_handle": {"b64": base64.b64encode(memory.handle).decode()},
            "device_id": 0,
            "byte_size": memory.nbytes,
        }
        _post(address, f"region/r{floats}/register", asked)
        request = region_request(f"lent{floats}", f"r{floats}", size)
        load(address, request, 1, 0.5)  # the first opens the handle
        found.append(middle(load(address, request, 1, seconds / 2)))
        _post(address, f"region/r{floats}/unregister", {})
        memory.free()
    text = f"{found[0] * 1e6:.0f} us, {found[1] * 1e6:.0f} us ({found[1] / found[0]:.2f})"
    sizes = " and ".join(f"{4 * floats // place.scale // 1000} KB" for floats in LENT_FLOATS)
    return row(f"CUDA shared memory, a request of {sizes}", text, "within 1.2", found[1] <= 1.2 * found[0])


def _post(address: str, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://{address}/v2/cudasharedmemory/{path}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()
