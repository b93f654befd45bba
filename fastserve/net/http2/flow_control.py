"""Flow control of streams: windows that grow for large bodies, and replies that wait for the client's
windows.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from fastserve._ext.http2_frames import CONTINUATION, DATA, HEADERS, frame, frame_head
from fastserve._ext.http2_path import SendingPath
from fastserve.net.http2 import abuse_budget
from fastserve.net.http2.settings import FIRST_WINDOW, LEAST_FRAME_BYTES, MOST_WINDOW
from fastserve.net.http2.stream import ConnectionFault, ErrorCode, Http2Stream, Outbox, Piece

GROWTH_BYTES = 32 << 20


class WindowTuner:
    """Enlarge the windows of one connection's streams beyond STREAM_WINDOW for large bodies, oldest first.

    A window is memory that a client can make the server hold, so all growth comes out of GROWTH_BYTES.
    Other streams wait until a body is complete, or one message of a stream of messages is consumed: its
    growth ends then, and the next message asks anew. The stream that has grown for longest always grows,
    however often it asks: of any number of bodies one can be completed."""

    __slots__ = ("_grown", "_out", "_waiting")

    def __init__(self) -> None:
        self._out = 0
        self._grown: dict[Http2Stream, None] | None = None  # streams with growth, the oldest first
        self._waiting: dict[Http2Stream, int] | None = None  # what each wants in all

    def ask(self, stream: Http2Stream, nbytes: int) -> None:
        """Let this stream have `nbytes` beyond its window in all, now or later."""
        inlet = stream.inlet
        if inlet is None or nbytes <= inlet.grown:
            return
        more = nbytes - inlet.grown
        if self._grown is None or self._waiting is None:
            self._grown, self._waiting = {}, {}
        oldest = next(iter(self._grown), stream)
        if oldest is not stream and self._out + more > GROWTH_BYTES:
            self._waiting[stream] = nbytes
            return
        self._waiting.pop(stream, None)
        self._grown[stream] = None
        self._out += more
        inlet.grown = nbytes
        stream.connection.widen(stream, more)

    def release(self, stream: Http2Stream) -> None:
        """End the growth of a stream whose body is complete, or dropped."""
        if self._waiting is not None and stream.inlet is not None:
            self._waiting.pop(stream, None)
            self.shrink(stream, stream.inlet.grown)

    def shrink(self, stream: Http2Stream, nbytes: int) -> None:
        """Take back `nbytes` of a stream's growth, which were used."""
        inlet = stream.inlet
        if self._grown is None or self._waiting is None or inlet is None or not nbytes:
            return
        self._out -= nbytes
        inlet.grown -= nbytes
        if not inlet.grown:
            del self._grown[stream]
        for other, nbytes in list(self._waiting.items()):
            self.ask(other, nbytes)


END_STREAM, END_HEADERS = 1, 4
TABLE_BYTES = 4096  # until a client asks for less
NO_TABLE = b"\x20"  # an update of the table's size to 0
FULL_BYTES = 1 << 16  # of one stream's queue, from which its service should wait
FRAME_BYTES = 1 << 18  # longest frame sent to a client that would take longer ones: others want their turn


class SendingConnection(Protocol):
    """The part of a connection that sends its frames."""

    @property
    def charged(self) -> bool:
        """Return whether it holds more than its allowance of the memory budget."""

    def write(self, data: bytes) -> None:
        """Send a frame."""

    def write_parts(self, head: bytes, piece: Piece) -> None:
        """Send a frame whose payload is not copied."""

    def charge_unsent(self) -> None:
        """Charge the memory budget with replies that the client does not take."""

    def earn(self, gain: int) -> None:
        """Give back so many points of the abuse budget."""

    def sent_end(self, stream: Http2Stream) -> None:
        """The last byte of a reply is handed over."""


