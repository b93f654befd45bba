"""The transport of a connection with TLS, and what the connections of one listener share."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable
from operator import methodcaller
from typing import Any, Protocol, cast

from fastserve.net.callback_guard import SUBJECT, Guard, guarded, report
from fastserve.net.half_closed import send_fin
from fastserve.net.tls.credentials import Credentials, subject_of
from fastserve.settings.server_settings import TlsOptions
from fastserve.util.rate_limited_log import run_all

# A buffer of OpenSSL's that once held a read, or what one became, keeps its size: 64 KiB each way.
SCRATCH_BYTES = 1 << 16
H2, HTTP_1_1 = "h2", "http/1.1"


class PendingHandshake(Protocol):
    """A connection whose handshake is under way."""

    def give_up(self, cause: str) -> None:
        """End it, counted under `cause`."""


class TlsPort:
    """Hold what a listener's TLS connections share: certificates, the read buffer, and a bound on
    handshakes. `protocols` are the ALPN names of what it speaks, the best first."""

    def __init__(self, credentials: Credentials, protocols: tuple[str, ...], guard: Guard) -> None:
        self.credentials = credentials
        self.guard = guard
        self.protocols = protocols
        self.view = memoryview(b"")
        self._under_way: dict[PendingHandshake, None] = {}
        self._flushing: list[TlsTransport] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def options(self) -> TlsOptions:
        return self.credentials.options

    def open(self) -> None:
        """Allocate the read buffer, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.view = memoryview(bytearray(SCRATCH_BYTES))

    def wrap(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Return the server's side of a new connection, with the current certificate."""
        context = self.credentials.context(self.protocols)
        return context.wrap_bio(incoming, outgoing, server_side=True)

    def speaks_one_of(self, offered: list[bytes]) -> bool:
        """Return whether the port speaks a protocol that the client offers; one that offers none may have
        any."""
        return not offered or any(name.encode() in offered for name in self.protocols)

    def begin(self, handshake: PendingHandshake) -> PendingHandshake | None:
        """Count a handshake; return the oldest one if there are too many, which has to end."""
        self._under_way[handshake] = None
        if len(self._under_way) <= self.options.handshakes:
            return None
        return next(iter(self._under_way))

    def end(self, handshake: PendingHandshake) -> None:
        """Forget a handshake. Idempotent."""
        self._under_way.pop(handshake, None)

    def flush_soon(self, transport: TlsTransport) -> None:
        """Encrypt what a transport was given at the end of the loop's turn: several writes are one record."""
        assert self._loop is not None
        if not self._flushing:
            self._loop.call_soon(self._flush)
        self._flushing.append(transport)

    def _flush(self) -> None:
        flushing, self._flushing = self._flushing, []
        run_all(flushing, methodcaller("flush"), report)


Piece = bytes | bytearray | memoryview
SLICE_BYTES = 1 << 16  # encrypted at a time
READ_BYTES = 1 << 14  # of one record
TURN_BYTES = 1 << 18  # decrypted before others have a turn
# Of what a client makes OpenSSL answer by itself (updates of keys, renegotiation) while it takes nothing.
MOST_UNREAD_ANSWERS = 100


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """Encrypt between a socket's transport and the protocol of HTTP above: a protocol and a transport at
    once.

        socket --> scratch --> incoming --OpenSSL--> the protocol's own buffer, or bytes
        socket <-- outgoing <--OpenSSL-- pieces of a turn of the loop, as long as the socket takes bytes

    Not uvloop's own TLS, which ends a connection whose client has sent FIN before it is answered, takes
    256 KiB a connection for reads, and encrypts all of a reply at once however slowly it is read
    (decision 0014). A reply that the socket does not take stays a view of its body: 64 KiB are encrypted
    at a time."""

    __slots__ = (
        "_app", "_app_fills", "_choked", "_closing", "_due", "_ends", "_got_end", "_incoming", "_inner",
        "_out", "_out_bytes", "_outgoing", "_paused", "_port", "_reading", "_ssl", "_subject",
        "_told_end", "_unread_answers",
    )  # fmt: skip

    _app: asyncio.BaseProtocol

    def __init__(
        self,
        port: TlsPort,
        inner: asyncio.Transport,
        secured: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
    ) -> None:
        super().__init__()
        self._app = asyncio.Protocol()  # until there is one
        self._app_fills = False
        self._port = port
        self._inner = inner
        self._ssl = secured
        self._incoming, self._outgoing = incoming, outgoing
        self._out: deque[Piece] = deque()
        self._out_bytes = 0
        self._paused = self._choked = self._due = self._reading = False
        self._closing = False  # nothing more is taken from either side
        self._ends = False  # the end of what is written follows upon what waits
        self._got_end = self._told_end = False  # the client has sent its last byte; the protocol knows
        self._unread_answers = 0
        self._subject = subject_of(secured)

    def begin(self) -> None:
        """Read what has come together with the end of the handshake."""
        self._read()

    # ---- what comes

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._port.view

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if not self._closing:  # else it is read off, so that a reset does not eat the last reply
                self._incoming.write(self._port.view[:nbytes])
                self._read()
        except Exception as error:
            self.callback_failed(error)

    @guarded
    def _read_on(self) -> None:
        """Read input that was held back, in another turn of the loop."""
        self._read()

    def _read(self) -> None:
        if self._reading:
            return
        self._reading = True
        try:
            while self._has_input():
                if not (self._fill() if self._app_fills else self._hand_on()):
                    break
        except ssl.SSLError:
            self.abort()  # a record that was forged, or an alert
        finally:
            self._reading = False
        self._answer()
        if self._got_end and not self._has_input():
            self._tell_end()

    def _has_input(self) -> bool:
        if self._paused or self._closing:
            return False
        return bool(self._incoming.pending or self._ssl.pending())

    def _fill(self) -> bool:
        """Decrypt into the protocol's own buffer, as much as there is."""
        app = cast(asyncio.BufferedProtocol, self._app)
        filled = 0
        with memoryview(app.get_buffer(-1)) as buffer, contextlib.suppress(ssl.SSLWantReadError):
            while filled < len(buffer) and self._has_input():
                got = self._ssl.read(len(buffer) - filled, buffer[filled:])
                if not got:
                    self._end_input()
                    break
                filled += cast(int, got)
        if filled:
            app.buffer_updated(filled)
        return filled > 0

    def _hand_on(self) -> bool:
        """Decrypt, and pass bytes to the protocol."""
        pieces: list[bytes] = []
        size = 0
        with contextlib.suppress(ssl.SSLWantReadError):
            while size < TURN_BYTES and self._has_input():
                piece = self._ssl.read(READ_BYTES)
                if not piece:
                    self._end_input()
                    break
                pieces.append(piece)
                size += len(piece)
        if pieces:
            app = cast(asyncio.Protocol, self._app)
            app.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return bool(pieces)

    def _end_input(self) -> None:
        """Handle close_notify: what comes after it is dropped."""
        self._got_end = True
        self._incoming.read()

    def _answer(self) -> None:
        """Send what OpenSSL answers by itself while reading."""
        if self._outgoing.pending and not self._inner.is_closing():
            if self._choked:
                self._unread_answers += 1
                if self._unread_answers > MOST_UNREAD_ANSWERS:
                    self.abort()
                    return
            self._inner.write(self._outgoing.read())

    @guarded
    def eof_received(self) -> bool:
        """Handle FIN, with close_notify before it or without: requests have lengths of their own."""
        self._got_end = True
        if not self._closing and not self._has_input():
            self._tell_end()
        if self._closing and not self._out:  # what waits for the socket goes first: `_finish` closes
            return False
        return not self._inner.is_closing()

    def _tell_end(self) -> None:
        if not self._paused and not self._told_end:
            self._told_end = True
            if not cast(asyncio.Protocol, self._app).eof_received():
                self.close()

    # ---- what goes out

    def write(self, data: Piece) -> None:
        """Encrypt and send: large data now, small data with all else of this turn of the loop."""
        if not data or self._ends:
            return
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= SLICE_BYTES:
            self.flush()
        elif not self._due and not self._choked:
            self._due = True
            self._port.flush_soon(self)

    def writelines(self, list_of_data: Iterable[Piece]) -> None:
        for data in list_of_data:
            self.write(data)

    def flush(self) -> None:
        """Encrypt and send, as long as the socket takes bytes."""
        self._due = False
        try:
            while self._out and not self._choked and not self._inner.is_closing():
                piece = self._next()
                self._out_bytes -= len(piece)
                self._ssl.write(piece)
                self._inner.write(self._outgoing.read())
        except ssl.SSLError:
            self.abort()
        if self._ends and not self._out:
            self._finish()

    def _next(self) -> Piece:
        """Return about SLICE_BYTES to encrypt: small pieces are joined, large ones are cut."""
        out = self._out
        piece = out.popleft()
        if len(piece) > SLICE_BYTES:
            view = memoryview(piece)
            out.appendleft(view[SLICE_BYTES:])
            return view[:SLICE_BYTES]
        if not out or len(piece) + len(out[0]) > SLICE_BYTES:
            return piece
        joined, size = [piece], len(piece)
        while out and size + len(out[0]) <= SLICE_BYTES:
            joined.append(out.popleft())
            size += len(joined[-1])
        return b"".join(joined)

    @guarded
    def pause_writing(self) -> None:
        self._choked = True
        self._app.pause_writing()

    @guarded
    def resume_writing(self) -> None:
        self._choked, self._unread_answers = False, 0
        self.flush()
        if not self._choked and not self._inner.is_closing():
            self._app.resume_writing()

    # ---- the end

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Send close_notify and FIN; what comes from now on is read off."""
        if not self._ends:
            self._ends = True
            self.flush()

    def close(self) -> None:
        """Send what is queued and close_notify, then close."""
        if self._closing and not self._out:
            self._inner.close()
        self._closing = True
        if not self._ends:
            self._ends = True
            self.flush()

    def _finish(self) -> None:
        if self._inner.is_closing():
            return
        with contextlib.suppress(ssl.SSLError):  # it would wait for the client's own alert
            self._ssl.unwrap()
        if self._outgoing.pending:
            self._inner.write(self._outgoing.read())
        if self._closing:
            self._inner.close()
        else:
            self._closing = True
            send_fin(self._inner)

    def abort(self) -> None:
        self._closing = True
        self._inner.abort()

    def callback_failed(self, error: Exception) -> None:
        self._port.guard.end(error, self.abort, self._inner.abort)

    @guarded
    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = self._ends = True
        self._out.clear()
        self._out_bytes = 0
        app, self._app = self._app, asyncio.Protocol()
        app.connection_lost(exc)

    # ---- the rest of a transport

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._app = protocol
        self._app_fills = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._app

    def pause_reading(self) -> None:
        self._paused = True
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._inner.resume_reading()
        if not self._reading and (self._has_input() or self._got_end):
            asyncio.get_running_loop().call_soon(self._read_on)

    def is_closing(self) -> bool:
        return self._closing or self._inner.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size() + self._out_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == SUBJECT:
            return self._subject or default
        return self._ssl if name == "ssl_object" else self._inner.get_extra_info(name, default)
