"""Bounds on the cost of any request, on every route and RPC of the server's own tables, in every shape.

No request holds the loop for LOOP_S, takes CPU_S of the front's CPU, or more memory than TIMES its bytes and
BASE_BYTES. CPU time is measured, not wall time. A cost beyond a bound is measured again and the least
counts, since a busy machine lengthens everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from fastserve.engine.schedulers.plain import MOST_BATCHES
from tests.faults import shapes
from tests.faults.costs import Cost, Costs, ask_http, ask_rpc, costly_server
from tests.running import until

QUICK_BYTES, FULL_BYTES = 1_000_000, 10_000_000
ON_THE_LOOP_BYTES = 65_000
"""The largest body of text that is read on the loop: a larger one is read in a thread."""
QUICK_SHAPES = 3  # of each route; of an RPC as many
OTHERS = 16  # of each route that takes no tensors, in the long run
TRIES = 3
BATCH_ROWS = 32  # of the model `free`
ROUTES, RPCS = shapes.routes(), shapes.rpcs()
INFERRING = [route for route in ROUTES if route.infers]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Costs]:
    with costly_server(tmp_path_factory.mktemp("costs")) as server:
        yield Costs(server)


@pytest.fixture
def costs(served: Costs) -> Costs:
    """Load what an earlier test has unloaded: an empty reload of TensorFlow Serving's unloads everything."""
    served.load_models()
    return served


def least(costs: Costs, nbytes: int, ask: Callable[[], object]) -> Cost:
    """Of as many tries as it takes to be within the bounds."""
    found = costs.of(nbytes, ask)
    for _ in range(TRIES - 1):
        if not found.excess:
            break
        again = costs.of(nbytes, ask)
        found = Cost(nbytes, *map(min, found[1:], again[1:]))
    return found


def check_route(costs: Costs, route: shapes.Route, size: int, some: int) -> None:
    excess = []
    for request in shapes.http_requests(route, size, some):
        cost = least(costs, len(request.body), partial(ask_http, costs.server, request))
        if cost.excess:
            excess.append(f"{request.name}: {cost.excess}")
    assert costs.server.alive, costs.server.log.read_text()[-3000:]
    assert not excess, "\n".join(excess)


def check_rpc(costs: Costs, path: str, size: int, some: int) -> None:
    excess = []
    for request in shapes.rpc_requests(path, RPCS[path], size, some):
        cost = least(costs, len(request.data), partial(ask_rpc, costs.server.http, path, request.data))
        if cost.excess:
            excess.append(f"{request.name}: {cost.excess}")
    assert costs.server.alive, costs.server.log.read_text()[-3000:]
    assert not excess, "\n".join(excess)


def test_the_tables_are_the_servers() -> None:
    """A route or RPC that is new is tried without a word here."""
    assert {route.dialect for route in ROUTES} == {spec.name for spec in shapes.SPECS if spec.routes}
    assert {path for spec in shapes.SPECS for path in spec.rpcs} <= RPCS.keys()
    assert len(ROUTES) > 100
    assert len(RPCS) > 40


@pytest.mark.parametrize("dialect", sorted({route.dialect for route in ROUTES}))
def test_a_megabyte_to_each_route(costs: Costs, dialect: str) -> None:
    for route in ROUTES:
        if route.dialect == dialect:
            check_route(costs, route, QUICK_BYTES, QUICK_SHAPES if route.infers else 1)


@pytest.mark.parametrize("service", sorted({path.split("/")[1] for path in RPCS}))
def test_a_megabyte_to_each_rpc(costs: Costs, service: str) -> None:
    for path in RPCS:
        if path.split("/")[1] == service:
            check_rpc(costs, path, QUICK_BYTES, QUICK_SHAPES)


