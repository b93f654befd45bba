"""How fast a server is with several front processes and workers, where its time goes, and what a larger
machine would do.

    python -m bench.load frontends --fronts 1,2,4,8 --workers 1,2,4 --json scale.json

Each line is one server under one load. Beside the rate stand the CPU time of a request in front processes
and in workers, and how often either went to sleep: rates of a busy or small machine say little, these say
the same everywhere. `Costs` is fitted to them, and `Costs.rate` is the model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench import workloads
from bench.load import grpc_load, h2load, measure, servers, table, wrk
from bench.load.measure import Plan
from bench.load.servers import Server
from bench.reference.grpc_echo import PATH
from bench.workloads import WORKLOADS

HTTP, GRPC = "HTTP", "gRPC"
LOADS = ((HTTP, "tiny"), (GRPC, "tiny"), (HTTP, "mlp"), (GRPC, "mlp"))
CONNECTIONS = 64  # of HTTP/1.1; gRPC has 8 of 8 streams
LARGER = (16, 64)  # cores that the model is asked about

# Lines of memory that move from core to core for a request where fronts fill one batch: the word of the open
# slot when rows are reserved and when they are settled, the line of a column that two rows share, and a
# worker's flag. The next user of each waits so long: measured within one socket, with two threads that take
# turns at a word, and as makers of processors give it for two sockets.
SHARED_LINES = 4
LINE_NS, FAR_LINE_NS = 73.0, 180.0
ONE_SOCKET_CORES = 32


@dataclass(frozen=True)
class Cell:
    """One server under one load. Times are microseconds of a request, sleeps are counts of it."""

    transport: str
    model: str
    fronts: int
    workers: int
    rate: float
    p99_us: float
    front_us: float
    worker_us: float
    front_sleeps: float
    worker_sleeps: float

    def row(self, base: float) -> table.Row:
        """Return the line of the table; `base` is the rate of one front process and one worker."""
        note = (
            f"CPU {self.front_us:.0f} + {self.worker_us:.0f} us, sleeps {self.front_sleeps:.2f} + "
            f"{self.worker_sleeps:.2f} a request" + (f", p99 {self.p99_us:,.0f} us" if self.p99_us else "")
        )
        name = f"{self.model} {self.transport}, {self.fronts} x {self.workers}"
        return table.Row(name, f"{base:,.0f}/s", f"{self.rate:,.0f}/s", self.rate / base, note=note)


@dataclass(frozen=True)
class Costs:
    """What a request costs, in microseconds: a front process that never sleeps, each of its sleeps (wake-up
    and a turn of the loop with little to do), and a worker. `sleeps` are those of a busy front, a request."""

    front_us: float
    wake_us: float
    sleeps: float
    worker_us: float

    @classmethod
    def fit(cls, cells: Sequence[Cell]) -> Costs:
        """Fit front_us + wake_us * sleeps by least squares, beside the lines that fronts share. With more
        fronts than cores, or little load, each sleeps more often: a larger machine does not pay for that."""
        xs = [cell.front_sleeps for cell in cells]
        ys = [cell.front_us - lines_us(cell.fronts, 1) for cell in cells]
        mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
        spread = sum((x - mean_x) ** 2 for x in xs)
        both = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
        wake_us = max(both / spread if spread else 0.0, 0.0)
        front_us = max(mean_y - wake_us * mean_x, 0.0)
        return cls(front_us, wake_us, min(xs), statistics.median(cell.worker_us for cell in cells))

    def rate(self, fronts: int, workers: int, cores: int) -> tuple[float, str]:
        """Return requests a second and what limits them."""
        front_us = self.front_us + self.wake_us * self.sleeps + lines_us(fronts, cores)
        limits = {
            "front processes": fronts / front_us,
            "workers": workers / self.worker_us,
            "cores": cores / (front_us + self.worker_us),
            "words of the open slot": 1e3 / (SHARED_LINES * _line_ns(cores)),
        }
        least = min(limits, key=limits.__getitem__)
        return limits[least] * 1e6, least

    def best(self, cores: int) -> tuple[int, int, float, str]:
        """Return front processes, workers, requests a second and the limit of the best split of a machine
        whose load comes from elsewhere."""
        splits = [(f, cores - f, *self.rate(f, cores - f, cores)) for f in range(1, cores)]
        return max(splits, key=lambda split: (split[2], -split[0]))


def _line_ns(cores: int) -> float:
    return LINE_NS if cores <= ONE_SOCKET_CORES else FAR_LINE_NS


def lines_us(fronts: int, cores: int) -> float:
    """Return what a request waits for lines that another of the fronts had last: so large a share of all."""
    return SHARED_LINES * _line_ns(cores) / 1e3 * (1 - 1 / fronts)


@contextlib.contextmanager
def serving(model: str, fronts: int, workers: int, cores: Sequence[int]) -> Iterator[Server]:
    """One model with so many workers, on one port for all protocols."""
    port = servers.free_port()
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
        copied = Path(folder) / model
        shutil.copytree(workloads.REPOSITORY / model, copied)
        with (copied / "model.yaml").open("a") as config:
            config.write(f"\ninstances: {workers}\n")
        command = [str(Path(sys.executable).with_name("fastserve")), "serve", folder]
        command += ["--listen", f"127.0.0.1:{port}", "--frontends", str(fronts)]
        with servers.started("fastserve", command, port, cores) as server:
            yield server


def split_cores() -> tuple[list[int], list[int]]:
    """Return the server's cores and those of the load: a quarter of eight and more, else all for both."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 8:
        return cores, cores
    return cores[: -len(cores) // 4], cores[-len(cores) // 4 :]


def spent(server: Server) -> tuple[float, float, float, float]:
    """Return CPU seconds and sleeps so far of front processes, and of workers."""
    cpu, sleeps = [0.0, 0.0], [0.0, 0.0]
    for pid in servers.tree(server.process.pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            worker = int(pid != server.process.pid and b"front_process" not in command)
            cpu[worker] += servers.cpu_ns(pid) / 1e9
            for task in Path(f"/proc/{pid}/task").iterdir():
                status = (task / "status").read_text()
                sleeps[worker] += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return cpu[0], cpu[1], sleeps[0], sleeps[1]


def run_load(
    server: Server, transport: str, model: str, body: Path, plan: Plan, cores: list[int]
) -> wrk.Load:
    """One run of the load. Raises RuntimeError when a request failed."""
    if transport == GRPC:
        with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
            message = grpc_load.make_request(model)
            framed = Path(folder) / "message"
            framed.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
            return h2load.post(
                server.origin + PATH, framed, "application/grpc", connections=8, streams=8,
                seconds=plan.seconds, core=cores[0], cores=cores,
            )  # fmt: skip
    load = wrk.post(
        server.origin + WORKLOADS[model].path, body, "application/json",
        connections=CONNECTIONS, seconds=plan.seconds, cores=cores, threads=max(1, len(cores) // 2),
    )  # fmt: skip
    if load.failed:
        raise server.fail(f"{load.failed} requests failed")
    return load


def measure_cell(transport: str, model: str, fronts: int, workers: int, plan: Plan) -> Cell:
    """Start a server, load it, and stop it. Rates are medians, costs the least of all runs: what else runs on
    the machine can only add to them."""
    own, theirs = split_cores()
    workload = WORKLOADS[model]
    with measure.posted_body(workload, plan) as body, serving(model, fronts, workers, own) as server:
        measure.ready(server, workload, body)
        servers.wait_ready(server, lambda: servers.healthy(server))
        uvloop.run(grpc_load.verify(server, model, grpc_load.make_request(model)))
        loads, costs = [], []
        for _ in range(plan.repeats):
            before = spent(server)
            loads.append(run_load(server, transport, model, body, plan, theirs))
            costs.append(
                [(now - then) / loads[-1].requests for now, then in zip(spent(server), before, strict=True)]
            )
    cost = min(costs, key=lambda one: one[0] + one[1])
    cell = Cell(
        transport, model, fronts, workers,
        statistics.median(load.rate for load in loads), statistics.median(load.p99_us for load in loads),
        cost[0] * 1e6, cost[1] * 1e6, cost[2], cost[3],
    )  # fmt: skip
    plan.say(f"{cell.row(cell.rate).workload}: {cell.rate:,.0f}/s")
    return cell


def rows(plan: Plan, fronts: Sequence[int], workers: Sequence[int]) -> list[table.Row]:
    """Return the whole table, and the model's lines for larger machines."""
    found = list[table.Row]()
    for transport, model in LOADS:
        cells = [measure_cell(transport, model, f, w, plan) for w in workers for f in fronts]
        found += [cell.row(cells[0].rate) for cell in cells]
        costs = Costs.fit(cells)
        note = f"model: {costs.front_us:.1f} us a front process and {costs.wake_us:.0f} a sleep, "
        note += f"{costs.worker_us:.1f} a worker; limit: "
        for cores in LARGER:
            f, w, rate, limit = costs.best(cores)
            name = f"{model} {transport}, {cores} cores: {f} x {w}"
            base = costs.rate(1, max(w, 1), cores)[0]
            found.append(table.Row(name, f"{base:,.0f}/s", f"{rate:,.0f}/s", rate / base, note=note + limit))
    return found
