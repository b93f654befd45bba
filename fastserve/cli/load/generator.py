"""One process of connections: reads a plan, keeps every connection busy, tells what it saw.

    stdin    one line of JSON (Plan), then the requests' bytes back to back, then "go\n" when all are ready
    stdout   {"ready": true}, then progress a few times a second if asked for, then {"result": ...}

Each connection has one request under way at a time: latency is from the first byte written to the
last byte read. Nothing is sent after the end; what is unanswered by then is waited for briefly.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import httptools
import msgspec

from fastserve.cli.load.counters import Counters
from fastserve.cli.trust import Trust

if TYPE_CHECKING:
    from fastserve.cli.load.grpc_calls import GrpcConnection

PROGRESS_S = 0.2
CONNECT_S = 5.0


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    """What one process is to do. `sizes`: bytes of each request that follows."""

    host: str
    port: int
    connections: int
    warm_up_s: float
    duration_s: float
    timeout_s: float
    sizes: list[int]
    method: str = ""  # of the gRPC calls to make; HTTP requests without one
    events: bool = False  # answers are streams of text
    trust: Trust | None = None  # in plain text without one
    progress: bool = False  # tell how far it is; only one process of several needs to


class Connection(asyncio.Protocol):
    """Asks again as soon as it is answered. `done` is set once it is closed."""

    def __init__(self, requests: cycle[bytes], counters: Counters) -> None:
        self.requests, self.counters = requests, counters
        self.done = asyncio.get_running_loop().create_future()
        self.sent_ns = 0  # 0: nothing under way
        self.body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own classes are no subclasses
        self.parser = httptools.HttpResponseParser(self)

    def ask(self) -> None:
        if self.counters.stopping:
            self.transport.close()
            return
        self.body_bytes = 0
        self.sent_ns = time.perf_counter_ns()
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.give_up("unreadable reply")

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)

    def on_message_complete(self) -> None:
        latency_ns, self.sent_ns = time.perf_counter_ns() - self.sent_ns, 0
        self.counters.answered(str(self.parser.get_status_code()), latency_ns, self.body_bytes)
        if self.parser.should_keep_alive():
            self.ask()
        else:
            self.transport.close()

    def close(self) -> None:
        """Close it when nothing is under way."""
        if not self.sent_ns:
            self.transport.close()

    def give_up(self, fault: str) -> None:
        """End it now; what is under way has failed."""
        if self.sent_ns:
            self.sent_ns = 0
            self.counters.failed(fault)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.sent_ns:
            self.counters.failed("connection lost")
        if not self.done.done():
            self.done.set_result(None)


class Group:
    """All connections of this process, reopened whenever the server closes one."""

    def __init__(self, plan: Plan, requests: list[bytes]) -> None:
        self.plan, self.requests, self.counters = plan, requests, Counters()
        self.open: set[Connection | GrpcConnection] = set()
        self.context = None if plan.trust is None or plan.method else plan.trust.context()

    async def connect(self) -> Connection | GrpcConnection | None:
        start = len(self.open) % len(self.requests)
        ring = cycle(self.requests[start:] + self.requests[:start])
        made = await (self._connect_grpc(ring) if self.plan.method else self._connect_http(ring))
        if made is not None:
            self.open.add(made)
        return made

    async def _connect_http(self, ring: cycle[bytes]) -> Connection | None:
        loop = asyncio.get_running_loop()
        kind = self._kind()
        try:
            _, made = await loop.create_connection(
                lambda: kind(ring, self.counters), self.plan.host, self.plan.port, ssl=self.context
            )
        except OSError:
            return None
        return made

    def _kind(self) -> type[Connection]:
        if not self.plan.events:
            return Connection
        from fastserve.cli.load.events import EventsConnection

        return EventsConnection

    async def _connect_grpc(self, ring: cycle[bytes]) -> GrpcConnection | None:
        from fastserve.cli.load.grpc_calls import GrpcConnection

        plan = self.plan
        made = GrpcConnection(f"{plan.host}:{plan.port}", plan.method, ring, self.counters, plan.trust)
        return made if await made.connect(CONNECT_S) else None

    async def keep(self, connection: Connection | GrpcConnection | None) -> None:
        while not self.counters.stopping:
            if connection is None:
                self.counters.failed("connection refused")
                await asyncio.sleep(0.1)  # a server that is not there is not asked a million times
            else:
                connection.ask()
                await connection.done
                self.open.discard(connection)
            connection = None if self.counters.stopping else await self.connect()
        if connection is not None:
            connection.close()

    async def run(self) -> dict[str, Any]:
        first = [await self.connect() for _ in range(self.plan.connections)]
        say({"ready": True})
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.readline)
        keepers = [asyncio.create_task(self.keep(connection)) for connection in first]
        await self.watch(self.plan.warm_up_s)
        self.counters.counting = True
        began = time.monotonic()
        await self.watch(self.plan.duration_s)
        seconds = time.monotonic() - began
        await self.finish(keepers)
        return {**self.counters.result(), "seconds": seconds}

    async def watch(self, seconds: float) -> None:
        """Lets the load run, tells how it goes, and gives up on requests that take too long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(PROGRESS_S, left))
            oldest = time.perf_counter_ns() - int(self.plan.timeout_s * 1e9)
            for connection in list(self.open):
                if 0 < connection.sent_ns < oldest:
                    connection.give_up("timed out")
            if self.plan.progress:
                say({"done": self.counters.histogram.total})

    async def finish(self, keepers: list[asyncio.Task[None]]) -> None:
        self.counters.stopping = True
        for connection in list(self.open):
            connection.close()
        await asyncio.wait(keepers, timeout=self.plan.timeout_s)
        for connection in list(self.open):
            connection.give_up("timed out")
        await asyncio.gather(*keepers)


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    import uvloop

    source = sys.stdin.buffer
    plan = msgspec.json.decode(source.readline(), type=Plan)
    requests = [source.read(size) for size in plan.sizes]
    say({"result": uvloop.run(Group(plan, requests).run())})


if __name__ == "__main__":
    main()
