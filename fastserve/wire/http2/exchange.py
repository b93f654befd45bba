"""Plain HTTP requests on streams: each becomes a Call, so that every route of HTTP/1.1 is a route of HTTP/2.

What an endpoint sees is the same; what it says about connections (`close`) is left out, since a refused
request costs its stream alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastserve._ext.slab import blank_bytes, grow_bytes
from fastserve.wire.bulk import BULK_BYTES, CLAIMED_BYTES
from fastserve.wire.call import Call
from fastserve.wire.faults import JSON, WireFault, cut_off, over_limit
from fastserve.wire.head import Head
from fastserve.wire.http2.errors import ErrorCode
from fastserve.wire.http2.heads import CONTINUE, write_fields
from fastserve.wire.http2.states import State
from fastserve.wire.http2.stream import Piece
from fastserve.wire.http2.stream import Stream as Http2Stream
from fastserve.wire.pace import Verdict, slowness
from fastserve.wire.replies import BODILESS
from fastserve.wire.stream import Stream, Turns

if TYPE_CHECKING:
    from fastserve.wire.listener import HttpListener


class Body:
    """One body as it comes: in one buffer, which has its place beforehand when its length is known."""

    __slots__ = ("_at", "_buffer", "_stream", "_total", "_view")

    def __init__(self, stream: Http2Stream, total: int) -> None:
        self._stream = stream
        self._total = total  # below 0: not known
        self._buffer = blank_bytes(min(total, CLAIMED_BYTES)) if total > 0 else bytearray()
        # Pieces go through a view: assigned to a bytearray's slice, a view is copied to a bytearray first.
        self._view = memoryview(self._buffer) if total > 0 else None
        self._at = 0

    def add(self, piece: Piece) -> int:
        """Append a piece; how many bytes there are now."""
        view = self._view
        if view is None:
            self._buffer += piece
            return len(self._buffer)
        stop = self._at + len(piece)
        if stop > len(view):  # the head alone claims a length: room for it grows as bytes come
            view.release()
            grow_bytes(self._buffer, min(self._total, max(stop, 2 * self._at)))
            view = self._view = memoryview(self._buffer)
        view[self._at : stop] = piece
        self._at = stop
        self.offer()
        return stop

    def offer(self) -> None:
        """Have what comes next read straight into its place, if that is worth it and the place stays."""
        if self._view is not None and BULK_BYTES <= self._total <= CLAIMED_BYTES:
            stream = self._stream
            if stream.connection.may_divert(stream):
                stream.place(self._view[self._at :], self._took)

    def _took(self, nbytes: int) -> None:
        self._at += nbytes
        self.offer()

    def take(self) -> bytearray:
        """All of it."""
        if self._view is not None:
            self._view.release()
        return self._buffer


class Exchanges:
    """Serves plain HTTP on a listener's streams: the last of its services, which takes every head."""

    def __init__(self, listener: HttpListener) -> None:
        self._listener = listener

    def find(self, head: Head) -> Exchanges:
        """Every request is HTTP's."""
        head.endpoint, head.routed_anew = self._listener.router.find(head.method, head.target)
        return self

    def answer(self, stream: Http2Stream, body: bytes | bytearray) -> None:
        """A whole request."""
        head = stream.head
        if len(body) > self._listener.limits.body_bytes:
            self._refuse_length(stream)
            return
        connection: Any = stream.connection
        stream.context = call = Exchange(connection, head, body)
        call.carrier = stream
        try:
            work = head.endpoint(call)
        except Exception as error:
            call.fail(error)
        else:
            if work is not None:
                call.run(work)

    def begin(self, stream: Http2Stream) -> None:
        """The body follows; a client that asked before sending it is told to."""
        if stream.head.expects_continue:
            stream.send_head(CONTINUE)
        stream.context = body = Body(stream, stream.head.body_bytes)
        body.offer()
        stream.expect(stream.head.body_bytes)

    def data(self, stream: Http2Stream, piece: Piece) -> None:
        """Some of the body; nobody's, once its refusal waits for the client to take it."""
        if not isinstance(stream.context, Body):
            return
        have = stream.context.add(piece)
        if have > self._listener.limits.body_bytes:
            self._refuse_length(stream)
        elif stream.head.body_bytes < 0:
            stream.expect(2 * have)

    def end(self, stream: Http2Stream) -> None:
        """All of it is here."""
        if isinstance(stream.context, Body):
            self.answer(stream, stream.context.take())

    def gone(self, stream: Http2Stream) -> None:
        """Nobody waits for the reply."""
        call, stream.context = stream.context, None
        if isinstance(call, Exchange):
            call.leave()

    def writable(self, stream: Http2Stream) -> None:
        """A reply in pieces may go on."""
        call = stream.context
        if isinstance(call, Exchange):
            call.wake()

    def too_slow(self, stream: Http2Stream) -> None:
        """408, as over HTTP/1.1."""
        if isinstance(stream.context, Body):
            self.refuse(stream, slowness(Verdict.SLOW_BODY, self._listener.limits))

    def cut_off(self, stream: Http2Stream) -> None:
        """400, as over HTTP/1.1."""
        if isinstance(stream.context, Body):
            self.refuse(stream, cut_off())

    def refuse(self, stream: Http2Stream, fault: WireFault) -> None:
        """Answer what cannot be served."""
        self._listener.count_refusal(fault.cause)
        connection: Any = stream.connection
        stream.context = call = Exchange(connection, Head(b""), b"")
        call.carrier = stream
        self._listener.router.refuse(call, fault)

    def _refuse_length(self, stream: Http2Stream) -> None:
        limit = self._listener.limits.body_bytes
        self.refuse(stream, over_limit(413, "Request body bytes", "body_bytes", limit))


