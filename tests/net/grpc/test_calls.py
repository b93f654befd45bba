"""gRPC on the server's own HTTP/2, beyond what a client of grpcio shows: bytes, faults, the short way.

The peer is `h2`, so that every frame can be chosen.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from time import monotonic_ns
from typing import Any

import h2.errors
import h2.settings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.deadlines import GRACE_NS, CallDeadlines
from fastserve.net.grpc import GrpcExchange, Method
from fastserve.net.grpc import method as method_module
from fastserve.net.grpc.metadata import NEVER_NS, read_metadata, read_timeout, write_message, write_metadata
from fastserve.util.rate_limited_log import RateLimitedLog
from tests.net.grpc.peer import Answer, frame, looked_at_often, send_all, serving
from tests.net.grpc.test_methods import echo, run
from tests.net.kit import WAIT_S, until

# -- requests ------------------------------------------------------------------------------------


def test_a_unary_answer_on_the_wire() -> None:
    async def main() -> None:
        async with serving() as (_, peer):
            answer = await peer.ask("/t.T/Echo", frame(b"hello"))
            head, trailers = answer.headers
            assert head[":status"] == "200"
            assert head["content-type"] == "application/grpc"
            assert set(head["grpc-accept-encoding"].split(", ")) == {"identity", "deflate", "gzip"}
            assert (answer.messages, trailers) == ([b"hello"], {"grpc-status": "0"})

    run(main())


def test_a_refusal_is_trailers_only() -> None:
    async def main() -> None:
        async with serving() as (_, peer):
            answer = await peer.ask("/t.T/None", frame(b""))
            (only,) = answer.headers
            assert (only[":status"], only["grpc-status"], bytes(answer.data)) == ("200", "12", b"")
            assert "grpc-message" not in only

    run(main())


@pytest.mark.parametrize("path", ["/t.T/Echo", "/t.T/Add"])
def test_messages_split_at_every_byte(path: str) -> None:
    body = frame(b"split anywhere")

    async def main() -> None:
        async with serving() as (_, peer):
            for at in range(1, len(body)):
                number = peer.begin(path)
                peer.send(number, body[:at])
                peer.send(number, body[at:], ends=True)
                answer = await peer.finish(number)
                assert (answer.messages, answer.status) == ([b"split anywhere"], (0, ""))
            number = peer.begin(path)
            for at in range(len(body)):
                peer.send(number, body[at : at + 1])
            peer.send(number, b"", ends=True)
            assert (await peer.finish(number)).messages == [b"split anywhere"]

    run(main())


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"", (), Kind.INTERNAL, "without its message"),
        (frame(b"abc")[:-1], (), Kind.INTERNAL, "within a message"),
        (b"\0\0", (), Kind.INTERNAL, "within a message"),
        (frame(b"a") * 2, (), Kind.INTERNAL, "more than one message"),
        (frame(b"a", 2), (), Kind.INTERNAL, "flag of a message"),
        (frame(b"a", 1), (), Kind.INTERNAL, "without grpc-encoding"),
        (frame(b"a", 1), (("grpc-encoding", "gzip"),), Kind.INVALID_ARGUMENT, "compressed body"),
        (frame(b"a"), (("grpc-encoding", "snappy"),), Kind.UNIMPLEMENTED, "identity, deflate, gzip"),
        (frame(b"a"), (("grpc-timeout", "1x"),), Kind.INTERNAL, "parsing 'grpc-timeout'"),
        (frame(b"a"), (("grpc-timeout", "123456789S"),), Kind.INTERNAL, "grpc-timeout"),
        (struct.pack(">BI", 0, 1001), (), Kind.RESOURCE_EXHAUSTED, "(1001 vs. 1000)"),
        (
            frame(gzip.compress(bytes(1001), mtime=0), 1),
            (("grpc-encoding", "gzip"),),
            Kind.RESOURCE_EXHAUSTED,
            "1000",
        ),
    ],
)
def test_a_bad_request_fails_alone(body: bytes, headers: Any, status: Kind, words: str) -> None:
    async def main() -> None:
        async with serving(message_bytes=1000) as (_, peer):
            answer = await peer.ask("/t.T/Echo", body, *headers)
            assert answer.status[0] == status.value
            assert words in answer.status[1]
            assert (await peer.ask("/t.T/Echo", frame(b"next"))).messages == [b"next"]

    run(main())


def test_malformed_calls_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """A client that sends malformed calls writes no log by them."""
    monkeypatch.setattr(method_module, "_limited_log", RateLimitedLog(method_module.log))

    async def main() -> None:
        async with serving() as (_, peer):
            for _ in range(3):
                for body, headers in (
                    (frame(b"a"), (("grpc-timeout", "1x"),)),
                    (frame(b"a"), (("grpc-encoding", "gzip"), ("grpc-timeout", "S"))),
                    (b"", ()),
                    (frame(b"a", 2), ()),
                ):
                    answer = await peer.ask("/t.T/Echo", body, *headers)
                    assert answer.status[0] == Kind.INTERNAL.value

    run(main())
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
        "calls that break gRPC's rules are answered INTERNAL"
    ]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ((frame(b"a", 2), False), Kind.INTERNAL),
        ((struct.pack(">BI", 0, 1001), False), Kind.RESOURCE_EXHAUSTED),
        ((frame(b"abc")[:-1], True), Kind.INTERNAL),
    ],
)
def test_a_method_hears_of_a_stream_that_is_broken(wrong: tuple[bytes, bool], status: Kind) -> None:
    """Work that it has begun ends then and there, as when the client leaves."""
    stopped: list[bytes] = []

    async def wait(requests: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                yield request
        except asyncio.CancelledError:
            stopped.append(request)
            raise

    async def main() -> None:
        method = Method(
            "/t.T/Wait", bytes, wait, bytes, takes_stream=True, gives_stream=True, scope=Scope.INFER
        )
        async with serving(method, message_bytes=1000) as (_, peer):
            number = peer.begin("/t.T/Wait")
            peer.send(number, frame(b"first"))
            await peer.read(lambda: peer.answers[number].messages)
            peer.send(number, wrong[0], ends=wrong[1])
            answer = await peer.finish(number)
            assert (answer.messages, answer.status[0]) == ([b"first"], status.value)
            await until(lambda: stopped == [b"first"])

    run(main())


def test_a_bomb_within_a_message_is_bounded() -> None:
    bomb = frame(zlib.compress(bytes(50_000_000), 9), 1)

    async def main() -> None:
        async with serving() as (_, peer):
            number = peer.begin("/t.T/Echo", ("grpc-encoding", "deflate"))
            await send_all(peer, number, bomb)
            peer.send(number, b"", ends=True)
            answer = await peer.finish(number)
            assert answer.status[0] == Kind.RESOURCE_EXHAUSTED.value
            assert "inflate_ratio" in answer.status[1]

    run(main())


def test_other_content_is_not_grpc() -> None:
    async def main() -> None:
        async with serving() as (_, peer):
            for kind, taken in (("application/grpc+proto", True), ("application/grpc-web", False)):
                number = peer.h2.get_next_available_stream_id()
                sent = [(":method", "POST"), (":scheme", "http"), (":path", "/t.T/Echo"), (":authority", "t")]
                peer.h2.send_headers(number, [*sent, ("content-type", kind)])
                peer.answers[number] = Answer()
                peer.send(number, frame(b"x"), ends=True)
                answer = await peer.finish(number)
                assert ("grpc-status" in answer.headers[-1]) == taken

    run(main())


# -- compression, large messages, windows --------------------------------------------------------


async def squeeze(request: bytes, rpc: Any) -> bytes:
    rpc.compress()
    return request


async def squeeze_all(requests: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
    rpc.compress()
    async for request in requests:
        yield request


@pytest.mark.parametrize(
    ("takes", "coding", "packing"),
    [
        ("identity,gzip", "gzip", gzip.compress),
        ("identity, deflate", "deflate", zlib.compress),
        ("deflate,gzip", "gzip", gzip.compress),
    ],
)
def test_answers_are_compressed_for_who_takes_it(takes: str, coding: str, packing: Any) -> None:
    methods = [
        Method("/t.T/Squeeze", bytes, squeeze, bytes, scope=Scope.INFER),
        Method("/t.T/SqueezeAll", bytes, squeeze_all, bytes, True, True, scope=Scope.INFER),
    ]
    large = random.Random(1).randbytes(1_500_000)
    accept = ("grpc-accept-encoding", takes)

    async def main() -> None:
        async with serving(*methods) as (_, peer):
            for path in ("/t.T/Squeeze", "/t.T/SqueezeAll"):
                answer = await peer.ask(path, frame(b"a" * 1000), accept)
                assert (answer.headers[0]["grpc-encoding"], answer.data[0]) == (coding, 1)
                assert answer.messages == [b"a" * 1000]
                for none in ((), (("grpc-accept-encoding", "identity,snappy"),)):
                    answer = await peer.ask(path, frame(b"a" * 1000), *none)
                    assert ("grpc-encoding" in answer.headers[0], answer.data[0]) == (False, 0)
            packed = frame(packing(large), 1)
            number = peer.begin("/t.T/Squeeze", ("grpc-encoding", coding), accept)
            await send_all(peer, number, packed)
            peer.send(number, b"", ends=True)
            answer = await peer.finish(number)
            assert answer.messages == [large]

    run(main())


def test_messages_larger_than_the_window() -> None:
    """Alone, and as every other one of a stream, where the window is what the method has not taken yet."""
    large, small = bytes(range(256)) * 12_000, b"small" * 100_000

    async def main() -> None:
        async with serving() as (_, peer):
            number = peer.begin("/t.T/Echo")
            await send_all(peer, number, frame(large))
            peer.send(number, b"", ends=True)
            assert (await peer.finish(number)).messages == [large]
            number = peer.begin("/t.T/Add")
            for message in (large, small, large, small, small):
                await send_all(peer, number, frame(message))
            peer.send(number, b"", ends=True)
            assert (await peer.finish(number)).messages == [b"+".join((large, small, large, small, small))]

    run(main())


def test_a_method_that_does_not_read_stops_its_client() -> None:
    async def idle(requests: AsyncIterator[bytes], rpc: Any) -> bytes:
        await go.wait()
        return b"%d" % len([one async for one in requests])

    go = asyncio.Event()
    message = frame(bytes(100_000))

    async def main() -> None:
        async with serving(Method("/t.T/Idle", bytes, idle, bytes, takes_stream=True, scope=Scope.INFER)) as (
            _,
            peer,
        ):
            number = peer.begin("/t.T/Idle")
            sent = 0
            while sent < 100:
                sending = asyncio.ensure_future(send_all(peer, number, message))
                await asyncio.wait([sending], timeout=0.5 if sent > 5 else WAIT_S)
                if sending.cancel():
                    await asyncio.wait([sending])
                    break
                sent += 1
            assert 5 < sent < 30  # about a window of STREAM_WINDOW
            go.set()
            peer.h2.reset_stream(number)
            peer.flush()
            assert (await peer.ask("/t.T/Echo", frame(b"next"))).messages == [b"next"]

    run(main())


# -- the short way -------------------------------------------------------------------------------


class Short:
    """A method whose `start` keeps what it was given."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.held: list[tuple[bytes, GrpcExchange]] = []
        self.gone: list[bytes] = []

    def start(self, data: bytes, exchange: GrpcExchange) -> bool:
        if data == b"raise":
            raise RuntimeError("secret")
        if not self.takes:
            return False
        self.held.append((data, exchange))
        exchange.on_gone = lambda: self.gone.append(data)
        return True

    @property
    def method(self) -> Method:
        return Method("/t.T/Short", bytes, echo, bytes, start=self.start, scope=Scope.INFER)


