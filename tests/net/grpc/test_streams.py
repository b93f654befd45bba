"""Streams of many small messages: what of them is an object at a time, and what a turn of the loop takes.

The clock of the share is the test's own: a message takes a millisecond, however fast the machine is.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2

from fastserve.errors import Kind
from fastserve.net import fair_queue
from fastserve.net.access_control import Scope
from fastserve.net.grpc import Method
from fastserve.net.grpc.calls import MOST_READ, Inbox
from fastserve.net.grpc.health import MOST_ASKED, reflection_methods
from fastserve.net.grpc.method import SMALL_BYTES
from tests.net.grpc.peer import Peer, frame, send_all, serving
from tests.net.grpc.test_methods import run

PATH = "/t.T/Count"
EMPTY = frame(b"")
A_TURN = 4  # messages: SHARE_S of the test's clock, and one more


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond passes each time it is asked."""
    ticks: Iterator[float] = itertools.count(1.0, 0.001)
    monkeypatch.setattr(fair_queue, "monotonic", lambda: next(ticks))


class Turns:
    """How many messages were taken in one turn of the loop, at most."""

    def __init__(self) -> None:
        self.taken = self.most = self._in_this_turn = 0

    def take(self) -> None:
        if not self._in_this_turn:
            asyncio.get_running_loop().call_soon(self._turn)
        self.taken += 1
        self._in_this_turn += 1

    def _turn(self) -> None:
        self.most, self._in_this_turn = max(self.most, self._in_this_turn), 0


def counting(turns: Turns) -> Method:
    async def count(requests: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            turns.take()
        yield b"%d" % turns.taken

    return Method(PATH, bytes, count, bytes, takes_stream=True, gives_stream=True, scope=Scope.INFER)


@pytest.mark.parametrize("streams", [1, 20])
@pytest.mark.usefixtures("clock")
def test_streams_of_empty_messages_give_the_loop_back(streams: int) -> None:
    """All streams of a listener share what a turn has for them."""
    turns, count = Turns(), 2000

    async def main() -> None:
        async with serving(counting(turns)) as (_, peer):
            numbers = [peer.begin(PATH) for _ in range(streams)]
            for number in numbers:
                peer.send(number, EMPTY * (count // streams), ends=True)
            for number in numbers:
                assert (await peer.finish(number)).status == (0, "")

    run(main())
    assert turns.taken == count
    assert turns.most <= A_TURN + fair_queue.AT_ONCE


def test_messages_that_nobody_takes_are_kept_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of them is 200,000 messages."""
    made: list[Inbox] = []
    begin = Inbox.__init__
    monkeypatch.setattr(Inbox, "__init__", lambda self, *given: made.append(self) or begin(self, *given))
    may = asyncio.Event()

    async def late(requests: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
        await may.wait()
        yield b"%d" % len([request async for request in requests])

    async def main() -> None:
        method = Method(
            "/t.T/Late", bytes, late, bytes, takes_stream=True, gives_stream=True, scope=Scope.INFER
        )
        async with serving(method) as (_, peer):
            number, other = peer.begin("/t.T/Late"), peer.begin("/t.T/Late")
            await send_all(peer, number, EMPTY * 20_000)
            peer.send(other, b"", ends=True)
            assert (await peer.ask("/t.T/Echo", frame(b"all has come"))).messages == [b"all has come"]
            assert len(made[0]._messages) == MOST_READ
            assert len(made[0]._rest) == (20_000 - MOST_READ) * len(EMPTY)
            may.set()
            peer.send(number, frame(b"a")[:3])
            peer.send(number, frame(b"a")[3:], ends=True)
            assert (await peer.finish(number)).messages == [b"20001"]

    run(main())


@pytest.mark.parametrize(
    ("wrong", "code"),
    [(frame(b"a", 2), Kind.INTERNAL), (frame(b"abc")[:-1], Kind.INTERNAL), (frame(b"1001"), None)],
)
def test_what_is_wrong_behind_many_messages_ends_the_call(wrong: bytes, code: Kind | None) -> None:
    """It is found when the method gets there."""

    async def main() -> None:
        async with serving(counting(Turns())) as (_, peer):
            number = peer.begin(PATH)
            peer.send(number, EMPTY * 3000 + wrong, ends=True)
            answer = await peer.finish(number)
            assert answer.status[0] == (0 if code is None else code.value)
            assert answer.messages == ([b"3001"] if code is None else [])

    run(main())


async def ask_reflection(peer: Peer, message: bytes, count: int) -> Any:
    number = peer.begin("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    await send_all(peer, number, frame(message) * count)
    if not peer.answers[number].ended:
        peer.send(number, b"", ends=True)
    return await peer.finish(number)


def test_reflection_answers_so_many_requests_of_a_stream() -> None:
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health")

    async def main() -> None:
        async with serving(*reflection_methods(["t.T"], [])) as (_, peer):
            one = await ask_reflection(peer, asked.SerializeToString(), 1)
            many = await ask_reflection(peer, asked.SerializeToString(), 100)
            assert many.messages == one.messages * 100
            flood = await ask_reflection(peer, b"", MOST_ASKED + 1)
            assert len(flood.messages) == MOST_ASKED
            assert flood.status[0] == Kind.RESOURCE_EXHAUSTED.value

    run(main())


async def length(request: bytes, rpc: Any) -> bytes:
    return b"%d" % len(request)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("scope", "own", "most"),
    [
        (Scope.HEALTH, 0, SMALL_BYTES),
        (Scope.METADATA, 0, SMALL_BYTES),
        (Scope.ADMIN, 0, SMALL_BYTES),
        (Scope.ADMIN, 1 << 62, 4 << 20),
        (Scope.INFER, 0, 4 << 20),
        (Scope.INFER, 60_000, 60_000),
    ],
)
def test_methods_without_tensors_take_small_messages(scope: Scope, own: int, most: int, packed: bool) -> None:
    """Their parser holds everybody up as long as a message is."""
    method = Method("/t.T/Length", bytes, length, bytes, scope=scope, most_bytes=own)

    async def ask(peer: Peer, size: int) -> Any:
        message = (random.Random(1).randbytes(20_000) * (size // 20_000 + 1))[:size]
        number = peer.begin("/t.T/Length", *([("grpc-encoding", "gzip")] if packed else []))
        if size > most and not packed:  # its length is enough
            peer.send(number, frame(message)[:5])
        else:
            await send_all(peer, number, frame(gzip.compress(message, 1), 1) if packed else frame(message))
            peer.send(number, b"", ends=True)
        return await peer.finish(number)

    async def main() -> None:
        async with serving(method, message_bytes=4 << 20) as (_, peer):
            assert (await ask(peer, most)).messages == [b"%d" % most]
            assert (await ask(peer, most + 1)).status[0] == Kind.RESOURCE_EXHAUSTED.value

    run(main())
