"""Every conformance case of MindIE's and TGI's APIs, over real sockets, against its rig."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.text_common.cases import play
from tests.dialects.text_common.deviations import DEVIATIONS
from tests.dialects.text_common.rigs import PROFILES, RIGS
from tests.dialects.text_common.serving import Asking, hosted

CASES = [
    json.loads(line)
    for name in ("mindie", "tgi")
    for line in Path(f"tests/vectors/{name}.jsonl").read_text().splitlines()
]


# Where a rig's own pause would only cost time: the order is what the case is about.
QUICKER = {"mindie-priority-order": {"pause_s": 0.2}}
Servers = dict[tuple[str, str], Asking]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers of this module, by rig and profile: real ones, with workers."""
    with ExitStack() as stack:
        known: Servers = {}
        for rig, profile in sorted({(case["rig"], case["profile"]) for case in CASES}):
            options = {**RIGS[rig].options, **PROFILES[profile]}
            known[rig, profile] = stack.enter_context(hosted(rig, Path(), **options))
        yield known


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any], servers: Servers, tmp_path: Path) -> None:
    if case["id"] in DEVIATIONS:
        pytest.skip(DEVIATIONS[case["id"]])
    if case["id"] in QUICKER:
        with hosted(case["rig"], tmp_path, parameters=QUICKER[case["id"]]) as at:
            play(at, case)
    else:
        play(servers[case["rig"], case["profile"]], case)
