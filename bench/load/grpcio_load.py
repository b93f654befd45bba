"""grpcio's own client as the load: the native transport beside grpcio's, one core each, in turns.

The client is the slow side: with it a server that costs nothing would make no more than it can ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time

import grpc.aio

from bench.load import grpc_load
from bench.load.measure import Plan
from bench.load.table import Row
from bench.reference.grpc_echo import PATH

PARTS = ["grpc-client"]
TRANSPORTS = ("grpcio", "native")
CHANNELS, AT_ONCE = 4, 8
TURN_S = 1.0


async def run(port: int, message: bytes) -> float:
    """Calls a second, AT_ONCE on each of CHANNELS connections. Raises AioRpcError when one fails."""
    end = time.perf_counter() + TURN_S
    done = 0

    async def caller(ask: grpc.aio.UnaryUnaryMultiCallable) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await ask(message)
            done += 1

    async with contextlib.AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]  # or all channels would share one connection
        callers = []
        for _ in range(CHANNELS):
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            )
            callers += [caller(channel.unary_unary(PATH)) for _ in range(AT_ONCE)]
        began = time.perf_counter()
        await asyncio.gather(*callers)
        return done / (time.perf_counter() - began)


def row(part: str, plan: Plan) -> Row:
    """One line of the table. The ratio is the median of those of the turns."""
    message, allowed = grpc_load.make_request("tiny"), os.sched_getaffinity(0)
    rates: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(
                grpc_load.subject("tiny", [plan.server_core], "--grpc-options-transport", name)
            )
            for name in TRANSPORTS
        }
        for server in started.values():
            asyncio.run(grpc_load.verify(server, "tiny", message))
        os.sched_setaffinity(0, {plan.load_core})
        try:
            for turn in range(max(3, round(plan.repeats * plan.seconds / TURN_S))):
                for name, server in started.items():
                    rates[name].append(asyncio.run(run(server.port, message)))
                plan.say(
                    f"{part}: {turn + 1}  " + "  ".join(f"{rates[name][-1]:,.0f}/s" for name in TRANSPORTS)
                )
        finally:
            os.sched_setaffinity(0, allowed)
    ratio = statistics.median(ours / base for base, ours in zip(*rates.values(), strict=True))
    shown = [f"{statistics.median(found):,.0f}/s" for found in rates.values()]
    note = f"{CHANNELS} connections x {AT_ONCE}; beside the grpcio transport; the client is the slow side"
    return Row("4 floats, grpcio's client", shown[0], shown[1], ratio, 1.5, note=note)
