"""A million requests of clients with API keys behind three front processes, while fronts and workers are
killed, the file of keys changes all the time, a key floods far over its limits, and strangers try.

No request is lost, crossed with another's or failed; no stranger is let in; memory does not grow.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import uvloop

from fastserve.protos import load
from fastserve.settings.key_file import changing, make_key
from tests.running import Running, until
from tests.server.rig import write_model
from tests.torture.test_front_kills import fronts_of

# `lingers`: grpcio keeps its poller's thread and pipe
pytestmark = [pytest.mark.torture, pytest.mark.lingers, pytest.mark.timeout(3000)]
REQUESTS = 1_000_000
CLIENTS, FLOODERS, RPC_CLIENTS, STRANGERS, FRONTS = 32, 8, 4, 4, 3
DEPTH = 16  # requests of a connection that are under way: limits.pipelined_calls
FLOOD_RATE, FLOOD_CONCURRENCY = 100.0, 4
KILL_S, TURN_S = 5.0, 2.0
SETTLED_S = 1.5
"""Seconds after a change of the file of keys from which each front process holds to it: many `keys_poll_s`,
since a front that has just been started and one that got no processor are among them."""
POLL_S = "0.1"
ANSWER_S = 60.0
GROWTH_BYTES = 64 << 20

Head = dict[str, str]


class Keys:
    """The file of keys. One key is a new one every TURN_S; the one before is revoked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.good = self.add("good", "infer", "metadata")
        self.one_model = self.add("one-model", "infer", models=("other",))
        self.reader = self.add("reader", "metadata")
        flood = {"requests_per_second": FLOOD_RATE, "concurrency": FLOOD_CONCURRENCY}
        self.flood = self.add("flood", "infer", **flood)
        self.turning = self.add("turn-0", "infer")
        self.revoked = ""
        self.turns = 0

    def add(self, name: str, *scopes: Any, **limits: Any) -> str:
        with changing(self.path) as entries:
            text, entry = make_key(name, scopes, **limits)
            entries.append(entry)
        return text

    def revoke(self, name: str) -> None:
        with changing(self.path) as entries:
            entries[:] = [entry for entry in entries if entry.name != name]

    async def turn(self, over: asyncio.Event) -> None:
        """Rotate as an operator does: add, hand out, wait for those who still use the old one, revoke."""
        while not over.is_set():
            self.turns += 1
            new = self.add(f"turn-{self.turns}", "infer")
            await asyncio.sleep(SETTLED_S)
            old, self.turning = self.turning, new
            await asyncio.sleep(TURN_S)
            self.revoke(f"turn-{self.turns - 1}")
            await asyncio.sleep(SETTLED_S)
            self.revoked = old


class Report:
    """What the clients have seen."""

    def __init__(self) -> None:
        self.answers = 0
        self.by_status: dict[str, Counter[int]] = {kind: Counter() for kind in ("good", "flood", "stranger")}
        self.wrong: list[str] = []
        self.connections_lost = 0
        self.over = asyncio.Event()

    def count(self, kind: str, status: int) -> None:
        self.by_status[kind][status] += 1
        if kind == "good":
            self.answers += 1
            if self.answers >= REQUESTS:
                self.over.set()


def write_request(key: str, number: int, model: str = "twice") -> bytes:
    body = b'{"instances": [[%d, %d]]}' % (number, number + 1)
    head = f"POST /v1/models/{model}:predict HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    return f"{head}authorization: Bearer {key}\r\n\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


def is_right(body: bytes, number: int) -> bool:
    return bool(json.loads(body) == {"predictions": [[2.0 * number, 2.0 * number + 2]]})


async def ask(
    address: tuple[str, int], keys: Keys, report: Report, kind: str, numbers: Iterator[int]
) -> None:
    """One client: DEPTH requests at a time, again over a new connection when its front was killed."""
    waiting: list[int] = []
    while not report.over.is_set():
        try:
            reader, writer = await asyncio.open_connection(*address)
        except ConnectionError:  # it was in the queue of a front that was killed
            report.connections_lost += 1
            continue
        with closing(writer):
            try:
                while not report.over.is_set():
                    waiting = waiting or list(itertools.islice(numbers, DEPTH))
                    key = keys.flood if kind == "flood" else random.choice((keys.good, keys.turning))
                    writer.write(b"".join(write_request(key, number) for number in waiting))
                    while waiting:
                        status, body = await asyncio.wait_for(read_answer(reader), ANSWER_S)
                        number = waiting.pop(0)
                        report.count(kind, status)
                        if status == 200 and not is_right(body, number):
                            report.wrong.append(f"{number}: {body!r}")
                        elif status != 200 and (kind, status) != ("flood", 429):
                            report.wrong.append(f"{kind}: {status} {body!r}")
            except (ConnectionError, asyncio.IncompleteReadError):
                report.connections_lost += 1


