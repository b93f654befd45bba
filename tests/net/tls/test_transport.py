"""HTTP over TLS on real sockets: bodies, slow readers, ends of every kind, and what is chosen by ALPN."""

from __future__ import annotations

import asyncio
import socket
import ssl

import h2.config
import h2.connection
import h2.events
import pytest

from fastserve.net import listener as listener_module
from fastserve.net.http1.connection import Http1Connection
from fastserve.net.http2.connection import Http2Connection
from fastserve.net.tls.transport import TlsTransport
from tests.certificates import trusting
from tests.net.kit import WAIT_S, Held, echo, limits, run, until
from tests.net.tls.kit import HandClient, client, serving

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def hello(call) -> None:  # type: ignore[no-untyped-def]
    call.reply(200, b"hello", b"text/plain")


def test_requests_on_a_kept_connection_and_pipelined() -> None:
    async def main() -> None:
        async with serving({"/": hello, "/echo": echo}) as listener, client(listener) as peer:
            for size in (0, 1, 16384, 16385, 100_000):
                peer.send(
                    b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
                )
                assert (await peer.reply()).body == b"POST /echo " + b"x" * size
            peer.send(GET * 10)
            assert [(await peer.reply()).body for _ in range(10)] == [b"hello"] * 10

    run(main())


def test_large_bodies_go_both_ways() -> None:
    """Longer than every buffer on the way, with bytes that tell where they belong."""
    body = b"".join(n.to_bytes(4, "big") for n in range(4 << 20))

    async def main() -> None:
        echoes = {"/echo": lambda call: call.reply(200, bytes(call.body))}
        async with serving(echoes) as listener, client(listener) as peer:
            for _ in range(2):
                peer.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
                peer.send(body)
                assert (await peer.reply()).body == body

    run(main())


def test_a_slow_reader_holds_its_reply_and_no_ciphertext_of_it() -> None:
    body = bytes(64 << 20)

    async def main() -> None:
        async with serving({"/": lambda call: call.reply(200, body)}) as listener:
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(GET)
            await until(lambda: unsent(listener) > 32 << 20)
            transport = next(iter(listener.connections))._transport
            assert isinstance(transport, TlsTransport)
            assert transport._inner.get_write_buffer_size() < 1 << 20
            got = 0
            while got < len(body):
                got += len(await peer.read())
            await until(lambda: not unsent(listener))
            peer.close()

    run(main())


def test_replies_keep_their_order_behind_a_slow_reader() -> None:
    held = Held()

    async def main() -> None:
        async with serving({"/": held}) as listener, client(listener) as peer:
            peer.send(GET * 3)
            await until(lambda: len(held.calls) == 3)
            for number in (2, 1, 0):  # so that all three are written at once
                held.calls[number].reply(200, bytes([number]) * (8 << 20))
            for number in range(3):
                assert (await peer.reply()).body == bytes([number]) * (8 << 20)

    run(main())


class Sipping(asyncio.BufferedProtocol):
    """Takes 100 bytes, then no more until it is told."""

    def __init__(self) -> None:
        self.buffer, self.sips = bytearray(100), []

    def connection_made(self, transport) -> None:  # type: ignore[no-untyped-def]
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.sips.append(bytes(self.buffer[:nbytes]))
        self.transport.pause_reading()


def test_what_is_decrypted_waits_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Sipping()

    async def main() -> None:
        async with serving({}) as listener:
            monkeypatch.setattr(listener, "_speak", lambda protocol: app)
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(bytes(range(250)))
            for sips in (1, 2, 3):
                await until(lambda sips=sips: len(app.sips) == sips)
                for _ in range(5):
                    await asyncio.sleep(0)
                assert len(app.sips) == sips
                app.transport.resume_reading()
            assert b"".join(app.sips) == bytes(range(250))
            peer.close()
            app.transport.abort()

    run(main())


def unsent(listener) -> int:  # type: ignore[no-untyped-def]
    return sum(c._transport.get_write_buffer_size() for c in listener.connections)


def test_a_reader_that_stalls_is_cut_off() -> None:
    async def main() -> None:
        with_limits = limits(write_stall_s=5.0)
        async with serving(
            {"/": lambda call: call.reply(200, bytes(64 << 20))}, with_limits=with_limits
        ) as one:
            peer = await HandClient.connect(one)
            await peer.shake()
            await peer.send(GET)
            await until(lambda: unsent(one) > 32 << 20)
            for now in (1.0, 7.0):
                one.clock.now = now  # type: ignore[attr-defined]
                one.scan()
            await until(lambda: not one.connections)
            assert one.refusals["write_stall_s"] == 1
            peer.close()

    run(main())


