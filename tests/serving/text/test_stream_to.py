"""Streams of tokens poured into replies: over sockets, with clients that read, wait, or leave."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fastserve._ext.text_tokens import ByteText, Flow, Flowing, pass_on
from fastserve.codec.generation import Finish
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, ReplyStream
from fastserve.net.router import Route
from fastserve.serving.dialect import Dialect
from fastserve.serving.text import (
    Ending,
    EventTemplate,
    Info,
    Placeholder,
    Sampling,
    TextAsk,
    TextModels,
    Token,
    stream_to,
)
from tests.text_rig import LocalEngine, Scripted, listening

PLENTY = Info(vocab_size=9, tokenizer="words", max_tokens=1 << 30, max_new_tokens=1 << 30)


def write(tokens: list[Token]) -> bytes:
    return b"".join(b"%d:%b\n" % (token.index, token.text.encode()) for token in tokens)


class Poured(Dialect):
    """Answers every call with so many tokens."""

    def __init__(
        self,
        texts: TextModels,
        count: int,
        write: Callable[[list[Token]], bytes],
        frames: EventTemplate | None = None,
    ) -> None:
        self._texts, self._count, self._write, self._frames = texts, count, write, frames
        self.endings: list[Ending] = []

    def route(self, method: str, target: str) -> Route:
        return Route(self._answer, Scope.INFER)

    async def _answer(self, call: Call) -> None:
        ask = TextAsk(prompt=[1], sampling=Sampling(max_new_tokens=self._count))
        async with await self._texts.find("").start(ask) as stream:
            reply = call.stream(200, b"text/plain")
            self.endings.append(await stream_to(stream, reply, self._write, self._frames))
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
    frames: EventTemplate | None = None,
    **place: Any,
) -> None:
    async def whole() -> None:
        with LocalEngine() as engine:
            engine.add("m1", Scripted(script, info=PLENTY), **place)
            dialect = Poured(TextModels(engine.context), count, write, frames)
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
    large = EventTemplate((Placeholder.NUMBER, b"x" * 10_000 + b"\n"))

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
    def broken(stream: ReplyStream, data: bytes) -> None:
        if data.startswith(b"20:"):
            raise ZeroDivisionError
        plain(stream, data)

    plain = ReplyStream.send
    monkeypatch.setattr(ReplyStream, "send", broken)
    frames = EventTemplate((Placeholder.NUMBER, b":"))

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


class Bare:
    """A reply that keeps what it is sent; `trouble` is what asking it raises."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.trouble: Exception | None = None
        self.reads, self.told = True, asyncio.Event()

    @property
    def ready(self) -> bool:
        if self.trouble is not None:
            raise self.trouble
        return self.reads

    async def wait(self) -> None:
        await self.told.wait()

    def send(self, data: bytes) -> None:
        self.sent.append(data)


def test_whoever_lets_go_of_what_flowed_ends_it() -> None:
    """At once: the engine holds a stream weakly, and so does what flowed of it, without a collection."""

    async def work() -> None:
        with LocalEngine() as engine:
            engine.add("m1", Scripted([(1, None)], info=PLENTY))
            stream = (
                await TextModels(engine.context)
                .find("")
                .start(TextAsk(prompt=[1], sampling=Sampling(max_new_tokens=1 << 29)))
            )
            reply, frames = Bare(), EventTemplate((Placeholder.NUMBER, b" "))
            writer = asyncio.create_task(stream_to(stream, reply, frames.write, frames))
            while len(reply.sent) < 9:
                await asyncio.sleep(0.001)
            taken_ns = stream.taken_ns
            stream.end_pass_through()
            assert stream.taken_ns == taken_ns  # of what flowed, though it does no more
            writer.cancel()
            await asyncio.wait([writer])
            del writer, stream
            await asyncio.wait_for(engine.idle(), 60)

    gc.disable()
    try:
        asyncio.run(work())
    finally:
        gc.enable()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_trouble_of_one_of_a_step_is_not_that_of_others(broken: int) -> None:
    """Records of the same step for others are passed on, whatever a reply raises when it is asked."""
    run_of: list[Flowing] = []
    replies, faults = [Bare() for _ in range(3)], list[Exception]()
    frames = EventTemplate((Placeholder.ID, b" "))

    class Reader:
        def taken(self, slot: int, count: int) -> None:
            took.append((slot, count))

    took: list[tuple[int, int]] = []
    for slot, reply in enumerate(replies):
        one = Flowing()
        flow = Flow(ByteText({7: "a"}, str), frozenset(), Finish.NONE, [], [], frames, reply, faults.append)
        one.slot, one.held, one.begun, one.ended, flow.open = slot, 3, True, False, True
        one.flow = flow
        run_of.append(one)
    replies[broken].trouble = ZeroDivisionError()
    gaps: list[int] = []
    left = pass_on([(one, [(7, 0, 5, b"")]) for one in run_of], Reader(), gaps, 1)
    assert [reply.sent for reply in replies] == [[] if at == broken else [b"7 "] for at in range(3)]
    assert (left, len(faults), gaps, [slot for slot, _ in took]) == ([], 1, [5] * 3, [0, 1, 2])
    assert [one.held for one in run_of] == [4] * 3
    flow = run_of[broken].flow
    assert flow is not None
    assert not flow.open


def test_nothing_flows_past_what_waits_for_a_client_that_stood_still() -> None:
    """It reads again a moment before whoever pours hears of it: what comes meanwhile comes after the rest."""

    async def work() -> None:
        with LocalEngine() as engine:
            engine.add("m1", Scripted([(1, None)], info=PLENTY), reader_tokens=1000)
            ask = TextAsk(prompt=[1], sampling=Sampling(max_new_tokens=100_000))
            reply, frames = Bare(), EventTemplate((Placeholder.NUMBER, b" "))
            async with await TextModels(engine.context).find("").start(ask) as stream:
                writer = asyncio.create_task(stream_to(stream, reply, frames.write, frames))
                for count in (9, 90, 190):
                    while len(b"".join(reply.sent).split()) < count:
                        await asyncio.sleep(0.001)
                    reply.reads = False
                    heard = stream.taken_ns
                    while stream.taken_ns == heard or not stream.has_news:
                        await asyncio.sleep(0.001)
                    reply.reads, heard = True, stream.taken_ns
                    while stream.taken_ns == heard:
                        await asyncio.sleep(0.001)
                    reply.told.set()
                    await asyncio.sleep(0)
                    reply.told.clear()
                while len(b"".join(reply.sent).split()) < 300:
                    await asyncio.sleep(0.001)
                writer.cancel()
                await asyncio.wait([writer])
            numbers = [int(word) for word in b"".join(reply.sent).split()]
            assert numbers == list(range(1, len(numbers) + 1))
            await engine.idle()

    asyncio.run(asyncio.wait_for(work(), 120))
