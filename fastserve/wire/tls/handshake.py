"""A connection to a TLS port until its handshake is done: first bytes, hello, handshake, then the protocol.

    HELLO --its whole--> SHAKING --done--> a TlsTransport, and on it what ALPN has chosen
      |--plain text: told so      |--refused by either side, or too late: the alert goes out, and it ends

A client that only connects costs no more than this object: OpenSSL has no part before the hello is whole.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from typing import TYPE_CHECKING, cast

from fastserve._ext.http2_frames import GOAWAY, frame
from fastserve.wire.faults import JSON, error_body
from fastserve.wire.http2.errors import ErrorCode
from fastserve.wire.http2.settings import PREFACE
from fastserve.wire.pace import LINGER_S, Verdict
from fastserve.wire.tls.hello import NO_PROTOCOL, NotTls, is_http, offered_protocols, whole_hello
from fastserve.wire.tls.transport import TlsTransport

if TYPE_CHECKING:
    from fastserve.wire.faults import WireFault
    from fastserve.wire.listener import HttpListener
    from fastserve.wire.tls.port import TlsPort

PLAIN = "this port speaks TLS, and the request came in plain text: use https://"
_HEAD = b"HTTP/1.1 400 Bad Request\r\nContent-Type: %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
_BODY = error_body(PLAIN)
_ANSWER = _HEAD % (JSON, len(_BODY)) + _BODY


class Handshake(asyncio.BufferedProtocol):
    """The protocol of one socket, until a TlsTransport is."""

    __slots__ = (
        "_hello", "_incoming", "_listener", "_outgoing", "_over", "_port", "_since_s", "_ssl", "_transport",
    )  # fmt: skip

    _transport: asyncio.Transport

    def __init__(self, listener: HttpListener, port: TlsPort) -> None:
        self._listener = listener
        self._port = port
        self._hello = bytearray()
        self._incoming: ssl.MemoryBIO | None = None
        self._outgoing: ssl.MemoryBIO | None = None
        self._ssl: ssl.SSLObject | None = None
        self._over = False  # what comes is read off, so that a reset does not eat what it was told
        self._since_s = -1.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        too_old = self._port.begin(self)
        if too_old is not None:
            too_old.give_up("tls.handshakes")
        if not self._listener.make_room(self):
            self._port.end(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._port.view

    def buffer_updated(self, nbytes: int) -> None:
        data = self._port.view[:nbytes]
        try:
            if self._over:
                return
            if self._ssl is None:
                self._greet(data)
            else:
                assert self._incoming is not None
                self._incoming.write(data)
                self._shake()
        except NotTls:
            self._turn_away()

    def _greet(self, data: memoryview) -> None:
        self._hello += data
        hello = whole_hello(self._hello)
        if hello is None:
            return
        if not self._port.speaks_one_of(offered_protocols(hello)):
            self._transport.write(NO_PROTOCOL)
            self._refuse("tls_protocol", "a client offers no protocol this port speaks")
            return
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = self._port.wrap(self._incoming, self._outgoing)
        self._incoming.write(self._hello)
        self._hello = bytearray()
        self._shake()

    def _shake(self) -> None:
        assert self._ssl is not None
        assert self._outgoing is not None
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
        except ssl.SSLError as fault:
            self._send()
            self._refuse("tls_handshake", (fault.reason or "unknown").lower().replace("_", " "))
        else:
            self._send()
            self._open()

    def _send(self) -> None:
        assert self._outgoing is not None
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def _open(self) -> None:
        """Hand the socket over."""
        assert self._ssl is not None
        assert self._incoming is not None
        assert self._outgoing is not None
        self._port.end(self)
        secured = TlsTransport(self._port, self._transport, self._ssl, self._incoming, self._outgoing)
        self._transport.set_protocol(secured)
        self._listener.secured(self, secured, self._ssl.selected_alpn_protocol())
        secured.begin()

    def _turn_away(self) -> None:
        """Not TLS: in plain text, as far as one can tell which."""
        data = bytes(self._hello)
        if data[: len(PREFACE)] == PREFACE[: len(data)] and len(data) > 3:
            # Without SETTINGS before it: to gRPC's clients they mean success, and a next attempt at once.
            last = struct.pack(">II", 0, ErrorCode.INADEQUATE_SECURITY)
            self._transport.write(frame(GOAWAY, 0, 0, last + PLAIN.encode()))
        elif is_http(data):
            self._transport.write(_ANSWER)
        self._refuse("tls_plain_text", "a client speaks plain text")

    def _refuse(self, cause: str, text: str) -> None:
        self._listener.warn_of(f"TLS on %s: {text}")
        self.give_up(cause)

    def give_up(self, cause: str) -> None:
        """End it; what is written goes out, and the client has a moment to read it."""
        self._listener.count_refusal(cause)
        self._port.end(self)
        self._over, self._since_s = True, -1.0
        self._transport.write_eof()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.end(self)
        self._listener.forget(self)

    # ---- for the listener

    def look(self, now: float) -> Verdict:
        """Whether it still has time, however busily it sends."""
        if self._since_s < 0:
            self._since_s = now
        passed = now - self._since_s
        if self._over:
            return Verdict.LINGERED if passed >= LINGER_S else Verdict.FINE
        allowed_s = self._port.options.handshake_timeout_s
        if self._ssl is None and not self._hello:  # it owes nothing yet, like a connection between requests
            allowed_s = min(allowed_s, self._listener.limits.idle_timeout_s)
        if passed >= allowed_s:
            self.give_up("tls.handshake_timeout_s")
        return Verdict.FINE

    def refuse(self, fault: WireFault) -> None:
        """There is nobody to tell yet."""
        self.abort()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
