"""One server for all of these, and the ways in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance import steps
from tests.conformance.grps_ways import GRPS_WAYS
from tests.conformance.h2_ways import H2_WAYS
from tests.conformance.models import PATHS
from tests.conformance.rig import Rig, open_rig
from tests.conformance.rpc_ways import RPC_WAYS
from tests.conformance.ways import HTTP_WAYS, Way

WAYS: tuple[Way, ...] = (*HTTP_WAYS, *H2_WAYS, *RPC_WAYS, *GRPS_WAYS)


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with steps.installed(), open_rig(tmp_path_factory.mktemp("conformance")) as opened:
        yield opened


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every way with every form of a model it can ask, on both paths where there are two; of these what a
    test wants to know."""
    wanted = [name for name in ("way", "form", "path") if name in metafunc.fixturenames]
    if not wanted:
        return
    found: dict[tuple[Any, ...], str] = {}
    for way in WAYS:
        for form in way.forms:
            for path in PATHS if form in way.fast else PATHS[:1]:
                case = {"way": way, "form": form, "path": path}
                texts = {"way": way.name, "form": form, "path": path}
                found[tuple(case[name] for name in wanted)] = "-".join(texts[name] for name in wanted)
    metafunc.parametrize(wanted, list(found), ids=list(found.values()))
