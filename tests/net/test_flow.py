"""Queues and endings: pipelining bounds, clients that leave, the connection cap, drain, streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time

import pytest

from fastserve.net import Call
from tests.net.kit import WAIT_S, Clock, Held, Pipe, client, echo, limits, run, serving, until

HELD = b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n"
GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"


def test_at_most_so_many_calls_are_parsed_ahead() -> None:
    held = Held()
    pipe = Pipe({"/held": held})
    pipe.feed(HELD * 100)
    assert len(held.calls) == 16
    assert not pipe.reading
    held.calls[1].reply(200)  # not its turn: nothing moves
    assert len(held.calls) == 16
    held.calls[0].reply(200)
    assert len(held.calls) == 18
    for call in held.calls:  # grows while it is walked
        if not call._replied:
            call.reply(200)
    assert len(held.calls) == 100
    assert [r.status for r in pipe.replies()] == [200] * 100
    assert pipe.reading


def test_large_bodies_are_not_gathered_in_the_queue() -> None:
    held = Held()
    pipe = Pipe({"/held": held})
    post = b"POST /held HTTP/1.1\r\nHost: a\r\nContent-Length: 700000\r\n\r\n" + bytes(700000)
    pipe.feed(post * 4)
    assert len(held.calls) == 2
    assert not pipe.reading
    held.calls[0].reply(200)
    assert len(held.calls) == 3


def test_a_hundred_thousand_pipelined_requests_unread() -> None:
    async def main() -> None:
        seen = 0

        def endpoint(call: Call) -> None:
            nonlocal seen
            seen += 1
            call.reply(200, bytes(1000))

        async with serving({"/held": endpoint}) as listener, client(listener, receive_bytes=4096) as peer:
            peer.writer.transport.pause_reading()
            peer.send(HELD * 100_000)
            await until(lambda: any(c._paused for c in listener.connections))
            (connection,) = listener.connections
            assert connection._transport.get_write_buffer_size() < 1 << 20
            assert len(connection._buffer) < 1 << 20
            assert seen < 100_000
            peer.writer.transport.abort()
            await until(lambda: not listener.connections)

    run(main())


def test_a_reader_that_starts_again_gets_everything() -> None:
    async def main() -> None:
        async with (
            serving({"/held": lambda call: call.reply(200, bytes(10000))}) as listener,
            client(listener, receive_bytes=4096) as peer,
        ):
            peer.send(HELD * 500)
            await until(lambda: any(c._paused for c in listener.connections))
            for _ in range(500):
                assert len((await peer.reply()).body) == 10000

    run(main())


@pytest.mark.parametrize("how", ["close", "abort", "shut"])
def test_a_client_that_leaves_is_noticed_once(how: str) -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener, client(listener) as peer:
            peer.send(HELD * 3)
            await until(lambda: len(held.calls) == 3)
            if how == "close":
                peer.close()
            elif how == "abort":
                peer.writer.transport.abort()
            else:
                with socket.socket(fileno=os.dup(peer.writer.get_extra_info("socket").fileno())) as link:
                    link.shutdown(socket.SHUT_RDWR)
            await until(lambda: not listener.connections)
            assert held.left == held.calls
            assert all(call.gone for call in held.calls)
            held.calls[0].reply(200, b"nobody hears")
            held.calls[1].reply_raw(b"nobody hears")
            held.calls[2].stream(200, b"text/plain")

    run(main())


def test_a_coroutine_is_cancelled_when_its_client_leaves() -> None:
    async def main() -> None:
        begun, ended, stayed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def cancelled(call: Call) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def steadfast(call: Call) -> None:
            call.on_gone = None
            begun.set()
            await until(lambda: call.gone)
            stayed.set()

        async with serving({"/a": cancelled, "/b": steadfast}) as listener:
            for path, done in ((b"/a", ended), (b"/b", stayed)):
                begun.clear()
                async with client(listener) as peer:
                    peer.send(HELD.replace(b"/held", path))
                    await asyncio.wait_for(begun.wait(), WAIT_S)
                await asyncio.wait_for(done.wait(), WAIT_S)

    run(main())


def test_a_task_cancelled_by_the_server_answers_503() -> None:
    async def main() -> None:
        tasks = []

        async def endpoint(call: Call) -> None:
            tasks.append(asyncio.current_task())
            await asyncio.Event().wait()

        async with serving({"/held": endpoint}) as listener, client(listener) as peer:
            peer.send(HELD)
            await until(lambda: tasks)
            tasks[0].cancel()
            assert (await peer.reply()).status == 503

    run(main())


def test_one_connection_too_many_is_told_so() -> None:
    async def main() -> None:
        async with (
            serving({"/echo": echo}, limits(connections=2)) as listener,
            client(listener) as first,
            client(listener) as second,
        ):
            await until(lambda: len(listener.connections) == 2)
            async with client(listener) as third:
                reply = await third.reply()
                assert (reply.status, reply.closes) == (503, True)
                assert b"limits.connections" in reply.body
                assert await third.rest() == b""
            for peer in (first, second):
                peer.send(GET)
                assert (await peer.reply()).status == 200
            first.close()
            await until(lambda: len(listener.connections) == 1)
            async with client(listener) as fourth:
                fourth.send(GET)
                assert (await fourth.reply()).status == 200

    run(main())


def test_connect_and_abort_many_times_with_few_descriptors() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener:
            for _ in range(2000):
                link = socket.create_connection(listener.address)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                link.close()
                await asyncio.sleep(0)
            async with client(listener) as peer:
                peer.send(GET)
                assert (await peer.reply()).status == 200
            await until(lambda: not listener.connections)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_drain_answers_what_was_sent_and_closes_behind_the_last_reply() -> None:
    async def main() -> None:
        held, clock = Held(), Clock()
        async with (
            serving({"/held": held, "/echo": echo}, clock=clock) as listener,
            client(listener) as quiet,
            client(listener) as used,
            client(listener) as busy,
            client(listener) as sending,
        ):
            for peer in (quiet, used):
                peer.send(GET)
                assert not (await peer.reply()).closes
            busy.send(HELD * 3)
            sending.send(GET[:10])
            await until(lambda: len(held.calls) == 3 and len(listener.connections) == 4)
            await until(lambda: sum(bool(c._buffer) for c in listener.connections) == 1)
            listener.scan()
            drained = asyncio.ensure_future(listener.drain(WAIT_S))
            await until(lambda: listener.draining)
            with pytest.raises(OSError):
                await asyncio.open_connection(*listener.address)
            clock.now += 0.9
            listener.scan()
            used.send(GET)  # it may still be used, once
            assert (await used.reply()).closes
            assert await used.rest() == b""
            clock.now += 0.2
            listener.scan()
            assert await quiet.rest() == b""
            sending.send(GET[10:])
            assert (await sending.reply()).closes
            for number in (2, 0, 1):
                held.calls[number].reply(200, b"%d" % number)
            replies = [await busy.reply() for _ in held.calls]
            assert [(r.body, r.closes) for r in replies] == [(b"0", False), (b"1", False), (b"2", True)]
            for peer in (busy, sending, used):
                assert await peer.rest() == b""
                peer.close()
            assert await asyncio.wait_for(drained, WAIT_S) == 0
            assert held.left == []

    run(main())


def read_all(link: socket.socket) -> bytes:
    with link, link.makefile("rb") as file:
        return file.read()


def test_drain_takes_in_who_has_connected_but_is_not_accepted_yet() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}, clock=time.monotonic) as listener:
            links = [socket.create_connection(listener.address) for _ in range(20)]
            for link in links:
                link.sendall(GET)
            assert not listener.connections  # the loop has not turned
            replies = [asyncio.ensure_future(asyncio.to_thread(read_all, link)) for link in links]
            assert await listener.drain(WAIT_S) == 0
            assert all([b"GET /echo" in await reply for reply in replies])

    run(main())


def test_drain_takes_in_who_was_accepted_in_the_turn_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop accepts in one turn and tells the protocol in the next: between them nobody knows of it."""

    async def main() -> None:
        monkeypatch.setattr("fastserve.net.sockets._shut", lambda listening: 0.0)
        for turns in range(2):
            held = Held()
            async with serving({"/held": held}, clock=time.monotonic) as listener:
                drained = asyncio.ensure_future(listener.drain(WAIT_S))
                for _ in range(turns):
                    await asyncio.sleep(0)
                link = socket.create_connection(listener.address)
                link.sendall(HELD)
                await until(lambda held=held: held.calls)
                assert not drained.done()
                held.calls[0].reply(200, b"late")
                assert (await asyncio.to_thread(read_all, link)).endswith(b"late")
                assert await drained == 0

    run(main())


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="no way to hold a handshake up")
def test_drain_waits_for_a_handshake_under_way() -> None:
    """This client keeps back the last acknowledgement until it sends: connected, and not in the queue."""

    async def main() -> None:
        async with serving({"/echo": echo}, clock=time.monotonic) as listener:
            link = socket.socket()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
            link.connect(listener.address)
            loop = asyncio.get_running_loop()
            drained = asyncio.ensure_future(listener.drain(WAIT_S))
            loop.call_later(0.01, link.sendall, GET)  # it is due before the end of any longer wait
            assert await drained == 0
            assert b"GET /echo" in await asyncio.to_thread(read_all, link)

    run(main())


