"""Plain HTTP requests on streams: each becomes a Call, so that every route of HTTP/1.1 is a route of HTTP/2.

Endpoints see the same calls. A reply's `close` is left out: a refused request costs its stream alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol, cast

from fastserve._ext.slab import blank_bytes, grow_bytes
from fastserve.errors import ServeError, detach
from fastserve.net.callback_guard import Guarded, report
from fastserve.net.http1.large_bodies import BULK_BYTES, CLAIMED_BYTES, SIP_BYTES, ArrivedBody, offer
from fastserve.net.http2.arrived_bodies import BodyWaits
from fastserve.net.http2.headers import CONTINUE, Fields, read_head, write_fields
from fastserve.net.http2.stream import (
    STREAM_WINDOW,
    ErrorCode,
    Http2Stream,
    Piece,
    ServiceFinder,
    StreamState,
)
from fastserve.net.limits import JSON, HeldBack, Verdict, WireFault, cut_off, over_limit, slowness
from fastserve.net.request import BODILESS, Call, ReplyStream, RequestHead, WriteTurns
from fastserve.net.router import CHECKED_BYTES
from fastserve.util.memory_budget import REASON
from fastserve.util.rate_limited_log import run_all

if TYPE_CHECKING:
    from fastserve.net.listener_state import ListenerState


class StreamBody:
    """Collect one body in one buffer, which is allocated beforehand when its length is known."""

    __slots__ = ("_at", "_buffer", "_service", "_stream", "_total", "_view")

    def __init__(self, service: HttpService, stream: Http2Stream, total: int) -> None:
        self._service, self._stream = service, stream
        self._total = total  # below 0: not known
        self._buffer = blank_bytes(min(total, CLAIMED_BYTES)) if total > 0 else bytearray()
        # Pieces go through a view: assigned to a bytearray's slice, a view is copied to a bytearray first.
        self._view = memoryview(self._buffer) if total > 0 else None
        self._at = 0

    def add(self, piece: Piece) -> int:
        """Append a piece; return how many bytes there are now."""
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
        """Have the next bytes read straight into the buffer, where that pays and the buffer stays in
        place."""
        if self._view is not None and BULK_BYTES <= self._total <= CLAIMED_BYTES:
            stream = self._stream
            if stream.connection.may_divert(stream):
                stream.place(self._view[self._at :], self._took)
                if not self._at and hasattr(stream.head.endpoint, "take"):
                    stream.offer_rest(self)

    def _took(self, nbytes: int) -> None:
        self._at += nbytes
        self.offer()

    # ---- fastserve.net.http2.stream.BodyTaker

    def missing(self) -> int:
        return self._total - self._at

    def received(self) -> bytes:
        return bytes(memoryview(self._buffer)[: self._at])

    def take_arrived(self, body: ArrivedBody) -> bool:
        return self._service.take(self._stream, body)

    def take(self) -> bytearray:
        """Return the whole body."""
        if self._view is not None:
            self._view.release()
        return self._buffer


class HttpService:
    """Serve plain HTTP on a listener's streams: the last of its services, which takes every head."""

    def __init__(self, listener: ListenerState) -> None:
        self._listener = listener

    def find(self, head: RequestHead) -> HttpService:
        """Route the head; every request that reaches this service is plain HTTP."""
        self._listener.router.route(head)
        return self

    def answer(self, stream: Http2Stream, body: bytes | bytearray) -> None:
        """Serve a whole request."""
        head = stream.head
        if len(body) > self._listener.limits.body_bytes:
            self._refuse_length(stream)
            return
        connection: Any = stream.connection
        stream.context = call = StreamCall(connection, head, body)
        call.carrier = stream
        if head.timeout_ns >= 0:
            call.bind()
        try:
            work = head.endpoint(call)
        except Exception as error:
            call.fail(error)
        else:
            if work is not None:
                call.run(work)

    def take(self, stream: Http2Stream, body: ArrivedBody) -> bool:
        """Offer a body that waits in the socket to the endpoint; return whether it took the call."""
        connection: Any = stream.connection
        begun, endpoint = stream.context, stream.head.endpoint
        stream.context = call = StreamCall(connection, stream.head, cast(bytes, body))  # its length is asked
        call.carrier = stream
        taken = offer(endpoint.take, call, body)  # type: ignore[attr-defined]
        if not taken:
            stream.context = begun
        elif stream.head.timeout_ns >= 0:
            call.bind()
        return taken

    def begin(self, stream: Http2Stream) -> None:
        """Prepare for a body; send 100 Continue where the client waits for it."""
        head, router = stream.head, self._listener.router
        try:
            if self._listener.gate is not None:
                router.check_key(head)
            if head.body_bytes >= CHECKED_BYTES:
                router.check_body(head, head.body_bytes)
        except HeldBack as refused:
            self._hold_back(stream, refused.fault, refused.cause)
            return
        if stream.head.expects_continue:
            stream.send_head(CONTINUE)
        stream.context = body = StreamBody(self, stream, stream.head.body_bytes)
        body.offer()
        stream.expect(stream.head.body_bytes)

    def data(self, stream: Http2Stream, piece: Piece) -> None:
        """Take a piece of the body; drop it where the request is refused already."""
        if not isinstance(stream.context, StreamBody):
            return
        have = stream.context.add(piece)
        if have > self._listener.limits.body_bytes:
            self._refuse_length(stream)
        elif 2 * have > STREAM_WINDOW and stream.head.body_bytes < 0:
            stream.expect(2 * have)

    def end(self, stream: Http2Stream) -> None:
        """Serve the request: its body is complete."""
        if isinstance(stream.context, StreamBody):
            self.answer(stream, stream.context.take())

    def gone(self, stream: Http2Stream) -> None:
        """Tell the call that its client is gone."""
        call, stream.context = stream.context, None
        if isinstance(call, StreamCall):
            call.leave()

    def writable(self, stream: Http2Stream) -> None:
        """Let a streamed reply go on."""
        call = stream.context
        if isinstance(call, StreamCall):
            call.wake()

    def too_slow(self, stream: Http2Stream) -> None:
        """Answer 408, as over HTTP/1.1."""
        if isinstance(stream.context, StreamBody):
            self.refuse(stream, slowness(Verdict.SLOW_BODY, self._listener.limits))

    def no_room(self, stream: Http2Stream, fault: ServeError) -> None:
        """Answer 503 in the form of the dialect."""
        if isinstance(stream.context, StreamBody):
            self._hold_back(stream, fault, REASON)

    def cut_off(self, stream: Http2Stream) -> None:
        """Answer 400, as over HTTP/1.1."""
        if isinstance(stream.context, StreamBody):
            self.refuse(stream, cut_off())

    def refuse(self, stream: Http2Stream, fault: WireFault) -> None:
        """Answer a request that cannot be served."""
        self._listener.count_refusal(fault.cause)
        connection: Any = stream.connection
        stream.context = call = StreamCall(connection, RequestHead(b""), b"")
        call.carrier = stream
        self._listener.router.refuse(call, fault)

    def _hold_back(self, stream: Http2Stream, fault: ServeError, cause: str) -> None:
        self._listener.count_refusal(cause)
        connection: Any = stream.connection
        stream.context = call = StreamCall(connection, stream.head, b"")
        call.carrier = stream
        self._listener.router.hold_back(call, fault)

    def _refuse_length(self, stream: Http2Stream) -> None:
        limit = self._listener.limits.body_bytes
        self.refuse(stream, over_limit(413, "Request body bytes", "body_bytes", limit))


