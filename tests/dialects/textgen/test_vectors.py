"""Every conformance case of MindIE's and TGI's APIs, over real sockets, against its rig."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects.textgen.dialect import TABLE
from tests.dialects.textgen.cases import play
from tests.dialects.textgen.deviations import DEVIATIONS
from tests.dialects.textgen.rigs import PROFILES, RIGS
from tests.dialects.textgen.serving import Asking, local

CASES = [
    json.loads(line)
    for name in ("mindie", "tgi")
    for line in Path(f"tests/vectors/{name}.jsonl").read_text().splitlines()
]


def wanted(case: dict[str, Any]) -> tuple[str, str]:
    request = case.get("request", {"method": "POST", "path": "/infer"})
    return ("POST" if request["path"] == "/infer" else request["method"]), request["path"]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[tuple[str, str], Asking]]:
    """Those of this module, by rig and profile."""
    with ExitStack() as stack:
        known: dict[tuple[str, str], Asking] = {}
        for rig, profile in sorted({(case["rig"], case["profile"]) for case in CASES}):
            one = RIGS[rig]
            options = {**one.options, **PROFILES[profile]}
            known[rig, profile] = stack.enter_context(local(one.engine(), pause_s=one.pause_s, **options))
        yield known


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any], servers: dict[tuple[str, str], Asking]) -> None:
    if case["id"] in DEVIATIONS:
        pytest.skip(DEVIATIONS[case["id"]])
    if TABLE.find(*wanted(case)) is None:
        pytest.skip("no module of this API yet")
    play(servers[case["rig"], case["profile"]], case)
