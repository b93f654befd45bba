"""HTTP/1.1 connections of a client: one kind that blocks, one that awaits.

Connections are kept while the server keeps them, and are used by one call at a time. One that the server has
closed meanwhile is left for a new one; once a request is sent, it is never sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import httptools

from fastserve.client.v2 import ReceivedHttp, SentHttp, fault_of, split_events
from fastserve.errors import Kind, ServeError, internal

RECEIVED_BYTES = 1 << 18
MOST_PIECES = 256
"""Pieces of one system call; Linux takes up to 1024."""
EVENT_END = b"\n\n"
KEPT = 64


@dataclass(frozen=True)
class HttpTarget:
    """Where requests go, and what each of them brings."""

    host: str
    port: int
    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None

    def encode(self, request: SentHttp) -> list[bytes | memoryview]:
        """Return a request as it is sent, in pieces."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{request.method} {request.path} HTTP/1.1", f"host: {host}:{self.port}"]
        told = {**self.headers, **request.headers}
        for name, value in told.items():
            if not f"{name}{value}".isprintable():
                raise ValueError(f"the header {name!r} has characters that a header cannot have")
            lines.append(f"{name}: {value}")
        lines.append(f"content-length: {sum(map(len, request.blobs), len(request.body))}")
        return ["\r\n".join((*lines, "", "")).encode("latin-1") + request.body, *request.blobs]

    def unreachable(self, fault: OSError) -> ServeError:
        """Return the error of a server that cannot be reached, or that ended a connection."""
        if isinstance(fault, TimeoutError):
            text = f"{self.host}:{self.port} did not answer within {self.timeout_s:g} s"
            return ServeError(Kind.DEADLINE_EXCEEDED, text)
        return ServeError(Kind.UNAVAILABLE, f"{self.host}:{self.port}: {fault.strerror or fault}")


class AnswerReader:
    """Reads one answer out of the bytes of a connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.answer = ReceivedHttp()
        self.has_head = self.done = self.keep = False

    def feed(self, data: bytes) -> None:
        """Take bytes; b"" is the end of the connection. Raises ServeError."""
        if not data:
            raise ServeError(Kind.UNAVAILABLE, "the server closed the connection before its answer ended")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            raise internal("the server answered with something that is not HTTP") from None

    def take(self) -> bytes:
        """Return what has come of the body since the last call."""
        found, self._parts = b"".join(self._parts), []
        return found

    def whole(self) -> ReceivedHttp:
        """Return the answer with its body, once it is done."""
        self.answer.body = self.take()
        return self.answer

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answer.status, self.has_head = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.done, self.keep = True, self._parser.should_keep_alive()


class EventReader:
    """Cuts a body into the data of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        whole, found, rest = (self._rest + data).rpartition(EVENT_END)
        self._rest = rest
        return split_events(whole) if found else iter(())