class RefusalService:
    """Serve requests whose head cannot be served."""

    def __init__(self, exchanges: HttpService, fault: WireFault) -> None:
        self._exchanges = exchanges
        self._fault = detach(fault)  # heads are kept for all connections

    def answer(self, stream: Http2Stream, body: bytes) -> None:
        self._exchanges.refuse(stream, self._fault)

    def begin(self, stream: Http2Stream) -> None:
        self._exchanges.refuse(stream, self._fault)

    def data(self, stream: Http2Stream, piece: Piece) -> None:
        """Drop it: the reply has closed the stream, or waits for the client to take it."""

    def end(self, stream: Http2Stream) -> None:
        """Likewise."""

    def no_room(self, stream: Http2Stream, fault: ServeError) -> None:
        """Likewise."""

    too_slow = cut_off = end

    def gone(self, stream: Http2Stream) -> None:
        self._exchanges.gone(stream)

    def writable(self, stream: Http2Stream) -> None:
        self._exchanges.writable(stream)


class StreamCall(Call):
    """A Call whose reply goes out on a stream, `carrier`. Of its connection only the listener is used."""

    __slots__ = ("carrier",)

    carrier: Http2Stream
    _connection: Any  # an Http2Connection

    def raw_head(self, content_type: bytes = JSON) -> bytes:
        """Return b"": replies over HTTP/2 are framed here."""
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
        """Send the reply; an ordinary one takes a shorter way."""
        listener, head = self._connection.listener, self.head
        special = status != 200 or headers or self._replied or head.bodiless or head.found is not None
        if special or head.slow or not listener.plain:
            super().reply(status, body, content_type, headers, close)  # RFC 9113 8.1: no DATA to a HEAD
            return
        self._replied = True
        block = listener.blocks.find(status, content_type, len(body))
        stream = self.carrier
        stream.context = None  # or the two would wait for the collector
        if stream.state is not StreamState.CLOSED:
            stream.connection.sending.reply(stream, block, body, b"")

    def _frame(
        self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]], nbytes: int, mode: int
    ) -> bytes:
        length = -1 if status in BODILESS else nbytes
        block: bytes = self._connection.listener.blocks.find(status, content_type, length)
        return block + write_fields(headers) if headers else block

    def _send(self, framed: bytes, body: bytes, mode: int) -> None:
        self.carrier.context = None
        self.carrier.reply(framed, body)

    def stream(
        self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> Http2ReplyStream:
        """Begin a reply whose length is not known."""
        if self._replied and not self.gone:
            self._refuse_second()
        block = self._frame(status, content_type, self._named(status, headers), -1, self.head.mode)
        self._begin_stream(status)
        self._stream = reply = Http2ReplyStream(self, status, block, self.carrier)
        return reply

    def wake(self) -> None:
        """Let a streamed reply go on."""
        if isinstance(self._stream, Http2ReplyStream):
            self._stream.wake()

    def leave(self) -> None:
        super().leave()
        self.wake()


class Http2ReplyStream(ReplyStream):
    """A reply in pieces: DATA frames, at the client's speed."""

    __slots__ = ("_carrier",)

    def __init__(self, call: StreamCall, status: int, block: bytes, carrier: Http2Stream) -> None:
        connection: Any = carrier.connection
        super().__init__(call, connection, WriteTurns(), status, block, False)
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
        """Wake the writer."""
        self._turns.wake()


SCRATCH_BYTES = 1 << 18
KNOWN_HEADS = 512
CLIENT = b"\x00client"  # no header has this name
KNOWN_HEAD_BYTES = 2048  # longer ones are read anew: what clients send must not fill the memory


class Flushed(Guarded, Protocol):
    """A connection that gathers what it writes in one turn of the loop."""

    def flush(self) -> None:
        """Hand what was gathered to the socket."""


class Http2Shared:
    """Hold what the HTTP/2 connections of a listener share: services, heads and the read buffer.
    `services` are asked in turn who serves a head; plain HTTP takes the rest."""

    def __init__(self, listener: ListenerState, services: Sequence[ServiceFinder]) -> None:
        self._listener = listener
        self.exchanges = HttpService(listener)
        self._services = tuple(services)
        self.scratch = bytearray()
        self.sip = memoryview(self.scratch)  # the beginning of it
        self._gathering: list[Flushed] = []
        self.waits = BodyWaits()
        self._heads: dict[tuple[tuple[bytes, bytes], ...], RequestHead] = {}

    def open(self) -> None:
        """Allocate the read buffer; before the first connection, so that a listener without one needs
        none."""
        if not self.scratch:
            self.scratch = bytearray(SCRATCH_BYTES)
            self.sip = memoryview(self.scratch)[:SIP_BYTES]

    def pour(self, data: bytes | bytearray, hand_on: Callable[[int], None]) -> None:
        """Pass bytes that were received elsewhere through the read buffer."""
        scratch = self.scratch
        for at in range(0, len(data), SCRATCH_BYTES):
            piece = data[at : at + SCRATCH_BYTES]
            scratch[: len(piece)] = piece
            hand_on(len(piece))

    def add(self, service: ServiceFinder) -> None:
        """Add a service, which is asked before the others. Before the listener is open."""
        self._services = (service, *self._services)

    def flush_soon(self, connection: Flushed) -> None:
        """Flush this connection at the end of the loop's turn, together with all others that ask."""
        loop = self._listener.fair_queue.loop
        if loop is None:
            connection.flush()
            return
        if not self._gathering:
            loop.call_soon(self._flush)
        self._gathering.append(connection)

    def _flush(self) -> None:
        gathering, self._gathering = self._gathering, []
        run_all(gathering, methodcaller("flush"), report)

    def find(self, fields: Fields, client: str = "") -> RequestHead:
        """Return the head of a request with its service: the same object for equal fields of clients with
        the same certificate, whose subject is `client` where that counts. Raises StreamFault."""
        key = (*fields, (CLIENT, client.encode())) if client else tuple(fields)
        head = self._heads.get(key)
        if head is None:
            head = self._read(fields, client)
            if sum(len(name) + len(value) for name, value in key) <= KNOWN_HEAD_BYTES:
                if len(self._heads) >= KNOWN_HEADS:
                    self._heads.clear()
                self._heads[key] = head
        return head

    def _read(self, fields: Fields, client: str) -> RequestHead:
        try:
            head = read_head(fields, self._listener.limits)
        except WireFault as fault:
            return self.refusal(fault, fields)
        head.client = client
        found = (service.find(head) for service in self._services)
        head.service = next(filter(None, found), None) or self.exchanges.find(head)
        return head

    def refusal(self, fault: WireFault, fields: Fields) -> RequestHead:
        """Return the head of requests that are answered with a fault."""
        head = RequestHead(b"")
        head.body_bytes = -1
        found = (service.refuse(fields, fault) for service in self._services)
        head.service = next(filter(None, found), None) or RefusalService(self.exchanges, fault)
        return head
