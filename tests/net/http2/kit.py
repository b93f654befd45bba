"""A client made of the h2 library over a Pipe: what it is sent is checked by h2, which raises at the first
byte that the protocol does not allow. Frames that h2 would not send are made with hyperframe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h2.config
import h2.connection
import h2.events
from hpack import Encoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame

from fastserve.net import Endpoint
from fastserve.net.http2.connection import Http2Connection
from fastserve.settings import Limits
from tests.net.kit import Pipe

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GET = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/echo")]
POST = [(":method", "POST"), *GET[1:]]


class Answer:
    """One reply as h2 saw it."""

    def __init__(self) -> None:
        self.informed: list[int] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.trailers: list[tuple[bytes, bytes]] = []
        self.ended = False
        self.reset: int | None = None


class Peer:
    """One client on a Pipe of its own."""

    def __init__(
        self, endpoints: Mapping[str, Endpoint], with_limits: Limits | None = None, **options: Any
    ) -> None:
        self.pipe = Pipe(endpoints, with_limits, **options)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.answers: dict[int, Answer] = {}
        self.goaway: h2.events.ConnectionTerminated | None = None
        self.events: list[h2.events.Event] = []
        self.credits = True  # give windows back as bytes come
        self._seen = 0
        self.h2.initiate_connection()

    @property
    def connection(self) -> Http2Connection:
        protocol = self.pipe.protocol
        assert isinstance(protocol, Http2Connection)
        return protocol

    def flush(self, size: int = 0) -> None:
        """Send what h2 has to say, in pieces of `size` bytes, and hear the answers, until both are quiet."""
        while data := self.h2.data_to_send():
            self.pipe.feed(data, size)
            self.hear()

    def hear(self) -> None:
        sent, self._seen = self.pipe.sent[self._seen :], len(self.pipe.sent)
        if sent:
            for event in self.h2.receive_data(sent):
                self.events.append(event)
                self._note(event)

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = event
            return
        number = getattr(event, "stream_id", None)
        if not number:
            return
        answer = self.answers.setdefault(number, Answer())
        if isinstance(event, h2.events.InformationalResponseReceived):
            answer.informed.append(int(dict(event.headers)[":status"]))
        elif isinstance(event, h2.events.ResponseReceived):
            answer.headers = dict(event.headers)
            answer.status = int(answer.headers[":status"])
        elif isinstance(event, h2.events.DataReceived):
            answer.body += event.data
            if self.credits:
                self.h2.acknowledge_received_data(event.flow_controlled_length, number)
        elif isinstance(event, h2.events.TrailersReceived):
            answer.trailers = list(event.headers)
        elif isinstance(event, h2.events.StreamEnded):
            answer.ended = True
        elif isinstance(event, h2.events.StreamReset):
            answer.reset = event.error_code

    def send(self, headers: list[tuple[str, str]], body: bytes = b"", *, end: bool = True) -> int:
        """Queue a request; `flush` sends it. A body has to fit the window."""
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, headers, end_stream=end and not body)
        for start in range(0, len(body), 16384):
            piece = body[start : start + 16384]
            self.h2.send_data(number, piece, end_stream=end and start + len(piece) == len(body))
        return number

    def ask(self, headers: list[tuple[str, str]], body: bytes = b"", size: int = 0) -> Answer:
        """A request and its answer."""
        number = self.send(headers, body)
        self.flush(size)
        return self.answers[number]


class Raw:
    """A client that sends what it likes; what comes back is read as frames."""

    def __init__(
        self, endpoints: Mapping[str, Endpoint], with_limits: Limits | None = None, **options: Any
    ) -> None:
        self.pipe = Pipe(endpoints, with_limits, **options)
        self.encoder = Encoder()
        self._seen = 0

    def greet(self) -> Raw:
        """The preface, SETTINGS, and the acknowledgement of the server's."""
        self.feed(PREFACE + SettingsFrame(0).serialize())
        self.feed(SettingsFrame(0, flags=["ACK"]).serialize())
        self.frames()
        return self

    def feed(self, data: bytes, size: int = 0) -> None:
        """Bytes as they are, no matter whether anybody still listens."""
        if not self.pipe.closed:
            self.pipe.feed(data, size)

    def headers(
        self, number: int, headers: list[tuple[str, str]], *flags: str, block: bytes | None = None
    ) -> bytes:
        """A HEADERS frame."""
        data = self.encoder.encode(headers) if block is None else block
        frame = HeadersFrame(number, data=data, flags=list(flags))
        return bytes(frame.serialize())

    @staticmethod
    def data(number: int, data: bytes, *flags: str) -> bytes:
        return bytes(DataFrame(number, data=data, flags=list(flags)).serialize())

    def frames(self) -> list[Frame]:
        """Return the frames that the server has sent since the last time."""
        sent, self._seen = self.pipe.sent[self._seen :], len(self.pipe.sent)
        return read_frames(sent)


def read_frames(data: bytes) -> list[Frame]:
    """All frames of a stream of bytes that ends with one."""
    found = []
    while data:
        frame, length = Frame.parse_frame_header(memoryview(data[:9]))
        frame.parse_body(memoryview(data[9 : 9 + length]))
        found.append(frame)
        data = data[9 + length :]
    return found
