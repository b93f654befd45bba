"""One HTTP/1.1 connection: cuts requests out of the byte stream and puts replies back in order.

    HEAD --head with a length--> BODY --all of it--> HEAD        (a call begins at the second arrow)
    HEAD --chunked head--> CHUNKS --last chunk--> HEAD
    any --refusal, end of input, a head that asks to close--> DEAF (input is dropped, replies go out)

Calls live in a queue: `_current` may write, the rest hold their replies until their turn. Reading stops
while limits.pipelined_calls calls wait or the client does not read; TCP then slows the client down. It also
stops when a turn of the event loop has taken TURN_STEPS of one read, until the next turn (row.py).

Clients of a model send the same head again and again, so the last head is kept: input that begins with
the same bytes, but for the digits of the length, needs no parsing at all (0.5 us instead of 6).
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, cast

from fastserve.each import each
from fastserve.wire.bulk import BODY, BULK_BYTES, CHUNKS, DEAF, HEAD, BulkReader
from fastserve.wire.call import Call
from fastserve.wire.chunks import ChunkReader, append_piece, join_pieces
from fastserve.wire.faults import WireFault, cut_off
from fastserve.wire.halves import HalfOpen
from fastserve.wire.head import CHUNKED, Head, check_unfinished, read_head
from fastserve.wire.http2.settings import PREFACE
from fastserve.wire.pace import Pace, Phase, Verdict
from fastserve.wire.peer import Peered
from fastserve.wire.replies import CLOSE, CONTINUE
from fastserve.wire.stream import Turns

if TYPE_CHECKING:
    from fastserve.wire.http2.connection import Http2Connection
    from fastserve.wire.listener import HttpListener

TURN_STEPS = 64  # heads, bodies or two chunks of one, taken in one turn of the loop
HELD_BODY_BYTES = 1 << 20  # bodies waiting in one connection's queue, beyond which no more is read


class Connection(Peered, BulkReader, asyncio.Protocol):
    """The protocol of one socket, and the owner of its calls until they are replied to."""

    __slots__ = (
        "_behind", "_buffer", "_choked", "_chunks", "_continue_due", "_ended", "_half", "_pace", "_parsing",
        "_repeated", "_scanned", "_waiting", "listener", "turns",
    )  # fmt: skip

    def __init__(self, listener: HttpListener) -> None:
        self.listener = listener
        self._state = HEAD
        self._buffer = bytearray()  # input not yet taken: part of a head, or held back
        self._scanned = 0  # bytes of _buffer known not to hold the end of a head
        self._head: Head | None = None  # of the body being read, or the last one
        self._repeated: Head | None = None  # the last head, when the next input may begin with it
        self._pieces: list[bytes | bytearray] = []
        self._need = 0  # body bytes still missing
        self._chunks: ChunkReader | None = None
        self._current: Call | None = None
        self._waiting: deque[Call] = deque()
        self.turns = Turns()
        self._parsing = self._paused = self._choked = self._continue_due = False
        self._behind = False  # input waits for another turn of the loop
        self._ended = False  # the last reply is handed over
        self.served, self._pace = 0, Pace()
        self._awaits = self._awaited = False
        self._half: HalfOpen | None = None  # the transport, once the client has sent its last byte

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.listener.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state, self._repeated = DEAF, None
        self._buffer.clear()
        self._drop_calls()
        if self._half is not None:
            self.listener.hangups.forget(self._half.fileno())
        self.listener.forget(self)

    def eof_received(self) -> bool:
        """The client has sent its last byte. True while it is owed replies: it may still read them."""
        if self._state in (BODY, CHUNKS) or self._buffer.strip(b"\r\n"):
            self.refuse(cut_off())
        if self._current is None:
            return False
        self._state = DEAF
        self._paused = True  # for good: `finish` looks whether there is more to do
        ahead, skip = self._current.ahead()
        self._transport.write(ahead)
        self._transport = self._half = HalfOpen(self._transport, skip)
        self.listener.hangups.watch(self._half.fileno(), self.abort)
        return True

    def data_received(self, data: bytes) -> None:
        head = self._repeated
        if head is not None and self._current is None:
            if data.startswith(head.raw):
                if len(data) == head.total_bytes:
                    self._begin(head, data[len(head.raw) :])
                    return
            else:
                end, length = head.match(data, 0, self.listener.limits.body_bytes)
                if end and len(data) == end + length:
                    self._begin(head, data[end:])
                    return
        self._take(data)

    def pause_writing(self) -> None:
        self._choked = True
        self._pause()

    def resume_writing(self) -> None:
        self._choked = False
        self.turns.wake()
        self._resume()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        """Go on with input that was held back, as far as the queue allows."""
        held = self._half is not None or self._parsing or self._transport.is_closing()
        if self._paused and not held and self._may_read():
            self._take(b"")

    def _may_read(self) -> bool:
        """Stop or restart reading, by what is in flight."""
        if self._is_full():
            self._pause()
            return False
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return True

    def _is_full(self) -> bool:
        if self._choked or self._behind or self._current is None:
            return self._choked or self._behind
        if len(self._waiting) + 1 >= self.listener.limits.pipelined_calls:
            return True
        held = len(self._current.body) + sum(len(call.body) for call in self._waiting)
        return held > HELD_BODY_BYTES

    def _take(self, data: bytes | bytearray) -> None:
        """Use input in whatever pieces it comes; keep what cannot be used yet."""
        if self._buffer:
            self._buffer += data
            if self._behind:
                return
            data = self._buffer
            self._buffer = bytearray()
        self._repeated = None
        self._parsing = True
        try:
            used = self._take_steps(data)
        except WireFault as fault:
            used = len(data)
            self.refuse(fault)
        finally:
            self._parsing = False
        if self._state == DEAF:
            return
        if self._paused:
            self._may_read()
        if used < len(data):
            self._buffer = data if type(data) is bytearray else bytearray(data)
            del self._buffer[:used]
        elif self._state == HEAD and self._head is not None and self._head.total_bytes:
            self._repeated = self._head

    def _take_steps(self, data: bytes | bytearray) -> int:
        """Take heads and bodies while they are there. Returns how many bytes are used up."""
        used = steps = 0
        while used < len(data) and self._state != DEAF:
            if steps == TURN_STEPS:
                self._behind = True
                self.listener.row.join(self, len(data) - used)
                self._pause()
                break
            steps += 1
            if self._state != HEAD:
                stop = self._take_body(data, used)
            elif self._may_read():
                stop = self._take_head(data, used)
            else:
                break
            if stop == used:
                break
            used = stop
        return used

    def catch_up(self) -> None:
        """Another turn of the loop, for input that waits."""
        self._behind = False
        self._resume()

    def _take_head(self, data: bytes | bytearray, origin: int) -> int:
        """Cut one head out. Returns where it ends, or `origin` when it is not all there."""
        limits = self.listener.limits
        if self._head is not None:
            end, length = self._head.match(data, origin, limits.body_bytes)
            if end:
                self._scanned = 0
                self._begin_body(self._head, length, len(data) - end)
                return end
        elif data.startswith(PREFACE, origin):
            self.hand_over().start(data[origin:])
            return len(data)
        # One empty line before a request is forgiven (RFC 9112 2.2).
        start = origin + 2 if data.startswith(b"\r\n", origin) else origin
        end = data.find(b"\r\n\r\n", max(start, origin + self._scanned - 3)) + 4
        if end < 4 or end - start > limits.header_bytes:
            seen = len(data) if end < 4 else end
            check_unfinished(data[:seen], start, origin + self._scanned, limits)
            self._scanned = len(data) - origin
            return origin
        self._scanned = 0
        head = read_head(bytes(data[start:end]), limits)
        self.listener.route(head)
        self._begin_body(head, head.body_bytes, len(data) - end)
        return end

    def _begin_body(self, head: Head, length: int, available: int) -> None:
        self._head = head
        self._need = length
        if head.body_bytes == CHUNKED:
            self._chunks = ChunkReader(self.listener.limits)
            self._state = CHUNKS
        elif length:
            self._state = BODY
        else:
            self._begin(head, b"")
            return
        if head.expects_continue and available == 0:
            self._continue_due = True
            self._send_continue()
        if length >= BULK_BYTES:
            self.begin_bulk(head, available)

    def _take_body(self, data: bytes | bytearray, start: int) -> int:
        head = cast(Head, self._head)
        if self._chunks is not None:
            stop = self._chunks.feed(data, start)
            if self._chunks.done:
                self._end_body(head, self._chunks.body())
            return stop
        stop = min(start + self._need, len(data))
        whole = start == 0 and stop == len(data) and type(data) is bytes
        append_piece(self._pieces, cast(bytes, data) if whole else bytes(data[start:stop]))
        self._need -= stop - start
        if self._need == 0:
            self._end_body(head, join_pieces(self._pieces))
        elif self._need >= BULK_BYTES:
            self._take_bulk(head)
        return stop

    def _end_body(self, head: Head, body: bytes | bytearray) -> None:
        self._state, self._continue_due, self._chunks, self._pieces = HEAD, False, None, []
        self._begin(head, body)

    def _send_continue(self) -> None:
        """Ask for the body once every earlier reply is out, else it would stand before them."""
        if self._continue_due and self._current is None:
            self._continue_due = False
            self._transport.write(CONTINUE)

    def _begin(self, head: Head, body: bytes | bytearray) -> None:
        call = Call(self, head, body)
        self.served += 1
        if self._current is None:
            self._current = call
        else:
            self._waiting.append(call)
        if head.mode == CLOSE:
            self._state = DEAF
        try:
            work = head.endpoint(call)
        except Exception as error:
            call.fail(error)
        else:
            if work is not None:
                call.run(work)

    def finish(self, call: Call, message: bytes, body: bytes, closes: bool) -> None:
        """Send the reply of `call`, now or when its turn comes."""
        if call is not self._current:
            call.ready = (message, body, closes)
            if closes:  # its client is told that what it sends from now on is not answered
                self._state = DEAF
            return
        self._transport.write(message)
        if body:
            self._transport.write(body)
        if closes:
            self._shut()
        elif self._waiting:
            self._advance()
        else:
            self._current = None
            if self._paused or self._continue_due:
                self._go_on()

    def _advance(self) -> None:
        """Send the replies that waited for the one just sent."""
        while self._waiting:
            call = self._current = self._waiting.popleft()
            if call.ready is None:
                self.turns.wake()
                break
            message, body, closes = call.ready
            self._transport.write(message + body)
            if closes:
                self._shut()
                return
        else:
            self._current = None
        self._go_on()

    def _go_on(self) -> None:
        if self._half is not None and self._current is None:
            self._shut()
            return
        self._send_continue()
        self._resume()

    def hand_over(self, message: bytes = b"") -> Http2Connection:
        """The client speaks HTTP/2 from here on, which `message` agrees to: who has the socket now."""
        self._state = DEAF
        self._transport.write(message)
        return self.listener.switch(self, self._transport)

    def is_last(self, call: Call) -> bool:
        """Whether nothing has come behind this call, not even the beginning of a request."""
        newest = self._waiting[-1] if self._waiting else self._current
        return call is newest and self._state in (HEAD, DEAF) and not self._buffer

    def refuse(self, fault: WireFault) -> None:
        """Answer a request that cannot be served, after the ones before it, and close."""
        self._state = DEAF
        self._pieces = []
        self._chunks = None
        self._buffer.clear()
        self.listener.count_refusal(fault.cause)
        head = Head(b"")
        head.endpoint = partial(self.listener.router.refuse, fault=fault)
        self._begin(head, b"")

    def _shut(self) -> None:
        """The last reply is handed over: say so to the client, then wait a little for it to hang up."""
        self._state = DEAF
        self._repeated = self._current = None
        self._drop_calls()
        if self._transport.is_closing():
            return
        self._ended = True
        if self._paused:  # input must be read off, or closing would reset the connection
            self._paused = False
            self._transport.resume_reading()
        self._transport.write_eof()

    def _drop_calls(self) -> None:
        """No reply can reach the client any more."""
        current, self._current = self._current, None
        waiting, self._waiting = self._waiting, deque()
        each((call for call in (current, *waiting) if call is not None), methodcaller("leave"))
        self.turns.wake()

    def abort(self) -> None:
        """Cut the connection; calls in flight learn that their client is gone."""
        self._transport.abort()

    def close(self) -> None:
        """Close it; what is written goes out."""
        self._transport.close()

    def look(self, now: float) -> Verdict:
        """How the client keeps the time limits (fastserve.wire.pace)."""
        self.stop_awaiting()
        unsent = self._transport.get_write_buffer_size()
        received = self._chunks.received if self._chunks is not None else -self._need
        return self._pace.judge(self._phase(), self.served, received, unsent, now, self.listener.limits)

    def _phase(self) -> Phase:
        if self._ended:
            return Phase.END
        if self._paused or self._state == DEAF:
            return Phase.REPLY
        if self._state != HEAD:
            return Phase.BODY
        if self._buffer:
            return Phase.HEAD
        return Phase.REPLY if self._current is not None else Phase.REQUEST
