"""Models that share a worker on a device: whatever one of them does to itself, with batches of the others in
flight, the others are answered rightly or with 503, and all are well again afterwards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.running import WITH_SIMULATED_DEVICES, Running, until
from tests.server.processes.test_shared_workers import manage
from tests.server.raw_clients import ask

torch = pytest.importorskip("torch")

# A value of x[:, 0] is what the model does with a batch that has it; the others' rows come back times FACTOR.
DIES, HANGS, STARVES, STICKS = -1.0, -2.0, -3.0, -4.0
MODEL = """
import os, time
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        what = float(x[:, 0].min())
        if what == -1:
            os._exit(9)
        if what == -2:
            time.sleep(600)
        if what == -3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if what == -4:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return {"y": x * %s}
"""
SIDES = {
    side: {name: {"dtype": "float32", "shape": [4]}} for side, name in (("inputs", "x"), ("outputs", "y"))
}
FACTORS = {"calm": 2.0, "even": 3.0, "wild": 5.0}
CONFIG = {
    **SIDES,
    "backend": "torch",
    "devices": "simulated",
    "shared_worker": "gpu",
    "max_batch_size": 8,
    "max_queue_delay_us": 500,
    "restart_backoff_s": 0.05,
}
ROWS = np.arange(1, 257, dtype=np.float32).reshape(64, 4)


def write(models: Path, name: str) -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "1" / "model.py").write_text(MODEL % FACTORS[name])
    limit = {"run_timeout_ms": 5000} if name == "wild" else {}
    (models / name / "model.yaml").write_text(yaml.safe_dump({**CONFIG, **limit}))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shared")
    for name in FACTORS:
        write(folder / "models", name)
    chosen = [word for name in FACTORS for word in ("--load-model", name)]
    options = ("--model-control", "explicit", *chosen)
    with Running(folder / "models", folder / "log", *options, module=WITH_SIMULATED_DEVICES) as running:
        yield running


def ask_row(served: Running, name: str, number: int) -> int:
    """The status; an answer is that of this row and no other."""
    row = ROWS[number % 64 : number % 64 + 1]
    status, found = ask(served.http, name, "x", row, "y")
    if status == 200:
        np.testing.assert_array_equal(found, row * FACTORS[name])
    return int(status)


REQUESTS_PER_S = 400  # of all clients together, at most


def load(served: Running, clients: int, evil: Callable[[], object], times: int = 3) -> Counter[int]:
    """Return the answers to clients of the models that do nothing, from before `evil` began until it has been
    done."""
    numbers, over = count(), threading.Event()

    def client(name: str) -> Counter[int]:
        heard: Counter[int] = Counter()
        while True:
            heard[ask_row(served, name, next(numbers))] += 1
            if over.wait(clients / REQUESTS_PER_S):
                return heard

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(client, ("calm", "even")[n % 2]) for n in range(clients)]
        try:
            for _ in range(times):
                evil()
                well(served)
        finally:
            over.set()
        return sum((one.result(90) for one in asked), Counter())


def well(served: Running) -> None:
    for name in FACTORS:
        until(lambda name=name: ask_row(served, name, 0) == 200, f"{name} is well again", 60)


def poison(served: Running, what: float) -> Callable[[], int]:
    def do() -> int:
        return int(ask(served.http, "wild", "x", np.full((1, 4), what, np.float32), "y")[0])

    return do


CLIENTS = pytest.mark.parametrize("clients", [4, 64])


@pytest.mark.parametrize(
    ("what", "clients"),
    [(DIES, 4), (DIES, 64), (STICKS, 4), (STICKS, 64), (HANGS, 64)],
    ids=["dies-4", "dies-64", "sticky-4", "sticky-64", "hangs-64"],
)
def test_the_end_of_their_worker(served: Running, clients: int, what: float) -> None:
    """Its own request fails; the others' batches are run by the next process, or fail with 503. A death is
    one start of each model, and no process is left over."""

    def restarts() -> int:
        return served.log.read_text().count("wild/1: worker 0 is ready again")

    before, times = restarts(), 2 if what == STICKS else 1
    statuses: list[int] = []
    heard = load(served, clients, lambda: statuses.append(poison(served, what)()), times)
    assert set(statuses) == {503}
    assert set(heard) <= {200, 503}, heard
    assert heard[200] > 0, heard
    until(lambda: restarts() - before >= times, "it has come back")
    assert restarts() - before == times
    until(lambda: len(served.workers) == 1, "no process more")


@CLIENTS
def test_one_that_has_no_memory(served: Running, clients: int) -> None:
    """Alone in it: nobody else hears of it, and no worker ends."""
    before = served.workers
    statuses: list[int] = []
    heard = load(served, clients, lambda: statuses.append(poison(served, STARVES)()), 4)
    assert set(statuses) == {503}
    assert set(heard) == {200}
    assert served.workers == before


@CLIENTS
def test_one_that_is_unloaded_and_loaded_again(served: Running, clients: int) -> None:
    before = served.workers

    def reload() -> None:
        assert manage(served, "unload", "wild") == (200, "")
        assert manage(served, "load", "wild") == (200, "")

    assert set(load(served, clients, reload, 3)) == {200}
    assert served.workers == before


def test_one_that_is_unloaded_while_its_worker_comes_back(served: Running) -> None:
    """Quarantined, drained and gone: the others come back without it, and so does it when it is loaded."""
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            struck = pool.submit(poison(served, STICKS))
            gone = pool.submit(manage, served, "unload", "wild")
            assert gone.result(60) == (200, "")
            assert struck.result(60) in (400, 404, 503)
        for name in ("calm", "even"):
            until(lambda name=name: ask_row(served, name, 0) == 200, f"{name} is well again", 60)
        assert manage(served, "load", "wild") == (200, "")
        well(served)
    until(lambda: len(served.workers) == 1, "no process more")
