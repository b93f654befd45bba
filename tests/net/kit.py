"""Helpers of the tests of net: a listener on a port of its own, raw clients, and a transport of lists.

Deterministic cases feed a Connection by hand through `Pipe`; the others use real sockets on port 0.
Nothing sleeps: time is a number the test moves, and the listener's scan() is called by the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
import uvloop

from fastserve.errors import ServeError
from fastserve.net import Call, Endpoint, HttpListener, Route
from fastserve.net.access_control import Scope
from fastserve.net.callback_guard import INTERNAL_ERROR
from fastserve.net.http1.connection import Http1Connection
from fastserve.settings import Limits

T = TypeVar("T")
WAIT_S = 30.0  # how long a test waits for something that must happen


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine on the loop the server runs on."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, 200)

    return uvloop.run(bounded())


async def _nothing() -> None:
    pass


run(_nothing())  # libuv opens its signal pipe with the process's first loop, for good


def limits(**changes: object) -> Limits:
    return msgspec.structs.replace(Limits(), **changes)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Paths:
    """A dialect made of a dict from path to endpoint; other paths are not its own."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self.endpoints = endpoints
        self.asked: list[tuple[str, str]] = []

    def route(self, method: str, target: str) -> Route | None:
        self.asked.append((method, target))
        endpoint = self.endpoints.get(target.partition("?")[0])
        return None if endpoint is None else Route(endpoint, Scope.INFER)

    def refuse(self, call: Call, fault: ServeError) -> None:
        call.reply(503, fault.message.encode(), b"text/plain")


def echo(call: Call) -> None:
    """Says what arrived."""
    call.reply(
        200, b"%b %b %b" % (call.method.encode(), call.target.encode("latin-1"), call.body), b"text/plain"
    )


class Held:
    """An endpoint whose calls stay open until the test replies to them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.left: list[Call] = []

    def __call__(self, call: Call) -> None:
        self.calls.append(call)
        call.on_gone = lambda: self.left.append(call)


@contextlib.asynccontextmanager
async def serving(
    endpoints: Mapping[str, Endpoint], with_limits: Limits | None = None, **options: Any
) -> AsyncIterator[HttpListener]:
    """An open listener; afterwards no connection may be left, and none may have ended by an exception that
    nobody foresaw, unless the test `breaks` one."""
    options.setdefault("clock", Clock())
    breaks = options.pop("breaks", False)
    listener = HttpListener("127.0.0.1", 0, [Paths(endpoints)], with_limits or Limits(), **options)
    await listener.open()
    try:
        yield listener
    finally:
        await listener.close()
        assert not listener.connections
        assert breaks or not listener.refusals[INTERNAL_ERROR]


class Client:
    """A raw client: bytes out, bytes in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self, bodiless: bool = False) -> Reply:
        """The next reply, by its Content-Length or chunks."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)
        reply = Reply(head)
        if bodiless or reply.status in (100, 204, 304):
            return reply
        if reply.headers.get("transfer-encoding") == "chunked":
            reply.body = await self._chunks()
        elif "content-length" in reply.headers:
            size = int(reply.headers["content-length"])
            reply.body = await asyncio.wait_for(self.reader.readexactly(size), WAIT_S)
        else:
            reply.body = await self.rest()
        return reply

    async def _chunks(self) -> bytes:
        body = b""
        while True:
            size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), WAIT_S), 16)
            body += (await asyncio.wait_for(self.reader.readexactly(size + 2), WAIT_S))[:-2]
            if size == 0:
                return body

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        return await asyncio.wait_for(self.reader.read(), WAIT_S)

    def close(self) -> None:
        self.writer.close()


class Reply:
    """One reply, taken apart."""

    def __init__(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        self.status = int(first.split(" ", 2)[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self.body = b""

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


def read_replies(data: bytes) -> list[Reply]:
    """All replies of a recorded connection; HEAD is not among its requests."""
    replies = []
    while data:
        head, empty, data = data.partition(b"\r\n\r\n")
        assert empty, data
        reply = Reply(head + b"\r\n\r\n")
        size = int(reply.headers.get("content-length", "0"))
        reply.body, data = data[:size], data[size:]
        assert len(reply.body) == size
        replies.append(reply)
    return replies


@contextlib.asynccontextmanager
async def client(listener: HttpListener, receive_bytes: int = 0) -> AsyncIterator[Client]:
    """A connected client; `receive_bytes` makes its window small."""
    link = socket.socket()
    if receive_bytes:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, listener.address)
    reader, writer = await asyncio.open_connection(sock=link, limit=1 << 16)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def until(true: Callable[[], object]) -> None:
    """Let the loop turn until something is so."""

    async def turn() -> None:
        while not true():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(turn(), WAIT_S)


DATE_S = 784111777.0
"""When a pipe's replies are sent, until its listener looks at the time: the date of RFC 9110's examples."""


class Pipe(asyncio.Transport):
    """A Connection fed by hand: what it writes is kept, and input waits while it does not read."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        with_limits: Limits | None = None,
        *,
        breaks: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.breaks = breaks  # the test makes callbacks fail
        self.clock = Clock()
        self.listener = HttpListener(
            "127.0.0.1", 0, [Paths(endpoints)], with_limits or Limits(), clock=self.clock, **options
        )
        self.listener.scan()
        for dated in (self.listener.heads, self.listener.blocks):
            dated.tick(DATE_S)  # of all pipes, so that what two send can be compared
        self.sent = b""
        self.unsent_bytes = 0
        self.reading = True
        self.ended = self.closed = False
        self.connection = Http1Connection(self.listener)
        self.protocol: Any = self.connection
        self.connection.connection_made(self)

    def feed(self, data: bytes, size: int = 0) -> None:
        """Send input, in pieces of `size` bytes."""
        step = size or len(data)
        for start in range(0, len(data), step):
            if not self.closed:
                assert self.reading
                self.arrive(data[start : start + step])

    def arrive(self, data: bytes) -> None:
        """One read: handed over, or written where the protocol of the moment wants it."""
        while data and not self.closed and isinstance(self.protocol, asyncio.BufferedProtocol):
            room = self.protocol.get_buffer(-1)
            taken = min(len(room), len(data))
            room[:taken] = data[:taken]
            del room  # a socket looks at it no longer than this
            self.protocol.buffer_updated(taken)
            self.turn()
            data = data[taken:]
        if data and not self.closed:
            self.protocol.data_received(data)
            self.turn()

    def turn(self) -> None:
        """The loop turns until nothing waits for that."""
        while self.listener.fair_queue:
            self.listener.fair_queue.turn()
        assert self.breaks or not self.listener.refusals[INTERNAL_ERROR]

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def replies(self) -> list[Reply]:
        return read_replies(self.sent)

    def scan(self, at: float) -> None:
        self.clock.now = at
        self.listener.scan()

    def write(self, data: Any) -> None:
        assert not self.ended
        self.sent += bytes(data)

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.protocol.connection_lost(None)

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes
