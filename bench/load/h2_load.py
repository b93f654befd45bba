"""gRPC and REST over HTTP/2 beside REST over HTTP/1.1: one server, the two taking turns of a second.

HTTP/1.1 is asked by wrk, HTTP/2 by h2load. Large bodies keep h2load busier than the server, and a single
connection's times hold the client's own, so there it asks over HTTP/1.1 too.

grpc-tiny-1      4 floats, 32 connections x 1, beside REST JSON
grpc-tiny-8      the same, 8 connections x 8 streams, beside 32 x 1
grpc-mlp         784 floats, in calls a second
grpc-imagebin    600 KB, beside raw bodies over HTTP/1.1
grpc-batch       200 connections, one batch, beside REST
grpc-alone       1 connection, the median time
h2-...           JSON, or raw bodies, over HTTP/2, beside the same over HTTP/1.1
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench import workloads
from bench.load import h2load, servers, wrk
from bench.load.measure import Plan
from bench.load.servers import Server
from bench.load.table import Row
from bench.reference.grpc_echo import PATH as MODEL_INFER
from bench.workloads import WORKLOADS

TURN_S = 1.0
GRPC = "application/grpc"


@dataclass(frozen=True)
class Ask:
    """Who asks what: `workload` over HTTP/1.1, HTTP/2 or gRPC."""

    workload: str
    over: str  # "h1", "h2", "grpc"
    connections: int
    streams: int = 1
    wrk: bool = False

    @property
    def label(self) -> str:
        names = {"h1": "HTTP/1.1", "h2": "HTTP/2", "grpc": "gRPC"}
        return f"{self.workload} over {names[self.over]}, {self.connections} x {self.streams}"


@dataclass(frozen=True)
class Part:
    """`least` and `aim` are ratios to `base`: of rates, or for `times` of medians (below 1: slower). Without
    a base they are rates a second."""

    base: Ask | None
    ask: Ask
    least: float
    aim: float
    times: bool = False


def rest(workload: str, connections: int) -> Ask:
    """REST over HTTP/1.1 as wrk asks it."""
    return Ask(workload, "h1", connections, wrk=True)


ALONE = Ask("tiny", "h1", 1)
PARTS = {
    "grpc-tiny-1": Part(rest("tiny", 32), Ask("tiny", "grpc", 32), 0.8, 1.1),
    "grpc-tiny-8": Part(Ask("tiny", "grpc", 32), Ask("tiny", "grpc", 8, 8), 1.2, 2.0),
    "grpc-mlp": Part(None, Ask("mlp", "grpc", 32), 60_000, 80_000),
    "grpc-imagebin": Part(Ask("imagebin", "h1", 32), Ask("imagebin", "grpc", 32), 0.9, 1.0),
    "grpc-batch": Part(rest("batch", 200), Ask("batch", "grpc", 200), 0.95, 1.0),
    "grpc-alone": Part(ALONE, Ask("tiny", "grpc", 1), 1 / 1.15, 1.0, times=True),
    "h2-tiny": Part(rest("tiny", 32), Ask("tiny", "h2", 32), 0.85, 1.0),
    "h2-streams": Part(rest("tiny", 32), Ask("tiny", "h2", 8, 8), 1.0, 1.5),
    "h2-imagebin": Part(Ask("imagebin", "h1", 32), Ask("imagebin", "h2", 32), 0.85, 1.0),
    "h2-alone": Part(ALONE, Ask("tiny", "h2", 1), 1 / 1.15, 1.0, times=True),
}


@dataclass
class Turns:
    """What one of the two did, turn by turn."""

    ask: Ask
    rates: list[float] = field(default_factory=list)
    p50s_us: list[float] = field(default_factory=list)
    costs_us: list[float] = field(
        default_factory=list
    )  # CPU time of a request, of all the server's processes
    done: int = 0

    def take(self, load: wrk.Load, cpu_s: float) -> None:
        self.rates.append(load.rate)
        self.p50s_us.append(load.p50_us)
        self.costs_us.append(cpu_s / load.requests * 1e6)
        self.done += load.requests

    def figure(self, part: Part) -> float:
        return statistics.median(self.p50s_us if part.times else self.rates)

    def shown(self, part: Part) -> str:
        return f"{self.figure(part):,.0f}" + (" us" if part.times else "/s")


class Runs:
    """Runs against one server."""

    def __init__(self, server: Server, folder: Path, plan: Plan) -> None:
        self._server, self._folder, self._plan = server, folder, plan

    def prepare(self, ask: Ask) -> Path:
        """The body, in a file; the server has answered it rightly once."""
        body = self._folder / f"{ask.workload}-{ask.over}"
        workload = WORKLOADS[ask.workload]
        if ask.over == "grpc":
            body.write_bytes(make_call(workload.model))
        else:
            body.write_bytes(workloads.body(workload, doubles=self._plan.doubles))
            servers.wait_ready(
                self._server, lambda: servers.verify(self._server, workload, body.read_bytes())
            )
        return body

    def take(self, turns: Turns, part: Part) -> None:
        ask, before = turns.ask, self._server.cpu_s()
        load = self._post(ask, self._folder / f"{ask.workload}-{ask.over}", part.times)
        turns.take(load, self._server.cpu_s() - before)

    def _post(self, ask: Ask, body: Path, times: bool) -> wrk.Load:
        workload, origin = WORKLOADS[ask.workload], self._server.origin
        if ask.wrk:
            url, kind, cores = origin + workload.path, workload.content_type, [self._plan.load_core]
            return wrk.post(url, body, kind, connections=ask.connections, seconds=TURN_S, cores=cores)
        grpc = ask.over == "grpc"
        return h2load.post(
            origin + (MODEL_INFER if grpc else workload.path),
            body,
            GRPC if grpc else workload.content_type,
            connections=ask.connections,
            streams=ask.streams,
            seconds=TURN_S,
            core=self._plan.load_core,
            http1=ask.over == "h1",
            times=self._folder / "times" if times else None,
        )


def make_call(model: str) -> bytes:
    """The body of a unary call of ModelInfer: a message of one row behind its prefix."""
    from bench.load.grpc_load import make_request

    message = make_request(model)
    return b"\0" + len(message).to_bytes(4, "big") + message


def row(name: str, plan: Plan) -> Row:
    """One line of the table. The ratio is the median of those of the turns."""
    h2load.require()
    part = PARTS[name]
    model = WORKLOADS[part.ask.workload].model
    sides = [Turns(ask) for ask in (part.base, part.ask) if ask is not None]
    with (
        tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder,
        servers.listening_model(model, [plan.server_core]) as server,
    ):
        runs = Runs(server, Path(folder), plan)
        for ask in (rest(part.ask.workload, 1), *(turns.ask for turns in sides)):
            runs.prepare(ask)
        if part.ask.over == "grpc":
            verify_call(server, model)
        before = servers.count_answers(server)
        for turn in range(max(3, round(plan.repeats * plan.seconds / TURN_S))):
            for turns in sides:
                runs.take(turns, part)
            plan.say(f"{name}: {turn + 1}  " + "  ".join(f"{turns.rates[-1]:,.0f}/s" for turns in sides))
        check_answers(server, before, sides)
    return make_row(part, sides)


def verify_call(server: Server, model: str) -> None:
    """One call against the model's own answer."""
    import asyncio

    from bench.load import grpc_load

    asyncio.run(grpc_load.verify(server, model, grpc_load.make_request(model)))


