"""Connections that are not open yet: who is slow, who is one too many, and who does not speak TLS at all."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.net.limits import is_tls
from fastserve.net.tls.handshake import (
    MOST_RECORDS,
    Handshake,
    NotTls,
    offered_protocols,
    whole_hello,
)
from tests.certificates import trusting
from tests.net import kit
from tests.net.kit import WAIT_S, limits, read_replies, run, until
from tests.net.tls.kit import client, credentials, serving
from tests.net.tls.test_transport import GET, hello


async def told(listener, data: bytes) -> bytes:  # type: ignore[no-untyped-def]
    """All that plain bytes are answered with."""
    reader, writer = await asyncio.open_connection(*listener.address)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    return answer


def test_plain_http_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving({"/": hello}) as listener:
            for _ in range(3):
                (reply,) = read_replies(await told(listener, GET))
                assert (reply.status, reply.closes) == (400, True)
                assert b"TLS" in reply.body
            assert listener.refusals["tls_plain_text"] == 3

    run(main())
    lines = [line for line in caplog.messages if "plain text" in line]
    assert len(lines) == 1, "one line a minute, however many there are"


def test_plain_http_2_is_told_so() -> None:
    async def main() -> None:
        async with serving({"/": hello}, only_http2=True) as listener:
            answer = await told(listener, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
            assert answer[3] == 7  # GOAWAY
            assert struct.unpack(">II", answer[9:17]) == (0, 12)  # INADEQUATE_SECURITY
            assert b"TLS" in answer

    run(main())


@pytest.mark.parametrize(
    "noise", [b"\0", b"\x80\x2e\x01", b"\x15\x03\x01\0\2\1\0", b"\x16\x03\x01\x48\x01", b"ssh"]
)
def test_other_noise_is_hung_up_on(noise: bytes) -> None:
    async def main() -> None:
        async with serving({"/": hello}) as listener:
            assert await told(listener, noise) == b""

    run(main())


@pytest.mark.parametrize("only_http2", [True, False])
def test_tls_on_a_plain_port_is_a_line_of_the_log(only_http2: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with kit.serving({"/": hello}, only_http2=only_http2) as listener:
            for _ in range(2):
                with pytest.raises((ssl.SSLError, OSError)):
                    async with client(listener, trusting("h2")):
                        pass
            assert listener.refusals["stray_tls"] == 2

    run(main())
    assert len([line for line in caplog.messages if "speaks plain text" in line]) == 1


@pytest.mark.parametrize("sends", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01"])
def test_who_takes_too_long_is_cut_off(sends: bytes) -> None:
    async def main() -> None:
        async with serving({"/": hello}, credentials(handshake_timeout_s=5.0)) as listener:
            reader, writer = await asyncio.open_connection(*listener.address)
            writer.write(sends)
            await until(lambda: listener.connections)
            for now in (1.0, 6.5):
                listener.clock.now = now  # type: ignore[attr-defined]
                listener.scan()
                writer.write(b"")
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            assert listener.refusals["tls.handshake_timeout_s"] == 1
            writer.close()
            await until(lambda: not listener.connections)

    run(main())


def test_one_handshake_too_many_ends_the_oldest() -> None:
    async def main() -> None:
        async with serving({"/": hello}, credentials(handshakes=3)) as listener:
            slow = [await asyncio.open_connection(*listener.address) for _ in range(3)]
            await until(lambda: len(listener.connections) == 3)
            async with client(listener) as peer:
                peer.send(GET)
                assert (await peer.reply()).body == b"hello"
                assert await asyncio.wait_for(slow[0][0].read(), WAIT_S) == b""
                assert listener.refusals["tls.handshakes"] == 1
                waiting = [
                    one for one in listener.connections if isinstance(one, Handshake) and not one._over
                ]
                assert len(waiting) == 2
            for _, writer in slow:
                writer.close()

    run(main())


def test_connections_in_their_handshake_count() -> None:
    async def main() -> None:
        async with serving({"/": hello}, with_limits=limits(connections=2)) as listener:
            slow = [await asyncio.open_connection(*listener.address) for _ in range(2)]
            await until(lambda: len(listener.connections) == 2)
            with pytest.raises((ssl.SSLError, OSError)):
                async with client(listener):
                    pass
            assert listener.refusals["connections"] == 1
            for _, writer in slow:
                writer.close()
            await until(lambda: not listener.connections)
            async with client(listener) as peer:
                peer.send(GET)
                assert (await peer.reply()).body == b"hello"

    run(main())


def test_a_client_that_does_not_trust_us_is_counted() -> None:
    async def main() -> None:
        async with serving({"/": hello}) as listener:
            with pytest.raises(ssl.SSLError):
                async with client(listener, trusting(ca="another")):
                    pass
            # It has sent its alert after the handshake, where TLS 1.3 has it: the connection just ends.
            await until(lambda: not listener.connections)

    run(main())


def test_many_handshakes_at_once() -> None:
    async def main() -> None:
        async with serving({"/": hello}) as listener:

            async def one() -> bytes:
                async with client(listener) as peer:
                    peer.send(GET)
                    return (await peer.reply()).body

            assert set(await asyncio.gather(*(one() for _ in range(100)))) == {b"hello"}

    run(main())


# ---- the first message


def a_hello(*protocols: str) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    link = trusting(*protocols).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        link.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("protocols", [(), ("h2",), ("h2", "http/1.1"), ("x" * 255, "y")])
def test_what_a_client_offers(protocols: tuple[str, ...]) -> None:
    data = a_hello(*protocols)
    for cut in range(1, len(data)):
        assert is_tls(data[:cut])
        assert whole_hello(data[:cut]) is None
    message = whole_hello(data)
    assert message is not None
    assert offered_protocols(message) == [name.encode() for name in protocols]


def test_a_hello_in_several_records() -> None:
    data = a_hello("h2")
    message = data[5:]
    cut = b"".join(
        b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
        for part in (message[start : start + 50] for start in range(0, len(message), 50))
    )
    assert whole_hello(cut) == whole_hello(data)


def test_a_hello_in_records_of_a_byte_is_refused_before_they_are_many() -> None:
    message = b"\x01\x00\x7f\x00" + bytes(256)
    data = b"".join(b"\x16\x03\x01\x00\x01%c" % byte for byte in message)
    assert whole_hello(data[: MOST_RECORDS * 6]) is None
    with pytest.raises(NotTls):
        whole_hello(data)


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_are_read_or_refused(noise: bytes, at: int, value: int) -> None:
    changed = bytearray(a_hello("h2", "http/1.1"))
    changed[at % len(changed)] = value
    for data in (noise, b"\x16\x03\x01" + noise, bytes(changed)):
        try:
            message = whole_hello(data)
        except NotTls:
            continue
        if message is not None:
            assert all(isinstance(name, bytes) for name in offered_protocols(message))


def test_a_hello_that_goes_on_for_ever_is_refused() -> None:
    record = b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + os.urandom(16380)
    with pytest.raises(NotTls):
        whole_hello(record)


def test_lines_that_clients_cause_are_seldom(caplog: pytest.LogCaptureFixture) -> None:
    from fastserve.util.rate_limited_log import EVERY_S, RateLimitedLog

    now = [0.0]
    seldom = RateLimitedLog(logging.getLogger("seldom"), lambda: now[0])
    for _ in range(5):
        seldom.warn("a %s", "b")
    now[0] = EVERY_S
    seldom.warn("a %s", "b")
    assert caplog.messages == ["a b", "a b (4 more since)"]