def test_start_takes_a_call_and_answers_later() -> None:
    short = Short()

    async def main() -> None:
        async with serving(short.method) as (_, peer):
            first, second = (peer.call("/t.T/Short", frame(text)) for text in (b"1", b"2"))
            await until(lambda: len(short.held) == 2)
            short.held[1][1].reply([b"se", b"cond"])
            short.held[0][1].refuse(ServeError(Kind.NOT_FOUND, "no such thing: 100 % é"))
            assert (await peer.finish(second)).messages == [b"second"]
            assert (await peer.finish(first)).status == (5, "no such thing: 100 %25 %C3%A9")
            for _, exchange in short.held:  # once
                exchange.reply(b"again")
                exchange.fail(RuntimeError("again"))
            assert (await peer.ask("/t.T/Echo", frame(b"next"))).messages == [b"next"]
            assert short.gone == []

    run(main())


def test_what_start_leaves_runs_as_a_coroutine(caplog: pytest.LogCaptureFixture) -> None:
    short = Short(takes=False)

    async def main() -> None:
        async with serving(short.method) as (_, peer):
            assert (await peer.ask("/t.T/Short", frame(b"x"))).messages == [b"x"]
            assert (await peer.ask("/t.T/Short", frame(b"raise"))).status == (13, "Internal error")

    run(main())
    assert "secret" in caplog.text