def test_drain_cuts_off_what_takes_too_long() -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener, client(listener) as peer:
            peer.send(HELD)
            await until(lambda: held.calls)
            assert await listener.drain(0.01) == 1
            assert held.left == held.calls
            with contextlib.suppress(ConnectionResetError):
                assert await peer.rest() == b""

    run(main())


def test_drain_with_nobody_connected() -> None:
    async def main() -> None:
        async with serving({}) as listener:
            assert await listener.drain(WAIT_S) == 0

    run(main())


def test_a_stream_arrives_in_pieces_and_in_order() -> None:
    async def main() -> None:
        held = Held()

        async def endpoint(call: Call) -> None:
            stream = call.stream(200, b"text/event-stream", [(b"cache-control", b"no-cache")])
            for piece in (b"one ", b"", b"two ", b"three"):
                await stream.write(piece)
            await stream.close()
            await stream.close()
            with pytest.raises(RuntimeError):
                await stream.write(b"more")
            with pytest.raises(RuntimeError):
                call.reply(200)

        async with serving({"/stream": endpoint, "/held": held}) as listener, client(listener) as peer:
            peer.send(HELD + HELD.replace(b"/held", b"/stream") * 2)
            await until(lambda: held.calls)
            await asyncio.sleep(0)
            held.calls[0].reply(200, b"first")
            assert (await peer.reply()).body == b"first"
            for _ in range(2):
                reply = await peer.reply()
                assert (reply.status, reply.body) == (200, b"one two three")
                assert reply.headers["transfer-encoding"] == "chunked"
                assert "content-length" not in reply.headers
            peer.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            reply = await peer.reply()
            assert (reply.body, reply.closes) == (b"one two three", True)
            assert "transfer-encoding" not in reply.headers

    run(main())


