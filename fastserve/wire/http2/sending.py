"""What goes out on a connection's streams: whole replies at once, the rest in turns as windows allow.

A reply that fits both windows and one frame is written in one piece. Anything else is queued by its stream,
and streams take turns of a frame each while the connection's window is open and the socket takes bytes:

    in turn  ==  has something queued, its own window is open
    queue empty, reply ended  -->  END_STREAM or trailers, which no window holds back

Nothing is copied: a body is sent as views of it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fastserve._ext.http2_frames import CONTINUATION, DATA, HEADERS, frame, frame_head
from fastserve._ext.http2_path import SendingPath
from fastserve.wire.http2 import calm
from fastserve.wire.http2.errors import ConnectionFault, ErrorCode
from fastserve.wire.http2.settings import FIRST_WINDOW, LEAST_FRAME_BYTES, MOST_WINDOW
from fastserve.wire.http2.stream import Outbox, Piece, Stream

if TYPE_CHECKING:
    from fastserve.wire.http2.connection import Http2Connection

END_STREAM, END_HEADERS = 1, 4
TABLE_BYTES = 4096  # until a client asks for less
NO_TABLE = b"\x20"  # an update of the table's size to 0
FULL_BYTES = 1 << 16  # of one stream's queue, from which its service should wait
FRAME_BYTES = 1 << 18  # longest frame sent to a client that would take longer ones: others want their turn


class Sending(SendingPath):
    """One connection's. A reply that can go at once goes so: `reply` of the base."""

    _connection: Http2Connection

    __slots__ = ("_table", "_turns", "frame_bytes")

    def __init__(self, connection: Http2Connection) -> None:
        super().__init__(connection, FIRST_WINDOW)
        self._turns: deque[Stream] | None = None
        self._table = TABLE_BYTES
        self.frame_bytes = LEAST_FRAME_BYTES

    def widen(self, increment: int) -> None:
        """The client takes so many bytes more on all streams together."""
        self.window += increment
        if self.window > MOST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window above 2^31-1")
        self.pump()

    def _reply_in_parts(self, stream: Stream, block: bytes, body: bytes, trailers: bytes) -> None:
        self.head(stream, block)
        if body:
            self.data(stream, body)
        self.finish(stream, trailers)

    def head(self, stream: Stream, block: bytes, flags: int = 0) -> None:
        """HEADERS, with CONTINUATION where the block is long."""
        most = self.frame_bytes
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
        first, rest = block[:most], block[most:]
        out = frame(HEADERS, flags | (0 if rest else END_HEADERS), stream.id, first)
        while rest:
            first, rest = rest[:most], rest[most:]
            out += frame(CONTINUATION, 0 if rest else END_HEADERS, stream.id, first)
        self._connection.write(out)

    def data(self, stream: Stream, data: Piece) -> None:
        """DATA, now or later."""
        outbox = stream.outbox
        if outbox is None:
            outbox = stream.outbox = Outbox()
        outbox.pieces.append(data)
        size = len(data)
        outbox.nbytes += size
        self.queued += size
        self.wait_turn(stream)
        self.pump()
        outbox.full = outbox.nbytes > FULL_BYTES

    def finish(self, stream: Stream, trailers: bytes) -> None:
        """The end of a reply, when all before it has gone out."""
        outbox = stream.outbox
        if outbox is None or not outbox.pieces:
            self._end(stream, trailers)
        else:
            outbox.ends = True
            outbox.trailers = trailers

    def _end(self, stream: Stream, trailers: bytes) -> None:
        if trailers:
            self.head(stream, trailers, END_STREAM)
        else:
            self._connection.write(frame_head(0, DATA, END_STREAM, stream.id))
        self._connection.sent_end(stream)

    def shrink_table(self, nbytes: int) -> None:
        """The client wants a table of so many bytes for blocks sent to it. They use none, and have to say so
        if it is fewer than before (RFC 7541 4.2)."""
        if nbytes < self._table:
            self._table, self._prefix = 0, NO_TABLE

    def wait_turn(self, stream: Stream) -> None:
        """Take a place in the row, if there is something to send and it may be sent."""
        outbox = stream.outbox
        if outbox is not None and outbox.pieces and stream.window > 0 and not outbox.in_turn:
            outbox.in_turn = True
            if self._turns is None:
                self._turns = deque()
            self._turns.append(stream)

    def is_shut(self, stream: Stream) -> bool:
        """Whether some of its reply waits for a window, and not for the socket."""
        waits = stream.outbox is not None and bool(stream.outbox.pieces)
        return waits and (stream.window <= 0 or self.window <= 0)

    def pump(self) -> None:
        """Send what may be sent."""
        turns = self._turns
        while turns and self.window > 0 and not self.choked:
            stream = turns.popleft()
            if stream.outbox is not None:  # not cut off meanwhile
                stream.outbox.in_turn = False
                if stream.window > 0:  # nor shut by SETTINGS (RFC 9113 6.9.2: even below 0)
                    self._send_frame(stream, stream.outbox)
                    self.wait_turn(stream)

    def _send_frame(self, stream: Stream, outbox: Outbox) -> None:
        pieces = outbox.pieces
        piece = pieces[0]
        size = min(len(piece), self.window, stream.window, self.frame_bytes, FRAME_BYTES)
        whole = size == len(piece)
        if whole:
            pieces.popleft()
        else:
            view = memoryview(piece)
            piece, pieces[0] = view[:size], view[size:]
        stream.window -= size
        outbox.nbytes -= size
        self.window -= size
        self.queued -= size
        last = outbox.ends and not pieces and not outbox.trailers
        connection = self._connection
        connection.write_parts(frame_head(size, DATA, END_STREAM if last else 0, stream.id), piece)
        if whole or size >= calm.USEFUL_BYTES:
            connection.earn(calm.DATA_SENT)
        if last:
            connection.sent_end(stream)
        elif outbox.ends and not pieces:
            self._end(stream, outbox.trailers)
        elif outbox.full and outbox.nbytes <= FULL_BYTES // 2:
            outbox.full = False
            stream.service.writable(stream)

    def drop(self, stream: Stream) -> None:
        """The stream is closed: what it has queued goes nowhere."""
        outbox, stream.outbox = stream.outbox, None
        if outbox is not None:
            self.queued -= outbox.nbytes
