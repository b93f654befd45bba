"""Many more models than memory, under requests whose models are drawn by Zipf's law.

TORTURE_BUDGET_MODELS, _ROOM, _SECONDS, _FRONTS and _CLIENTS choose the size of the run.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from fastserve.util.memory import proportional_bytes
from tests import proc
from tests.running import Running, until

pytestmark = [pytest.mark.torture, pytest.mark.alone]
MODELS = int(os.environ.get("TORTURE_BUDGET_MODELS", "200"))
ROOM = int(os.environ.get("TORTURE_BUDGET_ROOM", "10"))
SECONDS = float(os.environ.get("TORTURE_BUDGET_SECONDS", "60"))
FRONTS = os.environ.get("TORTURE_BUDGET_FRONTS", "1")
CLIENTS = int(os.environ.get("TORTURE_BUDGET_CLIENTS", "16"))
PINNED = 2
SKEW = 1.1
SOURCE = """
import os, pathlib, time

class Model:
    def __init__(self, config):
        self.add = config["parameters"]["add"]
        self.ballast = bytearray(os.urandom(1 << 20)) * 8
        if (held := pathlib.Path(config["parameters"]["held"])).exists():
            (held.parent / f"loading-{os.getpid()}").touch()
            while held.exists():
                time.sleep(0.01)

    def run(self, inputs):
        return {"y": inputs["x"] + self.add}
"""


def write_models(root: Path) -> None:
    tensor = {"dtype": "float32", "shape": [2]}
    for number in range(MODELS):
        folder = root / f"m{number}"
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(SOURCE)
        config = {
            "backend": "python",
            "inputs": {"x": tensor},
            "outputs": {"y": tensor},
            "max_batch_size": 4,
            "pin": number < PINNED,
            "parameters": {"add": number, "held": str(root / f"held-{number}")},
        }
        (folder / "model.yaml").write_text(yaml.safe_dump(config))


@dataclass
class Tally:
    """What clients have seen, and the times of good answers."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def p99_s(self) -> float:
        return sorted(self.times_s)[int(len(self.times_s) * 0.99)]


class Client:
    """One connection."""

    def __init__(self, address: str, tally: Tally) -> None:
        self._address, self._tally = address, tally
        self._connection = http.client.HTTPConnection(address, timeout=60)

    def ask(self, number: int) -> int:
        """Ask a model, and check the answer. Return the status."""
        x = float(random.randrange(1000))
        body = json.dumps({"instances": [[x, x + 1]]}).encode()
        began_s = time.monotonic()
        self._connection.request("POST", f"/v1/models/m{number}:predict", body)
        reply = self._connection.getresponse()
        told = json.loads(reply.read())
        self._tally.ends[str(reply.status)] += 1
        if reply.status == 200:
            self._tally.times_s.append(time.monotonic() - began_s)
            if told != {"predictions": [[x + number, x + 1 + number]]}:
                self._tally.wrong.append(f"m{number}: {told}")
        elif reply.status != 503 or not reply.getheader("Retry-After"):
            self._tally.wrong.append(f"m{number}: {reply.status} {told}")
        return reply.status