def test_a_stream_to_head_has_no_body() -> None:
    async def main() -> None:
        async def endpoint(call: Call) -> None:
            stream = call.stream(200, b"text/plain")
            await stream.write(b"unseen")
            await stream.close()

        async with serving({"/stream": endpoint, "/echo": echo}) as listener, client(listener) as peer:
            peer.send(b"HEAD /stream HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
            assert (await peer.reply(bodiless=True)).status == 200
            assert (await peer.reply()).body == b"GET /echo "

    run(main())


def test_a_stream_waits_for_its_reader_and_notices_that_it_left() -> None:
    async def main() -> None:
        written = 0
        error: list[BaseException] = []

        async def endpoint(call: Call) -> None:
            nonlocal written
            call.on_gone = None
            stream = call.stream(200, b"text/plain")
            try:
                while True:
                    await stream.write(bytes(65536))
                    written += 1
            except ConnectionResetError as caught:
                error.append(caught)
                await stream.close()

        async with serving({"/stream": endpoint}) as listener, client(listener, receive_bytes=4096) as peer:
            peer.writer.transport.pause_reading()
            peer.send(HELD.replace(b"/held", b"/stream"))
            await until(lambda: any(c._choked for c in listener.connections))
            before = written
            await asyncio.sleep(0.02)
            assert written <= before + 1
            (connection,) = listener.connections
            connection.abort()
            await until(lambda: error)

    run(main())


@pytest.mark.parametrize("fault", [None, RuntimeError("oops")])
def test_a_stream_that_is_dropped_cuts_the_connection(fault: Exception | None) -> None:
    async def main() -> None:
        async def endpoint(call: Call) -> None:
            await call.stream(200, b"text/plain").write(b"part")
            await asyncio.sleep(0.01)
            if fault:
                raise fault

        async with serving({"/stream": endpoint}) as listener, client(listener) as peer:
            peer.send(HELD.replace(b"/held", b"/stream"))
            head = await peer.reader.readuntil(b"\r\n\r\n")
            assert b"chunked" in head
            with contextlib.suppress(ConnectionResetError):
                assert not (await peer.rest()).endswith(b"0\r\n\r\n")

    run(main())
