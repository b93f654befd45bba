"""Large bodies that have come are read out of the socket by their endpoint; what is odd goes the usual way.

A `Line` is a socket pair with a Connection at one end that is fed by hand, one read at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.net import Call, HttpListener
from fastserve.net.http1 import connection as connection_module
from fastserve.net.http1 import large_bodies
from fastserve.net.http1.large_bodies import MOST_AWAITED_BYTES, ArrivedBody, BulkBody, ShortReads
from tests.net.kit import Pipe, client, run, serving, until

BODY = bytes(i % 251 for i in range(200_000))
HEAD = b"POST /rows HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


class Rows:
    """An endpoint that says what it got, and how."""

    def __init__(self) -> None:
        self.taken = self.called = 0
        self.willing = True
        self.fault: Exception | None = None
        self.fault_after: Exception | None = None

    def __call__(self, call: Call) -> None:
        self.called += 1
        call.reply(200, bytes(call.body))

    def take(self, call: Call, body: ArrivedBody) -> bool:
        if self.fault is not None:
            raise self.fault
        memory = bytearray(len(body))
        if not self.willing or not body.read_into([memoryview(memory)]):
            return False
        if self.fault_after is not None:
            raise self.fault_after
        self.taken += 1
        assert len(call.body) == len(memory)
        call.reply(200, bytes(memory))
        return True


class Line(Pipe):
    """Reads as a loop does, from a socket; `most` bytes where the protocol has no place of its own."""

    def __init__(self, endpoint: Any, most: int = 4096) -> None:
        self.client, self.server = socket.socketpair()
        for end in (self.client, self.server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            end.setblocking(False)
        self._most = most
        self._soon: list[Callable[[], None]] = []
        super().__init__({"/rows": endpoint})

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.server if name == "socket" else default

    def get_protocol(self) -> Any:
        return self.protocol

    def send(self, data: bytes) -> None:
        assert self.client.send(data) == len(data)

    def call_soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)

    def pump(self) -> None:
        """All reads there are, and the turns of the loop between them. Of a wait for the rest of a body the
        line knows nothing: it ends at once."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection_module, "get_running_loop", lambda: self)
            while (self.reading and not self.closed and self._read_once()) or self._soon:
                calls, self._soon = self._soon, []
                for call in calls:
                    call()

    def _read_once(self) -> bool:
        try:
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                got = self.server.recv_into(self.protocol.get_buffer(-1))
                self.protocol.buffer_updated(got)
                return bool(got)
            data = self.server.recv(self._most)
        except BlockingIOError:
            return False
        if data:
            self.protocol.data_received(data)
        return bool(data)

    def bodies(self) -> list[bytes]:
        return [reply.body for reply in self.replies()]

    def shut(self) -> None:
        self.client.close()
        self.close()
        self.server.close()
        assert not self.listener.connections


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def line(rows: Rows) -> Iterator[Line]:
    opened = Line(rows)
    yield opened
    opened.shut()


def ask(line: Line, body: bytes = BODY) -> None:
    line.send(HEAD % len(body) + body)
    line.pump()


def test_a_body_that_has_come_is_the_endpoints_to_read(line: Line, rows: Rows) -> None:
    for count in range(1, 4):
        ask(line)
        assert line.bodies() == [BODY] * count
        assert isinstance(line.protocol, ShortReads)
    assert (rows.taken, rows.called) == (3, 0)


def test_one_that_is_still_on_its_way_is_read_as_ever(line: Line, rows: Rows) -> None:
    line.send(HEAD % len(BODY) + BODY[:-1])
    line.pump()
    assert isinstance(line.protocol, BulkBody)
    assert rows.taken == rows.called == 0
    line.send(BODY[-1:])
    line.pump()
    assert line.bodies() == [BODY]
    assert (rows.taken, rows.called) == (0, 1)


def test_an_endpoint_that_does_not_take_it_is_called_with_all_of_it(line: Line, rows: Rows) -> None:
    rows.willing = False
    ask(line)
    rows.willing = True
    ask(line)
    assert line.bodies() == [BODY] * 2
    assert (rows.taken, rows.called) == (1, 1)


def test_what_follows_the_body_is_the_next_request(line: Line, rows: Rows) -> None:
    line.send((HEAD % len(BODY) + BODY) * 2 + HEAD % 2 + b"xy")
    line.pump()
    assert line.bodies() == [BODY, BODY, b"xy"]
    assert (rows.taken, rows.called) == (2, 1)


