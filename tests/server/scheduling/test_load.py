"""Few clients and many on every schedule, with one instance and two: every answer right, none late.

Few clients are the hard case: soon all wait for the same wake-up, and if that was lost, no further request
comes to repeat it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from fastserve.engine.supervision import NO_WORKER_LIMIT_S
from tests.running import Running, until
from tests.server.scheduling.load_clients import LIMIT_S, GrpcCaller, HttpCaller, Report, load
from tests.server.scheduling.load_models import MODELS, Loaded, write_repository

# Clients, seconds: a lost wake-up is for good, so a load ends or hangs. The long ones are in `make torture`.
Loads = list[tuple[int, float, type[HttpCaller] | type[GrpcCaller]]]
SHORT: Loads = [(4, 0.05, HttpCaller), (5, 0.05, HttpCaller), (16, 0.03, HttpCaller), (64, 0.03, HttpCaller)]
GRPC: Loads = [(4, 0.05, GrpcCaller), (16, 0.03, GrpcCaller)]
# Behind three fronts: each has few of five.
FRONTS = pytest.mark.parametrize(
    "loads",
    [([SHORT[1], SHORT[3]], GRPC[:1]), pytest.param((SHORT, GRPC), marks=pytest.mark.torture)],
    ids=["few and many", "all"],
)
BOTH_WAYS = ("direct_2", "levels_2", "plain_1", "ragged_2")
LONG_S, KILL_S = 2.0, 0.5
SEVERAL_FRONTS = ("--frontends", "3")
# While no worker lives a request is kept so long; one that waits for longer has been forgotten.
KILLED_LIMIT_S = NO_WORKER_LIMIT_S + LIMIT_S
BACK_S = 30.0
CASES = [(backend, model) for backend, models in MODELS.items() for model in models]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tmp_path_factory.mktemp("triton"), "triton") as running:
        yield running


@pytest.fixture(scope="module")
def triton_fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tmp_path_factory.mktemp("triton"), "triton", *SEVERAL_FRONTS) as running:
        yield running


@pytest.fixture(scope="module")
def onnx_fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tmp_path_factory.mktemp("onnx"), "onnx", *SEVERAL_FRONTS) as running:
        yield running


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tmp_path_factory.mktemp("onnx"), "onnx") as running:
        yield running


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tmp_path_factory.mktemp("native"), "native") as running:
        yield running


def start(folder: Path, backend: str, *options: str) -> Running:
    write_repository(folder / "models", backend)
    cache = () if SEVERAL_FRONTS[0] in options else ("--response-cache-bytes", "1000000")
    return Running(folder / "models", folder / "log", *cache, "--rate-limit", "execution_count", *options)


def check(report: Report, model: Loaded, limit_s: float = LIMIT_S) -> None:
    assert report.answered
    assert not report.wrong, report.wrong[:3]
    assert report.slowest_s < limit_s, f"{model.name}: a call took {report.slowest_s:.1f} s"


def load_all(served: Running, model: Loaded, http: Loads = SHORT, rpc: Loads = GRPC) -> None:
    loads = rpc if model.streams else http + rpc if model.name in BOTH_WAYS else http
    for clients, seconds, caller in loads:
        report = asyncio.run(load(served, model, clients, seconds, caller.open))
        assert not report.lost
        check(report, model)


@pytest.mark.parametrize("model", MODELS["triton"], ids=str)
def test_models_that_see_requests(triton: Running, model: Loaded) -> None:
    load_all(triton, model)


@FRONTS
@pytest.mark.parametrize("model", MODELS["triton"], ids=str)
def test_models_that_see_requests_behind_three_fronts(
    triton_fronts: Running, model: Loaded, loads: tuple[Loads, Loads]
) -> None:
    load_all(triton_fronts, model, *loads)


@FRONTS
@pytest.mark.parametrize("model", MODELS["onnx"], ids=str)
def test_models_that_see_arrays_behind_three_fronts(
    onnx_fronts: Running, model: Loaded, loads: tuple[Loads, Loads]
) -> None:
    load_all(onnx_fronts, model, *loads)


@pytest.mark.parametrize("model", MODELS["onnx"], ids=str)
def test_models_that_see_arrays_behind_a_schedule(onnx: Running, model: Loaded) -> None:
    load_all(onnx, model)


@pytest.mark.parametrize("model", MODELS["native"], ids=str)
def test_models_of_this_server(native: Running, model: Loaded) -> None:
    load_all(native, model)


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "model"), CASES, ids=str)
def test_for_long_while_workers_are_killed(tmp_path: Path, backend: str, model: Loaded) -> None:
    """Requests of a dead worker may be lost, and no others."""
    chosen = ("--model-control", "explicit", "--load-model", model.name)  # of an ensemble its steps, too
    with start(tmp_path, backend, *chosen) as served:
        killer = Killer(served)
        ways = [GrpcCaller] if model.streams else [HttpCaller, GrpcCaller]
        for clients, way in product((4, 5, 16, 64), ways):
            until(killer.may_kill, "every worker is back", BACK_S)
            with killer:
                report = asyncio.run(load(served, model, clients, LONG_S, way.open, KILLED_LIMIT_S))
            check(report, model, KILLED_LIMIT_S)
        assert killer.turns >= 4
        until(killer.may_kill, "every worker is back", BACK_S)
        report = asyncio.run(load(served, model, 5, LONG_S, ways[0].open))
        assert not report.lost
        check(report, model)


class Killer:
    """Kills a worker, and every third time all of them: KILL_S apart, and never before all are ready again.
    Else a machine that is busy kills them as they load, and no load of this world is answered."""

    def __init__(self, served: Running) -> None:
        self.turns = 0
        self._served = served
        self._killed: set[int] = set()

    def __enter__(self) -> Killer:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._over.set()
        self._thread.join()

    def may_kill(self) -> bool:
        """Whether the server has seen to the dead, and every worker that is wanted can run batches."""
        if self._killed.intersection(self._served.workers):
            return False
        with urllib.request.urlopen(f"http://{self._served.http}/metrics", timeout=60) as reply:
            page = reply.read().decode()
        alive, wanted = (
            sum(map(float, re.findall(rf"^fastserve_{name}{{.*}} (\S+)$", page, re.MULTILINE)))
            for name in ("workers_alive", "workers_wanted")
        )
        return 0 < wanted == alive

    def _work(self) -> None:
        while not self._over.wait(KILL_S):
            if self.may_kill():
                self.turns += 1
                workers = self._served.workers
                one = workers[self.turns % len(workers)]
                for pid in workers if self.turns % 3 == 0 else [one]:
                    self._killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
