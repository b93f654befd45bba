"""The closed loop behind `fastserve bench`: each connection has one request under way at a time."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from subprocess import PIPE
from typing import BinaryIO, cast

import click
import httptools
import msgspec
import uvloop

from fastserve.cli.client import Trust
from fastserve.cli.generate import AnswerProgress

GOOD = ("200", "OK")
RETRY_S = 0.1
KEPT_BITS = 7
HALF = 1 << (KEPT_BITS - 1)  # of a doubling's values have their leading bit set
# Equal channels of a process share one TCP connection by default.
GRPC_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


def bucket_of(value_ns: int) -> int:
    """Return a value's bucket: values below 2 * HALF have one each, then every doubling has HALF."""
    spare = max(0, value_ns.bit_length() - KEPT_BITS)
    return spare * HALF + (value_ns >> spare)


def floor_of(bucket: int) -> int:
    """Return the least value of a bucket, in ns."""
    spare = max(0, bucket // HALF - 1)
    return (bucket - spare * HALF) << spare


class LatencyHistogram(Counter[int]):
    """Counts of latencies in ns by bucket; buckets are at most 1/64 as wide as their values."""

    def add(self, value_ns: int) -> None:
        self[bucket_of(value_ns)] += 1

    def percentile(self, percent: float) -> float:
        """Return the latency in ns that `percent` of the requests stayed under; 0 when there were none."""
        wanted, seen = self.total() * percent / 100, 0
        for bucket in sorted(self):
            seen += self[bucket]
            if seen >= wanted:
                return (floor_of(bucket) + floor_of(bucket + 1)) / 2
        return 0.0

    def mean(self) -> float:
        """Return the mean latency in ns, from the middles of the buckets."""
        weighted = sum((floor_of(b) + floor_of(b + 1)) / 2 * n for b, n in self.items())
        return weighted / max(1, self.total())


@dataclass
class LoadResult:
    """Everything counted after the warm-up. `statuses` are HTTP's numbers or gRPC's names."""

    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    body_bytes: int = 0
    seconds: float = 0.0
    first: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Of streams of text: from the request to the first piece."""
    gaps: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Of streams of text: between two pieces."""
    pieces: int = 0
    """Of streams of text, within the measured time."""
    answers: int = 0
    """Whole ones, with their tokens and pieces."""
    tokens: int = 0
    answer_pieces: int = 0

    def merge(self, other: LoadResult) -> None:
        """Add the counts of another process, which ran at the same time."""
        seconds = max(self.seconds, other.seconds)
        for name, theirs in vars(other).items():
            if isinstance(theirs, Counter):
                getattr(self, name).update(theirs)
            else:
                setattr(self, name, getattr(self, name) + theirs)
        self.seconds = seconds

    @property
    def rate(self) -> float:
        return self.latency.total() / self.seconds if self.seconds else 0.0

    @property
    def token_rate(self) -> float:
        """Tokens a second: pieces of the measured time, each worth as many as in whole answers."""
        worth = self.tokens / self.answer_pieces if self.answer_pieces else 0.0
        return self.pieces * worth / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        return self.faults.total() + sum(n for s, n in self.statuses.items() if s not in GOOD)


@dataclass
class LoadPlan:
    """The load of one process. `requests` are bytes to send as they are, or messages of the gRPC `method`."""

    host: str
    port: int
    connections: int
    warm_up_s: float
    duration_s: float
    timeout_s: float
    requests: list[bytes]
    method: str = ""
    events: bool = False
    trust: Trust | None = None


class BrokenLoadError(Exception):
    """A request got no whole reply. Its connection is of no use any more."""


class HttpLoadClient(asyncio.Protocol):
    """One HTTP/1.1 connection."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[tuple[str, int]] | None = None
        self._nbytes = 0
        self.reusable = True

    async def ask(self, request: bytes) -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        self._reply, self._nbytes = loop.create_future(), 0
        timer = loop.call_later(self._plan.timeout_s, self._fail, "timed out")
        self._transport.write(request)
        try:
            return await self._reply
        finally:
            timer.cancel()

    def close(self) -> None:
        self._transport.abort()

    def _fail(self, fault: str) -> None:
        self.reusable = False
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(BrokenLoadError(fault))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own classes are no subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("connection lost")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("unreadable reply")

    def on_body(self, body: bytes) -> None:
        self._nbytes += len(body)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._reply is not None and not self._reply.done():
            self._reply.set_result((str(self._parser.get_status_code()), self._nbytes))


class GrpcLoadClient:
    """One gRPC channel with a TCP connection of its own. grpcio takes some 150 us of this side for a call."""

    reusable = True

    def __init__(self, plan: LoadPlan) -> None:
        import grpc.aio

        trust, address = plan.trust or Trust(), f"{plan.host}:{plan.port}"
        self._fault, self._timeout_s = grpc.aio.AioRpcError, plan.timeout_s
        self._channel = trust.channel(grpc.aio, address, plan.trust is not None, GRPC_OPTIONS)
        self._call = self._channel.unary_unary(plan.method)

    async def ask(self, request: bytes) -> tuple[str, int]:
        try:
            return "OK", len(await self._call(request, timeout=self._timeout_s))
        except self._fault as fault:
            self.reusable = fault.code().name != "UNAVAILABLE"
            return fault.code().name, 0

    def close(self) -> None:
        asyncio.get_running_loop().create_task(self._channel.close())


class EventsLoadClient(HttpLoadClient):
    """A connection whose replies are streams of OpenAI's API.

    A whole one has text, a reason for its end, its usage and [DONE].
    """

    def __init__(self, plan: LoadPlan, load: ClosedLoop) -> None:
        super().__init__(plan)
        self._load = load

    async def ask(self, request: bytes) -> tuple[str, int]:
        self._rest, self._piece_ns, self._pieces = b"", 0, 0
        self._progress, self._is_done = AnswerProgress(), False
        self._sent_ns = time.perf_counter_ns()
        status, nbytes = await super().ask(request)
        if status == "200":
            tokens, result = self._progress.tokens, self._load.result
            if not (self._is_done and self._progress.reason and tokens and self._pieces):
                raise BrokenLoadError("an answer that is not whole")
            if self._load.counting:
                result.answers += 1
                result.tokens += tokens
                result.answer_pieces += self._pieces
        return status, nbytes

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            self._take(event.removeprefix(b"data:").strip())

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = msgspec.json.decode(data)
            if event.get("error") is not None:
                return self._fail("an error within a stream")
            piece = self._progress.take(event)
        except (ValueError, LookupError, TypeError, AttributeError):
            return self._fail("an event that cannot be read")
        if piece:
            self._count_piece(time.perf_counter_ns())

    def _count_piece(self, now_ns: int) -> None:
        self._pieces += 1
        if self._load.measuring:
            self._load.result.pieces += 1
            histogram = self._load.result.gaps if self._piece_ns else self._load.result.first
            histogram.add(now_ns - (self._piece_ns or self._sent_ns))
        self._piece_ns = now_ns


class ClosedLoop:
    """All connections of one process."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan, self.result = plan, LoadResult()
        self.counting = self._stopping = False
        self._tls = None if plan.trust is None or plan.method else plan.trust.context()

    @property
    def measuring(self) -> bool:
        return self.counting and not self._stopping

    async def run(self) -> LoadResult:
        loops = [asyncio.create_task(self._keep_asking(i)) for i in range(self.plan.connections)]
        await asyncio.sleep(self.plan.warm_up_s)
        self.counting, began = True, time.monotonic()
        await asyncio.sleep(self.plan.duration_s)
        self.result.seconds = time.monotonic() - began
        self._stopping = True
        await asyncio.gather(*loops)
        return self.result

    async def _keep_asking(self, number: int) -> None:
        first = number % len(self.plan.requests)
        ring = cycle(self.plan.requests[first:] + self.plan.requests[:first])
        client = None
        while not self._stopping:
            try:
                client = client or await self._connect()
                await self._ask(client, next(ring))
            except (OSError, BrokenLoadError) as fault:
                if self.counting:
                    broken = isinstance(fault, BrokenLoadError)
                    self.result.faults[str(fault) if broken else "connection refused"] += 1
                if client is None:
                    await asyncio.sleep(RETRY_S)
            if client is not None and not client.reusable:
                client.close()
                client = None
        if client is not None:
            client.close()

    async def _ask(self, client: HttpLoadClient | GrpcLoadClient, request: bytes) -> None:
        sent_ns = time.perf_counter_ns()
        status, nbytes = await client.ask(request)
        if self.counting:
            self.result.latency.add(time.perf_counter_ns() - sent_ns)
            self.result.statuses[status] += 1
            self.result.body_bytes += nbytes

    async def _connect(self) -> HttpLoadClient | GrpcLoadClient:
        plan = self.plan
        if plan.method:
            return GrpcLoadClient(plan)
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: EventsLoadClient(plan, self) if plan.events else HttpLoadClient(plan),
            plan.host, plan.port, ssl=self._tls,
        )  # fmt: skip
        return client


