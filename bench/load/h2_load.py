"""REST over HTTP/2 against the same over HTTP/1.1: one server, the two protocols taking turns.

HTTP/1.1 is asked by wrk, HTTP/2 by h2load; `h2-streams` has 8 streams on each of 8 connections. Large bodies
keep h2load busier than the server, so there it asks over HTTP/1.1 too.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.load import measure
from bench.load.measure import Plan
from bench.load.table import Row
from bench.workloads import WORKLOADS

_DONE = re.compile(r"finished in [\d.]+m?s, ([\d.]+) req/s")
_FAILED = re.compile(r"(\d+) failed, (\d+) errored, (\d+) timeout")


class NoH2load(RuntimeError):
    """h2load is not on PATH."""


@dataclass(frozen=True)
class Part:
    """What is asked; `least` and `aim` are ratios to HTTP/1.1."""

    workload: str
    connections: int
    streams: int
    least: float
    aim: float
    h2load_alone: bool = False


PARTS = {
    "h2-tiny": Part("tiny", 32, 1, 0.85, 1.0),
    "h2-streams": Part("tiny", 8, 8, 1.0, 1.5),
    "h2-imagebin": Part("imagebin", 32, 1, 0.85, 1.0, h2load_alone=True),
}


def row(name: str, plan: Plan) -> Row:
    if shutil.which("h2load") is None:
        raise NoH2load("h2load is needed and not installed: apt-get install nghttp2-client")
    part = PARTS[name]
    workload = WORKLOADS[part.workload]
    theirs, ours = [], []
    with (
        measure.posted_body(workload, plan) as body,
        measure.start_fastserve(workload, [plan.server_core]) as server,
    ):
        measure.ready(server, workload, body)
        for turn in range(plan.repeats):
            url = server.origin + workload.path
            if part.h2load_alone:
                theirs.append(post(url, body, workload.content_type, part, plan, "--h1"))
            else:
                theirs.append(measure.load(server, workload, body, plan, workload.connections).rate)
            ours.append(post(url, body, workload.content_type, part, plan))
            plan.say(f"{name}: {turn + 1}/{plan.repeats}  {theirs[-1]:,.0f}/s, HTTP/2 {ours[-1]:,.0f}/s")
    base, rate = statistics.median(theirs), statistics.median(ours)
    shape = f"{part.connections} x {part.streams}"
    label = f"{part.workload} over HTTP/2, {shape}, against HTTP/1.1"
    return Row(label, f"{base:,.0f}/s", f"{rate:,.0f}/s", rate / base, part.least, part.aim)


def post(url: str, body: Path, content_type: str, part: Part, plan: Plan, *more: str) -> float:
    """Requests a second. Raises RuntimeError when one of them failed."""
    command = ["taskset", "-c", str(plan.load_core), "h2load", f"-c{part.connections}", f"-m{part.streams}"]
    command += [
        *more,
        f"-D{max(1, round(plan.seconds))}",
        "-d",
        str(body),
        "-H",
        f"content-type: {content_type}",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=plan.seconds + 60)
    rate, failed = _DONE.search(done.stdout), _FAILED.search(done.stdout)
    if rate is None or failed is None or any(map(int, failed.groups())):
        raise RuntimeError(f"h2load: {done.stdout}{done.stderr}")
    return float(rate[1])
