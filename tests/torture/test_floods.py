"""What floods cost somebody else: the 99th percentile of a bystander's times beside a flood, and beside an
ordinary client that asks as fast as it is answered.

Either client takes a core of the machine, which on a small one the bystander feels whatever the server does:
so the two are compared with each other, taking turns. What the bystander's times are without them is printed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hyperframe.frame import DataFrame

from fastserve._ext.http2_frames import frame
from tests.faults.flooding import DATA, END_HEADERS, END_STREAM, FLOODS, HEADERS, Link, block
from tests.running import QUICK_DEMO, Running

# `lingers`: multiprocessing keeps its tracker.
pytestmark = [pytest.mark.torture, pytest.mark.alone, pytest.mark.lingers]
TURN_S, TURNS = 1.0, 6
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


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_felt_no_more_than_a_client(server: Running, name: str) -> None:
    quiet, asked, flooded = [], [], []
    for _ in range(TURNS):
        quiet.append(p99_us(server))
        with beside(ask_for_good, server.http):
            asked.append(p99_us(server))
        with beside(flood_for_good, server.http, name):
            flooded.append(p99_us(server))
    found = [statistics.median(times) for times in (quiet, asked, flooded)]
    print(f"{name}: p99 {found[0]:,.0f} us alone, {found[1]:,.0f} beside a client, {found[2]:,.0f} beside it")
    assert found[2] < SLOWER * found[1]
