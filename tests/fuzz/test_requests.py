"""Mutated requests of every dialect to a real server, over raw sockets: no fault of its own, within bounds.

Each one is measured: 50 ms of the event loop, 1 s of CPU, ten times its bytes of memory and 20 MB (Costs). It
may not cause a 500 or INTERNAL, a traceback in the log or a connection that is not ended, and afterwards a
good request is answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import grpc
import pytest

from tests.faults import shapes
from tests.faults.costs import Costs, ask_http, costly_server
from tests.faults.test_costs import least
from tests.fuzz.requests import (
    RPCS,
    Sent,
    call,
    converse,
    grpc_frames,
    http2_fault,
    http2_inputs,
    http_fault,
    http_inputs,
    rpc_inputs,
)

SHORT, LONG = 4, 600
DIALECTS = sorted({route.dialect for route in shapes.routes()})
SERVICES = sorted({path.split("/")[1] for path in RPCS})
TIMES = [SHORT, pytest.param(LONG, marks=pytest.mark.torture)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Costs]:
    with costly_server(tmp_path_factory.mktemp("fuzz")) as server:
        yield Costs(server)


@pytest.fixture
def costs(served: Costs) -> Iterator[Costs]:
    """Afterwards the server answers a good request, and has logged no exception."""
    served.load_models()
    yield served
    served.load_models()
    target, body = shapes.of_rows("kserve_v2", 3)
    request = shapes.Http("rows", "POST", target, body, (("Content-Type", "application/json"),))
    assert ask_http(served.server, request) == 200
    logged = served.server.log.read_text()
    assert "Traceback" not in logged, logged[-3000:]


def seeded(words: object, count: int) -> random.Random:
    """The short run is the same each time, the long one is not."""
    return random.Random(f"{words}" if count == SHORT else f"{words} {random.SystemRandom().random()}")


def check(costs: Costs, inputs: Iterable[Sent], send: Callable[[Sent], str]) -> None:
    found = []
    for sent in inputs:
        faults: list[str] = []
        cost = least(costs, len(sent.data), lambda sent=sent, faults=faults: faults.append(send(sent)))
        said = ", ".join(filter(None, [*faults, cost.excess]))
        if said:
            found.append(f"{sent.name}: {said}: {sent.data[:600]!r}")
        assert costs.server.alive, sent
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("count", TIMES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_http(costs: Costs, dialect: str, count: int) -> None:
    place = costs.server.http
    inputs = http_inputs(dialect, seeded(dialect, count), count)
    check(costs, inputs, lambda sent: http_fault(sent, converse(place, sent.data)))


@pytest.mark.parametrize("count", TIMES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_http2(costs: Costs, dialect: str, count: int) -> None:
    place = costs.server.http
    inputs = http2_inputs(dialect, seeded(f"2 {dialect}", count), 2 * count)
    check(costs, inputs, lambda sent: http2_fault(sent, converse(place, sent.data)))


@pytest.mark.parametrize("count", TIMES)
@pytest.mark.parametrize("service", SERVICES)
def test_grpc(costs: Costs, service: str, count: int) -> None:
    with grpc.insecure_channel(costs.server.http) as channel:
        inputs = rpc_inputs(service, seeded(service, count), count)
        check(costs, inputs, lambda sent: call(channel, sent.name, sent.data))


@pytest.mark.parametrize("count", TIMES)
def test_frames_of_grpc(costs: Costs, count: int) -> None:
    place = costs.server.http
    inputs = grpc_frames(seeded("frames", count), 20 * count)
    check(costs, inputs, lambda sent: http2_fault(sent, converse(place, sent.data)))
