"""A client that sends its requests and shuts down its writing side gets its replies, and is let go of after
them. One that is gone altogether is noticed all the same: test_flow.py holds that for calls, here it is
held for what the two have in common, a FIN in the middle of things."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from fastserve.net import Call
from fastserve.net.half_closed import send_fin
from fastserve.net.http1.large_bodies import BULK_BYTES
from tests.net.kit import WAIT_S, Client, Held, client, echo, read_replies, run, serving, until

GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
HELD = GET.replace(b"/echo", b"/held")
STREAM = GET.replace(b"/echo", b"/stream")
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
LARGE = b"POST /held HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (4 * BULK_BYTES)


async def rest(peer: Client) -> list[tuple[int, bytes]]:
    return [(reply.status, reply.body) for reply in read_replies(await peer.rest())]


@pytest.mark.parametrize("size", [0, 10_000_000])
def test_the_replies_to_everything_sent_come_in_order_and_then_the_end(size: int) -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held, "/echo": echo}) as listener, client(listener) as peer:
            peer.send(HELD + POST + HELD)
            peer.writer.write_eof()
            await until(lambda: len(held.calls) == 2 and all(c._half for c in listener.connections))
            held.calls[1].reply(200, b"2")
            held.calls[0].reply(200, b"1" * size)
            assert await rest(peer) == [(200, b"1" * size), (200, b"POST /echo hello"), (200, b"2")]
            await until(lambda: not listener.connections)
            assert held.left == []
            assert listener.refusals == {}

    run(main())


def test_the_eof_may_come_behind_a_reply_or_before_anything() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener:
            for data, replies in (
                (b"", []),
                (GET, [(200, b"GET /echo ")]),
                (GET + b"\r\n", [(200, b"GET /echo ")]),
            ):
                async with client(listener) as peer:
                    peer.send(data)
                    peer.writer.write_eof()
                    assert await rest(peer) == replies
            assert listener.refusals == {}

    run(main())


def test_more_requests_than_are_parsed_ahead() -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener, client(listener) as peer:
            peer.send(HELD * 100)
            peer.writer.write_eof()
            await until(lambda: len(held.calls) == 16)
            for number, call in enumerate(held.calls):  # grows while it is walked
                call.reply(200, b"%d" % number)
            assert await rest(peer) == [(200, b"%d" % number) for number in range(100)]

    run(main())


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_stream_goes_on_to_its_end(version: bytes) -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def endpoint(call: Call) -> None:
            stream = call.stream(200, b"text/plain")
            await stream.write(b"one ")
            await go.wait()
            await stream.write(b"two ")
            await stream.write(bytes(300))
            await stream.close()

        async with serving({"/stream": endpoint}) as listener, client(listener) as peer:
            peer.send(STREAM.replace(b"HTTP/1.1", version))
            peer.writer.write_eof()
            await until(lambda: any(c._half for c in listener.connections))
            go.set()
            assert (await peer.reply()).body == b"one two " + bytes(300)
            assert await peer.rest() == b""

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_whose_client_has_gone_is_cancelled_before_its_next_piece(begun: bool) -> None:
    async def main() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def endpoint(call: Call) -> None:
            stream = call.stream(200, b"text/plain")
            if begun:
                await stream.write(b"one ")
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with serving({"/stream": endpoint}) as listener, client(listener) as peer:
            peer.send(STREAM)
            await asyncio.wait_for(started.wait(), WAIT_S)
            if begun:
                await peer.reader.readuntil(b"one ")
            peer.close()
            await asyncio.wait_for(cancelled.wait(), WAIT_S)
            await until(lambda: not listener.connections)

    run(main())


CUT = {
    "head": b"GET /echo HTTP/1.1\r\nHo",
    "body": POST[:-1],
    "large body": LARGE + bytes(100),
    "most of a large body": LARGE + bytes(3 * BULK_BYTES),
    "chunk": b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
    "last chunk": b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
    "continue": POST[:-9].replace(b"Content", b"Expect: 100-continue\r\nContent"),
}


@pytest.mark.parametrize("before", [b"", HELD])
@pytest.mark.parametrize("name", CUT)
def test_a_request_that_is_cut_off_is_told_so_and_never_begins(name: str, before: bytes) -> None:
    async def main() -> None:
        held = Held()
        begun: list[Call] = []
        async with serving({"/held": held, "/echo": begun.append}) as listener, client(listener) as peer:
            peer.send(before + CUT[name])
            peer.writer.write_eof()
            if before:
                await until(lambda: listener.refusals)
                held.calls[0].reply(200, b"first")
                assert (await peer.reply()).body == b"first"
            reply = await peer.reply()
            assert (reply.status, reply.closes) == (400, True)
            assert await peer.rest() == b""
            assert listener.refusals == {"cut_off": 1}
            assert (begun, len(held.calls)) == ([], 1 if before else 0)

    run(main())


def test_a_client_that_reads_slowly_still_gets_all_of_it() -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener, client(listener, receive_bytes=4096) as peer:
            peer.writer.transport.pause_reading()
            peer.send(HELD * 3)
            peer.writer.write_eof()
            await until(lambda: len(held.calls) == 3 and all(c._half for c in listener.connections))
            for call in held.calls:
                call.reply(200, bytes(3_000_000))
            await until(lambda: any(c._choked for c in listener.connections))
            peer.writer.transport.resume_reading()
            assert await rest(peer) == [(200, bytes(3_000_000))] * 3

    run(main())


def test_fin_to_a_client_that_has_reset_raises_on_no_loop() -> None:
    """asyncio's own loop raises ENOTCONN from write_eof, uvloop does not."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            peer = socket.create_connection(listening.getsockname(), WAIT_S)
            accepted, _ = listening.accept()
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, accepted)
        transport.pause_reading()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        send_fin(transport)
        transport.abort()
        await asyncio.sleep(0)

    asyncio.run(main())
