"""Clients that read their replies drop by drop: progress is a rate while something waits, and not any byte.

The test moves the clock and scans; where sockets are real, it waits for what the kernel does, not for time.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from fastserve.net import Call, HttpListener
from fastserve.net.access_control import Opening, Scope
from fastserve.net.grpc.calls import GrpcCalls
from fastserve.net.grpc.method import Method, RpcTerms
from fastserve.net.http2.stream import ErrorCode
from fastserve.net.limits import DrainRate, acked_bytes
from tests.net.http2.kit import GET, POST, Peer
from tests.net.kit import Held, Pipe, client, echo, limits, run, serving, until

LEAST = limits().reply_bytes_per_s
STALL_S = limits().write_stall_s
BIG = [*GET[:3], (":path", "/big")]
FAST = [*GET[:3], (":path", "/echo")]
REQUEST = b"GET /big HTTP/1.1\r\nHost: a\r\n\r\n"


def big(call: Call) -> None:
    call.reply(200, bytes(1 << 20))


def seconds(start: float, count: float) -> list[float]:
    """The looks of a listener, one a second."""
    return [start + i for i in range(int(count))]


# --- the rule itself


@pytest.mark.parametrize(
    ("per_s", "slow"), [(0, True), (1, True), (LEAST - 1, True), (LEAST, False), (100 * LEAST, False)]
)
def test_a_rate_is_kept_or_not(per_s: int, slow: bool) -> None:
    taking = DrainRate()
    found = [taking.is_slow(True, int(now * per_s), now, limits()) for now in seconds(0, 200)]
    assert any(found) is slow
    assert found.index(True) == STALL_S if slow else True


def test_a_rate_counts_only_while_something_waits() -> None:
    taking = DrainRate()
    for now in seconds(0, 1000):  # every 29 seconds there is a look that finds nothing
        assert not taking.is_slow(now % 29 != 0, 0, now, limits())


def test_a_stretch_that_was_fast_does_not_make_up_for_the_next() -> None:
    taking = DrainRate()
    assert not taking.is_slow(True, 0, 0.0, limits())
    assert not taking.is_slow(True, 1 << 30, 30.0, limits())
    assert taking.is_slow(True, (1 << 30) + 10, 60.0, limits())


def test_no_rate_is_asked_for_with_zero() -> None:
    taking = DrainRate()
    assert not any(taking.is_slow(True, 0, now, limits(reply_bytes_per_s=0)) for now in seconds(0, 100))


# --- HTTP/1.1


class Acked:
    """Stands in for a socket of TCP whose peer has taken so much."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.nbytes = 0

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        return bytes(120) + struct.pack("=Q", self.nbytes)


def drip(pipe: Pipe, per_look: int, looks: int) -> int:
    """A client that takes so many bytes before each look; how many looks it lived."""
    taken = Acked()
    pipe.get_extra_info = lambda name, default=None: taken if name == "socket" else default  # type: ignore[method-assign]
    pipe.unsent_bytes = 1 << 20
    for look in range(looks):
        pipe.scan(float(look))
        if pipe.closed:
            return look
        taken.nbytes += per_look
        pipe.unsent_bytes -= per_look
    return looks


def test_a_client_of_http_1_that_drips_is_cut_off() -> None:
    held = Held()
    pipe = Pipe({"/held": held})
    pipe.feed(REQUEST.replace(b"big", b"held"))
    assert drip(pipe, 2, 100) == STALL_S
    assert pipe.listener.refusals == {"reply_bytes_per_s": 1}
    assert held.left == held.calls


def test_a_client_of_http_1_that_is_slow_enough_to_wait_for_is_waited_for() -> None:
    pipe = Pipe({"/held": Held()})
    pipe.feed(REQUEST.replace(b"big", b"held"))
    assert drip(pipe, LEAST, 300) == 300
    assert not pipe.listener.refusals


def stands(transport: Any, seen: list[int]) -> bool:
    """Whether the client's kernel takes nothing more, as seen so far and now."""
    seen.append(acked_bytes(transport))
    return transport.get_write_buffer_size() > 0 and len(seen) > 50 and len(set(seen[-50:])) == 1


def look(listener: HttpListener, now: float) -> None:
    clock: Any = listener.clock
    clock.now = now
    listener.scan()


def test_what_tcp_says_is_what_the_client_has_taken() -> None:
    async def main() -> None:
        served = {"/big": lambda call: call.reply(200, bytes(32 << 20))}
        async with serving(served) as listener, client(listener, receive_bytes=4096) as peer:
            seen: list[int] = []
            peer.send(REQUEST)  # its reader takes 128 KB, and no more until somebody reads
            await until(lambda: listener.connections)
            (connection,) = listener.connections
            transport: Any = connection._transport
            await until(lambda: stands(transport, seen))
            look(listener, 0.0)
            before = acked_bytes(transport)
            assert before > 0
            assert len(await peer.reader.readexactly(1 << 20)) == 1 << 20
            await until(lambda: acked_bytes(transport) > before + LEAST * STALL_S)
            look(listener, STALL_S)
            assert not listener.refusals  # a megabyte within the stretch
            await until(lambda: stands(transport, seen))
            look(listener, 2 * STALL_S)
            await until(lambda: not listener.connections)
            assert set(listener.refusals) <= {"reply_bytes_per_s", "write_stall_s"}

    run(main())


