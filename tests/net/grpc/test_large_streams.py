"""Large messages on several streams of one connection: each has its turn, whatever the others leave open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fastserve.net.access_control import Scope
from fastserve.net.grpc.method import Method
from fastserve.net.http2.flow_control import GROWTH_BYTES
from tests.net.grpc.peer import Peer, frame, send_all, serving
from tests.net.grpc.test_methods import run

LARGE = bytes(20 << 20)
PATH = "/t.T/Sizes"


async def sizes(requests: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield b"%d" % len(request)


METHOD = Method(PATH, bytes, sizes, bytes, takes_stream=True, gives_stream=True, scope=Scope.INFER)


async def send(peer: Peer, number: int, message: bytes) -> None:
    """A message, and its answer."""
    answer = peer.answers[number]
    have = len(answer.messages)
    await asyncio.wait_for(send_all(peer, number, frame(message)), 60)
    await peer.read(lambda: len(answer.messages) > have)
    assert answer.messages[-1] == b"%d" % len(message)


@pytest.mark.parametrize("streams", [2, 3])
def test_streams_that_stay_open_do_not_wait_for_each_other(streams: int) -> None:
    async def main() -> None:
        async with serving(METHOD, message_bytes=1 << 26) as (listener, peer):
            numbers = [peer.begin(PATH) for _ in range(streams)]
            for _ in range(2):
                for number in numbers:
                    await send(peer, number, LARGE)
            (connection,) = listener.listener.connections
            assert connection.growth._out == 0
            for number in numbers:
                peer.send(number, b"", ends=True)
                assert (await peer.finish(number)).status == (0, "")

    assert 2 * len(LARGE) > GROWTH_BYTES
    run(main())


def test_messages_that_wait_for_their_method_keep_no_window_from_the_next() -> None:
    """The second has begun when the first, which had the larger window, is taken: it asks anew."""
    may = asyncio.Event()

    async def slow(requests: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
        await may.wait()
        async for request in requests:
            yield b"%d" % len(request)

    method = Method("/t.T/Slow", bytes, slow, bytes, takes_stream=True, gives_stream=True, scope=Scope.INFER)

    async def main() -> None:
        async with serving(method, message_bytes=1 << 26) as (_, peer):
            number = peer.begin("/t.T/Slow")
            first, second = frame(LARGE), frame(LARGE[:-1])
            sending = asyncio.create_task(send_all(peer, number, first + second))
            await asyncio.sleep(0.1)
            may.set()
            await asyncio.wait_for(sending, 60)
            await peer.read(lambda: len(peer.answers[number].messages) == 2)
            assert peer.answers[number].messages == [b"%d" % len(LARGE), b"%d" % (len(LARGE) - 1)]

    run(main())
