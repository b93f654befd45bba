"""One stream: its states, its faults, its queues, and the interface of services, which are callbacks without
tasks.

    class Echo:                                      # one object serves every stream; see StreamService
        def find(self, head): return self if head.target == "/echo" else None
        def answer(self, stream, body): stream.reply(BLOCK, body)       # a request that came at once
        def begin(self, stream): stream.context = bytearray()           # or piece by piece
        def data(self, stream, piece): stream.context += piece; stream.consume(len(piece))
        def end(self, stream): stream.reply(BLOCK, bytes(stream.context))
        def gone(self, stream): ...                                     # reset, or the connection is lost

A client may send STREAM_WINDOW bytes of a stream, and more after `consume` (the service has consumed so many)
or `expect` (so many are coming, and have a place). The connection gives its own window back as bytes come.

The life of a stream is a table (RFC 9113 5.1), without push. The connection's streams are those that are
neither IDLE nor CLOSED; a number above the last one that was begun is IDLE, any other is CLOSED.
docs/wire-http2.md draws its picture from TRANSITIONS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Protocol

from fastserve._ext.http2_path import StreamFields
from fastserve.net.limits import DrainRate

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from fastserve.errors import ServeError
    from fastserve.net.http1.large_bodies import ArrivedBody
    from fastserve.net.limits import WireFault
    from fastserve.net.request import CallListener, RequestHead
    from fastserve.settings import Limits


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(Exception):
    """A fault of the whole connection: GOAWAY, which carries `text`."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class StreamFault(Exception):
    """A fault of one stream, such as a malformed message (RFC 9113 8.1.1): RST_STREAM."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def malformed(text: str) -> StreamFault:
    return StreamFault(ErrorCode.PROTOCOL_ERROR, text)


class StreamState(Enum):
    """The state of a stream (RFC 9113 5.1)."""

    __hash__ = object.__hash__  # Enum's is Python, and each frame asks for it

    IDLE = auto()
    OPEN = auto()
    HALF_CLOSED_REMOTE = auto()  # the request is complete
    HALF_CLOSED_LOCAL = auto()  # the reply is complete, the request is not
    CLOSED = auto()


class StreamTransition(Enum):
    """An event that changes a stream's state. Frames that change none, such as DATA without END_STREAM,
    are not here."""

    __hash__ = object.__hash__

    HEADERS = auto()  # received, without END_STREAM
    WHOLE = auto()  # HEADERS received with END_STREAM, or at once with the only DATA
    RECEIVED_END = auto()
    SENT_END = auto()
    RESET = auto()  # by either side


TRANSITIONS: dict[tuple[StreamState, StreamTransition], StreamState] = {
    (StreamState.IDLE, StreamTransition.HEADERS): StreamState.OPEN,
    (StreamState.IDLE, StreamTransition.WHOLE): StreamState.HALF_CLOSED_REMOTE,
    (StreamState.OPEN, StreamTransition.RECEIVED_END): StreamState.HALF_CLOSED_REMOTE,
    (StreamState.OPEN, StreamTransition.SENT_END): StreamState.HALF_CLOSED_LOCAL,
    (StreamState.OPEN, StreamTransition.RESET): StreamState.CLOSED,
    (StreamState.HALF_CLOSED_REMOTE, StreamTransition.SENT_END): StreamState.CLOSED,
    (StreamState.HALF_CLOSED_REMOTE, StreamTransition.RESET): StreamState.CLOSED,
    (StreamState.HALF_CLOSED_LOCAL, StreamTransition.RECEIVED_END): StreamState.CLOSED,
    (StreamState.HALF_CLOSED_LOCAL, StreamTransition.RESET): StreamState.CLOSED,
}

# Frames that may still come from the client: DATA, trailers. Elsewhere they are STREAM_CLOSED.
RECEIVING = frozenset((StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL))
# A client may send so much without a WINDOW_UPDATE: a body of a large tensor needs no round trip.
STREAM_WINDOW = 1 << 20
Piece = bytes | memoryview


class ServiceFinder(Protocol):
    """Find the services of requests by their heads."""

    def find(self, head: RequestHead) -> StreamService | None:
        """Return the service of such requests, None when they belong to another. Asked once for each head."""

    def refuse(self, fields: Sequence[tuple[bytes, bytes]], fault: WireFault) -> StreamService | None:
        """Return a service that refuses such requests, None when they belong to another. `fields` may be
        the first ones only."""


class StreamService(Protocol):
    """Serve the streams of a connection. `stream.head` is shared by streams with equal header blocks; its
    `memo` is the service's own."""

    def answer(self, stream: Http2Stream, body: bytes) -> None:
        """Serve a whole request."""

    def begin(self, stream: Http2Stream) -> None:
        """Begin a request whose body follows."""

    def data(self, stream: Http2Stream, piece: Piece) -> None:
        """Take a piece of the body. A view is valid until this returns."""

    def end(self, stream: Http2Stream) -> None:
        """Handle the end of the request. Trailers are checked and dropped."""

    def gone(self, stream: Http2Stream) -> None:
        """Handle a stream that the client has reset, or whose connection is lost; nothing can be sent on
        it."""

    def writable(self, stream: Http2Stream) -> None:
        """Go on sending, after `stream.full`: enough of the queue has gone out."""

    def too_slow(self, stream: Http2Stream) -> None:
        """Handle a body that is slower than limits.body_bytes_per_s; a service of long streams ignores it."""

    def no_room(self, stream: Http2Stream, fault: ServeError) -> None:
        """Refuse a request of which a part has come: there is no memory for the rest."""

    def cut_off(self, stream: Http2Stream) -> None:
        """Handle a client that has sent FIN within this request. It may still read a reply."""


