"""How long connections of gRPC live, on both transports: age, its grace, idleness."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import h2.errors
import pytest
from hyperframe.frame import Frame, GoAwayFrame, SettingsFrame

from fastserve.net.access_control import Scope
from fastserve.net.grpc import Method, Rpc
from tests.net.grpc.peer import frame
from tests.net.grpc.peer import serving as peer_serving
from tests.net.grpc.test_methods import serving
from tests.net.http2.kit import PREFACE
from tests.net.kit import WAIT_S, run

pytestmark = [pytest.mark.lingers, pytest.mark.waits]  # grpcio keeps its poller's thread and pipe


async def wait(request: bytes, rpc: Rpc) -> bytes:
    await asyncio.sleep(float(request))
    return request


WAIT = Method("/t.T/Wait", bytes, wait, bytes, scope=Scope.INFER)


def test_an_old_connection_is_told_and_its_calls_are_finished() -> None:
    async def main() -> None:
        async with serving(WAIT, max_connection_age_s=0.3) as (_, channel):
            long = asyncio.ensure_future(channel.unary_unary("/t.T/Wait")(b"3"))
            answered = 0
            while not long.done():  # the channel connects anew whenever it is told
                assert await channel.unary_unary("/t.T/Echo")(b"x", wait_for_ready=True) == b"x"
                answered += 1
                await asyncio.sleep(0.01)
            assert await long == b"3"
            assert answered > 1

    run(main())


def test_an_old_connection_says_goodbye() -> None:
    """Frames by hand: h2 takes a PING behind GOAWAY for a fault."""

    async def main() -> None:
        async with peer_serving(max_connection_age_s=0.3) as (listener, _):
            reader, writer = await asyncio.open_connection(*listener.address)
            writer.write(PREFACE + SettingsFrame(0).serialize() + SettingsFrame(0, flags=["ACK"]).serialize())
            while True:
                head = await asyncio.wait_for(reader.readexactly(9), WAIT_S)
                kind, size = Frame.parse_frame_header(memoryview(head))
                kind.parse_body(memoryview(await reader.readexactly(size)))
                if isinstance(kind, GoAwayFrame):
                    break
            assert kind.error_code == h2.errors.ErrorCodes.NO_ERROR
            writer.close()

    run(main())


def test_what_is_left_after_the_grace_is_cut_off() -> None:
    async def main() -> None:
        ages = {"max_connection_age_s": 0.3, "max_connection_age_grace_s": 0.5}
        async with serving(WAIT, **ages) as (_, channel):
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as fault:
                await channel.unary_unary("/t.T/Wait")(b"50", timeout=40)
            assert fault.value.code() == grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began < 30

    run(main())


def test_an_idle_connection_says_goodbye_and_a_busy_one_does_not() -> None:
    async def main() -> None:
        async with peer_serving(WAIT, max_connection_idle_s=2) as (_, peer):
            assert (await peer.ask("/t.T/Wait", frame(b"4"))).messages == [b"4"]
            assert peer.goodbye is None
            await peer.read(lambda: peer.goodbye is not None)
            assert peer.goodbye is not None
            assert peer.goodbye.error_code == h2.errors.ErrorCodes.NO_ERROR

    run(main())


def test_nothing_ends_by_itself_without_a_limit() -> None:
    async def main() -> None:
        async with peer_serving() as (_, peer):
            assert (await peer.ask("/t.T/Echo", frame(b"x"))).messages == [b"x"]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(peer.read(lambda: peer.goodbye is not None), 1.5)
            assert (await peer.ask("/t.T/Echo", frame(b"y"))).messages == [b"y"]

    run(main())
