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

    On the slow path `make test` has one form of each way, the next one with the next way and scenario;
    `make torture` has them all."""
    wanted = [name for name in ("scenario", "way", "form", "path") if name in metafunc.fixturenames]
    if "way" not in wanted:
        return
    found: dict[tuple[Any, ...], Any] = {}
    for number, scenario in enumerate(SCENARIOS if "scenario" in wanted else [None]):
        for way, form, path, long in cases(scenario, number):
            case = {"scenario": scenario, "way": way, "form": form, "path": path}
            key = tuple(case[name] for name in wanted)
            text = "-".join(getattr(case[name], "name", case[name]) for name in wanted)
            marks = [pytest.mark.torture] if long else []
            found.setdefault(key, pytest.param(*key, id=text, marks=marks))
    metafunc.parametrize(wanted, list(found.values()))


def cases(scenario: Scenario | None, number: int) -> Iterator[tuple[Way, str, str, bool]]:
    """A way, a form, a path, and whether this is for `make torture`; of a form the fast path comes first."""
    forms, paths = (FORMS, PATHS) if scenario is None else (scenario.forms, scenario.paths)
    for turn, way in enumerate(WAYS, number):
        asked = list(filter(way.asks, forms))
        for at, form in enumerate(asked):
            if scenario is None or scenario.suits(way):
                for path in paths if way.is_fast(form) else paths[:1]:
                    yield way, form, path, path == PATHS[1] and len(paths) > 1 and at != turn % len(asked)