class StreamSending(Protocol):
    """The part of a connection's sending that its streams use."""

    def reply(self, stream: Http2Stream, block: bytes, body: bytes, trailers: bytes) -> None:
        """Send a whole reply."""

    def head(self, stream: Http2Stream, block: bytes, flags: int = 0) -> None:
        """Send HEADERS."""

    def data(self, stream: Http2Stream, data: Piece) -> None:
        """Send DATA, now or later."""

    def finish(self, stream: Http2Stream, trailers: bytes) -> None:
        """End the reply after what is queued."""


class StreamWindows(Protocol):
    """The part of a connection's window tuning that its streams use."""

    def ask(self, stream: Http2Stream, nbytes: int) -> None:
        """Let the stream have so many bytes beyond its window."""

    def shrink(self, stream: Http2Stream, nbytes: int) -> None:
        """Take back so much of that."""


class StreamConnection(Protocol):
    """The part of a connection that its streams, and what serves them, use."""

    @property
    def address(self) -> str:
        """HOST:PORT of the client."""

    @property
    def client(self) -> str:
        """The subject of the client's certificate."""

    @property
    def growth(self) -> StreamWindows:
        """The windows of its streams."""

    @property
    def listener(self) -> CallListener:
        """The listener of the connection."""

    @property
    def sending(self) -> StreamSending:
        """The sending side of the connection."""

    def callback_failed(self, error: Exception) -> None:
        """Report an exception, and end the connection."""

    def divert(self, stream: Http2Stream, place: Buffer) -> None:
        """Have a body put straight into its place, if it may."""

    def offer_rest(self, stream: Http2Stream, taker: BodyTaker) -> None:
        """Offer `taker` the rest of a body that is put into its place, once it has come."""

    def release_bytes(self, stream: Http2Stream, nbytes: int) -> None:
        """So many bytes of a request are not held any more."""

    def may_divert(self, stream: Http2Stream) -> bool:
        """Return whether a body may be put straight into its place."""

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        """Cut a stream off."""

    def widen(self, stream: Http2Stream, nbytes: int) -> None:
        """Let the client send so many bytes more on this stream."""


class BodyTaker(Protocol):
    """A request whose endpoint may read the rest of its large body out of the socket."""

    def missing(self) -> int:
        """Return how many bytes of the body are to come; 0 when the endpoint cannot read them."""

    def received(self) -> bytes:
        """Return the bytes of the body that are here."""

    def take_arrived(self, body: ArrivedBody) -> bool:
        """Begin the request with this body, or return False, without a trace but bytes read from the body."""


class Inlet:
    """The receiving side of a stream whose request did not come at once."""

    __slots__ = ("credit", "grown", "missing", "owed", "received", "seen", "since_s", "taker", "took")

    def __init__(self, missing: int) -> None:
        self.missing = missing  # bytes, below 0 when the length is not known
        self.credit = STREAM_WINDOW  # what the client may still send
        self.owed = 0  # consumed, and not yet given back
        self.grown = 0  # given beyond STREAM_WINDOW for what is held
        self.received = self.seen = 0  # bytes: all, and those of the last look at their rate
        self.since_s = -1.0  # when that was
        self.took: Callable[[int], None] | None = None  # gets the count of bytes that lie in their place
        self.taker: BodyTaker | None = None  # is offered the rest of the body

    def is_slow(self, now: float, limits: Limits) -> bool:
        """Return whether the body was too slow over the last limits.header_timeout_s."""
        if self.since_s < 0:
            self.since_s, self.seen = now, self.received
        passed = now - self.since_s
        if passed < limits.header_timeout_s:
            return False
        slow = self.received - self.seen < limits.body_bytes_per_s * passed
        self.since_s, self.seen = now, self.received
        return slow


