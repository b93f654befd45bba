"""One stream, and the face of whoever serves it: callbacks in, frames out, no task and no future.

    class Echo:                                      # one object serves every stream; see Service
        def find(self, head): return self if head.target == "/echo" else None
        def answer(self, stream, body): stream.reply(BLOCK, body)       # a request that came at once
        def begin(self, stream): stream.context = bytearray()           # or piece by piece
        def data(self, stream, piece): stream.context += piece; stream.consume(len(piece))
        def end(self, stream): stream.reply(BLOCK, bytes(stream.context))
        def gone(self, stream): ...                                     # reset, or the connection is lost

A client may send STREAM_WINDOW bytes of a stream; more after `consume` (the service has done with so many) or
`expect` (so many are coming, and the service has a place for them). The connection's own window is given back
by the connection as bytes come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from fastserve._ext.http2_path import StreamFields
from fastserve.wire.http2.errors import ErrorCode
from fastserve.wire.http2.settings import STREAM_WINDOW
from fastserve.wire.http2.states import RECEIVING, TRANSITIONS, Event, State

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from fastserve.config import Limits
    from fastserve.wire.faults import WireFault
    from fastserve.wire.head import Head
    from fastserve.wire.http2.connection import Http2Connection

Piece = bytes | memoryview


class Finder(Protocol):
    """Who knows the services of some requests."""

    def find(self, head: Head) -> Service | None:
        """Who serves such requests, None when they are not its own. Asked once for each head."""

    def refuse(self, fields: Sequence[tuple[bytes, bytes]], fault: WireFault) -> Service | None:
        """Who answers requests that cannot be served, None when they are not its own. `fields` may be the
        first ones only."""


class Service(Protocol):
    """What streams carry. `head` and `stream.head` are shared by streams whose header blocks are equal; its
    `memo` is the service's own."""

    def answer(self, stream: Stream, body: bytes) -> None:
        """A whole request."""

    def begin(self, stream: Stream) -> None:
        """A request whose body follows."""

    def data(self, stream: Stream, piece: Piece) -> None:
        """Some of it. A view is valid until this returns."""

    def end(self, stream: Stream) -> None:
        """The client has sent its last byte. What it sent as trailers is checked and dropped."""

    def gone(self, stream: Stream) -> None:
        """The client has reset the stream or is gone; whatever is sent on it now goes nowhere."""

    def writable(self, stream: Stream) -> None:
        """What was queued has gone out far enough for more, after `stream.full` was so."""

    def too_slow(self, stream: Stream) -> None:
        """The body comes more slowly than limits.body_bytes_per_s; a service of long streams lets it be."""

    def cut_off(self, stream: Stream) -> None:
        """The client has sent its last byte, in the midst of this request: nothing more of it will come. It
        may still read."""


class Inlet:
    """What is left to come of a request whose body did not come at once."""

    __slots__ = ("credit", "grown", "missing", "owed", "received", "seen", "since_s", "took")

    def __init__(self, missing: int) -> None:
        self.missing = missing  # bytes, below 0 when the length is not known
        self.credit = STREAM_WINDOW  # what the client may still send
        self.owed = 0  # consumed, and not yet given back
        self.grown = 0  # given beyond STREAM_WINDOW for what is held
        self.received = self.seen = 0  # bytes: all, and those of the last look at their rate
        self.since_s = -1.0  # when that was
        self.took: Callable[[int], None] | None = None  # who is told of what lies in its place

    def is_slow(self, now: float, limits: Limits) -> bool:
        """Whether the body has not kept its rate over the last limits.header_timeout_s."""
        if self.since_s < 0:
            self.since_s = now
        passed = now - self.since_s
        if passed < limits.header_timeout_s:
            return False
        slow = self.received - self.seen < limits.body_bytes_per_s * passed
        self.since_s, self.seen = now, self.received
        return slow


class Outbox:
    """What waits to be sent of a reply that did not go out at once."""

    __slots__ = ("ends", "full", "in_turn", "nbytes", "pieces", "trailers")

    def __init__(self) -> None:
        self.pieces: deque[Piece] = deque()
        self.nbytes = 0
        self.full = False  # its service should wait
        self.in_turn = False  # Sending has it in its row
        self.ends = False  # after the pieces: the end of the reply
        self.trailers = b""


class Stream(StreamFields):
    """One request and its reply. `context` is the service's own; once `closed`, nothing can be sent.

    A request that came at once and is answered at once needs no more than this; the rest is made when needed.
    """

    connection: Http2Connection
    head: Head
    state: State
    inlet: Inlet | None
    outbox: Outbox | None

    __slots__ = ()

    @property
    def service(self) -> Service:
        return self.head.service

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def complete(self) -> bool:
        """Whether the client has sent its last byte."""
        return self.state not in RECEIVING

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that its service should wait for `writable`."""
        return self.outbox is not None and self.outbox.full

    def move(self, event: Event) -> None:
        """Take the step of the table. KeyError would be a fault of ours."""
        self.state = TRANSITIONS[self.state, event]

    # ---- what comes

    def consume(self, nbytes: int) -> None:
        """So many bytes of the body are done with: as many more may come."""
        inlet = self.inlet
        if inlet is not None and not self.complete:
            inlet.owed += nbytes
            if inlet.owed >= STREAM_WINDOW // 2 and inlet.missing:
                nbytes, inlet.owed = inlet.owed, 0
                self.connection.widen(self, nbytes)

    def done_with(self, nbytes: int) -> None:
        """A whole message of several, of so many bytes. What was had beyond the usual window for it is not
        given back: `expect` asks for the next one."""
        if self.inlet is not None and not self.complete:
            had = min(self.inlet.grown, nbytes)
            self.consume(nbytes - had)
            self.connection.growth.shrink(self, had)

    def expect(self, nbytes: int) -> None:
        """A body, or message, of so many bytes from its first one on has a place: let it come unhindered."""
        if nbytes > STREAM_WINDOW and not self.complete:
            self.connection.growth.ask(self, nbytes - STREAM_WINDOW)

    def place(self, room: Buffer, took: Callable[[int], None]) -> None:
        """The next bytes of the body go straight into `room`, which is asked for anew at each read; `took`
        is told how many. What has no room there, or finds another stream at it, comes by Service.data."""
        if self.inlet is not None and not self.complete:
            self.inlet.took = took
            self.connection.divert(self, room)

    # ---- what goes

    def reply(self, block: bytes, body: bytes, trailers: bytes = b"") -> None:
        """A whole reply at once; blocks are whole header blocks, `trailers` ends the stream unless empty."""
        if self.state is not State.CLOSED:
            self.connection.sending.reply(self, block, body, trailers)

    def send_head(self, block: bytes) -> None:
        """Begin a reply; `send_data` and `finish` follow. Also for 1xx."""
        if not self.closed:
            self.connection.sending.head(self, block)

    def send_data(self, data: Piece) -> None:
        """Send some of the body, now or when the client takes it. While `full` is so, wait for
        Service.writable."""
        if not self.closed and data:
            self.connection.sending.data(self, data)

    def finish(self, trailers: bytes = b"") -> None:
        """End the reply, after what is queued."""
        if not self.closed:
            self.connection.sending.finish(self, trailers)

    def reset(self, code: ErrorCode) -> None:
        """Cut the stream off. `gone` is not called."""
        if not self.closed:
            self.connection.reset(self, code)
