"""One server for all of these, and the ways in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.net.http1 import connection
from tests.conformance import steps
from tests.conformance.arrived_ways import ARRIVING_WAYS, Bites
from tests.conformance.grps_ways import GRPS_WAYS
from tests.conformance.h2_ways import H2_WAYS
from tests.conformance.models import FORMS, PATHS
from tests.conformance.rig import Rig, open_rig
from tests.conformance.rpc_ways import RPC_WAYS
from tests.conformance.scenarios import SCENARIOS, Scenario
from tests.conformance.ways import HTTP_WAYS, Way

WAYS: tuple[Way, ...] = (*HTTP_WAYS, *ARRIVING_WAYS, *H2_WAYS, *RPC_WAYS, *GRPS_WAYS)


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with steps.installed(), large_is_small(), open_rig(tmp_path_factory.mktemp("conformance")) as opened:
        yield opened


@contextlib.contextmanager
def large_is_small() -> Iterator[None]:
    """A body of which all but a byte is missing counts as large: see arrived_ways.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "BULK_BYTES", 1)
        patch.setattr(connection, "ShortReads", Bites)
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every way with every form of a model it can ask, on both paths where there are two; of these what a
    test wants to know. With a scenario, those it is for.

    Of a test of paths `make test` has, for each way, one form on each path; the next way, scenario and test
    have the next form. So every two of scenario, way and form meet, as every two of test, way and form do.
    `make torture` has the rest."""
    wanted = [name for name in ("scenario", "way", "form", "path") if name in metafunc.fixturenames]
    if "way" not in wanted:
        return
    found: dict[tuple[Any, ...], Any] = {}
    first = sum(metafunc.function.__name__.encode())
    turns = {way.name: turn for turn, way in enumerate(WAYS, first)}
    for scenario in SCENARIOS if "scenario" in wanted else [None]:
        for way, form, path, long in cases(scenario, turns):
            case = {"scenario": scenario, "way": way, "form": form, "path": path}
            key = tuple(case[name] for name in wanted)
            text = "-".join(getattr(case[name], "name", case[name]) for name in wanted)
            marks = [pytest.mark.torture] if long and "path" in wanted else []
            found.setdefault(key, pytest.param(*key, id=text, marks=marks))
    metafunc.parametrize(wanted, list(found.values()))


def cases(scenario: Scenario | None, turns: dict[str, int]) -> Iterator[tuple[Way, str, str, bool]]:
    """A way, a form, a path, and whether this is for `make torture`. `turns` choose the form of each way, and
    are counted on."""
    forms, paths = (FORMS, PATHS) if scenario is None else (scenario.forms, scenario.paths)
    for way in WAYS:
        if scenario is not None and not scenario.suits(way):
            continue
        turn = turns[way.name] = turns[way.name] + 1
        asked = list(filter(way.asks, forms))
        both = list(filter(way.is_fast, asked)) if len(paths) > 1 else []
        for form in asked:
            yield way, form, paths[0], form != asked[turn % len(asked)]
            if form in both:
                yield way, form, paths[1], form != both[(turn + 1) % len(both)]