class Outbox:
    """The queue of a reply that did not go out at once."""

    __slots__ = ("ends", "full", "in_turn", "nbytes", "pieces", "sent", "taking", "trailers")

    def __init__(self) -> None:
        self.pieces: deque[Piece] = deque()
        self.nbytes = 0
        self.full = False  # its service should wait
        self.in_turn = False  # Sending has it in its row
        self.ends = False  # after the pieces: the end of the reply
        self.trailers = b""
        self.sent = 0  # bytes, since it was made
        self.taking: DrainRate | None = None  # since its window was seen shut

    def is_slow(self, shut: bool, now: float, limits: Limits) -> bool:
        """Return whether the client opens the window more slowly than limits.reply_bytes_per_s."""
        if self.taking is None:
            if not shut:
                return False
            self.taking = DrainRate()
        return self.taking.is_slow(shut, self.sent, now, limits)


class Http2Stream(StreamFields):
    """One request and its reply. `context` is the service's own; once `closed`, nothing can be sent.

    A request that comes at once and is answered at once needs these fields alone; the rest is made when
    needed."""

    connection: StreamConnection
    head: RequestHead
    state: StreamState
    inlet: Inlet | None
    outbox: Outbox | None

    __slots__ = ()

    @property
    def service(self) -> StreamService:
        service: StreamService = self.head.service
        return service

    @property
    def closed(self) -> bool:
        return self.state is StreamState.CLOSED

    @property
    def complete(self) -> bool:
        """Return whether the client has sent its last byte."""
        return self.state not in RECEIVING

    @property
    def full(self) -> bool:
        """Return whether so much is queued that the service should wait for `writable`."""
        return self.outbox is not None and self.outbox.full

    def move(self, event: StreamTransition) -> None:
        """Apply the event by TRANSITIONS."""
        self.state = TRANSITIONS[self.state, event]

    # ---- what comes

    def consume(self, nbytes: int) -> None:
        """Give `nbytes` of the window back: so much of the body is consumed."""
        inlet = self.inlet
        if inlet is not None and not self.complete:
            inlet.owed += nbytes
            if inlet.owed >= STREAM_WINDOW // 2 and inlet.missing:
                nbytes, inlet.owed = inlet.owed, 0
                self.connection.widen(self, nbytes)

    def done_with(self, nbytes: int) -> None:
        """Give back the window of one of several messages, without its growth: `expect` asks anew for the
        next one."""
        if self.inlet is not None and not self.complete:
            had = min(self.inlet.grown, nbytes)
            self.consume(nbytes - had)
            self.connection.growth.shrink(self, had)

    def expect(self, nbytes: int) -> None:
        """Enlarge the window for a body, or message, of `nbytes` from its first byte on, which has a
        place."""
        if nbytes > STREAM_WINDOW and not self.complete:
            self.connection.growth.ask(self, nbytes - STREAM_WINDOW)

    def place(self, room: Buffer, took: Callable[[int], None]) -> None:
        """Read the next bytes of the body straight into `room`, which is asked for anew at each read;
        `took` gets their count. Bytes that do not fit, or come beside other streams, arrive by
        StreamService.data."""
        if self.inlet is not None and not self.complete:
            self.inlet.took = took
            self.connection.divert(self, room)

    def offer_rest(self, taker: BodyTaker) -> None:
        """Offer `taker` the rest of a body that has a place, once all of it waits in the socket."""
        if self.inlet is not None and not self.complete:
            self.connection.offer_rest(self, taker)

    # ---- what goes

    def reply(self, block: bytes, body: bytes, trailers: bytes = b"") -> None:
        """Send a whole reply. `block` and `trailers` are whole header blocks; empty trailers send none."""
        if self.state is not StreamState.CLOSED:
            self.connection.sending.reply(self, block, body, trailers)

    def send_head(self, block: bytes) -> None:
        """Begin a reply; `send_data` and `finish` follow. Also for 1xx."""
        if not self.closed:
            self.connection.sending.head(self, block)

    def send_data(self, data: Piece) -> None:
        """Send some of the body, now or when the client takes it. While `full`, wait for
        StreamService.writable."""
        if not self.closed and data:
            self.connection.sending.data(self, data)

    def finish(self, trailers: bytes = b"") -> None:
        """End the reply after what is queued."""
        if not self.closed:
            self.connection.sending.finish(self, trailers)

    def reset(self, code: ErrorCode) -> None:
        """Send RST_STREAM. `gone` is not called."""
        if not self.closed:
            self.connection.reset(self, code)
