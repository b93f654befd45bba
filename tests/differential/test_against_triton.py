"""Each answer of this server held against a running Triton's: statuses, bodies, streams, headers that matter.

    make differential TRITON="run_triton --any-flags"

No part of `make test`: without that command everything here is passed over. One request at a time over HTTP
and gRPC, then sixteen clients at once whose answers are all known.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.differential.cases import CASES, OURS_ALONE, SHOWN, STREAMS, Case, floats, ints, pair, texts
from tests.differential.servers import COMMAND, copy_models, ours, triton

pytestmark = [
    pytest.mark.skipif(not COMMAND, reason="FASTSERVE_TRITON names no command that starts a Triton"),
    pytest.mark.logs_errors,
    pytest.mark.lingers,
]
CLIENTS, REQUESTS = 16, 400


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    with (
        triton(copy_models(folder / "theirs"), folder / "triton.log") as (theirs, _),
        ours(copy_models(folder / "ours"), folder / "ours.log") as (mine, _),
    ):
        yield theirs, mine


def differ(case: Case, theirs, mine) -> None:
    if case.differs:  # both fail, each in its own words
        assert theirs[0] == mine[0], case.differs
    else:
        assert mine == theirs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_over_http(both, case):
    theirs, mine = both
    differ(case, theirs.infer(case), mine.infer(case))


@pytest.mark.parametrize(("case", "status"), OURS_ALONE, ids=lambda given: getattr(given, "name", given))
def test_what_only_this_server_answers(both, case, status):
    assert both[1].infer(case)[0] == status


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_over_grpc(both, case):
    theirs, mine = both
    if case.model == "counts":
        pytest.skip("it has counted more by now; over HTTP both begin at nothing")
    differ(case, theirs.infer_grpc(case), mine.infer_grpc(case))


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case.name)
def test_streams(both, case):
    theirs, mine = both
    assert mine.stream(case) == theirs.stream(case)


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case.name)
def test_generate(both, case):
    theirs, mine = both
    body = {"id": "g", "IN": case.inputs[0].data}
    for path in ("generate", "generate_stream"):
        if path == "generate_stream" and case.name.startswith(("no ", "none ")):
            continue  # there the connection is left open
        asked = f"/v2/models/{case.model}/{path}"
        assert mine.get(asked, body) == theirs.get(asked, body), path


@pytest.mark.parametrize("model", SHOWN)
def test_what_is_shown_of_a_model(both, model):
    theirs, mine = both
    for path in ("", "/config", "/ready"):
        asked = f"/v2/models/{model}{path}"
        assert mine.get(asked) == theirs.get(asked), path


def test_a_sequence(both):
    for number, last in ((5, False), (7, False), (1, True)):
        said = {"sequence_id": 42, "sequence_start": number == 5, "sequence_end": last}
        case = Case("a sequence", "sums", (ints(number, rows=1),), parameters=said)
        theirs, mine = (server.infer(case) for server in both)
        assert mine == theirs
    lost = Case("a sequence not begun", "sums", (ints(1, rows=1),), parameters={"sequence_id": 43})
    theirs, mine = (server.infer(lost) for server in both)
    assert mine == theirs


def test_a_models_own_metrics_on_the_page(both):
    found = []
    for server in both:
        server.infer(Case("metrics", "counts", (ints(1),)))
        page = server.get("/metrics", place=server.metrics)[2]
        names = ("seen_numbers", "last_number", "numbers", "# HELP numbers", "# TYPE last_number")
        found.append(sorted(line for line in page.splitlines() if line.startswith(names)))
    assert [line.partition("}")[0] for line in found[0]] == [line.partition("}")[0] for line in found[1]]


def load_cases() -> list[tuple[Case, list[float]]]:
    """Requests and the numbers they must bring."""
    found: list[tuple[Case, list[float]]] = []
    for n in range(REQUESTS):
        rows = 1 + n % 3
        found.append((Case("load", "add_sub", pair(rows)), [1.5 * x for x in range(4 * rows)]))
        found.append((Case("load", "in_place", (floats(*[255.0 * n] * 3),)), [float(n)] * 3))
        found.append((Case("load", "coroutine", (ints(n, n + 1),)), [2 * n, 2 * n + 2]))
        found.append((Case("load", "completes", (ints(n, rows=1),)), [n]))
        found.append((Case("load", "calls", (ints(5, n, n + 1),)), [n, n + 1]))
    return found


@pytest.mark.parametrize("who", [0, 1], ids=["theirs", "ours"])
def test_many_clients_at_once(both, who):
    """Every answer is its own request's, on either server; calls to a decoupled model are asked of this one
    alone, the other loses processes over them."""

    def check(asked: tuple[Case, list[float]]) -> None:
        case, wanted = asked
        status, _, body = both[who].infer(case)
        assert status == 200, body
        assert body["outputs"][0]["data"][: len(wanted)] == wanted, case

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(check, [one for one in load_cases() if who or one[0].model != "calls"]))


def test_failures_under_load_reach_their_own_callers(both):
    """Of a batch in which one raises, all fail there; here none with another's answer."""
    words = ["fine", "error", "invalid", "fine", "sender"]
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [Case("load", "fails", (texts(words[n % 5], rows=1),)) for n in range(REQUESTS)]
        found = list(pool.map(both[1].infer, asked))
    assert {answer[0] for answer in found} <= {200, 400, 404}