def run_clients(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in so many threads, and raise what one of them raises."""
    faults: list[BaseException] = []

    def one(number: int) -> None:
        try:
            work(number)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def worker_bytes(server: Running) -> int:
    """The memory of the workers of all models."""
    found, left = 0, [server.pid]
    while left:
        children = proc.children_of(left.pop())
        left += children
        found += sum(proportional_bytes(pid) for pid in children if proc.name_of(pid).startswith("fs:m"))
    return found


def page(server: Running) -> dict[str, float]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def used_bytes(server: Running) -> float:
    return page(server)['fastserve_models_memory_bytes{state="used"}']


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_models(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def server(root: Path, tmp_path: Path) -> Iterator[Running]:
    one = measure_one(root, tmp_path)
    options = ["--memory-budget", str(ROOM * one), "--keep-alive-s", "0.5", "--frontends", FRONTS]
    with Running(root, tmp_path / "log", *options, "--drain-s", "5") as running:
        yield running


def measure_one(root: Path, tmp_path: Path) -> int:
    """Return what a model takes here."""
    options = [
        "--memory-budget",
        "64MB",
        "--keep-loaded",
        "m0,m1",
        "--load-model",
        "m0",
        "--load-model",
        "m1",
    ]
    with Running(root, tmp_path / "first", *options) as running:
        until(lambda: used_bytes(running) > 0, "the models are measured")
        return int(used_bytes(running) / PINNED)


def pinned_times(server: Running, seconds: float, rate: float = 100.0) -> Tally:
    """The times of requests to pinned models, so many a second on one connection."""
    tally = Tally()
    client, end_s = Client(server.http, tally), time.monotonic() + seconds
    while (now_s := time.monotonic()) < end_s:
        client.ask(random.randrange(PINNED))
        time.sleep(max(0.0, now_s + 1 / rate - time.monotonic()))
    return tally


def test_zipf(server: Running) -> None:
    weights = [1 / (rank + 1) ** SKEW for rank in range(MODELS)]
    before = pinned_times(server, min(10.0, SECONDS / 4))
    tally, peak, over = Tally(), 0, threading.Event()
    beside: list[Tally] = []
    budget = page(server)['fastserve_models_memory_bytes{state="budget"}']

    def load(number: int) -> None:
        nonlocal peak
        if number == CLIENTS:
            while not over.wait(0.5):
                peak = max(peak, worker_bytes(server))
        elif number == CLIENTS + 1:
            beside.append(pinned_times(server, SECONDS))
        else:
            client = Client(server.http, tally)
            end_s = time.monotonic() + SECONDS
            try:
                while time.monotonic() < end_s:
                    client.ask(random.choices(range(MODELS), weights)[0])
            finally:
                over.set()

    run_clients(CLIENTS + 2, load)
    told = {
        "ends": dict(tally.ends),
        "peak of the budget": round(peak / budget, 3),
        "p99 of pinned models, ms": (round(before.p99_s() * 1e3, 2), round(beside[0].p99_s() * 1e3, 2)),
        "p50 of pinned models, ms": tuple(
            round(sorted(one.times_s)[len(one.times_s) // 2] * 1e3, 2) for one in (before, beside[0])
        ),
        "loads": sum(value for name, value in page(server).items() if "model_loads_total" in name),
    }
    print(json.dumps(told))
    assert not [*tally.wrong, *before.wrong, *beside[0].wrong][:3]
    assert beside[0].ends["503"] == 0
    assert tally.ends["200"] > tally.ends["503"]
    assert peak <= 1.1 * budget


def test_64_clients_ask_for_20_cold_models_at_once(server: Running) -> None:
    tally, cold = Tally(), range(MODELS - 20, MODELS)
    run_clients(64, lambda number: _ask_until(Client(server.http, tally), cold[number % 20]))
    print(json.dumps(dict(tally.ends)))
    assert not tally.wrong[:3]
    assert tally.ends["200"] == 64
    counts = page(server)
    loads = [
        value
        for name, value in counts.items()
        if "fastserve_model_loads_total" in name and any(f'"m{number}"' in name for number in cold)
    ]
    assert max(loads) == 1.0


def _ask_until(client: Client, number: int) -> None:
    end_s = time.monotonic() + 240
    while client.ask(number) != 200:
        assert time.monotonic() < end_s, f"m{number} was never loaded"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_while_it_loads(
    server: Running, root: Path, number: signal.Signals
) -> None:
    held, tally, last = root / f"held-{MODELS - 1}", Tally(), MODELS - 1
    held.touch()
    asked = threading.Thread(target=lambda: _ask_until(Client(server.http, tally), last))
    asked.start()
    until(lambda: list(root.glob("loading-*")), "the worker loads")
    pid = int(next(iter(root.glob("loading-*"))).name.partition("-")[2])
    os.kill(pid, number)
    held.unlink()
    others = Tally()
    client = Client(server.http, others)
    for cold in range(MODELS - 6, MODELS - 1):
        _ask_until(client, cold)
    for _ in range(20):
        assert client.ask(0) == 200
    if number is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    asked.join(240)
    assert not asked.is_alive()
    print(json.dumps([dict(tally.ends), dict(others.ends)]))
    assert not [*tally.wrong, *others.wrong][:3]
    assert tally.ends["200"] == 1
