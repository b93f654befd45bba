"""What floods cost somebody else: the 99th percentile of a bystander's times beside a flood, beside a client
that asks as fast as it is answered, and beside the same flood poured into a socket that only reads.

The last is what a client costs that never waits, whatever server it sends to: on a machine of two cores a
bystander feels it first of all. It and the ordinary client are the measure. Each turn of a flood is compared
with the turns beside it, and the median of these ratios counts: what the machine does meanwhile is in both.
Where others have the machine too, ratios differ by more than is asked here, so a series that fails is run
again, twice; what a flood costs in CPU time, tests/faults/test_flood_costs.py holds on any machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hyperframe.frame import DataFrame

from fastserve._ext.http2_frames import frame
from tests.faults.flooding import DATA, END_HEADERS, END_STREAM, FLOODS, HEADERS, Link, block
from tests.running import QUICK_DEMO, Running

# `lingers`: multiprocessing keeps its tracker.
pytestmark = [pytest.mark.torture, pytest.mark.alone, pytest.mark.lingers]
TURN_S, TURNS, SERIES = 1.0, 6, 3
SLOWER = 1.2
PREDICT = "/v1/models/half_plus_two:predict"
BODY = b'{"instances": [1.0, 2.0, 5.0]}'
AT_ONCE = 50


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(Path("demo"), tmp_path_factory.mktemp("floods") / "log", *QUICK_DEMO) as running:
        yield running


def p99_us(server: Running) -> float:
    """Of a client that asks again and again."""
    link = http.client.HTTPConnection(server.http)
    times, end = [], time.monotonic() + TURN_S
    while time.monotonic() < end:
        began = time.monotonic()
        link.request("POST", PREDICT, BODY)
        assert json.loads(link.getresponse().read())["predictions"] == [2.5, 3.0, 4.5]
        times.append(time.monotonic() - began)
    link.close()
    return sorted(times)[len(times) * 99 // 100] * 1e6


def flood_for_good(place: str, name: str) -> None:
    """As fast as one client can, connection after connection."""
    while True:
        with Link(place) as link:
            link.flood(FLOODS[name]())


def ask_for_good(place: str) -> None:
    """AT_ONCE requests, and when they are answered the next, on one connection for a thousand of them."""
    head = block(PREDICT)
    while True:
        with Link(place) as link:
            for first in range(1, 2001, 2 * AT_ONCE):
                numbers = range(first, first + 2 * AT_ONCE, 2)
                link.send(
                    b"".join(
                        frame(HEADERS, END_HEADERS, n, head) + frame(DATA, END_STREAM, n, BODY)
                        for n in numbers
                    )
                )
                link.wait(numbers[-1] // 2 + 1, DataFrame)


def read_for_good(told: Connection) -> None:
    """Whatever comes, from one client after another."""
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


@contextlib.contextmanager
def beside(work: Callable[..., None], *args: str) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=work, args=args, daemon=True)
    process.start()
    time.sleep(1.0)  # it has to start Python
    try:
        yield
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


def felt(server: Running, name: str) -> float:
    """How much slower the bystander is beside a flood than beside the slower of the two others."""
    ratios = []
    for _ in range(TURNS):
        alone = p99_us(server)
        with sink() as place, beside(flood_for_good, place, name):
            pouring = p99_us(server)
        with beside(flood_for_good, server.http, name):
            flood = p99_us(server)
        with beside(ask_for_good, server.http):
            client = p99_us(server)
        ratios.append(flood / max(pouring, client))
        print(
            f"{name}: p99 {alone:,.0f} us alone, {client:,.0f} beside a client, "
            f"{pouring:,.0f} beside a sink's, {flood:,.0f} beside it"
        )
    return statistics.median(ratios)


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_felt_no_more_than_a_client(server: Running, name: str) -> None:
    found: list[float] = []
    while len(found) < SERIES and (not found or found[-1] >= SLOWER):
        found.append(felt(server, name))
    assert min(found) < SLOWER, found
