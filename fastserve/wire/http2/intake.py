"""What comes in on a connection's streams: the table of them, heads, bodies, and who may send what when.

    frame of a stream that is   here             closed            closed by us, too early   not begun yet
    HEADERS                     trailers         STREAM_CLOSED     read and dropped          a request
    DATA                        its body         STREAM_CLOSED     dropped                   PROTOCOL_ERROR
    RST_STREAM, WINDOW_UPDATE   its own          dropped           dropped                   PROTOCOL_ERROR

A client repeats its header block once its table is warm. A block that changed nothing in the decoder's table
is remembered with its head until the next one that does: then a request costs no decoding.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from fastserve._ext.hpack import Fault, HpackDecoder, HpackFault
from fastserve._ext.http2_path import IntakePath
from fastserve.each import each
from fastserve.wire.faults import over_limit
from fastserve.wire.head import CHUNKED, Head
from fastserve.wire.http2 import calm
from fastserve.wire.http2.errors import ConnectionFault, ErrorCode, StreamFault, malformed
from fastserve.wire.http2.heads import Fields, check_fields
from fastserve.wire.http2.settings import MOST_WINDOW
from fastserve.wire.http2.states import RECEIVING, TRANSITIONS, Event, State
from fastserve.wire.http2.stream import Inlet, Piece, Stream

if TYPE_CHECKING:
    from fastserve.config import Limits
    from fastserve.wire.http2.connection import Http2Connection

WHOLE = TRANSITIONS[State.IDLE, Event.WHOLE]
OPENED = TRANSITIONS[State.IDLE, Event.HEADERS]
DONE = TRANSITIONS[WHOLE, Event.SENT_END]
TABLE_BYTES = 4096  # of the decoder's dynamic table: what clients may count on without asking (RFC 7541)
KNOWN_BLOCKS = 64
CUT_STREAMS = 256
SKIPPED_RANGES = 16
MOST_QUEUED_BYTES = 64 << 20  # of replies that the client does not take, beyond which it gets no new stream


class Intake(IntakePath):
    """One connection's. Whole requests that are in order, under a known block, are `request` of the base."""

    blocks: dict[bytes, Head]
    streams: dict[int, Stream]
    _connection: Http2Connection

    __slots__ = ("_cut", "_decoder", "_generation", "_skipped")

    def __init__(self, connection: Http2Connection, limits: Limits) -> None:
        super().__init__(connection, MOST_WINDOW, limits.streams, MOST_QUEUED_BYTES)
        self._decoder = HpackDecoder(TABLE_BYTES, limits.header_bytes)
        self._generation = self._decoder.generation
        self._cut: OrderedDict[int, None] | None = None  # closed by us before the client was done
        self._skipped: list[tuple[int, int]] | None = None  # numbers a client has left out

    # ---- requests

    def _request_anew(self, number: int, block: bytes, body: bytes) -> None:
        """One that has something to it."""
        if number <= self.last or not number & 1:
            self.headers(number, False, block, False)
            self.data(number, True, body, len(body))
            return
        stream = self._open(number, block, WHOLE, False)
        if stream is None:
            return
        if stream.head.body_bytes not in (CHUNKED, len(body)):
            self._connection.reset(stream, ErrorCode.PROTOCOL_ERROR)
            return
        stream.service.answer(stream, body)

    def headers(self, number: int, ends: bool, block: bytes, own_parent: bool) -> None:
        """A header block: a request, or trailers."""
        stream = self.streams.get(number)
        if stream is not None:
            self._take_trailers(stream, ends, block)
            return
        if number <= self.last or not number & 1:
            self._check_late(number, "HEADERS")
            self._decode(block)
            return
        stream = self._open(number, block, WHOLE if ends else OPENED, own_parent)
        if stream is None:
            return
        if not ends:
            stream.inlet = Inlet(stream.head.body_bytes)
            stream.service.begin(stream)
        elif stream.head.body_bytes > 0:
            self._connection.reset(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.service.answer(stream, b"")

    def _open(self, number: int, block: bytes, state: State, own_parent: bool) -> Stream | None:
        """The stream of a new request; None when it was refused."""
        if number > self.last + 2:
            self._note_skipped(number)
        self.last = number
        head = self.blocks.get(block)
        try:
            if head is None:
                head = self._read_head(block)
            if own_parent:
                raise malformed("the stream depends on itself")
        except StreamFault as fault:
            self.refuse(number, state, fault.code, calm.MALFORMED)
            return None
        if number > self._stop or len(self.streams) >= self._most or self._is_choked():
            self.refuse(number, state, ErrorCode.REFUSED_STREAM, calm.REFUSED)
            return None
        stream = self.streams[number] = Stream(self._connection, number, head, state)
        return stream

    def _is_choked(self) -> bool:
        """Whether the client should first take what it has asked for."""
        queued: int = self._connection.sending.queued
        return queued > self._most_queued

    def _refuse_length(self, number: int) -> None:
        """A whole request whose body has not the length that its head tells."""
        self.refuse(number, WHOLE, ErrorCode.PROTOCOL_ERROR, calm.MALFORMED)

    def _read_head(self, block: bytes) -> Head:
        generation = self._generation
        listener = self._connection.listener
        try:
            fields = self._decode(block)
        except HpackFault as fault:
            limit = listener.limits.header_bytes
            refused = over_limit(431, "Header bytes", "header_bytes", limit)
            return listener.http2.refusal(refused, fault.fields)
        head = listener.http2.find(fields)
        if generation == self._generation:
            if len(self.blocks) >= KNOWN_BLOCKS:
                self.blocks.clear()
            self.blocks[block] = head
        return head

    def _decode(self, block: bytes) -> Fields:
        """The fields of a block. Raises HpackFault for a list that is too large; the table is right then."""
        try:
            return self._decoder.decode(block)
        except HpackFault as fault:
            if fault.code != Fault.LIST_TOO_LARGE:
                raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "a header block cannot be read") from None
            self._connection.spend(calm.BOMB)
            raise
        finally:
            if self._decoder.generation != self._generation:
                self._generation = self._decoder.generation
                self.blocks.clear()

    def refuse(self, number: int, state: State, code: ErrorCode, cost: int) -> None:
        """A stream that never was one."""
        if state is OPENED:
            self._note_cut(number)
        self._connection.send_reset(number, code)
        self._connection.spend(cost)

    def stop(self) -> None:
        """Begin no stream any more."""
        self._stop = self.last

    def adopt(self, head: Head, body: bytes) -> None:
        """A request that came by HTTP/1.1 is stream 1."""
        self.last = 1
        stream = self.streams[1] = Stream(self._connection, 1, head, WHOLE)
        stream.service.answer(stream, body)

    # ---- the rest of a request

    def data(self, number: int, ends: bool, piece: Piece | int, counted: int) -> None:
        """DATA, or a piece of it; `counted` bytes count against windows. A number: it lies in its place."""
        stream = self.streams.get(number)
        if stream is None:
            if number > self.last or not number & 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that was not begun")
            self._check_late(number, "DATA")
            return
        try:
            self._take_data(stream, ends, piece, counted)
        except StreamFault as fault:
            self._fail(stream, fault)

    def _take_data(self, stream: Stream, ends: bool, piece: Piece | int, counted: int) -> None:
        inlet = stream.inlet
        if inlet is None or stream.state not in RECEIVING:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        size = piece if isinstance(piece, int) else len(piece)
        inlet.credit -= counted
        inlet.received += size
        if inlet.credit < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the stream's window")
        if counted > size:
            stream.consume(counted - size)  # padding
        if inlet.missing >= 0:
            if size > inlet.missing or (ends and size < inlet.missing):
                raise malformed("the body's length is not its content-length")
            inlet.missing -= size
        if isinstance(piece, int):
            assert inlet.took is not None
            inlet.took(size)
        elif size:
            stream.service.data(stream, piece)
        elif not ends:
            self._connection.spend(calm.EMPTY)
        if ends and not stream.closed:
            self._complete(stream)

    def _complete(self, stream: Stream) -> None:
        stream.move(Event.RECEIVED_END)
        self._connection.let_go(stream)
        stream.service.end(stream)

    def _take_trailers(self, stream: Stream, ends: bool, block: bytes) -> None:
        try:
            fields = self._decode(block)
            if stream.state not in RECEIVING:
                raise StreamFault(ErrorCode.STREAM_CLOSED, "HEADERS after END_STREAM")
            if not ends:
                raise malformed("HEADERS after the first without END_STREAM")
            if stream.inlet is not None and stream.inlet.missing > 0:
                raise malformed("the body's length is not its content-length")
            check_fields(fields, 0)
            self._complete(stream)
        except HpackFault:
            self._fail(stream, malformed("trailers over the limit"))
        except StreamFault as fault:
            self._fail(stream, fault)

    def _fail(self, stream: Stream, fault: StreamFault) -> None:
        self._connection.spend(calm.BROKEN)
        if not stream.closed:
            service = stream.service
            self._connection.reset(stream, fault.code)
            service.gone(stream)

    def fail(self, number: int, code: ErrorCode) -> None:
        """A frame that is wrong on its stream alone."""
        stream = self.streams.get(number)
        if stream is not None:
            self._fail(stream, StreamFault(code, ""))
        else:
            raise ConnectionFault(code, "a wrong frame on a stream that is not open")

    def reset(self, number: int) -> None:
        """RST_STREAM."""
        stream = self.streams.get(number)
        if stream is None:
            self._check_begun(number)
            return
        self._connection.spend(calm.RESET)
        self.drop(stream)
        stream.service.gone(stream)
        self._connection.look_for_end()

    def retract(self, number: int, block: bytes, cost: int) -> None:
        """HEADERS of a stream that was reset before it was looked at."""
        self._connection.spend(cost)
        if number > self.last + 2:
            self._note_skipped(number)
        self.last = max(number, self.last)
        with contextlib.suppress(HpackFault):  # too large a list: nobody is to be told
            if block not in self.blocks:
                self._decode(block)

    def window(self, number: int, increment: int) -> None:
        """WINDOW_UPDATE of a stream."""
        stream = self.streams.get(number)
        if stream is None:
            self._check_begun(number)
            return
        sending = self._connection.sending
        if stream.window + increment > MOST_WINDOW:
            self._fail(stream, StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1"))
            return
        stream.window += increment
        sending.wait_turn(stream)
        sending.pump()

    def shift_windows(self, change: int, largest: int) -> None:
        """SETTINGS_INITIAL_WINDOW_SIZE has changed, by `largest` at some time and by `change` in the end: so
        do the windows of all streams (RFC 9113 6.9.2)."""
        for stream in self.streams.values():
            if stream.window + largest > MOST_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
            stream.window += change
            self._connection.sending.wait_turn(stream)

    def look(self, now: float, half_closed: bool) -> None:
        """Hold bodies to their rate. Who has sent the last byte opens no window any more: what waits for one
        is given up."""
        limits = self._connection.listener.limits
        for stream in [stream for stream in self.streams.values() if not stream.complete]:
            if stream.inlet is not None and stream.inlet.is_slow(now, limits):
                stream.service.too_slow(stream)
        if half_closed:
            self._give_up()

    def _give_up(self) -> None:
        shut = [stream for stream in self.streams.values() if self._connection.sending.is_shut(stream)]
        for stream in shut:
            self._connection.listener.count_refusal("window_shut")
            self.drop(stream)
        each(shut, _tell_gone)
        self._connection.look_for_end()

    def cut_off(self) -> None:
        """The client's last byte has come: requests that are not whole will not be."""
        each([stream for stream in self.streams.values() if not stream.complete], self._cut_off)

    def _cut_off(self, stream: Stream) -> None:
        if not stream.complete:
            stream.move(Event.RECEIVED_END)
            self._connection.let_go(stream)
            stream.service.cut_off(stream)

    # ---- the end of a stream

    def leave(self) -> None:
        """No reply can reach the client any more."""
        streams = list(self.streams.values())
        for stream in streams:
            self.drop(stream)
        each(streams, _tell_gone)

    def drop(self, stream: Stream) -> None:
        """Take it out of the table, whatever it was at."""
        del self.streams[stream.id]
        if not stream.complete:
            self._connection.let_go(stream)
        stream.move(Event.RESET)
        self._connection.sending.drop(stream)

    def sent_end(self, stream: Stream) -> None:
        """Its reply has gone out whole. A client that is still sending is told that nobody listens."""
        del self.streams[stream.id]
        if stream.state is WHOLE:
            stream.state = DONE
        else:
            stream.move(Event.SENT_END)
            self._connection.let_go(stream)
            self._note_cut(stream.id)
            self._connection.send_reset(stream.id, ErrorCode.NO_ERROR)
            stream.move(Event.RESET)
        if stream.outbox is not None:
            self._connection.sending.drop(stream)

    def cut(self, stream: Stream) -> None:
        """Reset by us."""
        if stream.state in RECEIVING:
            self._note_cut(stream.id)
        self.drop(stream)

    # ---- frames of streams that are closed

    def _note_cut(self, number: int) -> None:
        if self._cut is None:
            self._cut = OrderedDict()
        self._cut[number] = None
        if len(self._cut) > CUT_STREAMS:
            self._cut.popitem(last=False)

    def _note_skipped(self, number: int) -> None:
        if self._skipped is None:
            self._skipped = []
        self._skipped.append((self.last, number))
        del self._skipped[:-SKIPPED_RANGES]

    def _check_late(self, number: int, what: str) -> None:
        """Raises ConnectionFault unless the client may not have known that the stream is closed."""
        if self._cut is not None and number in self._cut:
            self._connection.spend(calm.LATE)
            return
        skipped = self._skipped is not None and any(low < number < high for low, high in self._skipped)
        if skipped or not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{what} on a stream that cannot be begun")
        raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"{what} on a closed stream")

    def _check_begun(self, number: int) -> None:
        if number > self.last or not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame on a stream that was not begun")
        self._connection.spend(calm.LATE)


def _tell_gone(stream: Stream) -> None:
    stream.service.gone(stream)
