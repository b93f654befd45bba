"""A client of gRPC on `h2`, which says exactly what a test wants said, and a listener for it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import msgspec

from fastserve.net.grpc import GrpcListener, Method
from fastserve.settings import GrpcOptions
from tests.net.grpc.test_methods import METHODS
from tests.net.kit import WAIT_S

Headers = list[tuple[str, str]]


@dataclass
class Answer:
    """The answer on one stream."""

    headers: list[dict[str, str]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def messages(self) -> list[bytes]:
        found, at = [], 0
        if not self.headers:
            return found
        unpack = zlib.decompress if self.headers[0].get("grpc-encoding") == "deflate" else gzip.decompress
        while at < len(self.data):
            flag, size = struct.unpack_from(">BI", self.data, at)
            raw = bytes(self.data[at + 5 : at + 5 + size])
            found.append(unpack(raw) if flag else raw)
            at += 5 + size
        return found

    @property
    def status(self) -> tuple[int, str]:
        last = self.headers[-1]
        return int(last["grpc-status"]), last.get("grpc-message", "")


class Peer:
    """A client that says exactly what a test wants said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.goodbye: h2.events.ConnectionTerminated | None = None
        self.pings = 0  # of the server; h2 answers them
        self.flush()

    def flush(self) -> None:
        self._writer.write(self.h2.data_to_send())

    def begin(self, path: str, *headers: tuple[str, str], ends: bool = False) -> int:
        number = self.h2.get_next_available_stream_id()
        sent: Headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "t")]
        sent += [("content-type", "application/grpc"), ("te", "trailers"), *headers]
        self.h2.send_headers(number, sent, end_stream=ends)
        self.answers[number] = Answer()
        self.flush()
        return number

    def send(self, number: int, data: bytes, *, ends: bool = False) -> None:
        self.h2.send_data(number, data, end_stream=ends)
        self.flush()

    def call(self, path: str, body: bytes, *headers: tuple[str, str]) -> int:
        number = self.begin(path, *headers)
        self.send(number, body, ends=True)
        return number

    async def read(self, done: Callable[[], object]) -> None:
        """Until it is so, or the server hangs up."""
        while not done():
            data = await asyncio.wait_for(self._reader.read(65536), WAIT_S)
            if not data:
                return
            for event in self.h2.receive_data(data):
                self._take(event)
            with contextlib.suppress(OSError):
                self.flush()

    def _take(self, event: Any) -> None:
        self.pings += isinstance(event, h2.events.PingReceived)
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goodbye = event
        answer = self.answers.get(getattr(event, "stream_id", None) or 0)
        if answer is None:
            return
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            answer.headers.append(dict(event.headers))
        elif isinstance(event, h2.events.DataReceived):
            answer.data += event.data
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            answer.ended = True
        elif isinstance(event, h2.events.StreamReset):
            answer.reset = event.error_code

    async def ask(self, path: str, body: bytes, *headers: tuple[str, str]) -> Answer:
        return await self.finish(self.call(path, body, *headers))

    async def finish(self, number: int) -> Answer:
        answer = self.answers[number]
        await self.read(lambda: answer.ended or answer.reset is not None)
        return answer

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(*more: Method, **options: Any) -> AsyncIterator[tuple[GrpcListener, Peer]]:
    access_log = options.pop("access_log", None)
    usual = msgspec.structs.replace(GrpcOptions(), **options)
    listener = GrpcListener("127.0.0.1", 0, [*METHODS, *more], usual, access_log=access_log)
    await listener.open()
    peer = Peer(*await asyncio.open_connection(*listener.address))
    yield listener, peer
    await peer.close()
    await listener.close()


@contextlib.asynccontextmanager
async def looked_at_often(listener: GrpcListener) -> AsyncIterator[None]:
    """The limits of its connections, which its own timer looks at once a second."""

    async def look() -> None:
        while True:
            listener.listener.scan()
            await asyncio.sleep(0.02)

    looking = asyncio.ensure_future(look())
    try:
        yield
    finally:
        looking.cancel()


def frame(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


async def send_all(peer: Peer, number: int, data: bytes) -> None:
    """As fast as the windows allow."""
    view = memoryview(data)
    while view:
        room = min(peer.h2.local_flow_control_window(number), 16384)
        if room:
            peer.send(number, bytes(view[:room]))
            view = view[room:]
        else:
            await peer.read(lambda: peer.h2.local_flow_control_window(number))