class Sending(SendingPath):
    """Send replies on one connection: at once where they fit, else in turns as windows allow.

    A reply that fits both windows and one frame is written in one piece (`reply` of the base). Other
    replies are queued by stream; streams with an open window take turns of a frame each, while the
    connection's window is open and the socket takes bytes. Trailers and END_STREAM need no window. Bodies
    are sent as views, without a copy."""

    _connection: SendingConnection

    __slots__ = ("_table", "_turns", "drained", "frame_bytes")

    def __init__(self, connection: Any) -> None:
        super().__init__(connection, FIRST_WINDOW)
        self._turns: deque[Http2Stream] | None = None
        self._table = TABLE_BYTES
        self.frame_bytes = LEAST_FRAME_BYTES
        self.drained = 0  # bytes that were queued and have gone out, of all streams

    def widen(self, increment: int) -> None:
        """Enlarge the connection's window: the client takes more on all streams together."""
        self.window += increment
        if self.window > MOST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window above 2^31-1")
        self.pump()

    def _reply_in_parts(self, stream: Http2Stream, block: bytes, body: bytes, trailers: bytes) -> None:
        self.head(stream, block)
        if body:
            self.data(stream, body)
        self.finish(stream, trailers)

    def head(self, stream: Http2Stream, block: bytes, flags: int = 0) -> None:
        """Send HEADERS, with CONTINUATION where the block is long."""
        most = self.frame_bytes
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
        first, rest = block[:most], block[most:]
        out = frame(HEADERS, flags | (0 if rest else END_HEADERS), stream.id, first)
        while rest:
            first, rest = rest[:most], rest[most:]
            out += frame(CONTINUATION, 0 if rest else END_HEADERS, stream.id, first)
        self._connection.write(out)

    def data(self, stream: Http2Stream, data: Piece) -> None:
        """Send DATA, now or later."""
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

    def finish(self, stream: Http2Stream, trailers: bytes) -> None:
        """End a reply after all that is queued."""
        outbox = stream.outbox
        if outbox is None or not outbox.pieces:
            self._end(stream, trailers)
        else:
            outbox.ends = True
            outbox.trailers = trailers

    def _end(self, stream: Http2Stream, trailers: bytes) -> None:
        if trailers:
            self.head(stream, trailers, END_STREAM)
        else:
            self._connection.write(frame_head(0, DATA, END_STREAM, stream.id))
        self._connection.sent_end(stream)

    def shrink_table(self, nbytes: int) -> None:
        """Announce a smaller table of the HPACK encoder (RFC 7541 4.2). Blocks use no table anyway."""
        if nbytes < self._table:
            self._table, self._prefix = 0, NO_TABLE

    def wait_turn(self, stream: Http2Stream) -> None:
        """Queue the stream if it has something to send and its window is open."""
        outbox = stream.outbox
        if outbox is not None and outbox.pieces and stream.window > 0 and not outbox.in_turn:
            outbox.in_turn = True
            if self._turns is None:
                self._turns = deque()
            self._turns.append(stream)

    def is_shut(self, stream: Http2Stream) -> bool:
        """Return whether some of a reply waits for a window, and not for the socket."""
        waits = stream.outbox is not None and bool(stream.outbox.pieces)
        return waits and (stream.window <= 0 or self.window <= 0)

    def pump(self) -> None:
        """Send frames of the queued streams while windows and the socket allow."""
        turns = self._turns
        while turns and self.window > 0 and not self.choked:
            stream = turns.popleft()
            if stream.outbox is not None:  # not cut off meanwhile
                stream.outbox.in_turn = False
                if stream.window > 0:  # nor shut by SETTINGS (RFC 9113 6.9.2: even below 0)
                    self._send_frame(stream, stream.outbox)
                    self.wait_turn(stream)
        if self.queued > FULL_BYTES or self._connection.charged:
            self._connection.charge_unsent()

    def _send_frame(self, stream: Http2Stream, outbox: Outbox) -> None:
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
        outbox.sent += size
        self.window -= size
        self.queued -= size
        self.drained += size
        if not pieces:
            outbox.taking = None  # nothing waits any more
        last = outbox.ends and not pieces and not outbox.trailers
        connection = self._connection
        connection.write_parts(frame_head(size, DATA, END_STREAM if last else 0, stream.id), piece)
        if whole or size >= abuse_budget.USEFUL_BYTES:
            connection.earn(abuse_budget.DATA_SENT)
        if last:
            connection.sent_end(stream)
        elif outbox.ends and not pieces:
            self._end(stream, outbox.trailers)
        elif outbox.full and outbox.nbytes <= FULL_BYTES // 2:
            outbox.full = False
            stream.service.writable(stream)

    def drop(self, stream: Http2Stream) -> None:
        """Discard what a closed stream has queued."""
        outbox, stream.outbox = stream.outbox, None
        if outbox is not None and outbox.nbytes:
            self.queued -= outbox.nbytes
            self._connection.charge_unsent()