def is_readable(connection: socket.socket) -> bool:
    """Whether there is something to read, which on an idle connection is its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def send_pieces(connection: socket.socket, pieces: Sequence[bytes | memoryview], until_s: float) -> None:
    """Send pieces one after the other, by a time of `monotonic`. To join them first costs more than to send
    them, from 100 KB on: pages of new memory. Raises OSError."""
    if isinstance(connection, ssl.SSLSocket):
        connection.sendall(b"".join(pieces))
        return
    left = [memoryview(piece) for piece in pieces if len(piece)]
    while left:
        connection.settimeout(max(0.001, until_s - monotonic()))
        sent = connection.sendmsg(left[:MOST_PIECES])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


class HttpConnections:
    """Connections of callers who block; threads may share them."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: SentHttp) -> ReceivedHttp:
        """Send a request and return its answer, whatever its status. Raises ServeError."""
        with self._sent(request) as (reader, receive):
            while not reader.done:
                reader.feed(receive())
            return reader.whole()

    def parts(self, request: SentHttp) -> Iterator[bytes]:
        """Send a request and yield the events of its answer. Raises ServeError."""
        with self._sent(request) as (reader, receive):
            while not reader.has_head:
                reader.feed(receive())
            while reader.answer.status != 200 and not reader.done:
                reader.feed(receive())
            if reader.answer.status != 200:
                raise fault_of(reader.whole())
            events = EventReader()
            yield from events.feed(reader.take())
            while not reader.done:
                reader.feed(receive())
                yield from events.feed(reader.take())

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for one in idle:
            one.close()

    @contextlib.contextmanager
    def _sent(self, request: SentHttp) -> Iterator[tuple[AnswerReader, Callable[[], bytes]]]:
        """Send a request; keep the connection if its answer has been read to the end by then."""
        reader, until = AnswerReader(), monotonic() + self._target.timeout_s
        sent = self._target.encode(request)
        connection: socket.socket | None = None

        def receive() -> bytes:
            assert connection is not None
            connection.settimeout(max(0.001, until - monotonic()))
            return connection.recv(RECEIVED_BYTES)

        def receive_part() -> bytes:
            nonlocal until
            found = receive()
            until = monotonic() + self._target.timeout_s
            return found

        try:
            connection = self._connect()
            send_pieces(connection, sent, until)
            yield reader, receive_part if "accept" in request.headers else receive
        except OSError as fault:
            raise self._target.unreachable(fault) from None
        finally:
            if connection is not None:
                self._put_back(connection, keep=reader.done and reader.keep)

    def _connect(self) -> socket.socket:
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this client is closed")
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                break
            if not is_readable(kept):
                kept.settimeout(self._target.timeout_s)
                return kept
            kept.close()  # by the server: nothing else is there to read
        target = self._target
        made = socket.create_connection((target.host, target.port), target.timeout_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return target.tls.wrap_socket(made, server_hostname=target.host) if target.tls else made
        except BaseException:
            made.close()
            raise

    def _put_back(self, connection: socket.socket, *, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed and len(self._idle) < KEPT:
                self._idle.append(connection)
                return
        connection.close()


@dataclass
class AsyncConnection:
    """Both ends of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class AsyncHttpConnections:
    """Connections of callers who await, on one event loop."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._idle: list[AsyncConnection] = []
        self._closed = False

    async def ask(self, request: SentHttp) -> ReceivedHttp:
        """Send a request and return its answer, whatever its status. Raises ServeError."""
        async with self._sent(request) as (reader, receive):
            while not reader.done:
                reader.feed(await receive())
            return reader.whole()

    async def parts(self, request: SentHttp) -> AsyncIterator[bytes]:
        """Send a request and yield the events of its answer. Raises ServeError."""
        async with self._sent(request) as (reader, receive):
            while not reader.has_head:
                reader.feed(await receive())
            while reader.answer.status != 200 and not reader.done:
                reader.feed(await receive())
            if reader.answer.status != 200:
                raise fault_of(reader.whole())
            events = EventReader()
            for event in events.feed(reader.take()):
                yield event
            while not reader.done:
                reader.feed(await receive())
                for event in events.feed(reader.take()):
                    yield event

    async def close(self) -> None:
        idle, self._idle, self._closed = self._idle, [], True
        for one in idle:
            await self._end(one)

    @contextlib.asynccontextmanager
    async def _sent(
        self, request: SentHttp
    ) -> AsyncIterator[tuple[AnswerReader, Callable[[], Awaitable[bytes]]]]:
        """Send a request; keep the connection if its answer has been read to the end by then."""
        reader, until = AnswerReader(), monotonic() + self._target.timeout_s
        sent, by_parts = self._target.encode(request), "accept" in request.headers
        connection: AsyncConnection | None = None

        async def receive() -> bytes:
            nonlocal until
            assert connection is not None
            left_s = max(0.001, until - monotonic())
            found = await asyncio.wait_for(connection.reader.read(RECEIVED_BYTES), left_s)
            if by_parts:
                until = monotonic() + self._target.timeout_s
            return found

        try:
            connection = await asyncio.wait_for(self._connect(), self._target.timeout_s)
            connection.writer.write(b"".join(sent))
            await asyncio.wait_for(connection.writer.drain(), max(0.001, until - monotonic()))
            yield reader, receive
        except asyncio.TimeoutError:  # in Python 3.10 not the builtin one
            raise self._target.unreachable(TimeoutError()) from None
        except OSError as fault:
            raise self._target.unreachable(fault) from None
        finally:
            if connection is not None:
                await self._put_back(connection, keep=reader.done and reader.keep)

    async def _connect(self) -> AsyncConnection:
        if self._closed:
            raise RuntimeError("this client is closed")
        while self._idle:
            kept = self._idle.pop()
            if not kept.reader.at_eof() and not kept.writer.is_closing():
                return kept
            await self._end(kept)
        target = self._target
        return AsyncConnection(
            *await asyncio.open_connection(target.host, target.port, ssl=target.tls, limit=RECEIVED_BYTES)
        )

    async def _put_back(self, connection: AsyncConnection, *, keep: bool) -> None:
        if keep and not self._closed and len(self._idle) < KEPT:
            self._idle.append(connection)
        else:
            await self._end(connection)

    async def _end(self, connection: AsyncConnection) -> None:
        connection.writer.close()
        with contextlib.suppress(OSError):  # it was broken already
            await connection.writer.wait_closed()