def test_a_client_that_leaves_is_told_of_once() -> None:
    """By a reset, and by the end of its connection; what is answered later goes nowhere."""
    short, lines = Short(), []

    async def main() -> None:
        async with serving(short.method, access_log=lambda *line: lines.append(line[:3])) as (_, peer):
            numbers = [peer.call("/t.T/Short", frame(text)) for text in (b"1", b"2", b"3")]
            await until(lambda: len(short.held) == 3)
            peer.h2.reset_stream(numbers[0], h2.errors.ErrorCodes.CANCEL)
            peer.flush()
            await until(lambda: short.gone == [b"1"])
            short.held[1][1].reply(b"in time")
            await peer.finish(numbers[1])
            await peer.close()
            await until(lambda: short.gone == [b"1", b"3"])
            for _, exchange in short.held:
                exchange.reply(b"late")

    run(main())
    said = [("/t.T/Short", "CANCELLED", 0), ("/t.T/Short", "OK", 7), ("/t.T/Short", "CANCELLED", 0)]
    assert lines == said


def test_a_client_that_shuts_its_side_within_its_calls() -> None:
    """A single message has to come whole; of a stream what came is answered, and the connection ends."""

    async def main() -> None:
        async with serving() as (_, peer):
            numbers = [peer.begin(f"/t.T/{name}") for name in ("Echo", "Echo", "Double", "Double")]
            sent = b"", frame(b"x")[:3], frame(b"x"), frame(b"y")[:3]
            for number, data in zip(numbers, sent, strict=True):
                peer.send(number, data)
            peer._writer.write_eof()
            peer.flush = lambda: None  # type: ignore[method-assign]
            await peer.read(lambda: False)  # until the server hangs up
            single, begun, stream, broken = (peer.answers[number] for number in numbers)
            cut_off = (Kind.CANCELLED.value, "the connection ended within the call")
            assert single.status == begun.status == broken.status == cut_off
            assert (stream.messages, stream.status) == ([b"xx"], (0, ""))

    run(main())