async def call(address: str, keys: Keys, report: Report, numbers: Iterator[int]) -> None:
    """One client of V2 over gRPC, whose channel connects again by itself."""
    kserve = load("kserve_v2")
    while not report.over.is_set():
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=kserve.ModelInferRequest.SerializeToString,
                response_deserializer=kserve.ModelInferResponse.FromString,
            )
            while not report.over.is_set():
                number = next(numbers)
                request = kserve.ModelInferRequest(model_name="twice")
                request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
                request.raw_input_contents.append(np.array([number, number + 1], np.float32).tobytes())
                metadata = (("authorization", f"Bearer {random.choice((keys.good, keys.turning))}"),)
                try:
                    reply = await method(request, metadata=metadata, timeout=ANSWER_S)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        report.wrong.append(f"gRPC: {error.code()} {error.details()}")
                    report.connections_lost += 1
                    break
                report.count("good", 200)
                values = np.frombuffer(reply.raw_output_contents[0], np.float32).tolist()
                if values != [2.0 * number, 2.0 * number + 2]:
                    report.wrong.append(f"gRPC: {number}: {values}")


async def intrude(address: tuple[str, int], keys: Keys, report: Report) -> None:
    """A stranger with each kind of key that is not good for this model."""
    forged = "fs_" + "0" * 12 + "_" + "A" * 43
    while not report.over.is_set():
        kinds = [
            ("", 401),
            (forged, 401),
            (keys.good[:-1] + "_", 401),
            (keys.one_model, 403),
            (keys.reader, 403),
        ]
        key, expected = random.choice([*kinds, *([(keys.revoked, 401)] if keys.revoked else [])])
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*address)
            with closing(writer):
                writer.write(write_request(key, 1))
                status, body = await asyncio.wait_for(read_answer(reader), ANSWER_S)
            report.count("stranger", status)
            if status != expected:
                report.wrong.append(f"stranger, {expected} expected: {status} {body!r}")


async def kill(served: Running, report: Report) -> Counter[str]:
    """Kill a front process and a worker in turn."""
    kills: Counter[str] = Counter()
    while not report.over.is_set():
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(report.over.wait(), KILL_S)
        fronts = set(fronts_of(served))
        kind = "front" if kills["front"] <= kills["worker"] else "worker"
        found = fronts if kind == "front" else workers_of(served) - fronts
        if found:
            os.kill(random.choice(sorted(found)), signal.SIGKILL)
            kills[kind] += 1
    return kills


def workers_of(served: Running) -> set[int]:
    """The processes that run a model: their arena is mapped, and no socket listens."""
    found = set()
    for pid in served.workers:
        with suppress(OSError):
            if "fastserve-arena" in Path(f"/proc/{pid}/maps").read_text():
                found.add(pid)
    return found


def test_a_million_requests_with_keys(tmp_path: Path) -> None:
    """The bar of keys under load: 0 lost, 0 crossed, 0 let in."""
    (tmp_path / "models").mkdir()
    for name in ("twice", "other"):
        write_model(tmp_path / "models", name, instances=2, max_batch_size=64)
    keys = Keys(tmp_path / "keys.yaml")
    options = ("--frontends", str(FRONTS), "--keys", str(keys.path), "--keys-poll-s", POLL_S)
    with Running(tmp_path / "models", tmp_path / "log", *options) as served:
        until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is there")
        host, _, port = served.http.rpartition(":")
        address = (host, int(port))

        async def work() -> tuple[Counter[str], Report, list[int]]:
            report, numbers = Report(), itertools.cycle(range(1 << 20))
            memory: list[int] = []

            async def watch_memory() -> None:
                for part in (0.25, 1.0):
                    while report.answers < part * REQUESTS and not report.over.is_set():
                        await asyncio.sleep(0.1)
                    memory.append(served.rss_bytes)

            clients = [ask(address, keys, report, "good", numbers) for _ in range(CLIENTS)]
            clients += [ask(address, keys, report, "flood", numbers) for _ in range(FLOODERS)]
            clients += [call(served.grpc, keys, report, numbers) for _ in range(RPC_CLIENTS)]
            clients += [intrude(address, keys, report) for _ in range(STRANGERS)]
            turning = asyncio.ensure_future(keys.turn(report.over))
            kills, *_ = await asyncio.gather(kill(served, report), watch_memory(), turning, *clients)
            return kills, report, memory

        kills, report, memory = uvloop.run(work())
        print(
            f"kills {dict(kills)}, {keys.turns} changes of keys, {report.connections_lost} connections lost"
        )
        print({kind: dict(counts) for kind, counts in report.by_status.items()}, f"memory {memory}")
        assert not report.wrong, report.wrong[:5]
        assert report.by_status["good"] == {200: report.answers}
        assert set(report.by_status["flood"]) == {200, 429}
        assert set(report.by_status["stranger"]) == {401, 403}
        assert kills["front"] >= 5
        assert kills["worker"] >= 5
        assert keys.turns >= 5
        assert memory[-1] - memory[0] < GROWTH_BYTES
        with socket.create_connection(address) as last:
            last.sendall(write_request(keys.good, 7))
            assert last.recv(4096).startswith(b"HTTP/1.1 200")