def test_a_client_that_sends_faster_than_it_is_answered_is_slowed_down() -> None:
    """Pipelined requests that wait: reading stops, with what is decrypted already held back."""
    held = Held()

    async def main() -> None:
        few = limits(pipelined_calls=4)
        async with serving({"/": held}, with_limits=few) as listener, client(listener) as peer:
            peer.send(GET * 100)
            for turn in range(100):
                await until(lambda turn=turn: len(held.calls) > turn)
                assert len(held.calls) <= turn + 5
                held.calls[turn].reply(200, b"%d" % turn)
            assert [(await peer.reply()).body for _ in range(100)] == [b"%d" % n for n in range(100)]

    run(main())


@pytest.mark.parametrize("alert", [True, False])
def test_who_has_sent_the_last_byte_is_still_answered(alert: bool) -> None:
    held = Held()

    async def main() -> None:
        async with serving({"/": held}) as listener:
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(GET)
            await until(lambda: held.calls)
            if alert:
                await peer.send_alert()
            peer.writer.write_eof()
            await asyncio.sleep(0.05)
            held.calls[0].reply(200, b"late")
            assert (await peer.rest()).endswith(b"late")
            peer.close()
            await until(lambda: not listener.connections)

    run(main())


class Pouring(asyncio.Protocol):
    """Answers all at once and reads on: HTTP/2's replies beside other streams."""

    body = bytes(range(256)) * (1 << 16)
    ended = False

    def connection_made(self, transport) -> None:  # type: ignore[no-untyped-def]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(self.body)

    def eof_received(self) -> bool:
        self.ended = True
        return False


