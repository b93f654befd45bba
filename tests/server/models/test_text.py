"""Streams of text through a whole server: several fronts, clients that hang up, processes that die."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import Client, Served, run, serving

SOURCE = """
import itertools

class Model:
    info = {"max_tokens": 1 << 20}

    def __init__(self, config):
        pass

    def generate(self, request):
        for token in itertools.count(len(request.ids)):
            yield token, f"{token} "
"""
CONFIG = """
backend: text_python
text: {tokenizer: words, max_new_tokens: 100000, max_tokens: 200000, reader_tokens: 64}
"""


def write(folder: Path) -> None:
    (folder / "m1" / "1").mkdir(parents=True)
    (folder / "m1" / "model.yaml").write_text(CONFIG)
    (folder / "m1" / "1" / "model.py").write_text(SOURCE)


def send(client: Client, first: int, count: int) -> None:
    """Ask for so many tokens, which count from `first`."""
    said = {
        "inputs": " ".join("x" * first),
        "stream": True,
        "parameters": {"max_new_tokens": count, "details": True},
    }
    body = json.dumps(said).encode()
    client.writer.write(
        b"POST /infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


async def event(client: Client) -> dict[str, Any]:
    """The next event; {} at the end of the stream. Whatever frames them, each is a line."""
    while True:
        line = await asyncio.wait_for(client.reader.readline(), 60)
        if line.startswith(b"data: "):
            found: dict[str, Any] = (
                json.loads(line[6:]) if line[6:7] == b"{" else {"error": line[6:].decode()}
            )
            return found
        if line in (b"", b"0\r\n"):
            return {}


async def tokens(client: Client, count: int) -> list[int]:
    return [(await event(client))["token"]["id"] for _ in range(count)]


async def whole(client: Client, first: int, count: int) -> None:
    send(client, first, count)
    assert await tokens(client, count) == list(range(first, first + count))
    assert await event(client) == {}
    await client.reader.readline()  # of the last chunk


async def streams(served: Served, client: Client) -> float:
    _, page = await client.get("/metrics")
    return sum(
        float(line.split()[-1])
        for line in page.decode().splitlines()
        if line.startswith(("fastserve_text_running{", "fastserve_text_waiting{"))
    )


def test_every_front_streams(tmp_path):
    write(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            clients = [(await connect_to_each(served, 2))[n % 2] for n in range(12)]
            await asyncio.gather(*(whole(client, n + 1, 300) for n, client in enumerate(clients)))
            assert await streams(served, clients[0]) == 0

    run(work())


@pytest.mark.logs_errors
def test_a_front_that_dies_takes_its_own_streams_alone(tmp_path):
    write(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            each = await connect_to_each(served, 2)
            kept, lost = each[0], each[1]
            for client in (kept, lost):
                send(client, 1, 5000)
                assert await tokens(client, 100) == list(range(1, 101))
            ring = next(iter(served.server.host.hosted.values())).queue.ring
            assert ring.outstanding() == 2
            (link,) = served.links
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            # The other may have run to its end meanwhile: what it wrote fits into its socket.
            await served.until(lambda: ring.outstanding() <= 1)
            assert await tokens(kept, 4900) == list(range(101, 5001))
            await served.until(lambda: link.pid not in (0, victim) and link._given and not link._waiting)
            again = await connect_to_each(served, 2)
            await asyncio.gather(*(whole(client, 3, 200) for client in again.values()))

    run(work())


@pytest.mark.logs_errors
def test_a_worker_that_dies_is_told_of_in_the_stream(tmp_path):
    write(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            client = await served.client()
            send(client, 1, 100_000)
            await tokens(client, 10)
            os.kill(served.pids[0], signal.SIGKILL)
            seen = [found := await event(client)]
            while "token" in found:
                seen.append(found := await event(client))
            assert "the worker process died" in str(found), seen[-3:]
            other = await served.client()
            await whole(other, 2, 50)

    run(work())


def test_clients_that_hang_up_at_any_token(tmp_path):
    write(tmp_path)
    rng = random.Random(7)

    async def one(served: Served, count: int) -> None:
        client = await served.client()
        send(client, 1, 100_000)
        await tokens(client, count)
        client.writer.transport.abort()

    async def work() -> None:
        async with serving(tmp_path) as served:
            staying = await served.client()
            send(staying, 5, 2000)
            for _ in range(10):
                await asyncio.gather(*(one(served, rng.choice([0, 0, 1, 3, 40])) for _ in range(20)))
            assert await tokens(staying, 2000) == list(range(5, 2005))
            ring = next(iter(served.server.host.hosted.values())).queue.ring
            await served.until(lambda: ring.outstanding() == 0)
            assert await streams(served, await served.client()) == 0

    run(work())


def test_a_client_that_does_not_read_stops_its_own_sequence(tmp_path):
    write(tmp_path)

    async def generated(client: Client) -> float:
        _, page = await client.get("/metrics")
        lines = page.decode().splitlines()
        return sum(float(n.split()[-1]) for n in lines if n.startswith("fastserve_text_tokens_total{"))

    async def work() -> None:
        async with serving(tmp_path) as served:
            # A window of its own: the kernel's would take in a whole answer.
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 12)
            slow, fast, asking = Client(reader, writer), await served.client(), await served.client()
            send(slow, 1, 100_000)
            before, rounds = -1.0, 0
            while (now := await generated(asking) - 2000 * rounds) == 0 or now != before:
                assert now < 100_000, "it ran through"
                before, rounds = now, rounds + 1
                await whole(fast, 1, 2000)  # a worker that does this does its steps too
            assert await tokens(slow, 2000) == list(range(1, 2001))
            writer.transport.abort()

    run(work())


DEMO = Path(__file__).parents[3] / "fastserve" / "demo" / "scribe" / "1"
ASKED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 100, "logprobs": 1},
    {"max_tokens": 90, "stop": [" other", "of the"], "temperature": 0},
    {"max_tokens": 60, "seed": 5, "temperature": 0.4, "presence_penalty": 0.2},
    {"max_tokens": 40, "guided_regex": "(ab|abc){4,9}"},
)


def test_answers_with_drafts_are_those_without(tmp_path):
    """Two models of the same weights, one of which drafts tokens by prompt look-up: whole and streamed."""
    for name, count in (("plain", 0), ("drafts", 6)):
        shutil.copytree(DEMO, tmp_path / name / "1")
        text = f"{{runtime: numpy, max_sequences: 8, prompt_lookup_num_tokens: {count}}}"
        (tmp_path / name / "model.yaml").write_text(f"backend: text\ntext: {text}\n")

    async def answer(served: Served, model: str, said: dict[str, Any]) -> tuple[Any, Any]:
        prompt = "the other side of the other side of the"
        asked = {"model": model, "prompt": prompt, "temperature": 0, **said}
        client = await served.client()
        status, page = await client.post("/v1/completions", json.dumps(asked).encode())
        assert status == 200, page
        whole = json.loads(page)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body := json.dumps(asked).encode()), body)
        )
        lines = (await asyncio.wait_for(client.reader.read(-1), 60)).split(b"\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        pieces = "".join(one["choices"][0]["text"] for one in events if one["choices"])
        assert pieces == whole["choices"][0]["text"]
        assert events[-1]["usage"] == whole["usage"]
        (choice,) = whole["choices"]
        own = choice.pop("logprobs") or {"tokens": [], "token_logprobs": []}
        return (choice, whole["usage"], own["tokens"]), own["token_logprobs"]

    async def work() -> None:
        async with serving(tmp_path) as served:
            pairs = [
                await asyncio.gather(*(answer(served, model, said) for said in ASKED))
                for model in ("plain", "drafts")
            ]
            for (plain, numbers), (drafted, others) in zip(*pairs, strict=True):
                assert drafted == plain
                assert others == pytest.approx(numbers, abs=1e-3)
            client = await served.client()
            drafted = accepted = 0.0
            while not accepted:
                _, page = await client.get("/metrics")
                lines = dict(line.rsplit(" ", 1) for line in page.decode().splitlines() if line[:1] != "#")
                drafted, accepted = (
                    float(lines.get(f'fastserve_text_{name}_tokens_total{{model="drafts",version="1"}}', 0))
                    for name in ("drafted", "accepted")
                )
            assert drafted >= accepted
            assert not any("drafted" in line and '"plain"' in line for line in lines)

    run(work())
