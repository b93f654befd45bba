"""Everybody gets the answer to their own question, and one to each, whoever else asks and whatever breaks.

Clients of every kind at once, over HTTP as JSON and as bytes, over shared memory, gRPC and streams, on a
native and on a Triton model. Every request holds numbers nobody else sends; every answer must be the sum and
difference of just those. Meanwhile clients leave in the middle of a request, and a worker is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc.aio
import pytest

from tests.conftest import Belongings
from tests.dialects.kserve import client_models
from tests.faults.rig import (
    MESSAGES,
    SERVICE,
    Http,
    Memory,
    ints,
    memory,
    message,
    mixed,
    pair,
    request_bytes,
    tensor,
)
from tests.running import WAIT_S, Running, until

MODELS = ("sums", "simple")
COLUMNS = 16
PAUSE_S = 60.0
GONE = (14, 503)  # what a caller is told whose worker was killed twice under it
OPTIONS = ("--model-control", "explicit", "--load-model", "*", "--allow-client-shm")
Numbers = list[int]
Pair = tuple[Numbers, Numbers]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("isolation") / "models"
    folder.mkdir()
    client_models.write_sums(folder)
    with Running(folder, folder.parent / "log", *OPTIONS) as running:
        yield running


class Ledger:
    """Requests and their outcomes: every request ends exactly once."""

    def __init__(self, served: Running, seed: int) -> None:
        self.served = served
        self.rng = random.Random(seed)
        self.asked = self.left = 0
        self.ended: Counter[str] = Counter()
        self._next = 0

    def begin(self) -> tuple[str, Numbers, Numbers]:
        """A model, and two rows that nobody else has."""
        self.asked += 1
        self._next += 1
        first = [self._next * 1000 + n for n in range(COLUMNS)]
        return self.rng.choice(MODELS), first, [self.rng.randrange(1000) for _ in range(COLUMNS)]

    def end(
        self, kind: str, first: Numbers, second: Numbers, status: int, found: tuple[Numbers, Numbers] | None
    ) -> None:
        """An answer: right, or an error that says a worker has gone."""
        if found is None:
            assert status in GONE, (kind, status)
            self.ended[f"{kind} gone"] += 1
            return
        sums = [a + b for a, b in zip(first, second, strict=True)]
        differences = [a - b for a, b in zip(first, second, strict=True)]
        assert found == (sums, differences), (kind, first[0], found)
        self.ended[kind] += 1

    def leave(self) -> None:
        """A request whose client has left: it has no answer."""
        self.left += 1


class Line:
    """A keep-alive HTTP connection."""

    def __init__(self, served: Running) -> None:
        self._place = served.http.split(":")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, path: str, body: bytes, **headers: str) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._place[0], int(self._place[1]))
        self._writer.write(request_bytes("POST", path, body, **headers))

    async def read(self) -> tuple[int, dict[str, str], bytes]:
        assert self._reader is not None
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), WAIT_S)
        first, *lines = head.decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await asyncio.wait_for(self._reader.readexactly(int(headers["content-length"])), WAIT_S)
        return int(first.split(" ")[1]), headers, body

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None


def row(data: bytes | memoryview) -> Numbers:
    return list(struct.unpack(f"<{COLUMNS}i", data))


def two(outputs: Any, rows: list[Numbers]) -> Pair:
    """Rows by the outputs' own names."""
    found = {
        output["name"] if isinstance(output, dict) else output.name: one
        for output, one in zip(outputs, rows, strict=True)
    }
    return found["OUTPUT0"], found["OUTPUT1"]


