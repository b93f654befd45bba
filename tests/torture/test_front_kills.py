"""Every scheduler at once behind three front processes, one of which is killed every five seconds: a client
may lose its connection, and nothing else. No answer is wrong, another's, or missing.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.running import Running, until
from tests.server.scheduling.load_clients import HttpCaller, Report, _ask_all
from tests.server.scheduling.load_models import MODELS, Loaded, write_repository

pytestmark = [pytest.mark.torture, pytest.mark.timeout(600)]
SECONDS, KILL_S, CLIENTS, FRONTS = 60.0, 5.0, 5, 3
LIMIT_S = 20.0  # beside sixty other clients; a sequence whose client was lost keeps its slot for a second
SCHEDULED = [model for model in MODELS["triton"] if not model.streams and model.queue != "cached"]


def fronts_of(served: Running) -> list[int]:
    """The other front processes: those that map a relay channel."""
    return [pid for pid in served.workers if "fastserve-relay" in links_of(pid)]


def links_of(pid: int) -> str:
    try:
        return " ".join(os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended meanwhile
        return ""


def kinds_of(pid: int) -> Counter[str]:
    """Descriptors that are open by kind, without those that are opened once and kept."""
    kinds = Counter(re.sub(r"\d+", "", link) for link in links_of(pid).split())
    return Counter({kind: count for kind, count in kinds.items() if kind != "/dev/null"})


async def ask(served: Running, model: Loaded, report: Report, until_s: float) -> int:
    """One client: it begins again, over a new connection, when its front was killed. Returns how often."""
    lost = 0
    while time.monotonic() < until_s:
        try:
            async with HttpCaller.open(served, model) as caller:
                while time.monotonic() < until_s:
                    await asyncio.wait_for(_ask_all(caller, model, report), LIMIT_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            lost += 1
    return lost


async def kill(served: Running, until_s: float) -> int:
    """Kill each front in turn. Returns how many."""
    kills = 0
    while time.monotonic() + KILL_S < until_s:
        await asyncio.sleep(KILL_S)  # the pace of the bar
        fronts = sorted(fronts_of(served))
        if fronts:
            os.kill(fronts[kills % len(fronts)], signal.SIGKILL)
            kills += 1
    return kills


def test_front_kills_cost_connections_only(tmp_path: Path) -> None:
    write_repository(tmp_path / "models", "triton")
    names = [option for model in SCHEDULED for option in ("--load-model", model.name)]
    options = ("--frontends", str(FRONTS), "--rate-limit", "execution_count", "--model-control", "explicit")
    with Running(tmp_path / "models", tmp_path / "log", *options, *names) as served:
        until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is there")
        before = kinds_of(served.pid)

        async def work() -> tuple[int, list[int], dict[str, Report]]:
            until_s = time.monotonic() + SECONDS
            reports = {model.name: Report() for model in SCHEDULED}
            asking = [
                ask(served, model, reports[model.name], until_s)
                for model in SCHEDULED
                for _ in range(CLIENTS)
            ]
            kills, *lost = await asyncio.gather(kill(served, until_s), *asking)
            return kills, lost, reports

        kills, lost, reports = asyncio.run(work())
        until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is back")
        for name, report in reports.items():
            print(f"{name}: {report.answered} answered, slowest {report.slowest_s:.2f} s")
        print(f"{kills} kills, {sum(lost)} connections lost")
        for name, report in reports.items():
            assert not report.wrong, report.wrong[:3]
            assert report.answered > 0, name
            assert not report.lost
        assert kills >= 8
        assert sum(lost) > 0
        until(lambda: not kinds_of(served.pid) - before, "descriptors are as before")
        asyncio.run(check_all(served))


async def check_all(served: Running) -> None:
    """Everything answers afterwards, and sequences find slots."""
    for model in SCHEDULED:
        report = Report()
        async with HttpCaller.open(served, model) as caller:
            await asyncio.wait_for(_ask_all(caller, model, report), LIMIT_S)
        assert not report.wrong