def run_plan(plan: LoadPlan) -> LoadResult:
    return uvloop.run(ClosedLoop(plan).run())


def share(total: int, parts: int) -> list[int]:
    """Split `total` into at most `parts` nearly equal pieces, none of them empty."""
    parts = min(parts, total)
    return [total // parts + (i < total % parts) for i in range(parts)]


def run_plans(plans: list[LoadPlan]) -> LoadResult:
    """Run the first plan in this process and each other one in its own, and return all counts together.

    Raises ClickException when a process ends without its counts.
    """
    command = [sys.executable, "-c", "from fastserve.cli.load import main; main()"]
    processes = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE) for _ in plans[1:]]
    try:
        for process, plan in zip(processes, plans[1:], strict=True):
            pickle.dump(plan, cast(BinaryIO, process.stdin))
            cast(BinaryIO, process.stdin).close()
        total = run_plan(plans[0])
        for process in processes:
            total.merge(read_result(process))
        return total
    finally:
        for process in processes:
            process.kill()
            process.wait()
            cast(BinaryIO, process.stdout).close()


def read_result(process: subprocess.Popen[bytes]) -> LoadResult:
    try:
        found: LoadResult = pickle.load(cast(BinaryIO, process.stdout))
    except EOFError:
        raise click.ClickException(f"a load process ended with exit code {process.wait()}") from None
    return found


def main() -> None:
    """Run the plan on standard input, and write the counts to standard output."""
    pickle.dump(run_plan(pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