def check_answers(server: Server, before: tuple[int, int], sides: list[Turns]) -> None:
    """Raises RuntimeError unless the server answered all that the load generators counted, and well."""
    found = servers.count_answers(server)
    answered, failed = (now - then for now, then in zip(found, before, strict=True))
    if failed or answered < sum(turns.done for turns in sides):
        raise server.fail(f"answered {answered} of {sum(turns.done for turns in sides)}, failed {failed}")


def make_row(part: Part, sides: list[Turns]) -> Row:
    ours, costs = sides[-1], [statistics.median(turns.costs_us) for turns in sides]
    note = f"CPU a request {' and '.join(f'{cost:,.1f}' for cost in costs)} us"
    if part.base is None:
        least, rate = part.least, ours.figure(part)
        return Row(
            part.ask.label, f"{least:,.0f}/s asked", f"{rate:,.0f}/s", rate / least, 1.0, part.aim / least,
            note=note,
        )  # fmt: skip
    base = sides[0]
    pairs = (base.p50s_us, ours.p50s_us) if part.times else (ours.rates, base.rates)
    ratio = statistics.median(high / low for high, low in zip(*pairs, strict=True))
    if not part.times:
        note += f": {costs[0] / costs[1]:.2f} x"
    label = part.ask.label + (", the other's median time to this one's" if part.times else "")
    note = f"beside {base.ask.label}; {note}"
    return Row(label, base.shown(part), ours.shown(part), ratio, part.least, part.aim, note=note)
