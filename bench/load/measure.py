"""The measurements behind the table. Each starts what it needs and stops it again."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bench import workloads
from bench.load import servers, wrk
from bench.load.servers import Server
from bench.workloads import WORKLOADS, Workload

Start = Callable[[Workload, Sequence[int]], AbstractContextManager[Server]]
MODEL_CALLS = 5000


@dataclass(frozen=True)
class Plan:
    """How long and where. The server has one core to itself and so has the load generator."""

    repeats: int
    seconds: float
    server_core: int
    load_core: int
    doubles: bool = False
    say: Callable[[str], None] = print
    fronts: tuple[int, ...] = (1, 2, 4, 8)  # processes and workers of the part `frontends`
    workers: tuple[int, ...] = (1, 2, 4)


@dataclass
class Sample:
    """What the runs of one server on one workload gave, in order."""

    loads: list[wrk.Load] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(load.rate for load in self.loads)

    @property
    def p50_us(self) -> float:
        return statistics.median(load.p50_us for load in self.loads)

    @property
    def p99_us(self) -> float:
        return statistics.median(load.p99_us for load in self.loads)

    @property
    def failed(self) -> int:
        return sum(load.failed for load in self.loads)


def start_reference(workload: Workload, cores: Sequence[int]) -> AbstractContextManager[Server]:
    return servers.reference(workload.name, cores)


def start_fastserve(workload: Workload, cores: Sequence[int]) -> AbstractContextManager[Server]:
    return servers.fastserve_model(workload.model, cores)


@contextlib.contextmanager
def posted_body(workload: Workload, plan: Plan) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
        path = Path(folder) / "body"
        path.write_bytes(workloads.body(workload, doubles=plan.doubles))
        yield path


def ready(server: Server, workload: Workload, body: Path) -> None:
    servers.wait_ready(server, lambda: servers.verify(server, workload, body.read_bytes()))


def load(
    server: Server, workload: Workload, body: Path, plan: Plan, connections: int, cores: Sequence[int] = ()
) -> wrk.Load:
    return wrk.post(
        server.origin + workload.path,
        body,
        workload.content_type,
        connections=connections,
        seconds=plan.seconds,
        cores=cores or [plan.load_core],
    )


def versus(workload: Workload, plan: Plan, subject: Start) -> tuple[Sample, Sample]:
    """(reference, subject). Both are up all the time and take turns under load."""
    with (
        posted_body(workload, plan) as body,
        start_reference(workload, [plan.server_core]) as theirs,
        subject(workload, [plan.server_core]) as ours,
    ):
        samples = Sample(), Sample()
        for server in (theirs, ours):
            ready(server, workload, body)
        for turn in range(plan.repeats):
            for server, sample in zip((theirs, ours), samples, strict=True):
                sample.loads.append(load(server, workload, body, plan, workload.connections))
                rate = sample.loads[-1].rate
                plan.say(f"{workload.name}: {server.name} {turn + 1}/{plan.repeats}  {rate:,.0f}/s")
        return samples


def hello(plan: Plan) -> float:
    """Requests a second of a bare constant reply: what framing and the load generator allow."""
    tiny = WORKLOADS["tiny"]
    with posted_body(tiny, plan) as body, servers.reference("hello", [plan.server_core]) as server:
        url = server.origin + tiny.path
        servers.wait_ready(server, lambda: servers.post(url, body.read_bytes(), tiny.content_type))
        return load(server, tiny, body, plan, tiny.connections).rate


def model_us(model: str, core: int) -> float:
    """Median microseconds of one call of the model with one row, in this process, on the server's core."""
    apply, row = workloads.load_model(model).run, {"x": workloads.row(model)[None]}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        spans = []
        for _ in range(MODEL_CALLS):
            began = time.perf_counter_ns()
            apply(row)
            spans.append(time.perf_counter_ns() - began)
    finally:
        os.sched_setaffinity(0, cores)
    return statistics.median(spans) / 1000


def alone(plan: Plan, subject: Start) -> tuple[float, float, float]:
    """tiny at one connection: p50 microseconds (model in process, reference, subject)."""
    tiny = WORKLOADS["tiny"]
    p50s = []
    for start in (start_reference, subject):
        with posted_body(tiny, plan) as body, start(tiny, [plan.server_core]) as server:
            ready(server, tiny, body)
            loads = [load(server, tiny, body, plan, 1) for _ in range(plan.repeats)]
            p50s.append(Sample(loads).p50_us)
            plan.say(f"one connection: {server.name} p50 {p50s[-1]:.0f} us")
    return model_us("tiny", plan.server_core), p50s[0], p50s[1]


def memory(plan: Plan) -> float:
    """Resident 10^6 bytes of the front process with the demo repository, idle."""
    with servers.fastserve("demo", [plan.server_core]) as server:
        servers.wait_ready(server, lambda: servers.healthy(server))
        return server.rss_mb()


def growth(plan: Plan, requests: int) -> tuple[int, float]:
    """(requests sent, 10^6 bytes gained by the front process) after a warm-up of a tenth of them."""
    tiny = WORKLOADS["tiny"]
    with posted_body(tiny, plan) as body, start_fastserve(tiny, [plan.server_core]) as server:
        ready(server, tiny, body)
        sent, before = 0, 0.0
        while sent < requests:
            sent += load(server, tiny, body, plan, tiny.connections).requests
            before = before or (server.rss_mb() if sent >= requests / 10 else 0.0)
            plan.say(f"{sent:,} requests, {server.rss_mb():.1f} MB resident")
        return sent, server.rss_mb() - before
