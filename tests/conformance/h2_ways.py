"""The HTTP ways once more, as streams of HTTP/2 with prior knowledge: the client is the h2 library."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.errors
import h2.events

from tests.conformance.ways import (
    LIMIT_S,
    Answer,
    HttpWay,
    Line,
    Reply,
    Rest,
    RestRaw,
    Sent,
    V1Http,
    V2Binary,
    V2Json,
)

if TYPE_CHECKING:
    from tests.conformance.rig import Rig

CONNECTIONS_OWN = {"host", "content-length"}


@dataclass
class Coming:
    """The reply on one stream, as far as it is there."""

    sent: Sent
    head: str = ""
    status: int = 0
    body: bytes = b""
    ended: bool = False


class Http2Line(Line):
    def __init__(self, way: HttpWay, rig: Rig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._way, self._rig, self._reader, self._writer = way, rig, reader, writer
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._streams: dict[int, Coming] = {}
        self._order: deque[int] = deque()
        self._flush()

    def send(self, sent: Sent) -> None:
        self._begin(sent, 0)

    def begin(self, sent: Sent) -> None:
        self._begin(sent, 4)

    def _begin(self, sent: Sent, missing: int) -> None:
        head, _, body = sent.data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        named = [line.partition(": ") for line in lines]
        headers = [(name.lower(), value) for name, _, value in named if name.lower() not in CONNECTIONS_OWN]
        stream = self._h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "http"), (":authority", "t"), (":path", path)]
        self._h2.send_headers(stream, [*pseudo, *headers], end_stream=not body and not missing)
        end, most = len(body) - missing, self._h2.max_outbound_frame_size
        for at in range(0, end, most):
            data = body[at : min(at + most, end)]
            self._h2.send_data(stream, data, end_stream=at + most >= end and not missing)
        self._streams[stream] = Coming(sent)
        self._order.append(stream)
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())

    async def reply(self) -> Answer:
        coming = self._streams[self._order.popleft()]
        while not coming.ended:
            data = await asyncio.wait_for(self._reader.read(1 << 16), LIMIT_S)
            assert data, "the connection ended"
            for event in self._h2.receive_data(data):
                self._hear(event)
            self._flush()
        reply = Reply(coming.status, coming.head, coming.body)
        return self._way.understand(self._rig, reply, coming.sent)

    def _hear(self, event: Any) -> None:
        coming = self._streams.get(getattr(event, "stream_id", None) or 0)
        if coming is None:
            return
        if isinstance(event, h2.events.ResponseReceived):
            coming.status = int(dict(event.headers)[":status"])
            lines = [f"{name}: {value}\r\n" for name, value in event.headers if name != "date"]
            coming.head = "".join([*lines, "\r\n"])
        elif isinstance(event, h2.events.DataReceived):
            coming.body += event.data
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            coming.ended = True
        elif isinstance(event, h2.events.StreamReset):
            raise AssertionError(f"the stream was reset: {event.error_code}")

    def leave(self) -> None:
        """Streams are reset; then the connection ends."""
        if self._writer.is_closing():
            return
        for stream in self._order:
            self._h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self._flush()
        self._writer.close()


class OverHttp2(HttpWay):
    """Before a way over HTTP."""

    async def connect(self, rig: Rig) -> Line:
        return Http2Line(self, rig, *await asyncio.open_connection(*rig.http))


class RestH2(OverHttp2, Rest):
    name = "tfserving-rows-h2"


class RestRawH2(OverHttp2, RestRaw):
    name = "tfserving-raw-h2"


class V2JsonH2(OverHttp2, V2Json):
    name = "v2-json-h2"


class V2BinaryH2(OverHttp2, V2Binary):
    name = "v2-binary-h2"


class V1H2(OverHttp2, V1Http):
    name = "v1-http-h2"


H2_WAYS = (RestH2(), RestRawH2(), V2JsonH2(), V2BinaryH2(), V1H2())