@pytest.mark.parametrize("size", [QUICK_BYTES, pytest.param(FULL_BYTES, marks=pytest.mark.torture)])
def test_what_is_fitted_logged_or_cached(costs: Costs, size: int) -> None:
    """Loose inputs, the request log, whose thread works on after the answer, and the response cache."""
    excess, statuses = [], list[int]()
    for request in shapes.kept_requests(size):
        logs = costs.server.log.with_name("request logs") / f"{request.target.split('/')[3]}.jsonl"

        def ask(request: shapes.Http = request, logs: Path = logs) -> None:
            before = logs.stat() if logs.exists() else None
            statuses.append(ask_http(costs.server, request))
            if statuses[-1] == 200 and logs.stem.startswith("logged"):
                until(lambda: logs.exists() and logs.stat() != before, "the request is logged")

        # A byte or two are a number of eight bytes to the model, converted: eight times the memory of a body
        # of its size, on the budget.
        grows = request.name.endswith(("INT8", "BOOL", "FP64"))
        cost = least(costs, len(request.body) * (8 if grows else 1), ask)
        if cost.excess or statuses[-1] in (0, 503):
            excess.append(f"{request.name}: {cost.excess}, {statuses[-1]}")
    assert costs.server.alive, costs.server.log.read_text()[-3000:]
    assert not excess, "\n".join(excess)
    assert statuses.count(200) > 5


@pytest.mark.parametrize(
    ("dialect", "more", "status"),
    [
        *[(dialect, 1, 400) for dialect in ("app", "tfserving", "kserve_v2", "grps")],
        *[(dialect, 0, 200) for dialect in ("tfserving", "kserve_v2")],
        *[pytest.param(dialect, 0, 200, marks=pytest.mark.torture) for dialect in ("app", "grps")],
    ],
)
def test_the_most_rows_that_a_request_may_have(costs: Costs, dialect: str, more: int, status: int) -> None:
    """A request that is split costs by its batches; one row more than may be is refused."""
    target, body = shapes.of_rows(dialect, MOST_BATCHES * BATCH_ROWS + more)
    request = shapes.Http("rows", "POST", target, body, (("Content-Type", "application/json"),))
    asked: list[int] = []
    cost = least(costs, len(body), lambda: asked.append(ask_http(costs.server, request)))
    assert not cost.excess, cost.excess
    assert asked[-1] == status


@pytest.mark.parametrize("dialect", ["tfserving", "kserve_v2", "grps"])
def test_a_known_message_of_packed_numbers_holds_nobody_up(costs: Costs, dialect: str) -> None:
    """The fast path knows the head of the large message from the small one; numbers are read one by one.
    A byte of them is four in memory: that is the model's, and not held against the bound."""
    path, small = shapes.of_integers(dialect, 1, 300_000)
    assert ask_rpc(costs.server.http, path, shapes.prefix(small))
    path, large = shapes.of_integers(dialect, BATCH_ROWS, 300_000)
    cost = least(costs, len(large), partial(ask_rpc, costs.server.http, path, shapes.prefix(large)))
    assert cost._replace(peak_bytes=0).excess == ""


def named(routes: Sequence[shapes.Route]) -> list[str]:
    return [f"{route.dialect} {route.verb} {route.target}" for route in routes]


@pytest.mark.torture
@pytest.mark.parametrize("route", ROUTES, ids=named(ROUTES))
def test_ten_megabytes_of_every_shape_to_a_route(costs: Costs, route: shapes.Route) -> None:
    check_route(costs, route, FULL_BYTES, 0 if route.infers else OTHERS)


@pytest.mark.torture
@pytest.mark.parametrize("route", INFERRING, ids=named(INFERRING))
def test_the_largest_that_is_read_on_the_loop_to_a_route(costs: Costs, route: shapes.Route) -> None:
    check_route(costs, route, ON_THE_LOOP_BYTES, 0)


@pytest.mark.torture
@pytest.mark.parametrize("path", RPCS)
def test_ten_megabytes_of_every_shape_to_an_rpc(costs: Costs, path: str) -> None:
    check_rpc(costs, path, FULL_BYTES, 0)