def test_a_deadline_ends_a_call_that_nobody_answers() -> None:
    short = Short()

    async def main() -> None:
        async with serving(short.method) as (_, peer):
            number = peer.call("/t.T/Short", frame(b"x"), ("grpc-timeout", "20m"))
            far = peer.call("/t.T/Short", frame(b"y"), ("grpc-timeout", "1H"))
            assert (await peer.finish(number)).status == (4, "Deadline Exceeded")
            assert short.gone == [b"x"]
            (_, late), (_, held) = short.held
            assert held.deadline_ns - held.received_ns == 3600 * 10**9 + GRACE_NS
            late.reply(b"late")
            held.reply(b"in time")
            assert (await peer.finish(far)).messages == [b"in time"]

    run(main())


def test_a_deadline_is_told_whoever_notices_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine, on a late loop, whose words may be others."""
    monkeypatch.setattr(CallDeadlines, "add", lambda *_: None)
    short, words = Short(), ServeError(Kind.RESOURCE_EXHAUSTED, "it waited too long")

    async def main() -> None:
        async with serving(short.method) as (_, peer):
            number = peer.call("/t.T/Short", frame(b"x"), ("grpc-timeout", "20m"))
            far = peer.call("/t.T/Short", frame(b"y"), ("grpc-timeout", "1H"))
            await until(lambda: len(short.held) == 2)
            (_, late), (_, held) = short.held
            await until(lambda: monotonic_ns() >= late.deadline_ns)
            late.refuse(words)
            held.refuse(words)
            assert (await peer.finish(number)).status == (4, "Deadline Exceeded")
            assert (await peer.finish(far)).status == (8, words.message)

    run(main())


# -- floods --------------------------------------------------------------------------------------


def test_too_many_pings_end_the_connection_in_words_that_clients_know() -> None:
    async def main() -> None:
        async with serving() as (_, peer):
            for number in range(5000):
                peer.h2.ping(number.to_bytes(8, "big"))
            peer.flush()
            with contextlib.suppress(OSError):
                await peer.read(lambda: peer.goodbye is not None)
            assert peer.goodbye is not None
            assert peer.goodbye.error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
            assert peer.goodbye.additional_data == b"too_many_pings"

    run(main())


def test_a_quiet_client_is_asked_whether_it_is_there() -> None:
    async def main() -> None:
        brief = {"keepalive_s": 0.2, "keepalive_timeout_s": 0.3}
        async with serving(**brief) as (listener, peer), looked_at_often(listener):
            assert (await peer.ask("/t.T/Echo", frame(b"x"))).messages == [b"x"]
            await peer.read(lambda: peer.pings >= 2)  # answers them
            reader, writer = await asyncio.open_connection(*listener.address)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), WAIT_S)  # until it is cut off
            writer.close()

    run(main())


def test_a_small_header_table_of_the_client_is_honoured() -> None:
    """Prebuilt blocks say nothing of the table: its new size has to stand before them."""

    async def main() -> None:
        async with serving() as (_, peer):
            peer.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
            peer.flush()
            await peer.read(lambda: peer.h2.local_settings.header_table_size == 0)
            for _ in range(2):
                assert (await peer.ask("/t.T/Echo", frame(b"x"))).messages == [b"x"]

    run(main())


# -- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "ns"),
    [(b"1H", 3600 * 10**9), (b"2M", 120 * 10**9), (b"3S", 3 * 10**9), (b"4m", 4 * 10**6), (b"5u", 5000),
     (b"6n", 6), (b"0m", 0), (b"99999999H", NEVER_NS)],
)  # fmt: skip
def test_timeouts_of_every_unit(value: bytes, ns: int) -> None:
    assert read_timeout(value) == ns


@given(st.text(max_size=40))
def test_messages_of_errors_are_printable_and_come_back(text: str) -> None:
    raw = text.encode("utf-8", "replace")
    value = write_message(text)
    assert all(0x20 <= byte <= 0x7E for byte in value)
    decoded, at = bytearray(), 0
    while at < len(value):
        coded = value[at : at + 1] == b"%"
        decoded += bytes([int(value[at + 1 : at + 3], 16)]) if coded else value[at : at + 1]
        at += 3 if coded else 1
    assert bytes(decoded) == raw


@given(st.lists(st.binary(max_size=20), max_size=4))
def test_binary_metadata_comes_back(values: list[bytes]) -> None:
    sent = tuple(("key-bin", value) for value in values)
    assert read_metadata(write_metadata(sent)) == sent
    joined = b", ".join(value for _, value in write_metadata(sent))
    assert not values or read_metadata([(b"key-bin", joined)]) == sent
    padded = b",".join(base64.b64encode(value) for value in values)  # as some clients send it
    assert not values or read_metadata([(b"key-bin", padded)]) == sent


def test_metadata_that_cannot_be_sent_or_read() -> None:
    for name, value in (("Upper", "x"), ("a b", "x"), ("a", "x\n"), ("a", " x"), ("a", "é")):
        with pytest.raises(ValueError, match="must not be sent"):
            write_metadata([(name, value)])
    with pytest.raises(ServeError):
        read_metadata([(b"key-bin", b"###")])


def test_serving_needs_no_grpcio() -> None:
    code = """
import asyncio, sys
sys.modules["grpc"] = sys.modules["grpc_health"] = sys.modules["grpc_reflection"] = None  # imports fail
from fastserve.settings import GrpcOptions
from fastserve.net.grpc import GrpcListener
async def main():
    listener = GrpcListener("127.0.0.1", 0, [], GrpcOptions())
    await listener.open()
    await listener.close()
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
