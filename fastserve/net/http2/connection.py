"""One HTTP/2 connection (RFC 9113): frames in, streams, frames out. Knows no requests: see
stream.StreamService.

    socket --> FrameReader --> streams: heads, bodies --> StreamService --> Sending --> socket
                   |--> SETTINGS, PING, GOAWAY, windows of the connection, abuse budget, the end

    frame of a stream that is   here             closed            reset by us, too early   not begun yet
    HEADERS                     trailers         STREAM_CLOSED     read and dropped         a request
    DATA                        its body         STREAM_CLOSED     dropped                  PROTOCOL_ERROR
    RST_STREAM, WINDOW_UPDATE   its own          dropped           dropped                  PROTOCOL_ERROR

Reads of all connections of a listener land in one scratch buffer: small payloads are copied out of it, large
ones handed on as views. A client repeats its header block once its table is warm: a block that changed
nothing in the decoder's table is kept with its head until the next one that does, and then a request costs no
decoding. The path of small whole requests is compiled: fastserve._ext.http2_path.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

from fastserve._ext import http2_frames as kinds
from fastserve._ext.hpack import Fault, HpackDecoder, HpackFault
from fastserve._ext.http2_frames import HEADERS, FrameReader, frame
from fastserve._ext.http2_path import Http2Path
from fastserve.errors import ServeError
from fastserve.net.callback_guard import Peered, guarded
from fastserve.net.half_closed import HalfClosedTransport, send_fin
from fastserve.net.http1.large_bodies import BULK_BYTES, MOST_AWAITED_BYTES, bare_socket, wake_at
from fastserve.net.http2 import abuse_budget, settings
from fastserve.net.http2.abuse_budget import RAPID_RESET, FrameBacklog, FrameEvent, drop_rapid_resets
from fastserve.net.http2.arrived_bodies import SKIPPED_BODIES, ArrivedFrames
from fastserve.net.http2.flow_control import Sending, WindowTuner
from fastserve.net.http2.headers import Fields, check_fields
from fastserve.net.http2.settings import (
    ANSWER_S,
    ANYBODY,
    CONNECTION_WINDOW,
    DRAIN,
    FIRST_WINDOW,
    MOST_WINDOW,
    PATIENCE_S,
    Lifetime,
)
from fastserve.net.http2.stream import (
    RECEIVING,
    TRANSITIONS,
    BodyTaker,
    ConnectionFault,
    ErrorCode,
    Http2Stream,
    Inlet,
    StreamFault,
    StreamState,
    StreamTransition,
    malformed,
)
from fastserve.net.limits import (
    ConnectionPhase,
    DrainRate,
    Timeouts,
    Verdict,
    WireFault,
    acked_bytes,
    over_limit,
)
from fastserve.net.request import CHUNKED, RequestHead
from fastserve.util.memory_budget import ALLOWANCE_BYTES, Claim
from fastserve.util.rate_limited_log import run_all

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from fastserve.net.http2.exchange import Http2Shared
    from fastserve.net.http2.stream import Piece
    from fastserve.net.listener_state import ListenerState
    from fastserve.settings import Limits

WHOLE = TRANSITIONS[StreamState.IDLE, StreamTransition.WHOLE]
OPENED = TRANSITIONS[StreamState.IDLE, StreamTransition.HEADERS]
DONE = TRANSITIONS[WHOLE, StreamTransition.SENT_END]
TABLE_BYTES = 4096  # of the decoder's dynamic table: what clients may count on without asking (RFC 7541)
KNOWN_BLOCKS = 64
CUT_STREAMS = 256
SKIPPED_RANGES = 16
MOST_QUEUED_BYTES = 64 << 20  # of replies that the client does not take, beyond which it gets no new stream
ACK = 1
QUANTUM_BYTES = 1 << 16  # in which requests of a connection are charged: most are not, each by itself
LOW_WINDOW = CONNECTION_WINDOW // 2  # from which the client is given back what it has sent
TERMS = abuse_budget.BURST, abuse_budget.A_TURN, abuse_budget.ANSWERED, WHOLE, DONE, Http2Stream
_U32 = struct.Struct(">I")
_LAST_AND_CODE = struct.Struct(">II")


class Http2Connection(Peered, Http2Path, asyncio.BufferedProtocol):
    """Serve one socket, and own its streams."""

    blocks: dict[bytes, RequestHead]
    sending: Sending
    streams: dict[int, Http2Stream]
    arriving: Http2Stream | None

    __slots__ = (
        "_address", "_awaited", "_awaits", "_claim", "_cut", "_decoder", "_drain_rate", "_drain_s", "_file",
        "_generation", "_held_back", "_parts", "_settings_due", "_since_s", "_skipped", "_timeouts",
        "_unawaited", "_unoffered", "_unsent_answers", "growth", "listener", "shared",
    )  # fmt: skip
    _claim: Claim | None  # of the memory that this connection holds beyond its allowance

    def __init__(self, listener: ListenerState, shared: Http2Shared) -> None:
        limits = listener.limits
        super().__init__(TERMS, MOST_WINDOW, limits.streams, MOST_QUEUED_BYTES)
        self.listener, self.shared = listener, shared
        block_bytes = max(limits.header_bytes, settings.BLOCK_BYTES)
        self._reader = FrameReader(settings.FRAME_BYTES, block_bytes, settings.CONTINUATIONS)
        self._scratch = shared.scratch
        self._decoder = HpackDecoder(TABLE_BYTES, limits.header_bytes)
        self._generation = self._decoder.generation
        self._cut: OrderedDict[int, None] | None = None  # closed by us before the client was done
        self._skipped: list[tuple[int, int]] | None = None  # numbers a client has left out
        self.sending = Sending(self)
        self.growth = WindowTuner()
        self.client_window = FIRST_WINDOW
        self._parts = False  # some of what is written while input is read is large
        self._file = -1  # the socket's descriptor, where bodies may be read out of it
        self._unoffered = self._unawaited = 0  # next bodies that are not offered to endpoints, or not awaited
        self._awaits = self._awaited = False  # the body's rest may be awaited; the kernel waits for it
        self._credit, self._low = CONNECTION_WINDOW, LOW_WINDOW
        self._unsent_answers, self._settings_due, self._timeouts = 0, True, Timeouts()
        self._drain_rate: DrainRate | None = None  # of what is queued, since anything was
        self._since_s = self._drain_s = -1.0  # when it was first looked at, and first when draining
        self._most_held, self._claim, self._held_back = ALLOWANCE_BYTES, None, False
        self._lifetime = None if listener.lifetimes is None else Lifetime(listener.lifetimes)

    @guarded
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin on a listener of HTTP/2 alone. A connection over the limit gets no SETTINGS: after them
        grpcio tries again at once."""
        self.take_over(cast(asyncio.Transport, transport))
        if self.listener.admit(self):
            self.start(b"")

    def take_over(self, transport: asyncio.Transport) -> None:
        """Take the socket over; `start` follows."""
        self._transport = transport

    def start(self, data: bytes | bytearray) -> None:
        """Begin with the bytes that have come, from the preface on."""
        limits = self.listener.limits
        self.write(frame(kinds.SETTINGS, 0, 0, settings.write_settings(limits.streams, limits.header_bytes)))
        self.write(frame(kinds.WINDOW_UPDATE, 0, 0, _U32.pack(CONNECTION_WINDOW - FIRST_WINDOW)))
        self.shared.pour(data, self.buffer_updated)
        bare = bare_socket(self._transport)  # now that nothing lies between the frame reader and the socket
        self._file = -1 if bare is None else bare.fileno()

    def _take(self, kind: int, flags: int, number: int, payload: Any, value: int) -> None:
        """Handle any frame but a whole request and DATA."""
        if kind == HEADERS:
            self._take_headers(number, bool(flags), payload, bool(value))
        else:
            self._control(kind, flags, number, payload, value)

    def _drop_rapid_resets(self, events: list[FrameEvent]) -> list[FrameEvent]:
        """Return the events of a read that has RST_STREAM in it, without requests that it resets."""
        return drop_rapid_resets(events, self.last)

    def _put_off(self, events: list[FrameEvent], data: bytearray | memoryview, start: int, stop: int) -> None:
        """Keep input for a later turn of the loop, and pause reading until then."""
        rest = memoryview(data)[start:stop]
        self.backlog = FrameBacklog(events, bytes(rest) if data is self._scratch else rest)
        self._transport.pause_reading()
        self.listener.fair_queue.join(self, len(rest))

    def catch_up(self) -> None:
        """Go on with the backlog for one turn of the loop."""
        backlog, self.backlog = self.backlog, None
        if not self.over:
            self.go_on(backlog.events, backlog.data)
        if not self._held_back:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if self.backlog is None and not self._transport.is_closing():
            self._transport.resume_reading()

    def callback_failed(self, error: Exception) -> None:
        """End the connection: its client has broken the protocol, or a callback has failed otherwise."""
        if isinstance(error, ConnectionFault):
            try:
                self._blame(error)
                return
            except Exception as second:
                error = second
        self.listener.guard.end(error, self._end_broken, self.abort)

    def _blame(self, fault: ConnectionFault) -> None:
        self.listener.count_stray_tls(self._scratch, self._reader.settled)
        self.fail(fault.code, fault.text)

    def _end_broken(self) -> None:
        self._hang_up(ErrorCode.INTERNAL_ERROR, "internal error")

    @guarded
    def _set_aside(self, nbytes: int) -> None:
        """Keep bytes for a later turn, or drop them after the end. They are read off then, since a reset
        could eat GOAWAY; a client that sends on and on is cut off."""
        if not self.over:
            assert self.backlog is not None
            self.backlog.add(self._scratch, nbytes)
            return
        self._credit -= nbytes
        if self._credit < CONNECTION_WINDOW - abuse_budget.LINGER_BYTES:
            self.abort()

    def _control(self, kind: int, flags: int, number: int, payload: Any, value: int) -> None:
        if kind == kinds.WINDOW_UPDATE:
            self.spend(abuse_budget.UPDATE)
            if number:
                self._take_window_update(number, value)
            else:
                self.sending.widen(value)
        elif kind == kinds.RST_STREAM:
            self._take_reset(number)
        elif kind == RAPID_RESET:
            self.spend_window(value)
            self._take_rapid_reset(number, payload, flags)
        elif kind == kinds.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == kinds.PING:
            self._ping(flags, payload)
        elif kind == kinds.FAULT:
            if number == 0:
                raise ConnectionFault(ErrorCode(value), payload)
            self._fail_frame(number, ErrorCode(value))
        else:  # PRIORITY, GOAWAY, and unknown kinds
            self.spend(abuse_budget.UNKNOWN)

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            self.spend(0 if self._settings_due else abuse_budget.UNASKED)
            self._settings_due = False
            return
        self.spend(settings.cost(payload))
        self._apply_settings(payload)
        self.answer(frame(kinds.SETTINGS, ACK, 0, b""))
        self.sending.pump()

    def _apply_settings(self, payload: bytes) -> None:
        """Apply a client's SETTINGS. A frame has room for 2730 pairs: the windows of all streams move once.

        Raises ConnectionFault."""
        before = largest = self.client_window
        for name, value in settings.read_settings(payload):
            if name == settings.INITIAL_WINDOW_SIZE:
                self.client_window = value
                largest = max(largest, value)
            elif name == settings.MAX_FRAME_SIZE:
                self.sending.frame_bytes = value
            elif name == settings.HEADER_TABLE_SIZE:
                self.sending.shrink_table(value)
        if largest > before or self.client_window != before:
            self._shift_windows(self.client_window - before, largest - before)

    def _ping(self, flags: int, payload: bytes) -> None:
        if not flags & ACK:
            self.spend(abuse_budget.PING, abuse_budget.TOO_MANY_PINGS)
            self.answer(frame(kinds.PING, ACK, 0, payload))
        elif payload == DRAIN and self._leaving == 1:
            self._stop_streams()
        else:
            self.spend(abuse_budget.UNASKED)

    # ---- requests

    def _request_anew(self, number: int, block: bytes, body: bytes) -> None:
        """Handle a whole request that is new, out of order, or over a limit."""
        if number <= self.last or not number & 1:
            self._take_headers(number, False, block, False)
            self._take_data_frame(number, True, body, len(body))
            return
        stream = self._open_stream(number, block, WHOLE, False)
        if stream is None:
            return
        self.hold(stream, len(body))
        if stream.head.body_bytes not in (CHUNKED, len(body)):
            self.reset(stream, ErrorCode.PROTOCOL_ERROR)
            return
        stream.service.answer(stream, body)

    def _take_headers(self, number: int, ends: bool, block: bytes, own_parent: bool) -> None:
        """Handle a header block: a request, or trailers."""
        stream = self.streams.get(number)
        if stream is not None:
            self._take_trailers(stream, ends, block)
            return
        if number <= self.last or not number & 1:
            self._check_late(number, "HEADERS")
            with contextlib.suppress(HpackFault):  # too large a list, of a stream that is closed
                self._decode(block)
            return
        stream = self._open_stream(number, block, WHOLE if ends else OPENED, own_parent)
        if stream is None:
            return
        if not ends:
            stream.inlet = Inlet(stream.head.body_bytes)
            stream.service.begin(stream)
        elif stream.head.body_bytes > 0:
            self.reset(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.service.answer(stream, b"")

    def _open_stream(
        self, number: int, block: bytes, state: StreamState, own_parent: bool
    ) -> Http2Stream | None:
        """Return the stream of a new request; None when it was refused."""
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
            self._refuse_stream(number, state, fault.code, abuse_budget.MALFORMED)
            return None
        if number > self._stop or len(self.streams) >= self._most or self._is_choked():
            self._refuse_stream(number, state, ErrorCode.REFUSED_STREAM, abuse_budget.REFUSED)
            return None
        stream = self.streams[number] = Http2Stream(self, number, head, state)
        return stream

    def _is_choked(self) -> bool:
        """Return whether the client should first take the replies it has asked for."""
        queued: int = self.sending.queued
        return queued > self._most_queued

    def _refuse_length(self, number: int) -> None:
        """Refuse a whole request whose body does not have its content-length."""
        self._refuse_stream(number, WHOLE, ErrorCode.PROTOCOL_ERROR, abuse_budget.MALFORMED)

    def _read_head(self, block: bytes) -> RequestHead:
        generation = self._generation
        listener = self.listener
        try:
            fields = self._decode(block)
        except HpackFault as fault:
            limit = listener.limits.header_bytes
            refused = over_limit(431, "Header bytes", "header_bytes", limit)
            return self.shared.refusal(refused, fault.fields)
        head = self.shared.find(fields, self.client if listener.gate is not None else "")
        if generation == self._generation:
            if len(self.blocks) >= KNOWN_BLOCKS:
                self.blocks.clear()
            self.blocks[block] = head
        return head

    def _decode(self, block: bytes) -> Fields:
        """Return the fields of a block. Raises HpackFault for a list over the limit, after which the
        table is right."""
        try:
            return self._decoder.decode(block)
        except HpackFault as fault:
            if fault.code != Fault.LIST_TOO_LARGE:
                raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "a header block cannot be read") from None
            self.spend(abuse_budget.BOMB)
            raise
        finally:
            if self._decoder.generation != self._generation:
                self._generation = self._decoder.generation
                self.blocks.clear()

    def _refuse_stream(self, number: int, state: StreamState, code: ErrorCode, cost: int) -> None:
        """Refuse a stream before it begins."""
        if state is OPENED:
            self._note_cut(number)
        self.send_reset(number, code)
        self.spend(cost)

    # ---- the rest of a request

    def _take_data_frame(self, number: int, ends: bool, piece: Piece | int, counted: int) -> None:
        """Handle DATA, or a piece of it; `counted` bytes count against windows. A number is that of bytes
        which lie in their place."""
        stream = self.streams.get(number)
        if stream is None:
            if number > self.last or not number & 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that was not begun")
            self._check_late(number, "DATA")
            return
        try:
            inlet = stream.inlet
            if inlet is None or stream.state not in RECEIVING:
                raise StreamFault(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
            size = piece if isinstance(piece, int) else len(piece)
            inlet.credit -= counted
            inlet.received += size
            if not self.hold(stream, size):
                return
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
                self.spend(abuse_budget.EMPTY)
            if ends and not stream.closed:
                self._complete(stream)
        except StreamFault as fault:
            self._fail_stream(stream, fault)

    def _complete(self, stream: Http2Stream) -> None:
        stream.move(StreamTransition.RECEIVED_END)
        self.let_go(stream)
        stream.service.end(stream)

    def _take_trailers(self, stream: Http2Stream, ends: bool, block: bytes) -> None:
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
            self._fail_stream(stream, malformed("trailers over the limit"))
        except StreamFault as fault:
            self._fail_stream(stream, fault)

    def _fail_stream(self, stream: Http2Stream, fault: StreamFault) -> None:
        self.spend(abuse_budget.BROKEN)
        if not stream.closed:
            service = stream.service
            self.reset(stream, fault.code)
            service.gone(stream)

    def _fail_frame(self, number: int, code: ErrorCode) -> None:
        """Handle a frame that is wrong on its stream alone."""
        stream = self.streams.get(number)
        if stream is not None:
            self._fail_stream(stream, StreamFault(code, ""))
        else:
            raise ConnectionFault(code, "a wrong frame on a stream that is not open")

    def _take_reset(self, number: int) -> None:
        """Handle RST_STREAM."""
        stream = self.streams.get(number)
        if stream is None:
            self._check_begun(number)
            return
        self.spend(abuse_budget.RESET)
        self._drop_stream(stream)
        stream.service.gone(stream)
        self.look_for_end()

    def _take_rapid_reset(self, number: int, block: bytes, cost: int) -> None:
        """Handle a request that was reset in the read that began it."""
        self.spend(cost)
        if number > self.last + 2:
            self._note_skipped(number)
        self.last = max(number, self.last)
        with contextlib.suppress(HpackFault):  # too large a list, of a stream that is closed
            if block not in self.blocks:
                self._decode(block)

    def _take_window_update(self, number: int, increment: int) -> None:
        """Handle WINDOW_UPDATE of a stream."""
        stream = self.streams.get(number)
        if stream is None:
            self._check_begun(number)
            return
        sending = self.sending
        if stream.window + increment > MOST_WINDOW:
            self._fail_stream(stream, StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1"))
            return
        stream.window += increment
        sending.wait_turn(stream)
        sending.pump()

    def _shift_windows(self, change: int, largest: int) -> None:
        """Change the windows of all streams after SETTINGS_INITIAL_WINDOW_SIZE (RFC 9113 6.9.2), by
        `change` in the end and by `largest` at most meanwhile."""
        for stream in self.streams.values():
            if stream.window + largest > MOST_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
            stream.window += change
            self.sending.wait_turn(stream)

    def _look_at_streams(self, now: float, limits: Limits, *, half_closed: bool, reads: bool) -> None:
        """Hold bodies and replies to their rates; without `reads` bodies have none. A client that has
        sent FIN opens no window any more: replies that wait for one are given up."""
        for stream in [stream for stream in self.streams.values() if not stream.complete]:
            if stream.inlet is None:
                continue
            if not reads:
                stream.inlet.since_s = -1.0
            elif stream.inlet.is_slow(now, limits):
                stream.service.too_slow(stream)
        slow = [stream for stream in self.streams.values() if self._is_read_slowly(stream, now, limits)]
        if slow:
            self._give_up(slow, "reply_bytes_per_s", ErrorCode.ENHANCE_YOUR_CALM)
        if half_closed:
            shut = [stream for stream in self.streams.values() if self.sending.is_shut(stream)]
            self._give_up(shut, "window_shut", None)

    def _is_read_slowly(self, stream: Http2Stream, now: float, limits: Limits) -> bool:
        outbox = stream.outbox
        if outbox is None:
            return False
        return outbox.is_slow(bool(outbox.pieces) and stream.window <= 0, now, limits)

    def _give_up(self, streams: list[Http2Stream], cause: str, code: ErrorCode | None) -> None:
        """End replies that the client does not take, by RST_STREAM unless `code` is None."""
        for stream in streams:
            self.listener.count_refusal(cause)
            if code is None:
                self._drop_stream(stream)
            else:
                self._cut_stream(stream)
                self.send_reset(stream.id, code)
        run_all(streams, _tell_gone)
        self.look_for_end()

    def _cut_off_streams(self) -> None:
        """Tell requests that are incomplete that the client has sent FIN."""
        run_all([stream for stream in self.streams.values() if not stream.complete], self._cut_off_stream)

    def _cut_off_stream(self, stream: Http2Stream) -> None:
        if not stream.complete:
            stream.move(StreamTransition.RECEIVED_END)
            self.let_go(stream)
            stream.service.cut_off(stream)

    # ---- the end of a stream

    def _drop_streams(self) -> None:
        """Drop all streams: no reply can reach the client any more."""
        streams = list(self.streams.values())
        for stream in streams:
            self._drop_stream(stream)
        run_all(streams, _tell_gone)

    def _drop_stream(self, stream: Http2Stream) -> None:
        """Remove a stream in any state."""
        del self.streams[stream.id]
        if stream.held:
            self.release_bytes(stream, stream.held)
        if not stream.complete:
            self.let_go(stream)
        stream.move(StreamTransition.RESET)
        self.sending.drop(stream)

    def _finish_stream(self, stream: Http2Stream) -> None:
        """Remove a stream whose reply has gone out. A client that is still sending gets RST_STREAM."""
        del self.streams[stream.id]
        if stream.state is WHOLE:
            stream.state = DONE
        else:
            stream.move(StreamTransition.SENT_END)
            self.let_go(stream)
            self._note_cut(stream.id)
            self.send_reset(stream.id, ErrorCode.NO_ERROR)
            stream.move(StreamTransition.RESET)
        if stream.outbox is not None:
            self.sending.drop(stream)

    def _cut_stream(self, stream: Http2Stream) -> None:
        """Remove a stream that this server resets."""
        if stream.state in RECEIVING:
            self._note_cut(stream.id)
        self._drop_stream(stream)

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
        """Raise ConnectionFault unless the client may not have known that the stream is closed."""
        if self._cut is not None and number in self._cut:
            self.spend(abuse_budget.LATE)
            return
        skipped = self._skipped is not None and any(low < number < high for low, high in self._skipped)
        if skipped or not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{what} on a stream that cannot be begun")
        raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"{what} on a closed stream")

    def _check_begun(self, number: int) -> None:
        if number > self.last or not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame on a stream that was not begun")
        self.spend(abuse_budget.LATE)

    # ---- the memory budget

    def _charge(self, *, keep: bool = True) -> None:
        """Charge the memory budget: requests by QUANTUM_BYTES, and replies that the client has not taken.
        A connection that holds more than before is not read while there is no room.

        A connection that holds nothing any more keeps one quantum charged until the next look, while less
        than half of the room is used: most will need it again in the next turn, and to give it back and
        charge it anew in each turn took a twentieth of the time of calls with 3 kB (8 streams at a time).
        """
        before = self._most_held
        quanta = -((ALLOWANCE_BYTES - self.held) // QUANTUM_BYTES) if self.held > ALLOWANCE_BYTES else 0
        if not quanta and keep and self._claim is not None and self._claim.nbytes == QUANTUM_BYTES:
            budget = self.listener.budget
            unsent = self.sending.queued or self.sending.choked
            if 2 * budget.used < budget.room and not unsent and not self._held_back:
                self._least_held = 0
                return
        self._most_held = ALLOWANCE_BYTES + quanta * QUANTUM_BYTES
        self._least_held = max(1, self._most_held - 2 * QUANTUM_BYTES) if quanta else 0
        held = quanta * QUANTUM_BYTES + self.sending.queued
        if self.sending.choked:
            held += self._transport.get_write_buffer_size()
        if not held:
            self._release()
            return
        if self._claim is None:
            self._claim = Claim(self.listener.budget)
        self._claim.set(held)
        if self._most_held > before and not self._held_back and not self.over:
            self._heed_budget(self._claim)

    def _heed_budget(self, claim: Claim) -> None:
        if claim.may_read():
            return
        if self.listener.budget.exhausted and self._refuse_bodies(self.listener.budget.refuse()):
            return
        self._held_back = True
        self._transport.pause_reading()
        claim.wait(self._end_holding_back, self._refuse_bodies)

    def _end_holding_back(self) -> None:
        self._held_back = False
        self._resume_reading()

    def _refuse_bodies(self, fault: ServeError) -> bool:
        """Refuse the requests of which a part has come; return whether there were any. Whole ones get
        answered."""
        held_back, self._held_back = self._held_back, False
        unfinished = [one for one in self.streams.values() if one.held and not one.complete]
        run_all(unfinished, lambda stream: stream.service.no_room(stream, fault))
        if held_back:
            self._resume_reading()
        return bool(unfinished)

    @property
    def charged(self) -> bool:
        """Return whether it holds more than its allowance of the memory budget."""
        return self._claim is not None

    def charge_unsent(self) -> None:
        """Charge replies that the client does not take."""
        if self.charged or self.sending.queued > QUANTUM_BYTES or self.sending.choked:
            self._charge()

    def _release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()
        if self._held_back:
            self._end_holding_back()

    # ---- windows of the client's sending

    def _renew_window(self) -> None:
        """Give the connection's window back. Raises ConnectionFault where the client has sent beyond it."""
        if self._credit < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
        self.write(frame(kinds.WINDOW_UPDATE, 0, 0, _U32.pack(CONNECTION_WINDOW - self._credit)))
        self._credit = CONNECTION_WINDOW

    def widen(self, stream: Http2Stream, nbytes: int) -> None:
        """Let the client send so many bytes more on this stream."""
        if not stream.closed and not stream.complete:
            assert stream.inlet is not None
            stream.inlet.credit += nbytes
            self.write(frame(kinds.WINDOW_UPDATE, 0, stream.id, _U32.pack(nbytes)))

    def may_divert(self, stream: Http2Stream) -> bool:
        """Return whether a body may be read straight into its place. Not where streams send side by side:
        a read has a frame of each then, and an event for every frame costs more than its copy."""
        return self._reader.diverted == stream.id or len(self.streams) == 1

    def divert(self, stream: Http2Stream, place: Buffer) -> None:
        """Have a body read straight into its place, if it may be."""
        if self.may_divert(stream):
            self._reader.divert(stream.id, place)

    # ---- large bodies that wait in the socket

    def offer_rest(self, stream: Http2Stream, taker: BodyTaker) -> None:
        """Offer `taker` the rest of a body that is put into its place, once all of it waits in the
        socket."""
        if self._file < 0 or self._reader.diverted != stream.id:
            return
        if self._unoffered:
            self._unoffered -= 1
            return
        assert stream.inlet is not None
        stream.inlet.taker, self.arriving = taker, stream
        self._awaits = not self._unawaited
        self._unawaited -= bool(self._unawaited)

    def _offer_body(self) -> None:
        """Offer a body to its endpoint at the end of a read, if the rest of it waits in the socket in frames
        of the usual size. The endpoint reads it into the rows of a batch; none are reserved for a slow
        client."""
        stream = self.arriving
        assert stream is not None
        inlet = stream.inlet
        assert inlet is not None
        assert inlet.taker is not None
        awaited = self._awaited
        self._stop_awaiting()
        rest = inlet.taker.missing()
        if rest < max(BULK_BYTES, inlet.received) or len(self.streams) > 1 or stream.state is not OPENED:
            self.arriving = None  # to copy what is there once more would cost what is saved
            return
        if rest > min(inlet.credit, self._credit) or inlet.missing not in (-1, rest):
            return
        if self._transport.is_closing():
            return
        missing = self._reader.missing_of(self._file, stream.id, rest)
        if missing == 0:
            self.arriving = None
            self._take_arrived(stream, inlet.taker, rest)
        elif missing > 0 and not awaited:  # else the kernel has ended the wait: its buffer has no more room
            self._await_rest(rest)

    def _take_arrived(self, stream: Http2Stream, taker: BodyTaker, rest: int) -> None:
        """Have a body read out of the socket. If its frames are not as expected, the bytes before are
        handed on as a piece of the body, and those from there on become input."""
        begun = taker.received()
        body = ArrivedFrames(self._file, begun, rest, self, stream)
        taker.take_arrived(body)
        if body.left and len(body.begin) > len(begun):
            piece = body.begin[len(begun) :]
            self.spend_window(len(piece))
            self._take_data_frame(stream.id, False, piece, len(piece))
        if body.odd and not self.over:
            self._unoffered = SKIPPED_BODIES
            self._put_off([], memoryview(body.odd), 0, len(body.odd))

    def _await_rest(self, nbytes: int) -> None:
        """Have the loop wake once, when so many bytes of a body have come or a few milliseconds have
        passed."""
        if self._awaits and nbytes <= MOST_AWAITED_BYTES and wake_at(self._transport, nbytes):
            self._awaited = True
            self._sip = self.shared.sip
            self.shared.waits.add(self)
            self._transport.pause_reading()  # it may read again in this turn otherwise, without waiting
            asyncio.get_running_loop().call_soon(self._end_pause)

    @guarded
    def _end_pause(self) -> None:
        if not self._held_back:
            self._resume_reading()

    def _stop_awaiting(self) -> None:
        """Read bytes as they come again."""
        if self._awaited:
            self._awaited = False
            self.shared.waits.remove(self)
            wake_at(self._transport, 1)

    def give_up_awaiting(self) -> None:
        """Read a body as it comes that has taken too long; the client's next ones are not awaited."""
        self._awaits, self._unawaited = False, SKIPPED_BODIES
        self._stop_awaiting()

    def receive(self, file: int, stream: Http2Stream, places: list[memoryview]) -> tuple[int, bytes]:
        """Read the rest of a body out of the socket into its places. Returns how many bytes lie there, and
        those behind them that are no DATA as expected. The last byte ends the request."""
        got, odd = self._reader.receive(file, stream.id, places)
        if got == sum(map(len, places)):
            assert stream.inlet is not None
            stream.inlet.credit -= got
            stream.inlet.received += got
            stream.inlet.missing = 0
            self.spend_window(got)
            stream.move(StreamTransition.RECEIVED_END)
            self.let_go(stream)
        return got, odd

    # ---- the end of receiving

    def let_go(self, stream: Http2Stream) -> None:
        """Release what was kept for receiving the stream's body."""
        self.growth.release(stream)
        if self.arriving is stream:
            self.arriving = None
            self._stop_awaiting()
        if self._reader.diverted == stream.id:
            self._reader.divert(0, None)
            self._sip = self.shared.sip  # the next is likely to be as large: its head comes alone
        if stream.inlet is not None:
            stream.inlet.took = stream.inlet.taker = None

    # ---- what goes out

    def write(self, data: bytes) -> None:
        """Send bytes, together with all else of this turn of the loop."""
        if self._out is not None:
            self._out.append(data)
        else:
            self._transport.write(data)

    def write_parts(self, head: bytes, piece: Piece) -> None:
        """Send a frame whose payload is not copied."""
        self.write(head)
        if self._out is not None:
            self._out.append(piece)
            self._parts = self._parts or len(piece) > FIRST_WINDOW // 4
        else:
            self._transport.write(piece)

    def flush(self) -> None:
        """Write what was gathered to the socket in one piece."""
        out, parts, self._out, self._parts = self._out, self._parts, None, False
        if out and not self._transport.is_closing():
            if parts:
                self._transport.writelines(out)
            else:
                self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._ended and not self._transport.is_closing():
            send_fin(self._transport)

    def answer(self, data: bytes) -> None:
        """Send what a client makes the server send, however little it reads."""
        if self.sending.choked:
            self._unsent_answers += 1
            if self._unsent_answers > abuse_budget.MOST_UNSENT_ANSWERS:  # not raised: services come here too
                self.fail(ErrorCode.ENHANCE_YOUR_CALM, "answers wait that are not read")
                return
        self.write(data)

    def is_last(self, call: object) -> bool:
        """Return False: no reply says that its connection closes, GOAWAY does."""
        return False

    def send_reset(self, number: int, code: ErrorCode) -> None:
        self.answer(frame(kinds.RST_STREAM, 0, number, _U32.pack(code)))

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        """Send RST_STREAM."""
        self._cut_stream(stream)
        self.send_reset(stream.id, code)
        self.look_for_end()

    def _flush_soon(self) -> None:
        self.shared.flush_soon(self)

    def pause_writing(self) -> None:
        self.sending.choked = True
        self.charge_unsent()

    @guarded
    def resume_writing(self) -> None:
        self.sending.choked, self._unsent_answers = False, 0
        self.sending.pump()
        self.charge_unsent()

    # ---- floods

    def spend(self, cost: int, what: str = "too many frames of no use") -> None:
        """Take points off the abuse budget. Raises ConnectionFault when it is used up."""
        self._abuse_budget -= cost
        if self._abuse_budget < 0:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, what)

    def earn(self, gain: int) -> None:
        """Give points of the abuse budget back."""
        self._abuse_budget = min(abuse_budget.BURST, self._abuse_budget + gain)

    # ---- the end

    def fail(self, code: ErrorCode, text: str) -> None:
        """End the connection with a GOAWAY that says why."""
        self._hang_up(code, text, f"http2_{code.name.lower()}")

    def refuse(self, fault: WireFault) -> None:
        """End a connection that breaks a limit of its own."""
        self._hang_up(ErrorCode.ENHANCE_YOUR_CALM, str(fault), fault.cause)

    def close(self) -> None:
        """Close an idle connection with GOAWAY, or one that has lingered."""
        if self.over:
            self._transport.close()
        else:
            self._hang_up(ErrorCode.NO_ERROR, "")

    def _hang_up(self, code: ErrorCode, text: str, cause: str = "") -> None:
        if not self.over:
            if cause:
                self.listener.count_refusal(cause)
            self._goodbye(max(self.last, 0), code, text)
            self._end()

    def abort(self) -> None:
        """Cut the connection; streams in flight learn that their client is gone."""
        self._transport.abort()

    def cut(self, cause: str) -> None:
        """Abort, counted under `cause`."""
        self.listener.count_refusal(cause)
        self.abort()

    def _goodbye(self, last: int, code: ErrorCode, text: str) -> None:
        self.write(frame(kinds.GOAWAY, 0, 0, _LAST_AND_CODE.pack(last, code) + text.encode()))

    def _end(self) -> None:
        """Read and begin nothing more; the client has a moment to close (ConnectionPhase.END)."""
        self.over, self._ended, self._credit = True, True, CONNECTION_WINDOW
        self._drop_streams()
        if self._out is None:
            self.flush()

    def _drain(self, now: float) -> None:
        """Send GOAWAY in two steps, so that no request on its way is lost (RFC 9113 6.8). Clients on
        Python's h2 drop their streams at GOAWAY, so the first one waits a little for a moment without
        streams."""
        if self._drain_s < 0:
            self._drain_s = now
        if self._leaving == 0 and (not self.streams or now - self._drain_s >= PATIENCE_S):
            self._leaving = 1
            self._goodbye(MOST_WINDOW, ErrorCode.NO_ERROR, "")
            self.write(frame(kinds.PING, 0, 0, DRAIN))
        elif self._leaving == 1 and now - self._drain_s >= PATIENCE_S + ANSWER_S:
            self._stop_streams()

    def _stop_streams(self) -> None:
        self._leaving = 2
        self._stop = self.last
        self._goodbye(max(self.last, 0), ErrorCode.NO_ERROR, "")
        self.look_for_end()

    def look_for_end(self) -> None:
        """End the connection if it is to end and no stream is left."""
        if not self.streams and not self.over and (self._leaving == 2 or self._half is not None):
            self._end()

    @guarded
    def eof_received(self) -> bool:
        """Handle the client's FIN; it may still read replies."""
        if not self.over:
            self._cut_off_streams()
        if self._out is not None:
            self.flush()  # replies of this turn of the loop; after the transport's end they would be lost
        if self.over or not self.streams:
            return False
        self.write(ANYBODY)
        self._transport = self._half = HalfClosedTransport(self._transport, 0)
        self.listener.hangups.watch(self._half.fileno(), self.abort)
        return True

    @guarded
    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.forget(self)
        self.over, self._out = True, None
        self._drop_streams()
        self._release()
        if self._half is not None:
            self.listener.hangups.forget(self._half.fileno())

    # ---- the listener's look, about once a second

    def look(self, now: float) -> Verdict:
        """Check the client against the time limits."""
        if self._claim is not None:
            self._charge(keep=False)
        limits = self.listener.limits_for(self._claim)
        if self._since_s < 0:
            self._since_s = now
        if self._abuse_budget < abuse_budget.BURST:
            self.earn(abuse_budget.PER_LOOK)
        if not self.over:
            old = self._lifetime is not None and self._lifetime.look(now, self)
            if old or self.listener.draining:
                self._drain(now)
            elif self._settings_due and self._reader.settled and now - self._since_s >= limits.idle_timeout_s:
                self.fail(ErrorCode.SETTINGS_TIMEOUT, "SETTINGS were not acknowledged")
            if self._half is not None:
                self.write(
                    ANYBODY
                )  # a client that leaves now sends nothing more, and its stream may have no end
            if self.streams:
                self._look_at_streams(
                    now, limits, half_closed=self._half is not None, reads=not self._held_back
                )
        return self._judge(now, limits)

    def _judge(self, now: float, limits: Limits) -> Verdict:
        """Judge how fast the client takes replies: bytes in the socket by TCP's own count, queued ones by
        the windows. Answers to PING are no part of a reply."""
        written, queued = self._transport.get_write_buffer_size(), self.sending.queued
        taken = acked_bytes(self._transport) if written else -1
        unsent = written + queued
        verdict = self._timeouts.judge(self._phase(), self._served, 0, unsent, taken, now, limits)
        if queued and self._drain_rate is None:
            self._drain_rate = DrainRate()
        if self._drain_rate is not None and self._drain_rate.is_slow(
            queued > 0, self.sending.drained, now, limits
        ):
            return Verdict.SLOW_REPLY if verdict is Verdict.FINE else verdict
        return verdict

    def _phase(self) -> ConnectionPhase:
        if self.over or (self._reader.waits and not self._held_back):
            return ConnectionPhase.END if self.over else ConnectionPhase.HEAD
        return ConnectionPhase.REPLY if self.streams else ConnectionPhase.REQUEST


def _tell_gone(stream: Http2Stream) -> None:
    stream.service.gone(stream)
