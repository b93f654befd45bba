"""A connection's transport that encrypts: between a socket's own and the protocol of HTTP above it.

    socket --> scratch --> incoming --OpenSSL--> the protocol's own buffer, or bytes
    socket <-- outgoing <--OpenSSL-- pieces of a turn of the loop, as long as the socket takes bytes

Not uvloop's own TLS, which ends a connection whose client has sent its last byte before it is answered, takes
256 KiB a connection for reads, and encrypts all of a reply at once however slowly it is read (decision 0014).

A reply that the socket does not take stays what it was, views of a body: ciphertext is made of 64 KiB at a
time. Reading stops when the protocol asks for it; what of one read is not decrypted yet waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from fastserve.wire.peer import SUBJECT
from fastserve.wire.tls.credentials import subject_of

if TYPE_CHECKING:
    from fastserve.wire.tls.port import TlsPort

Piece = bytes | bytearray | memoryview
SLICE_BYTES = 1 << 16  # encrypted at a time
READ_BYTES = 1 << 14  # of one record
TURN_BYTES = 1 << 18  # decrypted before others have a turn
# Of what a client makes OpenSSL answer by itself (updates of keys, renegotiation) while it takes nothing.
MOST_UNREAD_ANSWERS = 100


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of a protocol."""

    __slots__ = (
        "_app", "_app_fills", "_choked", "_closing", "_due", "_ends", "_got_end", "_incoming", "_inner",
        "_out", "_out_bytes", "_outgoing", "_paused", "_port", "_reading", "_ssl", "_subject", "_told_end",
        "_unread_answers",
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
        """What came together with the end of the handshake."""
        self._read()

    # ---- what comes

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._port.view

    def buffer_updated(self, nbytes: int) -> None:
        if not self._closing:  # else it is read off, so that a reset does not eat the last reply
            self._incoming.write(self._port.view[:nbytes])
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
        """Into the protocol's own buffer, as much as there is."""
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
        """As bytes."""
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
        """The client's alert: what it sends behind it is nothing."""
        self._got_end = True
        self._incoming.read()

    def _answer(self) -> None:
        """Send what reading has made OpenSSL say."""
        if self._outgoing.pending and not self._inner.is_closing():
            if self._choked:
                self._unread_answers += 1
                if self._unread_answers > MOST_UNREAD_ANSWERS:
                    self.abort()
                    return
            self._inner.write(self._outgoing.read())

    def eof_received(self) -> bool:
        """The client's last byte, with an alert before it or without: requests know their own length."""
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
        """Now if it is much, else with all else of this turn of the loop."""
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
        """About SLICE_BYTES, small pieces joined, large ones cut."""
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

    def pause_writing(self) -> None:
        self._choked = True
        self._app.pause_writing()

    def resume_writing(self) -> None:
        self._choked, self._unread_answers = False, 0
        self.flush()
        if not self._choked and not self._inner.is_closing():
            self._app.resume_writing()

    # ---- the end

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The last byte, with its alert; what comes from now on is read off."""
        if not self._ends:
            self._ends = True
            self.flush()

    def close(self) -> None:
        """Send what waits and the alert, then close."""
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
            self._inner.write_eof()

    def abort(self) -> None:
        self._closing = True
        self._inner.abort()

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
            asyncio.get_running_loop().call_soon(self._read)

    def is_closing(self) -> bool:
        return self._closing or self._inner.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size() + self._out_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == SUBJECT:
            return self._subject or default
        return self._ssl if name == "ssl_object" else self._inner.get_extra_info(name, default)
