"""gRPC under load: fastserve beside the echo server, one core each, the client on another.

The client is grpcio's too, in this process; it is the slower side of tiny requests, for both servers alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import uvloop

from bench import workloads
from bench.load import servers, table
from bench.load.measure import Plan
from bench.load.servers import Server
from bench.reference.grpc_echo import PATH
from fastserve.protos import load

V2 = load("kserve_v2")
AT_ONCE = 32
CHANNELS = 4
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
LEAST = {"grpc-tiny": ("tiny", 0.9), "grpc-image": ("image", 0.9)}


@contextlib.contextmanager
def echo(model: str, cores: Sequence[int]) -> Iterator[Server]:
    port, items = servers.free_port(), workloads.expected(model).size
    command = [sys.executable, "-m", "bench.reference.grpc_echo", "--port", str(port), "--items", str(items)]
    with servers.started("grpc echo", command, port, cores) as server:
        yield server


@contextlib.contextmanager
def subject(model: str, cores: Sequence[int]) -> Iterator[Server]:
    port = servers.free_port()
    command = [str(Path(sys.executable).with_name("fastserve")), "serve", str(workloads.REPOSITORY)]
    command += ["--load-model", model, "--http", "off", "--grpc", f"127.0.0.1:{port}"]
    with servers.started("fastserve", command, port, cores) as server:
        yield server


def make_request(model: str) -> bytes:
    row = workloads.row(model)
    request = V2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, row.size])
    request.raw_input_contents.append(row.astype("<f4").tobytes())
    data: bytes = request.SerializeToString()
    return data


async def run(port: int, message: bytes, seconds: float) -> float:
    """Requests a second with AT_ONCE under way."""
    target = f"127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as opened:
        channels = [
            await opened.enter_async_context(grpc.aio.insecure_channel(target, options=OPTIONS))
            for _ in range(CHANNELS)
        ]
        calls = [channel.unary_unary(PATH) for channel in channels]
        await calls[0](message, wait_for_ready=True, timeout=60)
        began, done = time.perf_counter(), 0
        until = began + seconds

        async def ask(number: int) -> None:
            nonlocal done
            while time.perf_counter() < until:
                await calls[number % CHANNELS](message)
                done += 1

        await asyncio.gather(*(ask(number) for number in range(AT_ONCE)))
        return done / (time.perf_counter() - began)


def row(part: str, plan: Plan) -> table.Row:
    """One line of the table: both servers up all the time, taking turns under load."""
    model, least = LEAST[part]
    message, allowed = make_request(model), os.sched_getaffinity(0)
    rates: dict[str, list[float]] = {"grpc echo": [], "fastserve": []}
    with echo(model, [plan.server_core]) as theirs, subject(model, [plan.server_core]) as ours:
        os.sched_setaffinity(0, {plan.load_core})
        try:
            for turn in range(plan.repeats):
                for server in (theirs, ours):
                    rates[server.name].append(uvloop.run(run(server.port, message, plan.seconds)))
                    done = f"{turn + 1}/{plan.repeats}  {rates[server.name][-1]:,.0f}/s"
                    plan.say(f"{part}: {server.name} {done}")
        finally:
            os.sched_setaffinity(0, allowed)
    base, rate = (statistics.median(found) for found in rates.values())
    note = "reference: grpcio echo that parses and writes the same messages"
    return table.Row(part, f"{base:,.0f}/s", f"{rate:,.0f}/s", rate / base, least, note=note)
