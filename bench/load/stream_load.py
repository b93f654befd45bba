"""Streams: how long a message takes from the model that says it to the client that reads its chunk.

grps-stream-1     one stream, a message each 20 ms
grps-stream-200   200 streams at once, 500 messages a second together: the cores stay idle most of the time

The model stamps a message just before it hands it over, with the machine's monotonic clock; the client reads
that clock when the chunk is there. Between them are the worker, the ring, the front process and loopback. How
late this machine wakes a process at all, at that hour, stands beside it: the same client on a bare pipe.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.load import servers, table
from bench.load.measure import Plan
from bench.load.servers import Server

DEPLOYMENT = Path(__file__).resolve().parent.parent / "deployment"
PATH = "/grps/v1/infer/predict?streaming=true"
MOST_US = 2000.0
# part -> (streams, messages of each, seconds between two)
PARTS = {"grps-stream-1": (1, 150, 0.02), "grps-stream-200": (200, 10, 0.4)}
TELLER = """
import sys, time
for _ in range(150):
    time.sleep(0.02)
    sys.stdout.write(f"{time.monotonic_ns()}\\n"); sys.stdout.flush()
"""


def row(part: str, plan: Plan) -> table.Row:
    """How long 99 of 100 messages take at most."""
    streams, messages, pause_s = PARTS[part]
    port = servers.free_port()
    command = [str(Path(sys.executable).with_name("fastserve")), "grps", str(DEPLOYMENT)]
    command += ["--http", f"127.0.0.1:{port}=grps"]
    with servers.started("fastserve", command, port, [plan.server_core]) as server:
        servers.wait_ready(server, lambda: _ask_once(server))
        found, cpu_us, floor = _measure(server, plan, streams, f"{messages} {pause_s}", messages)
    shown = f"p50 {_us(found, 50):,.0f}, p99 {_us(found, 99):,.0f}, max {found[-1] / 1e3:,.0f} us"
    pipe = f"p50 {_us(floor, 50):,.0f}, p99 {_us(floor, 99):,.0f}, max {floor[-1] / 1e3:,.0f} us"
    note = f"p99; {cpu_us:.0f} us of CPU a message; a bare pipe here: {pipe}"
    return table.Row(part, "", shown, _us(found, 99), MOST_US, unit="us", note=note)


def _ask_once(server: Server) -> None:
    """Raises OSError while the model loads. A stream of grps is answered 200 all the same: its message says
    so."""
    told = servers.post(server.origin + PATH, json.dumps({"str_data": "1 0"}).encode(), "application/json")
    status = json.loads(told)["status"]
    if status["code"] != 200:
        raise OSError(status["msg"])


def _measure(
    server: Server, plan: Plan, streams: int, said: str, messages: int
) -> tuple[list[int], float, list[int]]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {plan.load_core})
    try:
        before = server.cpu_s()
        found = sorted(uvloop.run(_read_all(server.port, streams, said, messages)))
        spent = server.cpu_s() - before
        return found, spent / len(found) * 1e6, sorted(_pipe())
    finally:
        os.sched_setaffinity(0, allowed)


async def _read_all(port: int, streams: int, said: str, messages: int) -> list[int]:
    late = await asyncio.gather(*(_read_one(port, said, messages) for _ in range(streams)))
    return [one for stream in late for one in stream]


async def _read_one(port: int, said: str, messages: int) -> list[int]:
    """Nanoseconds of every message. Raises RuntimeError when one is missing, or shares a chunk."""
    body = json.dumps({"str_data": said}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await reader.readuntil(b"\r\n\r\n")
    late = []
    while size := int((await reader.readline()).strip(), 16):
        data = await reader.readexactly(size + 2)
        came = time.monotonic_ns()
        number, sent = json.loads(data)["str_data"].split()
        if int(number) != len(late):
            raise RuntimeError(f"message {number} where {len(late)} was due")
        late.append(came - int(sent))
    writer.close()
    if len(late) != messages:
        raise RuntimeError(f"{len(late)} messages of {messages}")
    return late


def _pipe() -> list[int]:
    """The same between a process that only tells the time and this one, which waits for it."""
    teller = subprocess.Popen([sys.executable, "-c", TELLER], stdout=subprocess.PIPE)
    assert teller.stdout is not None
    late = [time.monotonic_ns() - int(line) for line in teller.stdout]
    teller.wait()
    return late


def _us(found: Sequence[int], percent: int) -> float:
    return statistics.quantiles(found, n=100)[percent - 1] / 1e3
