"""Streams of tokens poured into replies: over sockets, with clients that read, wait, or leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fastserve.serving.dialect import Dialect
from fastserve.serving.text import Ending, Frames, Hole, Info, Sampling, TextAsk, Texts, Token, pour
from fastserve.wire.call import Call
from fastserve.wire.dialect import Route
from fastserve.wire.scope import Scope
from fastserve.wire.stream import Stream
from tests.text_rig import LocalEngine, Scripted, listening

PLENTY = Info(vocab_size=9, tokenizer="words", max_tokens=1 << 30, max_new_tokens=1 << 30)


def write(tokens: list[Token]) -> bytes:
    return b"".join(b"%d:%b\n" % (token.index, token.text.encode()) for token in tokens)


class Poured(Dialect):
    """Answers every call with so many tokens."""

    def __init__(
        self, texts: Texts, count: int, write: Callable[[list[Token]], bytes], frames: Frames | None = None
    ) -> None:
        self._texts, self._count, self._write, self._frames = texts, count, write, frames
        self.endings: list[Ending] = []

    def route(self, method: str, target: str) -> Route:
        return Route(self._answer, Scope.INFER)

    async def _answer(self, call: Call) -> None:
        ask = TextAsk(prompt=[1], sampling=Sampling(max_new_tokens=self._count))
        async with await self._texts.find("").start(ask) as stream:
            reply = call.stream(200, b"text/plain")
            self.endings.append(await pour(stream, reply, self._write, self._frames))
            await reply.close()


async def ask_of(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(b"GET / HTTP/1.0\r\nHost: t\r\n\r\n")
    return reader, writer


def run(
    work: Callable[[LocalEngine, Poured, int], Awaitable[None]],
    count: int,
    script: Any,
    write: Callable[[list[Token]], bytes] = write,
    frames: Frames | None = None,
    **place: Any,
) -> None:
    async def whole() -> None:
        with LocalEngine() as engine:
            engine.add("m1", Scripted(script, info=PLENTY), **place)
            dialect = Poured(Texts(engine.context), count, write, frames)
            async with listening(dialect) as port:
                await asyncio.wait_for(work(engine, dialect, port), 30)
            await engine.idle()

    asyncio.run(whole())


@pytest.mark.parametrize("steps", [1, 5])
def test_every_token_is_written_once_in_order(steps: int) -> None:
    async def work(engine: LocalEngine, dialect: Poured, port: int) -> None:
        reader, writer = await ask_of(port)
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        assert body == b"".join(b"%d:ab\n" % i for i in range(300))
        assert dialect.endings[0].generated == 300

    run(work, 300, [(1, "ab")], steps=steps)


def test_a_client_that_does_not_read_holds_the_engine_up_and_gets_everything_later() -> None:
    async def work(engine: LocalEngine, dialect: Poured, port: int) -> None:
        reader, writer = await ask_of(port)
        loop = next(iter(engine.loops.values()))
        while not (loop.runs and all(not loop.room(rid) for rid in loop.runs)):
            await asyncio.sleep(0.002)
        assert next(iter(loop.runs.values())).behind == 16
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        assert len(body.splitlines()) == 2000

    run(work, 2000, [(1, "x" * 10_000)], reader_tokens=16)


def test_what_flows_waits_for_its_client_too_and_stays_in_order() -> None:
    large = Frames((Hole.NUMBER, b"x" * 10_000 + b"\n"))

    async def work(engine: LocalEngine, dialect: Poured, port: int) -> None:
        reader, writer = await ask_of(port)
        loop = next(iter(engine.loops.values()))
        while not (loop.runs and all(not loop.room(rid) for rid in loop.runs)):
            await asyncio.sleep(0.002)
        body = b""
        while len(body) < 5_000_000:  # it goes on, stops again, and goes on
            body += await reader.read(1 << 20)
        while not all(not loop.room(rid) for rid in loop.runs):
            await asyncio.sleep(0.002)
        lines = (body + await reader.read()).partition(b"\r\n\r\n")[2].splitlines()
        writer.close()
        assert [int(line.rstrip(b"x")) for line in lines] == list(range(1, 3001))

    run(work, 3000, [(1, None)], large.write, large, reader_tokens=16, steps=3)


@pytest.mark.logs_errors
def test_what_a_reply_raises_ends_what_flows_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stream: Stream, data: bytes) -> None:
        if data.startswith(b"20:"):
            raise ZeroDivisionError
        plain(stream, data)

    plain = Stream.send
    monkeypatch.setattr(Stream, "send", broken)
    frames = Frames((Hole.NUMBER, b":"))

    async def work(engine: LocalEngine, dialect: Poured, port: int) -> None:
        reader, writer = await ask_of(port)
        assert (await reader.read()).endswith(b":19:")
        writer.close()
        await engine.idle()
        assert dialect.endings == []

    run(work, 1 << 29, [(1, None)], frames.write, frames)


def test_a_client_that_leaves_cancels() -> None:
    async def work(engine: LocalEngine, dialect: Poured, port: int) -> None:
        _, writer = await ask_of(port)
        writer.transport.abort()
        await engine.idle()

    run(work, 1 << 29, [(1, "x")])


@pytest.mark.logs_errors
def test_what_writing_raises_ends_the_call_and_the_sequence() -> None:
    def broken(tokens: list[Token]) -> bytes:
        raise ZeroDivisionError

    async def work(engine: LocalEngine, dialect: Poured, port: int) -> None:
        reader, writer = await ask_of(port)
        assert b"5:" not in await reader.read()
        writer.close()
        await engine.idle()
        assert dialect.endings == []

    run(work, 1 << 29, [(1, "x")], broken)
