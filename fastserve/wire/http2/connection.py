"""One HTTP/2 connection (RFC 9113): frames in, steps of streams, frames out. Not what they carry.

    socket --> FrameReader --> Intake --> Service --> Sending --> socket
                   |--> here: SETTINGS, PING, GOAWAY, windows of the connection, floods, the end

It takes the socket over from fastserve.wire.connection, which has seen the preface. Reads of all connections
of a listener land in one scratch buffer: small payloads are copied out of it, large ones handed on as views.
What runs for every small request, reading among it, is compiled: fastserve._ext.http2_path.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, cast

from fastserve._ext import http2_frames as kinds
from fastserve._ext.http2_frames import DATA, HEADERS, PLACED, FrameReader, frame
from fastserve._ext.http2_path import Http2Path
from fastserve.wire.faults import WireFault
from fastserve.wire.halves import HalfOpen
from fastserve.wire.http2 import calm, settings
from fastserve.wire.http2.behind import Behind
from fastserve.wire.http2.errors import ConnectionFault, ErrorCode
from fastserve.wire.http2.growth import Growth
from fastserve.wire.http2.intake import DONE, WHOLE, Intake
from fastserve.wire.http2.lifetime import ANSWER_S, ANYBODY, DRAIN, PATIENCE_S, Lifetime
from fastserve.wire.http2.retract import RETRACTED, Event, retract
from fastserve.wire.http2.sending import Sending
from fastserve.wire.http2.settings import CONNECTION_WINDOW, FIRST_WINDOW, MOST_WINDOW
from fastserve.wire.http2.stream import Stream
from fastserve.wire.pace import Pace, Phase, Verdict
from fastserve.wire.peer import Peered

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from fastserve.wire.head import Head
    from fastserve.wire.http2.stream import Piece
    from fastserve.wire.listener import HttpListener

ACK = 1
LOW_WINDOW = CONNECTION_WINDOW // 2  # from which the client is given back what it has sent
TERMS = calm.BURST, calm.A_TURN, calm.ANSWERED, WHOLE, DONE, Stream

_U32 = struct.Struct(">I")
_LAST_AND_CODE = struct.Struct(">II")


class Http2Connection(Peered, Http2Path, asyncio.BufferedProtocol):
    """The protocol of one socket, and the owner of its streams."""

    intake: Intake
    sending: Sending

    __slots__ = (
        "_drain_s", "_pace", "_parts", "_settings_due", "_since_s", "_unsent_answers", "growth", "listener",
    )  # fmt: skip

    def __init__(self, listener: HttpListener) -> None:
        super().__init__(TERMS)
        limits = listener.limits
        self.listener = listener
        block_bytes = max(limits.header_bytes, settings.BLOCK_BYTES)
        self._reader = FrameReader(settings.FRAME_BYTES, block_bytes, settings.CONTINUATIONS)
        self._scratch = listener.http2.scratch
        self.intake = Intake(self, limits)
        self.sending = Sending(self)
        self.growth = Growth()
        self.client_window = FIRST_WINDOW
        self._parts = False  # some of what is written while input is read is large
        self._credit, self._low = CONNECTION_WINDOW, LOW_WINDOW
        self._unsent_answers, self._settings_due, self._pace = 0, True, Pace()
        self._since_s = self._drain_s = -1.0  # when it was first looked at, and first when draining
        self._lifetime = None if listener.lifetimes is None else Lifetime(listener.lifetimes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of a listener of HTTP/2 alone. One too many gets no SETTINGS: after them grpcio tries again."""
        self.take_over(cast(asyncio.Transport, transport))
        if self.listener.admit(self):
            self.start(b"")

    def take_over(self, transport: asyncio.Transport) -> None:
        """The socket is this connection's; `start` follows."""
        self._transport = transport

    def start(self, data: bytes | bytearray) -> None:
        """Begin with the bytes that have come, from the preface on."""
        limits = self.listener.limits
        self.write(frame(kinds.SETTINGS, 0, 0, settings.write_settings(limits.streams, limits.header_bytes)))
        self.write(frame(kinds.WINDOW_UPDATE, 0, 0, _U32.pack(CONNECTION_WINDOW - FIRST_WINDOW)))
        self.listener.http2.pour(data, self.buffer_updated)

    def start_upgraded(self, payload: bytes, head: Head, body: bytes) -> None:
        """Begin with a request of HTTP/1.1 as stream 1 (RFC 7540 3.2); the preface follows."""
        settings.take(payload, self)
        self.start(b"")
        self.intake.adopt(head, body)

    def _take(self, kind: int, flags: int, number: int, payload: Any, value: int) -> None:
        """Any frame but a whole request."""
        if kind in (DATA, PLACED):
            self._spend_window(value)
            self.intake.data(number, bool(flags), payload, value)
        elif kind == HEADERS:
            self.intake.headers(number, bool(flags), payload, bool(value))
        else:
            self._control(kind, flags, number, payload, value)

    def _retracted(self, events: list[Event]) -> list[Event]:
        """What was read, and RST_STREAM in it."""
        return retract(events, self.intake.last)

    def _put_off(self, events: list[Event], data: bytearray | memoryview, start: int, stop: int) -> None:
        """What this turn of the loop has no time for; nothing more is read before it is done with."""
        rest = memoryview(data)[start:stop]
        self.behind = Behind(events, bytes(rest) if data is self._scratch else rest)
        self._transport.pause_reading()
        self.listener.row.join(self, len(rest))

    def catch_up(self) -> None:
        """One more turn for what was put off."""
        behind, self.behind = self.behind, None
        if not self.over:
            self.go_on(behind.events, behind.data)
        if self.behind is None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _fault(self, error: Exception) -> None:
        """What reading has ended with: a fault of the connection, or one of ours, which the loop reports."""
        if not isinstance(error, ConnectionFault):
            raise error
        self.listener.doubt(self._scratch, self._reader.settled)
        self.fail(error.code, error.text)

    def _drop(self, nbytes: int) -> None:
        """Read off what comes after the end: a reset could eat GOAWAY. Who goes on and on is cut off."""
        self._credit -= nbytes
        if self._credit < CONNECTION_WINDOW - calm.LINGER_BYTES:
            self.abort()

    def _control(self, kind: int, flags: int, number: int, payload: Any, value: int) -> None:
        if kind == kinds.WINDOW_UPDATE:
            self.spend(calm.UPDATE)
            if number:
                self.intake.window(number, value)
            else:
                self.sending.widen(value)
        elif kind == kinds.RST_STREAM:
            self.intake.reset(number)
        elif kind == RETRACTED:
            self._spend_window(value)
            self.intake.retract(number, payload, flags)
        elif kind == kinds.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == kinds.PING:
            self._ping(flags, payload)
        elif kind == kinds.FAULT:
            if number == 0:
                raise ConnectionFault(ErrorCode(value), payload)
            self.intake.fail(number, ErrorCode(value))
        else:  # PRIORITY, GOAWAY, and what nobody knows
            self.spend(calm.UNKNOWN)

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            self.spend(0 if self._settings_due else calm.UNASKED)
            self._settings_due = False
            return
        self.spend(settings.cost(payload))
        settings.take(payload, self)
        self.answer(frame(kinds.SETTINGS, ACK, 0, b""))
        self.sending.pump()

    def _ping(self, flags: int, payload: bytes) -> None:
        if not flags & ACK:
            self.spend(calm.PING, calm.TOO_MANY_PINGS)
            self.answer(frame(kinds.PING, ACK, 0, payload))
        elif payload == DRAIN and self._leaving == 1:
            self._stop_streams()
        else:
            self.spend(calm.UNASKED)

    # ---- windows of the client's sending

    def _spend_window(self, counted: int) -> None:
        """Bytes have come. Memory for them is the streams' matter: the connection gives them back at once."""
        self._credit -= counted
        if self._credit < LOW_WINDOW:
            if self._credit < 0:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
            self.write(frame(kinds.WINDOW_UPDATE, 0, 0, _U32.pack(CONNECTION_WINDOW - self._credit)))
            self._credit = CONNECTION_WINDOW

    def widen(self, stream: Stream, nbytes: int) -> None:
        """Let the client send so many bytes more on this stream."""
        if not stream.closed and not stream.complete:
            assert stream.inlet is not None
            stream.inlet.credit += nbytes
            self.write(frame(kinds.WINDOW_UPDATE, 0, stream.id, _U32.pack(nbytes)))

    def may_divert(self, stream: Stream) -> bool:
        """Whether its body may be put straight into its place. Not where streams send theirs side by side:
        a read has a frame of each then, and to tell of every frame costs more than its copy."""
        return self._reader.diverted == stream.id or len(self.intake.streams) == 1

    def divert(self, stream: Stream, place: Buffer) -> None:
        """Have a body put straight into its place, if it may."""
        if self.may_divert(stream):
            self._reader.divert(stream.id, place)

    def let_go(self, stream: Stream) -> None:
        """Nothing more comes of the stream's body."""
        self.growth.release(stream)
        if self._reader.diverted == stream.id:
            self._reader.divert(0, None)
            self._sip = self.listener.http2.sip  # the next is likely to be as large: its head comes alone
        if stream.inlet is not None:
            stream.inlet.took = None

    # ---- what goes out

    def write(self, data: bytes) -> None:
        """Send, with all else of this turn of the loop."""
        if self._out is not None:
            self._out.append(data)
        else:
            self._transport.write(data)

    def write_parts(self, head: bytes, piece: Piece) -> None:
        """A frame whose payload is not copied."""
        self.write(head)
        if self._out is not None:
            self._out.append(piece)
            self._parts = self._parts or len(piece) > FIRST_WINDOW // 4
        else:
            self._transport.write(piece)

    def flush(self) -> None:
        """Hand what was gathered to the socket in one piece."""
        out, parts, self._out, self._parts = self._out, self._parts, None, False
        if out and not self._transport.is_closing():
            if parts:
                self._transport.writelines(out)
            else:
                self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._ended and not self._transport.is_closing():
            self._transport.write_eof()

    def answer(self, data: bytes) -> None:
        """Send what a client makes the server send, however little it reads."""
        if self.sending.choked:
            self._unsent_answers += 1
            if self._unsent_answers > calm.MOST_UNSENT_ANSWERS:  # not raised: services come here too
                self.fail(ErrorCode.ENHANCE_YOUR_CALM, "answers wait that are not read")
                return
        self.write(data)

    def is_last(self, call: object) -> bool:
        """No reply says that its connection closes: GOAWAY does."""
        return False

    def send_reset(self, number: int, code: ErrorCode) -> None:
        self.answer(frame(kinds.RST_STREAM, 0, number, _U32.pack(code)))

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Cut a stream off."""
        self.intake.cut(stream)
        self.send_reset(stream.id, code)
        self.look_for_end()

    def _flush_soon(self) -> None:
        self.listener.http2.flush_soon(self)

    def pause_writing(self) -> None:
        self.sending.choked = True

    def resume_writing(self) -> None:
        self.sending.choked, self._unsent_answers = False, 0
        self.sending.pump()

    # ---- floods

    def spend(self, cost: int, what: str = "too many frames of no use") -> None:
        """The client has caused work without use. Raises ConnectionFault when it did too often."""
        self._calm -= cost
        if self._calm < 0:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, what)

    def earn(self, gain: int) -> None:
        """Something of use was done."""
        self._calm = min(calm.BURST, self._calm + gain)

    # ---- the end

    def fail(self, code: ErrorCode, text: str) -> None:
        """The connection cannot go on: say why, and hang up."""
        self._hang_up(code, text, f"http2_{code.name.lower()}")

    def refuse(self, fault: WireFault) -> None:
        """End a connection that breaks a limit of its own."""
        self._hang_up(ErrorCode.ENHANCE_YOUR_CALM, str(fault), fault.cause)

    def close(self) -> None:
        """It was quiet for long enough, or has lingered: hang up."""
        if self.over:
            self._transport.close()
        else:
            self._hang_up(ErrorCode.NO_ERROR, "")

    def _hang_up(self, code: ErrorCode, text: str, cause: str = "") -> None:
        if not self.over:
            if cause:
                self.listener.count_refusal(cause)
            self._goodbye(max(self.intake.last, 0), code, text)
            self._end()

    def abort(self) -> None:
        """Cut the connection; streams in flight learn that their client is gone."""
        self._transport.abort()

    def _goodbye(self, last: int, code: ErrorCode, text: str) -> None:
        self.write(frame(kinds.GOAWAY, 0, 0, _LAST_AND_CODE.pack(last, code) + text.encode()))

    def _end(self) -> None:
        """Nothing more is read or begun; the client is given a moment to hang up (Phase.END)."""
        self.over, self._ended, self._credit = True, True, CONNECTION_WINDOW
        self.intake.leave()
        if self._out is None:
            self.flush()

    def _drain(self, now: float) -> None:
        """Two steps, so that no request is lost that is on its way (RFC 9113 6.8). Clients on Python's h2
        take GOAWAY for the end of what they are owed, so it waits a little for a moment without streams."""
        if self._drain_s < 0:
            self._drain_s = now
        if self._leaving == 0 and (not self.intake.streams or now - self._drain_s >= PATIENCE_S):
            self._leaving = 1
            self._goodbye(MOST_WINDOW, ErrorCode.NO_ERROR, "")
            self.write(frame(kinds.PING, 0, 0, DRAIN))
        elif self._leaving == 1 and now - self._drain_s >= PATIENCE_S + ANSWER_S:
            self._stop_streams()

    def _stop_streams(self) -> None:
        self._leaving = 2
        self.intake.stop()
        self._goodbye(max(self.intake.last, 0), ErrorCode.NO_ERROR, "")
        self.look_for_end()

    def look_for_end(self) -> None:
        """A stream has ended: perhaps the last one that is owed anything."""
        if not self.intake.streams and not self.over and (self._leaving == 2 or self._half is not None):
            self._end()

    def eof_received(self) -> bool:
        """The client has sent its last byte; it may still read replies."""
        if not self.over:
            self.intake.cut_off()
        if self._out is not None:
            self.flush()  # replies of this turn of the loop; after the transport's end they would be lost
        if self.over or not self.intake.streams:
            return False
        self.write(ANYBODY)
        self._transport = self._half = HalfOpen(self._transport, 0)
        self.listener.hangups.watch(self._half.fileno(), self.abort)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.over, self._out = True, None
        self.intake.leave()
        if self._half is not None:
            self.listener.hangups.forget(self._half.fileno())
        self.listener.forget(self)

    # ---- the listener's look, about once a second

    def look(self, now: float) -> Verdict:
        """How the client keeps the time limits (fastserve.wire.pace)."""
        limits = self.listener.limits
        if self._since_s < 0:
            self._since_s = now
        if self._calm < calm.BURST:
            self.earn(calm.PER_LOOK)
        if not self.over:
            old = self._lifetime is not None and self._lifetime.look(now, self)
            if old or self.listener.draining:
                self._drain(now)
            elif self._settings_due and self._reader.settled and now - self._since_s >= limits.idle_timeout_s:
                self.fail(ErrorCode.SETTINGS_TIMEOUT, "SETTINGS were not acknowledged")
            if self._half is not None:
                self.write(ANYBODY)  # who leaves now says nothing more, and its stream may have no end
            if self.intake.streams:
                self.intake.look(now, self._half is not None)
        unsent = self._transport.get_write_buffer_size() + self.sending.queued
        return self._pace.judge(self._phase(), self._served, 0, unsent, now, limits)

    def _phase(self) -> Phase:
        if self.over or self._reader.waits:
            return Phase.END if self.over else Phase.HEAD
        return Phase.REPLY if self.intake.streams else Phase.REQUEST
