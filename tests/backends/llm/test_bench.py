"""The benchmark of a served text model, where fewer may write at a time than stand beside a long prompt."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.late import Late

text = Late("bench.text.served")
STARTS_PROCESSES = True
DEMO = Path(__file__).parents[3] / "fastserve" / "demo" / "scribe" / "1"


def test_every_line_of_four() -> None:
    asked = argparse.Namespace(folder=DEMO, device="cpu", threads=1, concurrency=4, prompt=8, new=4, rounds=1)
    with text.served(asked) as server:
        bench = text.Served(server, asked)
        costs: list[float] = []
        assert bench._rate(costs) > 0
        lines = [*bench.latency(), *bench.manners()]
    assert [line.name for line in lines] == [
        "TTFT p50, idle",
        "TTFT p50, all arriving at once",
        "gap p50",
        "gap p99",
        "worst gap of 3, beside a prompt of 900",
        "TTFT of 4 of priority 1 behind 40 queued, against the queued",
    ]
    assert len(costs) == 1
