"""How connections end: draining in two steps, quiet and half-open ones, clients that stop halfway."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from hyperframe.frame import GoAwayFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from fastserve.net.http2.settings import ANYBODY
from fastserve.net.http2.stream import ErrorCode
from tests.net.http2.kit import GET, POST, PREFACE, Peer, Raw
from tests.net.kit import WAIT_S, Held, client, echo, limits, run, serving, until

END, HEADS = "END_STREAM", "END_HEADERS"
HELD = [*GET[:3], (":path", "/held")]
LAST = (1 << 31) - 1
QUICK = limits(header_timeout_s=10.0, idle_timeout_s=75.0, write_stall_s=30.0, body_bytes_per_s=100)


def goaways(raw: Raw) -> list[tuple[int, int]]:
    return [(one.last_stream_id, one.error_code) for one in raw.frames() if isinstance(one, GoAwayFrame)]


def test_a_drain_loses_no_request_that_is_on_its_way() -> None:
    held = Held()
    raw = Raw({"/held": held, "/echo": echo}).greet()
    raw.feed(raw.headers(1, HELD, END, HEADS))
    raw.pipe.listener.draining = True
    raw.pipe.scan(1.0)
    assert not raw.frames()  # it may be answered in a moment, and the client never learn of it
    raw.pipe.scan(3.0)
    frames = raw.frames()
    assert [(type(one).__name__, getattr(one, "last_stream_id", None)) for one in frames] == [
        ("GoAwayFrame", LAST),
        ("PingFrame", None),
    ]
    raw.feed(raw.headers(3, GET, END, HEADS))  # sent before the client has heard
    assert {one.stream_id for one in raw.frames()} == {3}
    raw.feed(PingFrame(0, opaque_data=frames[1].opaque_data, flags=["ACK"]).serialize())
    assert goaways(raw) == [(3, ErrorCode.NO_ERROR)]
    raw.feed(raw.headers(5, GET, END, HEADS))
    (refused,) = raw.frames()
    assert (refused.stream_id, refused.error_code) == (5, ErrorCode.REFUSED_STREAM)
    assert not raw.pipe.ended
    held.calls[0].reply(200)
    assert {one.stream_id for one in raw.frames()} >= {1}
    assert raw.pipe.ended


def test_a_drain_ends_when_the_client_takes_back_its_last_request() -> None:
    raw = Raw({"/held": Held()}).greet()
    raw.feed(raw.headers(1, HELD, END, HEADS))
    raw.pipe.listener.draining = True
    raw.pipe.scan(1.0)
    raw.pipe.scan(3.0)
    raw.feed(PingFrame(0, opaque_data=raw.frames()[-1].opaque_data, flags=["ACK"]).serialize())
    assert not raw.pipe.ended
    raw.feed(RstStreamFrame(1, error_code=ErrorCode.CANCEL).serialize())
    assert raw.pipe.ended


def test_a_listener_drains() -> None:
    async def slow(call: object) -> None:
        await asyncio.sleep(0.05)
        call.reply(200, b"late")  # type: ignore[attr-defined]

    async def main() -> None:
        from httpx import AsyncClient

        async with serving({"/slow": slow, "/echo": echo}, clock=time.monotonic) as listener:
            base = "http://{}:{}".format(*listener.address)
            async with AsyncClient(http1=False, http2=True, base_url=base, trust_env=False) as peer:
                await peer.get("/echo")
                asked = asyncio.ensure_future(peer.get("/slow"))
                await until(lambda: any(c.streams for c in listener.connections))
                draining = asyncio.ensure_future(listener.drain(10.0))
                assert (await asked).content == b"late"
            assert await draining == 0

    run(main())


def test_a_quiet_connection_is_told_and_closed() -> None:
    raw = Raw({"/echo": echo}, QUICK).greet()
    raw.feed(raw.headers(1, GET, END, HEADS))
    raw.pipe.scan(0.0)
    raw.pipe.scan(74.0)
    raw.frames()
    raw.pipe.scan(75.0)
    assert goaways(raw) == [(1, ErrorCode.NO_ERROR)]
    assert raw.pipe.ended
    raw.pipe.scan(76.0)
    raw.pipe.scan(77.1)
    assert raw.pipe.closed


@pytest.mark.parametrize("sent", [PREFACE[:20], PREFACE, PREFACE + SettingsFrame(0).serialize()[:5]])
def test_a_preface_that_stops(sent: bytes) -> None:
    raw = Raw({"/echo": echo}, QUICK)
    raw.feed(sent)
    raw.pipe.scan(0.0)
    raw.pipe.scan(10.0)
    assert goaways(raw) == [(0, ErrorCode.ENHANCE_YOUR_CALM)]
    assert raw.pipe.listener.refusals == {"header_timeout_s": 1}


def test_settings_that_are_not_acknowledged() -> None:
    raw = Raw({"/held": Held()}, QUICK)
    raw.feed(PREFACE + SettingsFrame(0).serialize())
    raw.feed(raw.headers(1, HELD, END, HEADS))
    raw.pipe.scan(0.0)
    raw.pipe.scan(74.0)
    assert goaways(raw) == []
    raw.pipe.scan(75.0)
    assert goaways(raw) == [(1, ErrorCode.SETTINGS_TIMEOUT)]


def test_a_header_block_that_stops() -> None:
    raw = Raw({"/echo": echo}, QUICK).greet()
    raw.feed(raw.headers(1, GET, END, HEADS))
    raw.feed(raw.headers(3, GET, END))
    raw.pipe.scan(0.0)
    raw.pipe.scan(10.0)
    assert goaways(raw) == [(1, ErrorCode.ENHANCE_YOUR_CALM)]


def test_a_body_that_drips() -> None:
    peer = Peer({"/echo": echo}, QUICK)
    number = peer.send(POST, b"x", end=False)
    peer.flush()
    for second in range(1, 21):
        if not peer.answers:
            peer.h2.send_data(number, b"x" * 50)
        peer.flush()
        peer.pipe.scan(float(second))
        peer.hear()
    answer = peer.answers[number]
    assert (answer.status, answer.ended) == (408, True)
    assert b"limits.body_bytes_per_s" in answer.body
    assert peer.ask(GET).status == 200


def test_a_body_that_keeps_its_rate() -> None:
    peer = Peer({"/echo": echo}, QUICK)
    number = peer.send(POST, b"x", end=False)
    for second in range(1, 60):
        peer.h2.send_data(number, b"x" * 150)
        peer.flush()
        peer.pipe.scan(float(second))
    peer.h2.send_data(number, b"", end_stream=True)
    peer.flush()
    assert peer.answers[number].status == 200


def test_a_client_that_shuts_its_side_gets_its_replies() -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener, client(listener) as peer:
            raw = Raw({})
            peer.send(PREFACE + SettingsFrame(0).serialize() + raw.headers(1, HELD, END, HEADS))
            await until(lambda: held.calls)
            peer.writer.write_eof()
            await until(lambda: any(c._half is not None for c in listener.connections))
            held.calls[0].reply(200, b"still there")
            assert b"still there" in await peer.rest()
            await until(lambda: not listener.connections)

    run(main())


@pytest.mark.parametrize("shut", ["stream", "connection"])
def test_a_client_that_shuts_its_side_opens_no_window(shut: str) -> None:
    """The client gets as much as its windows have room for. No WINDOW_UPDATE can come for the rest, which is
    given up. A reply for which there is room, and is not made yet, is."""

    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener, client(listener) as peer:
            raw = Raw({})
            greeting = PREFACE + SettingsFrame(0).serialize()
            asked = raw.headers(1, HELD, END, HEADS) + raw.headers(3, HELD, END, HEADS)
            if shut == "stream":
                asked += WindowUpdateFrame(0, window_increment=1 << 20).serialize()
            peer.send(greeting + asked)
            await until(lambda: len(held.calls) == 2)
            peer.writer.write_eof()
            await until(lambda: any(c._half is not None for c in listener.connections))
            (connection,) = listener.connections
            held.calls[0].reply(200, bytes(100_000))
            assert not held.left
            listener.scan()
            assert listener.refusals == {"window_shut": 1}
            assert set(connection.streams) == {3}
            held.calls[1].reply(200, b"small" if shut == "stream" else b"")
            heard = await peer.rest()
            assert heard.count(bytes(1000)) > 0
            assert (b"small" in heard) == (shut == "stream")
            await until(lambda: not listener.connections)

    run(main())


def test_replies_of_the_turn_in_which_the_client_shuts_its_side() -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener, client(listener) as peer:
            raw = Raw({})
            asked = b"".join(raw.headers(number, HELD, END, HEADS) for number in (1, 3, 5))
            peer.send(PREFACE + SettingsFrame(0).serialize() + asked)
            await until(lambda: len(held.calls) == 3)
            (connection,) = listener.connections
            for call in held.calls:
                call.reply(200, b"in time")
            if not connection.eof_received():  # as uvloop does on the client's last byte
                connection._transport.close()
            assert (await peer.rest()).count(b"in time") == 3
            await until(lambda: not listener.connections)

    run(main())


def test_a_client_that_shuts_its_side_within_a_request() -> None:
    """A request that is not whole is told so at once, as over HTTP/1.1; one that is whole is answered."""

    async def main() -> None:
        held = Held()
        async with serving({"/held": held, "/echo": echo}) as listener, client(listener) as peer:
            raw = Raw({})
            asked = raw.headers(1, HELD, END, HEADS) + raw.headers(3, POST, HEADS) + raw.data(3, b"half")
            asked += raw.headers(5, [*POST, ("content-length", "100000")], HEADS) + raw.data(5, b"half")
            peer.send(PREFACE + SettingsFrame(0).serialize() + asked)
            peer.writer.write_eof()
            await until(lambda: any(c._half is not None for c in listener.connections))
            (connection,) = listener.connections
            assert list(connection.streams) == [1]
            held.calls[0].reply(200, b"still there")
            said = await peer.rest()
            assert said.count(b"the connection ended within it") == 2
            assert b"still there" in said
            assert listener.refusals == {"cut_off": 2}
            await until(lambda: not listener.connections)

    run(main())


def test_a_client_that_shuts_its_side_within_its_only_request() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener, client(listener) as peer:
            raw = Raw({})
            asked = raw.headers(1, POST, HEADS) + raw.headers(3, POST, HEADS) + raw.data(3, b"half")
            peer.send(PREFACE + SettingsFrame(0).serialize() + asked)
            peer.writer.write_eof()
            assert (await peer.rest()).count(b"the connection ended within it") == 2
            await until(lambda: not listener.connections)

    run(main())


def test_a_client_that_vanishes_after_it_shut_its_side() -> None:
    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener:
            link = socket.create_connection(listener.address)
            raw = Raw({})
            link.sendall(PREFACE + SettingsFrame(0).serialize() + raw.headers(1, HELD, END, HEADS))
            await until(lambda: held.calls)
            link.close()
            await until(lambda: held.left)
            await until(lambda: not listener.connections)

    run(main())


def test_a_client_that_vanishes_some_time_after_it_shut_its_side() -> None:
    """It has read what it was sent, so that its kernel says nothing; a later look of the listener asks."""

    async def main() -> None:
        held = Held()
        async with serving({"/held": held}) as listener:
            reader, writer = await asyncio.open_connection(*listener.address)
            raw = Raw({})
            writer.write(PREFACE + SettingsFrame(0).serialize() + raw.headers(1, HELD, END, HEADS))
            await until(lambda: held.calls)
            writer.write_eof()
            heard = b""
            while ANYBODY not in heard:
                heard += await asyncio.wait_for(reader.read(1000), WAIT_S)
            assert not held.left
            writer.close()
            await until(lambda: (listener.scan(), held.left)[1])
            await until(lambda: not listener.connections)

    run(main())


def test_more_connections_than_allowed() -> None:
    async def main() -> None:
        async with (
            serving({"/echo": echo}, limits(connections=1), only_http2=True) as listener,
            client(listener) as first,
            client(listener) as second,
        ):
            assert b"limits.connections" in await second.rest()
            first.send(PREFACE + SettingsFrame(0).serialize())
            assert await first.reader.read(9)

    run(main())
