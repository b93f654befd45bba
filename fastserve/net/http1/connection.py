"""One HTTP/1.1 connection: cuts requests out of the byte stream and puts replies back in order.

    HEAD --head with a length--> BODY --all of it--> HEAD        (a call begins at the second arrow)
    HEAD --chunked head--> CHUNKS --last chunk--> HEAD
    any --refusal, end of input, a head that asks to close--> DEAF (input is dropped, replies go out)

Calls are queued: `_current` may write, the others hold their replies until their turn. Reading stops while
limits.pipelined_calls calls wait, the client does not read, or the memory budget has no room; TCP then slows
the client down. It also stops when a turn of the event loop has taken TURN_STEPS of one read, until the next
turn (fair_queue.py).

Clients of a model send the same head again and again, so the last head is kept: input that begins with the
same bytes, but for the digits of the length, needs no parsing (0.5 us instead of 6).
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections import deque
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, cast

from fastserve.errors import ServeError
from fastserve.net.callback_guard import Peered, guarded
from fastserve.net.half_closed import HalfClosedTransport, send_fin
from fastserve.net.http1.large_bodies import (
    BULK_BYTES,
    MOST_AWAITED_BYTES,
    SIP_BYTES,
    ArrivedBody,
    AwaitedBody,
    BulkBody,
    ShortReads,
    find_arrived,
    offer,
    wake_at,
)
from fastserve.net.http1.parser import ChunkReader, append_piece, check_unfinished, join_pieces, read_head
from fastserve.net.http2.settings import PREFACE
from fastserve.net.limits import (
    ConnectionPhase,
    HeldBack,
    NoRoom,
    Timeouts,
    Verdict,
    WireFault,
    acked_bytes,
    cut_off,
)
from fastserve.net.request import CHUNKED, CLOSE, CONTINUE, Call, RequestHead, WriteTurns
from fastserve.net.router import CHECKED_BYTES
from fastserve.util.memory_budget import ALLOWANCE_BYTES, Claim
from fastserve.util.rate_limited_log import run_all

if TYPE_CHECKING:
    from fastserve.net.listener_state import ListenerState

HEAD, BODY, CHUNKS, DEAF = range(4)  # what a connection waits for
TURN_STEPS = 64  # heads, bodies or two chunks of one, taken in one turn of the loop
HELD_BODY_BYTES = 1 << 20  # bodies waiting in one connection's queue, beyond which no more is read


class Http1Connection(Peered, asyncio.Protocol):
    """Serve one socket, and own its calls until they are answered. With `may_switch` the socket may begin
    with HTTP/2's preface, and is handed over to HTTP/2 then."""

    __slots__ = (
        "_address", "_awaited", "_awaits", "_buffer", "_choked", "_chunks", "_claim", "_continue_due",
        "_current", "_ended", "_half", "_head", "_held_back", "_in_backlog", "_length", "_may_switch",
        "_need", "_parsing", "_paused", "_pieces", "_repeated", "_scanned", "_state", "_timeouts",
        "_transport", "_waiting", "listener", "served", "turns",
    )  # fmt: skip

    def __init__(self, listener: ListenerState, *, may_switch: bool = True) -> None:
        self.listener = listener
        self._may_switch = may_switch
        self._state = HEAD
        self._buffer = bytearray()  # input not yet taken: part of a head, or held back
        self._scanned = 0  # bytes of _buffer known not to hold the end of a head
        self._head: RequestHead | None = None  # of the body being read, or the last one
        self._repeated: RequestHead | None = None  # the last head, when the next input may begin with it
        self._pieces: list[bytes | bytearray] = []
        self._length = self._need = 0  # bytes of the body being read, and of those the missing ones
        self._chunks: ChunkReader | None = None
        self._current: Call | None = None
        self._waiting: deque[Call] = deque()
        self.turns = WriteTurns()
        self._parsing = self._paused = self._choked = self._continue_due = False
        self._in_backlog = False  # input waits for another turn of the loop
        self._claim: Claim | None = None  # of the memory that this connection holds beyond its allowance
        self._held_back = False  # a body waits for room in the budget
        self._ended = False  # the last reply is handed over
        self.served, self._timeouts = 0, Timeouts()
        self._awaits = self._awaited = False  # the kernel may be, or is, asked to wait for a whole body
        self._half: HalfClosedTransport | None = None  # the transport, once the client has sent its last byte

    def callback_failed(self, error: Exception) -> None:
        """End the connection after an exception in a callback; replies that are written go out."""
        self._state = DEAF
        self.listener.guard.end(error, self.close, self.abort)

    @guarded
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.listener.admit(self)

    @guarded
    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.forget(self)
        self._state, self._repeated = DEAF, None
        self._buffer.clear()
        self._drop_calls()
        if self._claim is not None:
            self._release()
        if self._half is not None:
            self.listener.hangups.forget(self._half.fileno())

    @guarded
    def eof_received(self) -> bool:
        """Handle the client's FIN; return True while it is owed replies, which it may still read."""
        if self._state in (BODY, CHUNKS) or self._buffer.strip(b"\r\n"):
            self.refuse(cut_off())
        if self._current is None:
            return False
        self._state = DEAF
        self._paused = True  # for good: `finish` looks whether there is more to do
        ahead, skip = self._current.ahead()
        self._transport.write(ahead)
        self._transport = self._half = HalfClosedTransport(self._transport, skip)
        self.listener.hangups.watch(self._half.fileno(), self.abort)
        return True

    def data_received(self, data: bytes) -> None:
        try:
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
        except Exception as error:
            self.callback_failed(error)

    @guarded
    def pause_writing(self) -> None:
        self._choked = True
        self._pause()
        self._charge()

    @guarded
    def resume_writing(self) -> None:
        self._choked = False
        self._charge()
        self.turns.wake()
        self._resume()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        """Go on with input that was held back, as far as the queue allows. A failure here is the
        connection's, not that of the call whose reply made room."""
        try:
            held = self._half is not None or self._parsing or self._transport.is_closing()
            if self._paused and not held and self._may_read():
                self._take(b"")
        except Exception as error:
            self.callback_failed(error)

    def _may_read(self) -> bool:
        """Pause or resume reading by the calls in flight; return whether the connection may read."""
        if self._is_full():
            self._pause()
            return False
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return True

    def _is_full(self) -> bool:
        if self._choked or self._in_backlog or self._held_back or self._current is None:
            return self._choked or self._in_backlog or self._held_back
        if len(self._waiting) + 1 >= self.listener.limits.pipelined_calls:
            return True
        held = len(self._current.body) + sum(len(call.body) for call in self._waiting)
        return held > HELD_BODY_BYTES

    def _take(self, data: bytes | bytearray) -> None:
        """Parse input in whatever pieces it comes; keep what cannot be used yet."""
        if self._buffer:
            self._buffer += data
            if self._in_backlog:
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
        if self._state != HEAD or self._buffer:
            self._charge()
            self._heed_budget()

    def _take_steps(self, data: bytes | bytearray) -> int:
        """Take heads and bodies while they are there. Returns how many bytes are used up."""
        used = steps = 0
        while used < len(data) and self._state != DEAF:
            if steps == TURN_STEPS:
                self._in_backlog = True
                self.listener.fair_queue.join(self, len(data) - used)
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
        """Go on with the backlog in another turn of the loop."""
        self._in_backlog = False
        self._resume()

    def _take_head(self, data: bytes | bytearray, origin: int) -> int:
        """Parse one head. Returns where it ends, or `origin` when it is incomplete."""
        limits = self.listener.limits
        if self._head is not None:
            end, length = self._head.match(data, origin, limits.body_bytes)
            if end:
                self._scanned = 0
                self._begin_body(self._head, length, len(data) - end)
                return end
        elif self._may_switch and data.startswith(PREFACE, origin):
            self._switch(data[origin:])
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
        if self.listener.gate is not None:
            head.client = self.client
        self.listener.router.route(head)
        self._begin_body(head, head.body_bytes, len(data) - end)
        return end

    def _begin_body(self, head: RequestHead, length: int, available: int) -> None:
        self._head = head
        self._length = self._need = length
        if head.body_bytes == CHUNKED:
            self._chunks = ChunkReader(self.listener.limits)
            self._state = CHUNKS
        elif length:
            self._state = BODY
        else:
            self._begin(head, b"")
            return
        if self.listener.gate is not None and (self._chunks is not None or available < length):
            self.listener.router.check_key(head)
        if length >= CHECKED_BYTES:
            self.listener.router.check_body(head, length)
        if head.expects_continue and available == 0:
            self._continue_due = True
            self._send_continue()
        if length >= BULK_BYTES:
            self.begin_bulk(head, available)

    def _take_body(self, data: bytes | bytearray, start: int) -> int:
        head = cast(RequestHead, self._head)
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

    # ---- large bodies

    def begin_bulk(self, head: RequestHead, available: int) -> None:
        """Prepare for a large body, of which `available` bytes have been read with its head."""
        self._awaits = SIP_BYTES < self._need <= MOST_AWAITED_BYTES
        if not available:
            self._await_bulk(head)

    def _await_bulk(self, head: RequestHead) -> bool:
        """Have the loop wake once, when the whole rest of the body has come; return False where that is
        not possible, or was done before."""
        if not (self._awaits and self._may_take(head) and wake_at(self._transport, self._need)):
            return False
        self._awaits, self._awaited = False, True
        self._transport.set_protocol(AwaitedBody(self, self._transport))
        return True

    def _pause_for_turn(self) -> None:
        """Pause reading for one turn: the transport may read again in the same turn otherwise, without
        waiting."""
        self._transport.pause_reading()
        get_running_loop().call_soon(self._end_pause)

    @guarded
    def _end_pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def stop_awaiting(self) -> None:
        """Read bytes as they come again. The timer does so once a second too, to see how fast the client
        sends."""
        if self._awaited:
            self._awaited = False
            wake_at(self._transport, 1)

    def _may_take(self, head: RequestHead) -> bool:
        """Return whether the endpoint may read the body out of the socket itself."""
        return self._current is None and head.mode != CLOSE and hasattr(head.endpoint, "take")

    def _take_bulk(self, head: RequestHead) -> None:
        """Go on with a large body that has begun."""
        if self._take_arrived(head):
            self._pieces = []
        elif self._await_bulk(head):
            self._pause_for_turn()
        else:
            self._transport.set_protocol(BulkBody(self, self._pieces, self._need))
            self._pieces = []

    def _take_arrived(self, head: RequestHead) -> bool:
        """Begin the call if its whole body is in the socket and the endpoint reads it from there; return
        whether it began."""
        body = find_arrived(self._transport, self._pieces, self._need) if self._may_take(head) else None
        if body is None:
            return False
        connection = self
        call = self._current = Call(connection, head, cast(bytes, body))  # of which only the length is asked
        self._state = HEAD
        if not offer(head.endpoint.take, call, body):  # type: ignore[attr-defined]
            self._state, self._current = BODY, None
            self._pieces, self._need = [body.begin], body.left
            return False
        if head.timeout_ns >= 0:
            call.bind()
        self.served += 1
        self._transport.set_protocol(ShortReads(connection, self._transport))
        if not body.drop():  # bytes are missing: where the next request begins is unknown
            self.abort()
        return True

    def bulk_received(self, nbytes: int, body: bytearray) -> None:
        """Count bytes of a large body that lie in their place; the last ones begin the call."""
        self._need -= nbytes
        if self._need:
            self._charge()
            self._heed_budget()
        else:
            self._transport.set_protocol(ShortReads(self, self._transport))
            if self._state == BODY:
                self._end_body(cast("RequestHead", self._head), body)

    def _end_body(self, head: RequestHead, body: bytes | bytearray) -> None:
        self._state, self._continue_due, self._chunks, self._pieces = HEAD, False, None, []
        self._length = self._need = 0
        self._begin(head, body)

    def _send_continue(self) -> None:
        """Send 100 Continue once every earlier reply is out."""
        if self._continue_due and self._current is None:
            self._continue_due = False
            self._transport.write(CONTINUE)

    def _begin(self, head: RequestHead, body: bytes | bytearray) -> None:
        call = Call(self, head, body)
        self.served += 1
        if self._current is None:
            self._current = call
        else:
            self._waiting.append(call)
            self._charge()
        if head.mode == CLOSE:
            self._state = DEAF
        try:
            if len(body) > ALLOWANCE_BYTES and not self._has_room():
                self.listener.hold_back(call)
                return
            if head.timeout_ns >= 0:
                call.bind()
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
            self._charge()
            if closes:  # what the client sends from now on is not answered
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
            if self._claim is not None:
                self._charge()
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
        if self._claim is not None:
            self._charge()
        self._go_on()

    def _go_on(self) -> None:
        if self._half is not None and self._current is None:
            self._shut()
            return
        self._send_continue()
        self._resume()

    # ---- the memory budget

    def _charge(self) -> None:
        """Charge the memory budget with input, bodies of calls and replies that the client has not taken."""
        held = len(self._buffer) + self._length - self._need
        if self._chunks is not None:
            held += self._chunks.held
        if self._current is not None:
            held += _held_by(self._current) + sum(map(_held_by, self._waiting))
        if self._choked:
            held += self._transport.get_write_buffer_size()
        if held > ALLOWANCE_BYTES:
            if self._claim is None:
                self._claim = Claim(self.listener.budget)
            self._claim.set(held - ALLOWANCE_BYTES)
        elif self._claim is not None:
            self._release()

    def _has_room(self) -> bool:
        """Charge a large body that has come whole; return False when the budget is exhausted."""
        self._charge()
        claim = self._claim
        return claim is None or not self.listener.budget.exhausted or claim.may_read()

    def _heed_budget(self) -> None:
        """Pause reading a body while the memory budget has no room for it."""
        claim = self._claim
        if claim is None or self._held_back or self._state in (HEAD, DEAF) or claim.may_read():
            return
        if self.listener.budget.exhausted:
            self._refuse_body(self.listener.budget.refuse())
            return
        self._held_back = True
        self._pause()
        claim.wait(self._end_holding_back, self._refuse_body)

    def _end_holding_back(self) -> None:
        self._held_back = False
        self._resume()

    def _refuse_body(self, fault: ServeError) -> None:
        if self._state in (HEAD, DEAF):
            self._end_holding_back()
        else:
            self._held_back = False
            self.refuse(NoRoom(fault))

    def _release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()
        if self._held_back:
            self._end_holding_back()

    def _switch(self, data: bytes | bytearray) -> None:
        """Hand the socket over to HTTP/2, with the bytes that have come."""
        self._state = DEAF
        self._release()
        self.listener.switch(self, self._transport, data)

    def is_last(self, call: Call) -> bool:
        """Return whether nothing has come behind this call, not even the beginning of a request."""
        newest = self._waiting[-1] if self._waiting else self._current
        return call is newest and self._state in (HEAD, DEAF) and not self._buffer

    def refuse(self, fault: WireFault) -> None:
        """Answer a request that cannot be served, after the ones before it, and close."""
        begun, self._state = self._state in (BODY, CHUNKS), DEAF
        self._pieces = []
        self._chunks = None
        self._length = self._need = 0
        self._buffer.clear()
        if self._half is None and begun:  # what comes of a body has no place any more
            self._transport.set_protocol(self)
        self.listener.count_refusal(fault.cause)
        head = RequestHead(b"")
        head.endpoint = partial(self.listener.router.refuse, fault=fault)
        if isinstance(fault, HeldBack) and begun and self._head is not None:
            head.method, head.target, head.mode = self._head.method, self._head.target, CLOSE
            head.headers, head.http_1_0 = self._head.headers, self._head.http_1_0
            head.endpoint = partial(self.listener.router.hold_back, fault=fault.fault)
        self._begin(head, b"")

    def _shut(self) -> None:
        """Close after the last reply: send FIN, then wait a little for the client's."""
        self._state = DEAF
        self._repeated = self._current = None
        self._drop_calls()
        self._charge()
        if self._transport.is_closing():
            return
        self._ended = True
        if self._paused:  # input must be read off, or closing would reset the connection
            self._paused = False
            self._transport.resume_reading()
        send_fin(self._transport)

    def _drop_calls(self) -> None:
        """Tell all calls that their client is gone."""
        current, self._current = self._current, None
        waiting, self._waiting = self._waiting, deque()
        run_all((call for call in (current, *waiting) if call is not None), methodcaller("leave"))
        self.turns.wake()

    def abort(self) -> None:
        """Cut the connection; calls in flight learn that their client is gone."""
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after sending what is written."""
        self._transport.close()

    def look(self, now: float) -> Verdict:
        """Check the client against the time limits."""
        self.stop_awaiting()
        if self._claim is not None:
            self._charge()
        unsent = self._transport.get_write_buffer_size()
        taken = acked_bytes(self._transport) if unsent else 0
        received = self._chunks.received if self._chunks is not None else -self._need
        limits = self.listener.limits_for(self._claim)
        return self._timeouts.judge(self._phase(), self.served, received, unsent, taken, now, limits)

    def _phase(self) -> ConnectionPhase:
        if self._ended:
            return ConnectionPhase.END
        if self._paused or self._state == DEAF:
            return ConnectionPhase.REPLY
        if self._state != HEAD:
            return ConnectionPhase.BODY
        if self._buffer:
            return ConnectionPhase.HEAD
        return ConnectionPhase.REPLY if self._current is not None else ConnectionPhase.REQUEST


def _held_by(call: Call) -> int:
    """Return the bytes of a call's body and waiting reply. A body that is read from the socket into a
    batch is not held here."""
    body = 0 if isinstance(call.body, ArrivedBody) else len(call.body)
    return body if call.ready is None else body + len(call.ready[0]) + len(call.ready[1])