class Refusal:
    """Serves requests whose head cannot be served."""

    def __init__(self, exchanges: Exchanges, fault: WireFault) -> None:
        self._exchanges = exchanges
        self._fault = fault

    def answer(self, stream: Http2Stream, body: bytes) -> None:
        self._exchanges.refuse(stream, self._fault)

    def begin(self, stream: Http2Stream) -> None:
        self._exchanges.refuse(stream, self._fault)

    def data(self, stream: Http2Stream, piece: Piece) -> None:
        """Its reply has closed the stream, or waits for the client to take it."""

    def end(self, stream: Http2Stream) -> None:
        """Likewise."""

    too_slow = cut_off = end

    def gone(self, stream: Http2Stream) -> None:
        self._exchanges.gone(stream)

    def writable(self, stream: Http2Stream) -> None:
        self._exchanges.writable(stream)


class Exchange(Call):
    """A Call whose reply goes out on a stream. Of its connection it knows the listener; what else HTTP/1.1
    does with one is done with `carrier` here."""

    __slots__ = ("carrier",)

    carrier: Http2Stream

    def raw_head(self, content_type: bytes = JSON) -> bytes:
        """There are none: a reply is framed here."""
        return b""

    def reply(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
        close: bool = False,
        even_to_head: bool = False,
    ) -> None:
        """Send the reply. What nothing is special about takes a shorter way."""
        listener, head = self._connection.listener, self.head
        special = status != 200 or headers or self._replied or head.bodiless or head.routed_anew
        if special or not listener.plain:
            super().reply(status, body, content_type, headers, close, even_to_head)
            return
        self._replied = True
        block = listener.http2.blocks.find(status, content_type, len(body))
        stream = self.carrier
        stream.context = None  # or the two would wait for the collector
        if stream.state is not State.CLOSED:
            stream.connection.sending.reply(stream, block, body, b"")

    def _frame(
        self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]], nbytes: int, mode: int
    ) -> bytes:
        length = -1 if status in BODILESS else nbytes
        block = self._connection.listener.http2.blocks.find(status, content_type, length)
        return block + write_fields(headers) if headers else block

    def _send(self, framed: bytes, body: bytes, mode: int) -> None:
        self.carrier.context = None
        self.carrier.reply(framed, body)

    def stream(
        self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> StreamedReply:
        """Begin a reply whose length is not known."""
        if self._replied and not self.gone:
            self._refuse_second()
        block = self._frame(status, content_type, headers, -1, self.head.mode)
        self._replied = True
        self._stream = reply = StreamedReply(self, status, block, self.carrier)
        return reply

    def wake(self) -> None:
        """The client takes more of a streamed reply."""
        if isinstance(self._stream, StreamedReply):
            self._stream.wake()

    def leave(self) -> None:
        super().leave()
        self.wake()


class StreamedReply(Stream):
    """A reply in pieces: DATA frames, at the pace of the client."""

    __slots__ = ("_carrier",)

    def __init__(self, call: Exchange, status: int, block: bytes, carrier: Http2Stream) -> None:
        connection: Any = carrier.connection
        super().__init__(call, connection, Turns(), status, block, False)
        self._carrier = carrier

    def _may_send(self) -> bool:
        return not self._carrier.full

    def _send_piece(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head:
            self._carrier.send_head(head)
        if not self._silent:
            self._carrier.send_data(data)

    def _send_end(self) -> None:
        self._send_piece(b"")
        self._carrier.context = None
        self._carrier.finish()

    def _cut(self) -> None:
        self._carrier.reset(ErrorCode.INTERNAL_ERROR)

    def wake(self) -> None:
        """Whoever waits looks again."""
        self._turns.wake()
