"""gRPC under load: fastserve beside the echo server, one core each, the client on another.

Both servers are up all the time and take turns of TURN_SECONDS. Beside the rate stands what a request cost
each of them in CPU time, over all processes: that is what a core of its own would show, and it stays true
when the machine has other work and neither server ever has its core to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import uvloop

from bench import workloads
from bench.load import h2load, servers, table
from bench.load.measure import Plan
from bench.load.servers import Server
from bench.reference.grpc_echo import PATH
from fastserve.protos import load

V2 = load("kserve_v2")
HOW = {"connections": 4, "streams": 8}
TURN_SECONDS = 1.0
LEAST = {"grpc-tiny": ("tiny", 0.9), "grpc-image": ("image", 0.9)}


@contextlib.contextmanager
def echo(model: str, cores: Sequence[int]) -> Iterator[Server]:
    port, items = servers.free_port(), workloads.expected(model).size
    command = [sys.executable, "-m", "bench.reference.grpc_echo", "--port", str(port), "--items", str(items)]
    with servers.started("grpc echo", command, port, cores) as server:
        yield server


@contextlib.contextmanager
def subject(model: str, cores: Sequence[int], *extra: str) -> Iterator[Server]:
    port = servers.free_port()
    command = [str(Path(sys.executable).with_name("fastserve")), "serve", str(workloads.REPOSITORY)]
    command += ["--load-model", model, "--http", "off", "--grpc", f"127.0.0.1:{port}", *extra]
    with servers.started("fastserve", command, port, cores) as server:
        yield server


def make_request(model: str) -> bytes:
    row = workloads.row(model)
    request = V2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, row.size])
    request.raw_input_contents.append(row.astype("<f4").tobytes())
    data: bytes = request.SerializeToString()
    return data


async def ask_until_loaded(port: int, path: str, message: bytes, limit_s: float = 60.0) -> bytes:
    """The reply, once the server's models are loaded. Raises AioRpcError."""
    end = time.monotonic() + limit_s
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        while True:
            try:
                reply: bytes = await channel.unary_unary(path)(message, wait_for_ready=True, timeout=limit_s)
                return reply
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise
            await asyncio.sleep(0.1)


async def verify(server: Server, model: str, message: bytes) -> None:
    """Ask once, by grpcio, until there is an answer of the right size. Raises AssertionError, AioRpcError."""
    reply = await ask_until_loaded(server.port, PATH, message)
    (raw,) = V2.ModelInferResponse.FromString(reply).raw_output_contents
    assert len(raw) == 4 * workloads.expected(model).size, server.name


@dataclass
class Turns:
    """What one server did, turn by turn."""

    server: Server
    rates: list[float] = field(default_factory=list)
    costs_us: list[float] = field(default_factory=list)  # CPU time of one request

    def take(self, message: bytes, core: int, path: str = PATH) -> None:
        """Run h2load for TURN_SECONDS."""
        before, port = self.server.cpu_s(), self.server.port
        self.rates.append(h2load.grpc_rate(port, path, message, core=core, seconds=TURN_SECONDS, **HOW))
        spent = self.server.cpu_s() - before
        self.costs_us.append(spent / (self.rates[-1] * TURN_SECONDS) * 1e6)


def row(part: str, plan: Plan) -> table.Row:
    """One line of the table. The ratio is that of the costs; medians of all turns."""
    model, least = LEAST[part]
    message = make_request(model)
    with echo(model, [plan.server_core]) as theirs, subject(model, [plan.server_core]) as ours:
        for server in (theirs, ours):
            uvloop.run(verify(server, model, message))
        base, found = Turns(theirs), Turns(ours)
        for turn in range(max(1, round(plan.repeats * plan.seconds / TURN_SECONDS))):
            for taken in (base, found):
                taken.take(message, plan.load_core)
            plan.say(f"{part}: {turn + 1}  {base.rates[-1]:,.0f}/s {found.rates[-1]:,.0f}/s")
    rates = [statistics.median(taken.rates) for taken in (base, found)]
    costs = [statistics.median(taken.costs_us) for taken in (base, found)]
    note = f"CPU {costs[0]:,.0f} and {costs[1]:,.0f} us a request, that of rates {rates[1] / rates[0]:.2f}"
    return table.Row(part, f"{rates[0]:,.0f}/s", f"{rates[1]:,.0f}/s", costs[0] / costs[1], least, note=note)
