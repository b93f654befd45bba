"""Clients' device memory under load: read by workers on the device, in batches that plain requests share,
while workers are killed. Every answer is right or says why not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import yaml

from tests.devices.simulated import Allocation, FakeGpus
from tests.devices.test_client_memory import register
from tests.devices.test_lending import MODEL, ROW, WIDE, answer_of, asked, fill, other_of, rows
from tests.faults.rig import Http
from tests.running import WITH_SIMULATED_DEVICES, Running, until

pytestmark = pytest.mark.torture
MODELS = {
    "near": {"devices": "simulated", "shared_worker": "all"},
    "beside": {"devices": "simulated", "shared_worker": "all"},
}
SECONDS, KILL_S = 25.0, 2.0


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpus]:
    made = FakeGpus(tmp_path_factory.mktemp("gpus"))
    yield made
    assert made.broken == ""


@pytest.fixture(scope="module")
def served(gpus: FakeGpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("regions") / "models"
    sides = {
        "inputs": {"x": WIDE, "y": WIDE},
        "outputs": {"sum": WIDE, "difference": WIDE},
        "allowed_batch_sizes": [4, 8],
    }
    for name, more in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(MODEL)
        config = {"backend": "torch", "max_batch_size": 8, "max_queue_delay_us": 500, **sides, **more}
        (folder / name / "model.yaml").write_text(yaml.safe_dump(config))
    with ExitStack() as stack:
        with gpus.here():
            server = Running(
                folder, folder.parent / "log", "--allow-client-shm", module=WITH_SIMULATED_DEVICES
            )
            running = stack.enter_context(server)
        yield running


def work(served: Running, gpus: FakeGpus, found: Counter[str], number: int, end: float) -> None:
    """One client: a region for a while, requests into and out of it, and plain ones between them."""
    at, name = gpus.allocate(4096), f"r{number}"
    with Http(served) as http:
        while time.monotonic() < end:
            answer = register(http, name, at)
            assert answer.status == 200, answer.error
            for _ in range(random.randrange(1, 30)):
                ask(http, found, name, at, random.choice(list(MODELS)))
            assert http.post(f"/v2/cudasharedmemory/region/{name}/unregister", {}).status == 200
    at.free(early=True)


def ask(http: Http, found: Counter[str], name: str, at: Allocation, model: str) -> None:
    x, y = (rows(*np.random.default_rng().integers(100, 999, 2)) for _ in range(2))
    fill(at, x, y)
    body = asked(name, 2)
    if random.random() < 0.3:  # without a region, in the same batches
        body["inputs"] = [
            {"name": one, "shape": [2, 16], "datatype": "FP32", "data": value.ravel().tolist()}
            for one, value in (("x", x), ("y", y))
        ]
        del body["outputs"][0]["parameters"]
    at.put(bytes(2 * ROW), 1024)
    answer = http.post(f"/v2/models/{model}/infer", body)
    found[f"{model} {answer.status}"] += 1
    if answer.status != 200:
        assert answer.status == 503, answer.error
        return
    assert np.array_equal(other_of(answer), x - y)
    if "parameters" in body["outputs"][0]:
        assert np.array_equal(answer_of(at, 2), x + y)


def is_back(http: Http) -> bool:
    """Whether each model answers: one is ready, as Triton has it, while its worker is loaded again."""
    data = [1.0] * 16
    body = {"inputs": [{"name": x, "shape": [1, 16], "datatype": "FP32", "data": data} for x in ("x", "y")]}
    return all(http.post(f"/v2/models/{name}/infer", body).status == 200 for name in MODELS)


def kill_now_and_then(served: Running, over: threading.Event, found: Counter[str]) -> None:
    """A worker, where all are back: one takes seconds to load torch on a busy machine."""
    with Http(served) as http:
        while not over.wait(KILL_S):
            pid = random.choice([0, *served.workers]) if is_back(http) else 0
            if pid:
                found["worker killed"] += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("clients", [4, 64])
def test_half_a_minute_of_kills(served: Running, gpus: FakeGpus, clients: int) -> None:
    found: Counter[str] = Counter()
    end, over = time.monotonic() + SECONDS, threading.Event()
    killer = threading.Thread(target=kill_now_and_then, args=(served, over, found))
    killer.start()
    try:
        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(work, served, gpus, found, n, end) for n in range(clients)]:
                done.result()
    finally:
        over.set()
        killer.join()
    right = sum(found[f"{model} 200"] for model in MODELS)
    told = sum(found[f"{model} 503"] for model in MODELS)
    # One worker to a model: a kill fails who waits.
    assert right > 0.6 * (right + told), found
    with Http(served) as http:
        assert http.ask("GET", "/v2/cudasharedmemory/status").json() == []
    until(lambda: all(gpus.readers(pid) == 0 for pid in served.workers), "nothing is open any more")