# --- HTTP/2


class Dripping(Peer):
    """A client whose windows open a byte at a time, as it says."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.credits = False

    def widen(self, number: int, nbytes: int) -> None:
        self.h2.increment_flow_control_window(nbytes, number or None)
        self.flush()

    def looks(self, times: list[float], before: Callable[[], object]) -> float:
        """Look at each of these; when it was that something was refused, 0 for never."""
        for now in times:
            before()
            self.pipe.scan(now)
            if self.pipe.listener.refusals:
                self.hear()
                return now
        return 0


@pytest.fixture
def peer() -> Dripping:
    found = Dripping({"/big": big, "/echo": echo, "/held": Held()})
    found.h2.increment_flow_control_window(1 << 24)  # of the connection: streams have 65,535 each
    return found


def test_a_stream_whose_window_drips_is_reset_alone(peer: Dripping) -> None:
    slow = peer.send(BIG)
    other = peer.send([*GET[:3], (":path", "/held")])
    peer.flush()
    assert peer.looks(seconds(0, 100), lambda: (peer.widen(slow, 1), peer.widen(slow, 1))) == STALL_S
    assert peer.answers[slow].reset == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.pipe.listener.refusals == {"reply_bytes_per_s": 1}
    assert peer.connection.sending.queued == 0
    assert list(peer.connection.streams) == [other]
    assert peer.ask(FAST).status == 200


def test_a_stream_that_drips_is_found_beside_one_that_is_read_well(peer: Dripping) -> None:
    """The connection as a whole takes a lot."""
    slow, well = peer.send(BIG), peer.send(BIG)
    peer.flush()

    def read() -> None:
        peer.widen(slow, 1)
        peer.widen(well, 4096)

    assert peer.looks(seconds(0, 100), read) == STALL_S
    assert (peer.answers[slow].reset, peer.answers[well].reset) == (ErrorCode.ENHANCE_YOUR_CALM, None)


def test_a_stream_of_a_slow_client_goes_on(peer: Dripping) -> None:
    slow = peer.send(BIG)
    peer.flush()
    assert not peer.looks(seconds(0, 200), lambda: peer.widen(slow, LEAST))


def test_a_connection_whose_window_drips_is_cut_off() -> None:
    peer = Dripping({"/big": big})
    for number in [peer.send(BIG) for _ in range(8)]:
        peer.h2.increment_flow_control_window(1 << 24, number)
    peer.flush()

    def read() -> None:
        peer.widen(0, 1)
        peer.h2.ping(b"01234567")  # whose answer is no part of a reply
        peer.flush()

    assert peer.looks(seconds(0, 100), read) == STALL_S
    assert peer.pipe.closed


def test_a_stream_of_small_pieces_may_be_as_slow_as_its_writer() -> None:
    """A token a minute: nothing waits to be sent between them."""
    held = Held()
    peer = Dripping({"/held": held})
    number = peer.send([*GET[:3], (":path", "/held")])
    peer.flush()
    reply = held.calls[0].stream(200, b"text/event-stream")
    for now in seconds(0, 600):
        if now % 60 == 0:
            reply.send(b"data: a\n\n")
        peer.pipe.scan(now)
        peer.hear()
    assert peer.answers[number].body == b"data: a\n\n" * 10
    assert not peer.pipe.listener.refusals


def test_a_window_that_opens_now_and_then_is_no_slow_one(peer: Dripping) -> None:
    """Clients give back half a window at a time."""
    slow = peer.send(BIG)
    peer.flush()
    opened = iter(range(1000))

    def read() -> None:
        if next(opened) % 25 == 24:
            peer.widen(slow, 32768)

    assert not peer.looks(seconds(0, 200), read)


# --- gRPC


class Feed:
    """A method that gives messages for as long as somebody takes them."""

    def __init__(self) -> None:
        self.given = 0
        self.left = asyncio.Event()

    async def run(self, request: bytes, rpc: Any) -> Any:
        try:
            while True:
                self.given += 1
                yield bytes(1000)
        finally:
            self.left.set()


def test_a_stream_of_grpc_whose_window_drips_is_reset() -> None:
    async def main() -> None:
        feed = Feed()
        method = Method("/a.B/C", bytes, feed.run, bytes, gives_stream=True, scope=Scope.INFER)
        terms = RpcTerms(1 << 20, limits(), None, Opening())
        peer = Dripping({}, services=[GrpcCalls({method.path: method}, terms, 0)])
        head = [*POST[:3], (":path", "/a.B/C"), ("content-type", "application/grpc"), ("te", "trailers")]
        peer.h2.increment_flow_control_window(1 << 24)
        number = peer.send(head, bytes(5))
        peer.flush()
        await until(lambda: feed.given > 64)
        peer.hear()
        assert peer.looks(seconds(0, 100), lambda: peer.widen(number, 1)) == STALL_S
        assert peer.answers[number].reset == ErrorCode.ENHANCE_YOUR_CALM
        await until(feed.left.is_set)

    run(main())
