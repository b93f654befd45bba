"""Costs of floods to somebody else: the 99th percentile of a bystander's times beside a flood, beside a
client that asks as fast as it is answered, and beside the same flood poured into a socket that only reads.

On a machine of a few cores a bystander waits for a processor first of all, beside whatever never waits, and
that is no work of the server's. So of each of its times is left out what the kernel says that the threads on
its way waited for a processor; what a flood costs in the kernel's own work, the socket that only reads shows.
The three take turns of half a second in one run, each stopped while another goes on, and the median of the
differences between neighbouring turns counts, against the dearer of the two others.

Where others have the machine too a series may fail by chance, and is run again, twice; what a flood costs in
CPU time, tests/faults/test_flood_costs.py holds on any machine. A test shows that what does cost is seen.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fastserve._ext.http2_frames import frame
from tests.faults.flooding import DATA, END_HEADERS, END_STREAM, FLOODS, HEADERS, Link, block
from tests.running import QUICK_DEMO, Running

# `lingers`: multiprocessing keeps its tracker.
pytestmark = [pytest.mark.torture, pytest.mark.alone, pytest.mark.lingers]
TURN_S, TURNS, SERIES = 0.5, 15, 3
SLOWER = 0.2  # of the time beside the others
LEAST_US = 500.0  # what is less nobody feels: a tenth of what a scheduler lets others run
PREDICT = "/v1/models/half_plus_two:predict"
BODY = b'{"instances": [1.0, 2.0, 5.0]}'
AT_ONCE = 50
STARTED_S, SWITCHED_S, HELD_S = 1.0, 0.02, 0.01


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(Path("demo"), tmp_path_factory.mktemp("floods") / "log", *QUICK_DEMO) as running:
        yield running


class Bystander:
    """A client that asks again and again, and what the threads on its way wait for a processor."""

    def __init__(self, server: Running) -> None:
        self._link = http.client.HTTPConnection(server.http)
        tasks = [(os.getpid(), os.getpid()), *((pid, pid) for pid in (server.pid, *server.workers))]
        self._files = [os.open(f"/proc/{pid}/task/{task}/schedstat", os.O_RDONLY) for pid, task in tasks]

    def _waited_ns(self) -> int:
        return sum(int(os.pread(file, 64, 0).split()[1]) for file in self._files)

    def p99_us(self) -> float:
        times, end = [], time.monotonic() + TURN_S
        while time.monotonic() < end:
            waited_ns, began_ns = self._waited_ns(), time.monotonic_ns()
            self._link.request("POST", PREDICT, BODY)
            assert json.loads(self._link.getresponse().read())["predictions"] == [2.5, 3.0, 4.5]
            took_ns = time.monotonic_ns() - began_ns
            times.append(max(0, took_ns - (self._waited_ns() - waited_ns)))
        return sorted(times)[len(times) * 99 // 100] / 1e3

    def close(self) -> None:
        self._link.close()
        for file in self._files:
            os.close(file)


def flood_for_good(place: str, name: str) -> None:
    """As fast as one client can, connection after connection."""
    while True:
        with Link(place) as link:
            link.flood(FLOODS[name]())


def ask_for_good(place: str) -> None:
    """AT_ONCE requests, and when they are answered the next, on one connection for a thousand of them. Made
    beforehand, and the answers counted by a word: a client that parsed them would keep the server a quarter
    as busy as a flood does, whose client makes nothing of what it hears either."""
    head = block(PREDICT)
    some = [
        b"".join(
            frame(HEADERS, END_HEADERS, n, head) + frame(DATA, END_STREAM, n, BODY)
            for n in range(first, first + 2 * AT_ONCE, 2)
        )
        for first in range(1, 2001, 2 * AT_ONCE)
    ]
    while True:
        with Link(place) as link:
            for chunk in some:
                link.came.clear()
                link.send(chunk)
                link.hear(b"predictions", AT_ONCE)


@contextlib.contextmanager
def held_up(pid: int) -> Iterator[None]:
    """A process that stands still for HELD_S now and then, as its loop would for dear requests."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(2 * HELD_S):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(HELD_S)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_for_good(told: Connection) -> None:
    """Read all that comes, from one client after another."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        told.send(listening.getsockname()[1])
        while True:
            link, _ = listening.accept()
            with link, contextlib.suppress(ConnectionResetError):
                while link.recv(1 << 16):
                    pass


@contextlib.contextmanager
def sink() -> Iterator[str]:
    """HOST:PORT of a process that reads, and nothing else."""
    spawn = multiprocessing.get_context("spawn")
    heard, told = spawn.Pipe(duplex=False)
    process = spawn.Process(target=read_for_good, args=(told,), daemon=True)
    process.start()
    try:
        yield f"127.0.0.1:{heard.recv()}"
    finally:
        process.kill()
        process.join()
        heard.close()
        told.close()


class Beside:
    """A process that is stopped but in its turns."""

    def __init__(self, work: Callable[..., None], *args: str) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=work, args=args, daemon=True)

    def __enter__(self) -> Beside:
        self._process.start()
        time.sleep(STARTED_S)
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *fault: object) -> None:
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        time.sleep(SWITCHED_S)
        yield
        self._signal(signal.SIGSTOP)
        time.sleep(SWITCHED_S)

    @property
    def worked_s(self) -> float:
        """CPU time so far: a flood that only waits shows nothing."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def felt(server: Running, name: str, work: Callable[..., None], *args: str) -> tuple[float, float]:
    """How much longer the bystander waits beside it than beside the others, and how long beside those."""
    bystander, others_us, more_us = Bystander(server), [], []
    try:
        with (
            sink() as place,
            Beside(work, server.http, *args) as flood,
            Beside(work, place, *args) as pouring,
            Beside(ask_for_good, server.http) as client,
        ):
            worked_s = flood.worked_s
            for _ in range(TURNS):
                beside_us = []
                for other in (client, flood, pouring):
                    with other.turn():
                        beside_us.append(bystander.p99_us())
                others_us.append(max(beside_us[0], beside_us[2]))
                more_us.append(beside_us[1] - others_us[-1])
            assert flood.worked_s - worked_s > 0.01 * TURNS * TURN_S
    finally:
        bystander.close()
    found = statistics.median(more_us), statistics.median(others_us)
    print(f"{name}: p99 {found[1]:,.0f} us beside the others, {found[0]:+,.0f} beside it")
    return found


def is_felt(more_us: float, others_us: float) -> bool:
    return more_us > max(LEAST_US, SLOWER * others_us)


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_felt_no_more_than_a_client(server: Running, name: str) -> None:
    found: list[tuple[float, float]] = []
    while len(found) < SERIES and (not found or is_felt(*found[-1])):
        found.append(felt(server, name, flood_for_good, name))
    assert not is_felt(*found[-1]), found


def test_what_costs_is_felt(server: Running) -> None:
    """The measure leaves out what a bystander waits for a processor, and not what it waits for the loop."""
    bystander, alone_us, more_us = Bystander(server), [], []
    try:
        for _ in range(TURNS):
            alone_us.append(bystander.p99_us())
            with held_up(server.pid):
                more_us.append(bystander.p99_us() - alone_us[-1])
    finally:
        bystander.close()
    assert is_felt(statistics.median(more_us), statistics.median(alone_us)), (more_us, alone_us)