@pytest.mark.parametrize("alert", [True, False])
def test_a_reply_that_the_socket_has_not_taken_outlives_the_last_byte(
    alert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Pouring()

    async def main() -> None:
        async with serving({}) as listener:
            monkeypatch.setattr(listener, "_speak", lambda protocol: app)
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(b"all of it")
            await until(lambda: hasattr(app, "transport") and app.transport.get_write_buffer_size() > 8 << 20)
            if alert:
                await peer.send_alert()
            peer.writer.write_eof()
            await until(lambda: app.ended)
            assert app.transport.get_write_buffer_size() > 4 << 20
            assert await peer.rest() == app.body
            peer.close()

    run(main())


def test_who_is_gone_frees_what_was_asked() -> None:
    held = Held()

    async def main() -> None:
        async with serving({"/": held}) as listener:
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(GET)
            await until(lambda: held.calls)
            peer.close()
            await until(lambda: held.left)

    run(main())


def test_a_closing_reply_ends_with_the_alert() -> None:
    """So that nobody who cuts the connection can pass a part off as the whole (RFC 8446 6.1)."""

    async def main() -> None:
        async with serving({"/": hello}) as listener:
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(LAST)
            assert (await peer.rest()).endswith(b"hello")
            peer.close()

    run(main())


@pytest.fixture
def quickly_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it drains: before that, who has not spoken yet may wait for a core."""
    monkeypatch.setattr(listener_module, "QUIET_S", 0.1)


@pytest.mark.usefixtures("quickly_quiet")
def test_a_draining_listener_closes_quiet_connections_with_the_alert() -> None:
    held = Held()

    async def main() -> None:
        async with serving({"/": held}, clock=asyncio.get_event_loop().time) as one:
            quiet, busy = await HandClient.connect(one), await HandClient.connect(one)
            for peer in (quiet, busy):
                await peer.shake()
            await busy.send(GET)
            await until(lambda: held.calls)
            draining = asyncio.ensure_future(one.drain(WAIT_S))
            assert await quiet.rest() == b""
            held.calls[0].reply(200, b"last")
            assert (await busy.rest()).endswith(b"last")
            busy.close(), quiet.close()
            assert await draining == 0

    run(main())


@pytest.mark.usefixtures("quickly_quiet")
def test_who_says_nothing_holds_no_drain() -> None:
    """A port scanner, or a health check of bare TCP: no handshake is under way, so none is waited for."""

    async def main() -> None:
        by_loop = asyncio.get_event_loop().time
        async with serving({"/": hello}, clock=by_loop) as one:
            silent = await HandClient.connect(one)
            await until(lambda: one.connections)
            assert await asyncio.wait_for(one.drain(WAIT_S), WAIT_S) == 0
            silent.close()

    run(main())


def test_every_byte_by_itself() -> None:
    """Hello, handshake and request, cut wherever they can be."""

    async def main() -> None:
        async with serving({"/": hello}) as listener:
            peer = await HandClient.connect(listener, step=1)
            await peer.shake()
            await peer.send(LAST)
            assert (await peer.rest()).endswith(b"hello")
            peer.close()

    run(main())


def test_a_forged_record_ends_its_connection_alone() -> None:
    held = Held()

    async def main() -> None:
        async with serving({"/": held, "/echo": echo}) as listener, client(listener) as bystander:
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(GET)
            await until(lambda: held.calls)
            peer.writer.write(b"\x17\x03\x03\x00\x20" + bytes(32))
            await until(lambda: held.left)
            bystander.send(b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await bystander.reply()).status == 200
            peer.close()

    run(main())


# ---- ALPN


@pytest.mark.parametrize(
    ("only_http2", "offered", "chosen"),
    [
        (False, ("h2", "http/1.1"), "h2"),
        (False, ("http/1.1", "h2"), "h2"),
        (False, ("http/1.1",), "http/1.1"),
        (False, (), None),
        (False, ("spdy/3", "http/1.1"), "http/1.1"),
        (False, ("imap",), "refused"),
        (True, ("h2",), "h2"),
        (True, ("http/1.1",), "refused"),
        (True, (), None),
    ],
)
def test_protocols(only_http2: bool, offered: tuple[str, ...], chosen: str | None) -> None:
    async def main() -> None:
        async with serving({"/": hello}, only_http2=only_http2) as listener:
            if chosen == "refused":
                with pytest.raises(ssl.SSLError, match=r"(?i)no.application.protocol"):
                    async with client(listener, trusting(*offered)):
                        pass
                assert listener.refusals["tls_protocol"] == 1
                return
            async with client(listener, trusting(*offered)) as peer:
                told: ssl.SSLObject = peer.writer.get_extra_info("ssl_object")
                assert told.selected_alpn_protocol() == chosen
                kind = Http2Connection if only_http2 or chosen == "h2" else Http1Connection
                await until(lambda: any(isinstance(one, kind) for one in listener.connections))

    run(main())


@pytest.mark.parametrize("offered", [("h2",), ()])
def test_http_2_by_its_name_and_by_its_first_bytes(offered: tuple[str, ...]) -> None:
    async def main() -> None:
        async with serving({"/": hello}) as listener, client(listener, trusting(*offered)) as peer:
            assert await ask_http2(peer) == b"hello"

    run(main())


async def ask_http2(peer) -> bytes:  # type: ignore[no-untyped-def]
    link = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    link.initiate_connection()
    fields = {":method": "GET", ":path": "/", ":scheme": "https", ":authority": "a"}
    link.send_headers(1, list(fields.items()), end_stream=True)
    peer.send(link.data_to_send())
    body = b""
    while True:
        data = await asyncio.wait_for(peer.reader.read(65536), WAIT_S)
        assert data
        for event in link.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                body += event.data
            elif isinstance(event, h2.events.StreamEnded):
                return body


def test_an_offer_to_upgrade_is_left_alone() -> None:
    async def main() -> None:
        async with serving({"/": hello}) as listener, client(listener) as peer:
            peer.send(
                b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
                b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n"
            )
            assert (await peer.reply()).body == b"hello"

    run(main())


# ---- versions and ciphers


def test_versions_and_ciphers() -> None:
    old, weak, good, new = (trusting() for _ in range(4))
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.deprecated_call():
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    weak.maximum_version = good.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-SHA:AES256-GCM-SHA384:ECDHE-ECDSA-AES256-SHA")  # RFC 9113 appendix A lists all
    new.minimum_version = ssl.TLSVersion.TLSv1_3

    async def main() -> None:
        async with serving({"/": hello}) as listener:
            for context in (old, weak):
                with pytest.raises((ssl.SSLError, OSError)):
                    async with client(listener, context):
                        pass
            for context, version in ((good, "TLSv1.2"), (new, "TLSv1.3")):
                async with client(listener, context) as peer:
                    assert peer.writer.get_extra_info("ssl_object").version() == version
                    peer.send(GET)
                    assert (await peer.reply()).body == b"hello"

    run(main())


def test_a_reset_in_the_middle_of_a_reply_leaves_nothing() -> None:
    async def main() -> None:
        async with serving({"/": lambda call: call.reply(200, bytes(16 << 20))}) as listener:
            peer = await HandClient.connect(listener)
            await peer.shake()
            await peer.send(GET)
            await peer.read()
            link: socket.socket = peer.writer.get_extra_info("socket")
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            peer.writer.transport.abort()
            await until(lambda: not listener.connections)

    run(main())
