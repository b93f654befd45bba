"""No exception leaves a connection's callback through the event loop: each is counted, logged, and ends its
connection alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hpack import Encoder
from hyperframe.frame import GoAwayFrame, SettingsFrame

from fastserve._ext.http2_frames import frame
from fastserve.net import Call, HttpListener
from fastserve.net.callback_guard import INTERNAL_ERROR
from fastserve.net.http1 import large_bodies
from fastserve.net.http1.connection import Http1Connection
from fastserve.net.http2.connection import Http2Connection
from fastserve.net.http2.flow_control import Sending
from fastserve.net.http2.stream import ErrorCode
from fastserve.net.tls.handshake import Handshake
from fastserve.net.tls.transport import TlsTransport
from fastserve.util.rate_limited_log import EVERY_S, FEW, MOST_TEXTS, RateLimitedLog
from tests.certificates import trusting
from tests.net.http2.kit import GET, PREFACE, Raw
from tests.net.kit import Client, Held, Pipe, client, echo, limits, run, serving, until
from tests.net.test_fuzz import GOOD, PIECES
from tests.net.test_refusals import SMALL
from tests.net.tls import kit as tls

GREETING = PREFACE + SettingsFrame(0).serialize() + SettingsFrame(0, flags=["ACK"]).serialize()
PING = frame(6, 0, 0, bytes(8))
REQUEST = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 40000000\r\n\r\n"
Patch = pytest.MonkeyPatch


def broken(*args: object, **options: object) -> Any:
    raise RuntimeError("as planned")


def last_frame(raw: Raw) -> Any:
    return raw.frames()[-1]


# Who breaks, what is done to the connection before, and which callback is called then.
Step = Callable[[Pipe], object]
HTTP_1: dict[str, tuple[Any, str, Step, Step]] = {
    "data_received": (Http1Connection, "_take", lambda pipe: None, lambda pipe: pipe.arrive(REQUEST)),
    "a head again": (
        Http1Connection,
        "_begin",
        lambda pipe: pipe.arrive(REQUEST),
        lambda pipe: pipe.arrive(REQUEST),
    ),
    "eof_received": (
        Http1Connection,
        "refuse",
        lambda pipe: pipe.arrive(REQUEST[:9]),
        lambda pipe: pipe.protocol.eof_received() or pipe.close(),
    ),
    "connection_lost": (Http1Connection, "_drop_calls", lambda pipe: None, lambda pipe: pipe.close()),
    "pause_writing": (
        Http1Connection,
        "_pause",
        lambda pipe: None,
        lambda pipe: pipe.protocol.pause_writing(),
    ),
    "resume_writing": (
        Http1Connection,
        "_may_read",
        lambda pipe: pipe.protocol.pause_writing(),
        lambda pipe: pipe.protocol.resume_writing(),
    ),
    "the rest of a body": (
        Http1Connection,
        "bulk_received",
        lambda pipe: pipe.feed(LARGE + bytes(100)),
        lambda pipe: pipe.arrive(bytes(100)),
    ),
    "no memory for a body": (
        large_bodies,
        "grow_bytes",
        lambda pipe: pipe.feed(LARGE + bytes(100)),
        lambda pipe: pipe.feed(bytes(20_000_000)),
    ),
    "a turn in the row": (
        Http1Connection,
        "catch_up",
        lambda pipe: None,
        lambda pipe: pipe.arrive(REQUEST * 100),
    ),
    "a look": (Http1Connection, "_phase", lambda pipe: None, lambda pipe: pipe.scan(1.0)),
}
HTTP_2: dict[str, tuple[Any, str, Step, Step]] = {
    "frames": (Http2Connection, "_control", lambda pipe: None, lambda pipe: pipe.arrive(PING)),
    "flush": (Http2Connection, "flush", lambda pipe: None, lambda pipe: pipe.arrive(PING)),
    "eof_received": (
        Http2Connection,
        "_cut_off_streams",
        lambda pipe: None,
        lambda pipe: pipe.protocol.eof_received() or pipe.close(),
    ),
    "connection_lost": (Http2Connection, "_drop_streams", lambda pipe: None, lambda pipe: pipe.close()),
    "resume_writing": (Sending, "pump", lambda pipe: None, lambda pipe: pipe.protocol.resume_writing()),
    "a turn in the row": (
        Http2Connection,
        "catch_up",
        lambda pipe: None,
        lambda pipe: pipe.arrive(PING * 2000),
    ),
    "a look": (Http2Connection, "_phase", lambda pipe: None, lambda pipe: pipe.scan(1.0)),
}


@pytest.mark.parametrize("kind", HTTP_1)
def test_a_callback_of_http_1_that_fails(
    kind: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name, before, work = HTTP_1[kind]
    pipe = Pipe({"/echo": echo}, breaks=True)
    before(pipe)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        work(pipe)
    assert pipe.listener.refusals == {INTERNAL_ERROR: 1}
    assert pipe.closed
    assert not pipe.listener.connections
    assert [bool(record.exc_info) for record in caplog.records] == [True]


@pytest.mark.parametrize("kind", HTTP_2)
def test_a_callback_of_http_2_that_fails(
    kind: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name, before, work = HTTP_2[kind]
    raw = Raw({"/echo": echo}, breaks=True).greet()
    before(raw.pipe)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        work(raw.pipe)
    twice = kind in ("flush", "connection_lost")  # the end of the connection comes there too
    assert raw.pipe.listener.refusals[INTERNAL_ERROR] in ((1, 2) if twice else (1,))
    assert caplog.records[0].exc_info
    if not twice:
        assert isinstance(goaway := last_frame(raw), GoAwayFrame)
        assert goaway.error_code == ErrorCode.INTERNAL_ERROR
    raw.pipe.close()
    assert not raw.pipe.listener.connections


TLS: dict[str, tuple[type, str]] = {
    "connection_made": (HttpListener, "make_room"),
    "hello": (Handshake, "_greet"),
    "handshake": (Handshake, "_shake"),
    "secured": (HttpListener, "secured"),
    "read": (TlsTransport, "_fill"),
    "flush": (TlsTransport, "_next"),
    "end": (TlsTransport, "_tell_end"),
}


@contextlib.asynccontextmanager
async def watched(secure: bool = False, **options: Any) -> AsyncIterator[HttpListener]:
    """A listener on a loop whose exception handler must not be asked."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    serve = tls.serving if secure else serving
    async with serve({"/echo": echo, "/late": late, "/held": Held()}, **options) as listener:
        yield listener
    assert told == []