async def ask_json(ledger: Ledger, line: Line) -> None:
    model, first, second = ledger.begin()
    inputs = [tensor("INPUT0", [1, COLUMNS], first), tensor("INPUT1", [1, COLUMNS], second)]
    await line.send(f"/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode())
    if await leaves(ledger, line):
        return
    status, _, body = await line.read()
    outputs = json.loads(body)["outputs"] if status == 200 else []
    found = two(outputs, [output["data"] for output in outputs]) if outputs else None
    ledger.end("json", first, second, status, found)


async def ask_binary(ledger: Ledger, line: Line) -> None:
    model, first, second = ledger.begin()
    inputs = [tensor(f"INPUT{n}", [1, COLUMNS], binary_data_size=4 * COLUMNS) for n in (0, 1)]
    given = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    body, length = mixed(given, ints(*first), ints(*second))
    await line.send(f"/v2/models/{model}/infer", body, Inference_Header_Content_Length=str(length))
    if await leaves(ledger, line):
        return
    status, headers, body = await line.read()
    found = None
    if status == 200:
        at = int(headers["inference-header-content-length"])
        rows = [row(body[at + n : at + n + 64]) for n in (0, 64)]
        found = two(json.loads(body[:at])["outputs"], rows)
    ledger.end("binary", first, second, status, found)


async def leaves(ledger: Ledger, line: Line) -> bool:
    """One client in ten goes before it is answered."""
    if ledger.rng.random() >= 0.1:
        return False
    await asyncio.sleep(ledger.rng.random() * 0.002)
    line.close()
    ledger.leave()
    return True


def asker_of_memory(region: Memory, number: int) -> Callable[[Ledger, Line], Awaitable[None]]:
    """A client with a part of the region to itself."""
    start = number * 512

    async def ask(ledger: Ledger, line: Line) -> None:
        model, first, second = ledger.begin()
        region.put(ints(*first) + ints(*second), start)
        places = [region.place(start + 64 * n, 64) for n in range(4)]
        inputs = [tensor(f"INPUT{n}", [1, COLUMNS], **places[n]) for n in (0, 1)]
        outputs = [{"name": f"OUTPUT{n}", "parameters": places[n + 2]} for n in (0, 1)]
        body = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        await line.send(f"/v2/models/{model}/infer", body)
        status, _, _ = await line.read()
        found = (
            (row(region.get(64, start + 128)), row(region.get(64, start + 192))) if status == 200 else None
        )
        ledger.end("memory", first, second, status, found)

    return ask


def rows_of(response: Any) -> Pair:
    return two(response.outputs, [row(raw) for raw in response.raw_output_contents])


async def ask_grpc(ledger: Ledger, channel: grpc.aio.Channel) -> None:
    model, first, second = ledger.begin()
    sent = sums_message(model, first, second).SerializeToString()
    call = channel.unary_unary(f"{SERVICE}ModelInfer")(sent, timeout=WAIT_S)
    if ledger.rng.random() < 0.1:
        await asyncio.sleep(ledger.rng.random() * 0.002)
        call.cancel()
        ledger.leave()
        return
    try:
        found, status = rows_of(MESSAGES.ModelInferResponse.FromString(await call)), 0
    except grpc.aio.AioRpcError as fault:
        found, status = None, fault.code().value[0]
    ledger.end("grpc", first, second, status, found)


def sums_message(model: str, first: Numbers, second: Numbers) -> Any:
    given = (("INPUT0", first), ("INPUT1", second))
    return message(model, *((name, "INT32", [1, COLUMNS], ints(*numbers)) for name, numbers in given))


async def ask_stream(ledger: Ledger, channel: grpc.aio.Channel) -> None:
    """Five requests in one stream, answered by their ids."""
    asked = {str(n): ledger.begin() for n in range(5)}

    async def requests() -> AsyncIterator[bytes]:
        for key, (model, first, second) in list(asked.items()):
            made = sums_message(model, first, second)
            made.id = key
            yield made.SerializeToString()

    call = channel.stream_stream(f"{SERVICE}ModelStreamInfer")(requests(), timeout=WAIT_S)
    left = ledger.rng.random() < 0.1
    async for data in call:
        response = MESSAGES.ModelStreamInferResponse.FromString(data)
        _, first, second = asked.pop(response.infer_response.id)
        found = None if response.error_message else rows_of(response.infer_response)
        ledger.end("stream", first, second, GONE[0], found)
        if left and len(asked) < 4:
            call.cancel()
            for _ in asked:
                ledger.leave()
            return
    assert not asked, "every request of a stream has its answer"


async def over_http(ledger: Ledger, ask: Callable[[Ledger, Line], Awaitable[None]], rounds: int) -> None:
    line = Line(ledger.served)
    for _ in range(rounds):
        await ask(ledger, line)
    line.close()


async def over_grpc(ledger: Ledger, ask: Any, rounds: int) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(ledger.served.grpc, options=options) as channel:
        for _ in range(rounds):
            await ask(ledger, channel)


async def kill_one(ledger: Ledger, after: int) -> None:
    """A worker, once so much was asked."""
    while ledger.asked < after:
        await asyncio.sleep(0.001)
    os.kill(ledger.rng.choice(ledger.served.workers), signal.SIGKILL)


async def storm(ledger: Ledger, region: Memory, rounds: int, kills: int) -> None:
    clients = [over_http(ledger, ask, rounds) for ask in (ask_json, ask_binary) * 3]
    clients += [over_http(ledger, asker_of_memory(region, n), rounds) for n in range(3)]
    clients += [over_grpc(ledger, ask_grpc, rounds) for _ in range(3)]
    clients += [over_grpc(ledger, ask_stream, rounds // 5) for _ in range(2)]
    total = rounds * len(clients)
    killers = [kill_one(ledger, (n + 1) * total // (kills + 2)) for n in range(kills)]
    await asyncio.gather(*clients, *killers)


def run_storm(served: Running, seed: int, rounds: int, kills: int) -> Ledger:
    ledger = Ledger(served, seed)
    with Http(served) as http, memory(http) as region:
        asyncio.run(asyncio.wait_for(storm(ledger, region, rounds, kills), 60 + rounds))
        # A worker that keeps dying is started again after longer and longer pauses.
        until(lambda: len(served.workers) == len(MODELS), "both workers are back", PAUSE_S)
        for model in MODELS:
            path = f"/v2/models/{model}/infer"
            until(lambda path=path: http.post(path, pair()).status == 200, f"{model} is back", PAUSE_S)
    assert ledger.asked == ledger.left + sum(ledger.ended.values())
    assert {"json", "binary", "memory", "grpc", "stream"} <= set(ledger.ended)
    return ledger


@pytest.mark.parametrize("kills", [0, 1])
def test_everybody_gets_their_own(server: Running, kills: int) -> None:
    ours, holds = Belongings.count(), server.holds()
    ledger = run_storm(server, seed=kills, rounds=60, kills=kills)
    gone = sum(count for kind, count in ledger.ended.items() if kind.endswith("gone"))
    assert gone <= kills * 20
    assert ledger.left > 20
    assert server.alive
    until(lambda: not ours.gained(), "the client gives everything back")
    server.settles(holds, errors=kills > 0)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(2, 12))
def test_everybody_gets_their_own_for_long(server: Running, seed: int) -> None:
    holds = server.holds()
    run_storm(server, seed, rounds=1000, kills=10)
    server.settles(holds, errors=True)