@pytest.mark.parametrize("more", [1, 1000, len(BODY)])
def test_a_socket_that_has_less_than_it_says(
    line: Line, rows: Rows, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = (1 << 30).to_bytes(4, "little")
    monkeypatch.setattr(large_bodies, "ioctl", lambda *_: there)
    data = HEAD % len(BODY) + BODY
    line.send(data[:-more])
    line.pump()
    assert line.bodies() == []
    line.send(data[-more:])
    line.pump()
    assert line.bodies() == [BODY]


def test_a_read_that_fails(line: Line, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("no")

    monkeypatch.setattr(large_bodies.os, "readv", fail)
    ask(line)
    assert line.bodies() == [BODY]
    assert (rows.taken, rows.called) == (0, 1)


def test_a_client_that_leaves_midway_starts_nothing(line: Line, rows: Rows) -> None:
    line.send(HEAD % len(BODY) + BODY[:-1])
    line.client.close()
    line.pump()
    assert line.protocol.eof_received() in (False, None, True)
    line.close()
    assert rows.taken == rows.called == 0


@pytest.mark.parametrize("name", ["fault", "fault_after"])
def test_a_failure_is_answered_and_nothing_of_the_body_is_taken_for_a_request(
    line: Line, rows: Rows, name: str
) -> None:
    setattr(rows, name, RuntimeError("a secret"))
    ask(line, (HEAD % 0) * 3000)
    setattr(rows, name, None)
    ask(line)
    assert [reply.status for reply in line.replies()] == [500, 200]
    assert line.bodies()[1] == BODY


def test_a_body_read_and_not_taken_is_a_failure(line: Line, rows: Rows) -> None:
    rows.take = lambda call, body: body.drop() and False  # type: ignore[method-assign]
    ask(line)
    assert [reply.status for reply in line.replies()] == [500]


def test_a_failure_where_the_socket_has_lied_ends_the_connection(
    line: Line, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "ioctl", lambda *_: (1 << 30).to_bytes(4, "little"))
    rows.fault = RuntimeError("a secret")
    line.send(HEAD % len(BODY) + BODY[:-1])
    line.pump()
    assert [reply.status for reply in line.replies()] == [500]
    assert line.closed


def test_behind_a_call_that_waits_it_is_read_as_ever(line: Line, rows: Rows) -> None:
    calls: list[Call] = []
    line.listener.router._dialects[0].endpoints["/wait"] = calls.append
    line.send(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD % len(BODY) + BODY)
    line.pump()
    assert (rows.taken, rows.called) == (0, 1)
    calls[0].reply(200, b"first")
    assert line.bodies() == [b"first", BODY]


@pytest.mark.parametrize("lines", [b"Connection: close\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_heads_that_are_not_for_this(line: Line, rows: Rows, lines: bytes) -> None:
    chunked = b"chunked" in lines
    head = (HEAD % len(BODY)).replace(b"Content-Length: %d\r\n" % len(BODY) if chunked else b"\r\n\r\n", b"")
    if chunked:
        line.send(head[:-2] + lines + b"\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
    else:
        line.send(head + b"\r\n" + lines + b"\r\n" + BODY)
    line.pump()
    assert line.bodies() == [BODY]
    assert (rows.taken, rows.called) == (0, 1)


@pytest.mark.parametrize("closing", [True, False])
def test_sockets_that_cannot_be_read_so(line: Line, closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is closed, whose number may be another's; one with TLS in it."""
    if closing:
        line.is_closing = lambda: True  # type: ignore[method-assign]
    else:
        line.get_extra_info = lambda name, default=None: (  # type: ignore[method-assign]
            line.server if name in ("socket", "ssl_object") else default
        )
    line.send(b"x")
    assert large_bodies.find_arrived(line, [b"a"], 1) is None


def test_places_of_another_size_are_refused(line: Line) -> None:
    line.send(b"abc")
    body = large_bodies.find_arrived(line, [b"xy"], 3)
    assert body is not None
    for sizes in ([4], [6], [2, 2], [1]):
        with pytest.raises(ValueError, match="another size"):
            body.read_into([memoryview(bytearray(size)) for size in sizes])
    with pytest.raises(ValueError, match="another size"):
        body.read_into([memoryview(bytearray(4))], 2)
    places = [memoryview(bytearray(1)), memoryview(bytearray(3))]
    assert body.read_into(places, 1)
    assert [bytes(place) for place in places] == [b"y", b"abc"]


@given(st.data())
def test_wherever_requests_are_split_answers_are_the_same(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=4))
    stream = b"".join(HEAD % len(body) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    willing = data.draw(st.booleans())
    short = data.draw(st.booleans())
    check_splits(bodies, [0, *cuts, len(stream)], data.draw(st.sampled_from([1, 7, 4096])), willing, short)


@pytest.mark.parametrize("short", [False, True])
def test_split_at_every_byte(short: bool) -> None:
    bodies = [b"0123456789abcdef", b"x", b"0123456789ABCDEF"]
    size = sum(len(HEAD % len(body) + body) for body in bodies)
    taken = [
        check_splits(bodies, [0, at, size], most, True, short)
        for most in (1, 5, 4096)
        for at in range(size + 1)
    ]
    assert max(taken) == 2  # of one byte there is no rest


def check_splits(bodies: list[bytes], cuts: list[int], most: int, willing: bool, short: bool) -> int:
    """Bodies of four bytes count as large; `short`: the socket has always less than it says."""
    stream = b"".join(HEAD % len(body) + body for body in bodies)
    rows = Rows()
    rows.willing = willing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_module, "BULK_BYTES", 4)
        patch.setattr(large_bodies, "SIP_BYTES", 7)
        if short:
            patch.setattr(large_bodies, "ioctl", lambda *_: (1 << 30).to_bytes(4, "little"))
        line = Line(rows, most)
        try:
            for start, stop in itertools.pairwise(cuts):
                line.send(stream[start:stop])
                line.pump()
            assert line.bodies() == bodies
            assert rows.taken + rows.called == len(bodies)
        finally:
            line.shut()
    return rows.taken


# --- bodies that come apart from their heads, on a real loop and over TCP ---------------------------------


async def watch(listener: HttpListener) -> tuple[Any, socket.socket]:
    """The one connection a client has opened, and the server's end of it."""
    await until(lambda: listener.connections)
    (connection,) = listener.connections
    return connection, connection._transport.get_extra_info("socket")  # type: ignore[union-attr]


def awaits(server: socket.socket) -> int:
    """From how many bytes on the socket counts as readable."""
    return server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def arrived_bytes(server: socket.socket) -> int:
    return int.from_bytes(large_bodies.ioctl(server.fileno(), large_bodies.FIONREAD, bytes(4)), "little")


@pytest.mark.parametrize("begun", [0, 1, 100, 4096, 100_000, len(BODY) - 1])
def test_bodies_that_come_apart_from_their_heads_are_taken_as_a_whole(rows: Rows, begun: int) -> None:
    """Bodies are taken whole however much was read with the head, and in however many pieces the rest comes.
    While its window is small, the kernel now and then ends a wait before all is there."""

    async def work() -> None:
        async with serving({"/rows": rows}) as listener, client(listener) as peer:
            _, server = await watch(listener)
            while rows.taken < 3:
                peer.send(HEAD % len(BODY) + BODY[:begun])
                await asyncio.sleep(0)
                for at in range(begun, len(BODY), 50_000):
                    peer.send(BODY[at : at + 50_000])
                    await asyncio.sleep(0)
                assert (await peer.reply()).body == BODY
                assert awaits(server) == 1
            peer.send(HEAD % 2 + b"xy")
            assert (await peer.reply()).body == b"xy"

    run(work())


def test_one_whose_client_is_slow_is_read_as_it_comes_after_a_look(rows: Rows) -> None:
    """How fast it comes can be told then, and it is answered all the same."""

    async def work() -> None:
        async with serving({"/rows": rows}) as listener, client(listener) as peer:
            peer.send(HEAD % len(BODY))
            connection, server = await watch(listener)
            await until(lambda: awaits(server) > 1)
            peer.send(BODY[:1000])
            await until(lambda: arrived_bytes(server) == 1000)
            assert connection._need == len(BODY)
            listener.scan()
            await until(lambda: connection._need == len(BODY) - 1000)
            assert awaits(server) == 1
            peer.send(BODY[1000:])
            assert (await peer.reply()).body == BODY
            assert (rows.taken, rows.called) == (0, 1)

    run(work())


@pytest.mark.parametrize("sent", [0, 1000])
def test_a_client_that_leaves_while_its_body_is_awaited(rows: Rows, sent: int) -> None:
    async def work() -> None:
        async with serving({"/rows": rows}) as listener:
            async with client(listener) as peer:
                peer.send(HEAD % len(BODY))
                _, server = await watch(listener)
                await until(lambda: awaits(server) > 1)
                peer.send(BODY[:sent])
                await until(lambda: arrived_bytes(server) == sent)
            await until(lambda: not listener.connections)
        assert rows.taken == rows.called == 0

    run(work())


@pytest.mark.parametrize("body_bytes", [4096, MOST_AWAITED_BYTES + 1])
def test_bodies_that_are_not_awaited(rows: Rows, body_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "wake_at", lambda *_: pytest.fail("it was"))
    line = Line(rows)
    try:
        line.send(HEAD % body_bytes)
        line.pump()
        assert rows.taken == rows.called == 0
    finally:
        line.shut()