async def late(call: Call) -> None:
    await asyncio.sleep(0)
    call.reply(200, b"late")


async def end_of(peer: Client) -> None:
    """Read to the connection's end, however that comes."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while await asyncio.wait_for(peer.reader.read(65536), 30):
            pass


@pytest.mark.parametrize("kind", TLS)
def test_a_callback_below_tls_that_fails(kind: str, monkeypatch: Patch) -> None:
    owner, name = TLS[kind]
    context = trusting()
    context.set_alpn_protocols(["h2"])

    async def main() -> None:
        async with watched(secure=True, breaks=True) as listener:
            monkeypatch.setattr(owner, name, broken)
            with contextlib.suppress(OSError, EOFError):
                async with tls.client(listener, context) as peer:
                    peer.send(GREETING + PING)
                    if kind == "end":
                        await asyncio.wait_for(peer.reader.read(1), 30)
                        peer.writer.close()
                    else:
                        await end_of(peer)
            await until(lambda: listener.refusals[INTERNAL_ERROR] and not listener.connections)
            monkeypatch.undo()
            async with tls.client(listener) as peer:
                peer.send(REQUEST)
                assert (await peer.reply()).status == 200

    run(main())


@pytest.mark.parametrize("secure", [False, True])
def test_a_connection_there_is_no_memory_for_costs_no_other(secure: bool, monkeypatch: Patch) -> None:
    """An exception here had the loop accept nobody any more."""

    async def main() -> None:
        async with watched(secure=secure, breaks=True) as listener:
            with monkeypatch.context() as patch:
                patch.setattr(Handshake if secure else Http1Connection, "__init__", broken)
                for _ in range(3):
                    async with client(listener) as peer:
                        await end_of(peer)
            async with (tls.client if secure else client)(listener) as peer:
                peer.send(REQUEST)
                assert (await peer.reply()).status == 200
            assert listener.refusals[INTERNAL_ERROR] == 3

    run(main())


def test_a_failure_that_cannot_be_told_is_not_left_to_the_task(monkeypatch: Patch) -> None:
    async def main() -> None:
        async with watched(breaks=True) as listener, client(listener) as peer:
            monkeypatch.setattr(Http1Connection, "finish", broken)
            peer.send(REQUEST.replace(b"echo", b"late"))
            await end_of(peer)
            assert listener.refusals[INTERNAL_ERROR] == 1

    run(main())


def test_a_failure_is_told_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    seldom = RateLimitedLog(logging.getLogger("seldom"), lambda: now[0])
    for at in (0.0, 0.0, EVERY_S, 3 * EVERY_S):
        now[0] = at
        try:
            broken()
        except RuntimeError as error:
            seldom.error("it broke", error)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert "(1 more since): as planned" in caplog.messages[1]


# ---- what clients did that left as an exception


def test_too_large_a_header_list_on_a_stream_that_was_cut_costs_nothing_more() -> None:
    raw = Raw({"/echo": echo}, limits(header_bytes=8192)).greet()
    raw.feed(raw.headers(1, [(":method", "POST"), *GET[1:], ("content-length", "9")], "END_HEADERS"))
    raw.feed(raw.data(1, bytes(10)))  # more than it said: reset, and the client may not know yet
    bomb = raw.headers(1, [("x", "y" * 4000)] * 9, "END_HEADERS", "END_STREAM")
    raw.feed(bomb)
    raw.feed(raw.headers(3, GET, "END_HEADERS", "END_STREAM"))
    kinds = [type(one).__name__ for one in raw.frames() if one.stream_id == 3]
    assert kinds == ["HeadersFrame", "DataFrame"]


def test_the_preface_is_refused_where_alpn_has_chosen_http_1() -> None:
    context = trusting()
    context.set_alpn_protocols(["http/1.1"])

    async def main() -> None:
        async with watched(secure=True) as listener, tls.client(listener, context) as peer:
            peer.send(GREETING)
            reply = await peer.reply()
            assert (reply.status, reply.closes) == (400, True)
            assert await peer.rest() == b""

    run(main())


# ---- and what they might do


def spoiled(data: bytes, noise: random.Random) -> bytes:
    """Some bytes turned, left out, repeated or put in."""
    for _ in range(noise.randrange(1, 4)):
        at, size = noise.randrange(len(data) + 1), noise.randrange(1, 12)
        way = noise.randrange(4)
        part = (b"", data[at : at + size] * 2, noise.randbytes(size), bytes([noise.randrange(256)]))[way]
        data = data[:at] + part + data[at + size :]
    return data


def some_frames(noise: random.Random, encoder: Encoder) -> bytes:
    """Frames of a client, in an order that may be none."""
    made = [GREETING]
    for _ in range(noise.randrange(1, 12)):
        number = noise.choice((0, 1, 1, 3, 3, 5, 7, 2))
        path = noise.choice(("/echo", "/late", "/held", "/nowhere"))
        fields = [(":method", noise.choice(("GET", "POST", "HEAD"))), *GET[1:3], (":path", path)]
        fields += noise.choice(([], [("content-length", "5")], [("te", "x")], [("x", "y" * 9000)] * 9))
        kind = noise.randrange(12)
        payload = (
            encoder.encode(fields) if kind in (1, 9) else noise.randbytes(noise.choice((0, 4, 5, 6, 8, 30)))
        )
        made.append(frame(kind, noise.choice((0, 1, 4, 5, 8, 36)), number, payload))
    return b"".join(made)


def some_bytes(noise: random.Random) -> bytes:
    way = noise.randrange(4)
    if way == 0:
        return b"".join(noise.choices(PIECES, k=30))
    if way == 1:
        return spoiled(b"".join(noise.choices(GOOD, k=3)), noise)
    made = some_frames(noise, Encoder())
    return made if way == 2 else spoiled(made, noise)


@pytest.mark.parametrize("rounds", [12, pytest.param(60, marks=pytest.mark.torture)])
@pytest.mark.parametrize("secure", [False, True])
def test_nothing_that_clients_send_reaches_the_loop_as_an_exception(secure: bool, rounds: int) -> None:
    noise = random.Random(20 + secure)

    async def send(listener: HttpListener) -> None:
        connect = tls.client if secure and noise.random() < 0.8 else client
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            async with connect(listener) as peer:
                data = some_bytes(noise)
                cut = noise.randrange(len(data) + 1)
                for part in (data[:cut], data[cut:]):
                    peer.send(part)
                    await asyncio.sleep(0)
                if peer.writer.can_write_eof():
                    peer.writer.write_eof()
                    await asyncio.wait_for(peer.reader.read(noise.choice((1, 65536))), 30)

    async def main() -> None:
        async with watched(secure=secure, with_limits=SMALL) as listener:
            for _ in range(rounds):
                await asyncio.gather(*(send(listener) for _ in range(10)))
            async with (tls.client if secure else client)(listener) as peer:
                peer.send(REQUEST)
                assert (await peer.reply()).status == 200

    run(main())


def test_a_few_lines_of_each_cause() -> None:
    """A cause that clients repeat hides no other, and however many causes there are, lines are bounded."""
    now = [0.0]
    seldom = RateLimitedLog(logging.getLogger("seldom"), lambda: now[0])
    assert [seldom.few("/a") for _ in range(FEW + 5)] == [""] * FEW + [None] * 5
    assert seldom.few("/b") == ""
    assert sum(seldom.few(f"/{n}") is not None for n in range(10_000)) == MOST_TEXTS - 2 + FEW
    now[0] += EVERY_S
    assert seldom.few("/a") == f" ({5 + 10_000 - (MOST_TEXTS - 2) - FEW} such lines more before)"
    assert seldom.few("/a") == ""
