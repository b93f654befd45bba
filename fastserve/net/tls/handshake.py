"""A connection to a TLS port until its handshake is done: first bytes, hello, handshake, then the protocol.

The hello is read before OpenSSL sees it, for two answers that OpenSSL does not give from Python: plain text
is answered in plain text, and a client with no protocol in common gets the alert of RFC 7301 3.2. A malformed
hello is left for OpenSSL to refuse.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from typing import TYPE_CHECKING, cast

from fastserve._ext.http2_frames import GOAWAY, frame
from fastserve.net.callback_guard import guarded
from fastserve.net.half_closed import send_fin
from fastserve.net.http2.settings import PREFACE
from fastserve.net.http2.stream import ErrorCode
from fastserve.net.limits import JSON, LINGER_S, Verdict, error_body, is_tls
from fastserve.net.tls.transport import TlsTransport

if TYPE_CHECKING:
    from fastserve.net.limits import WireFault
    from fastserve.net.listener_state import ListenerState
    from fastserve.net.tls.transport import TlsPort


HANDSHAKE, CLIENT_HELLO, ALPN = 22, 1, 16
MOST_BYTES = 1 << 15  # of a client's first message; browsers send 2 KiB, with certificates to resume 4 KiB
MOST_RECORD = 16384
MOST_RECORDS = 64  # it comes in: with every piece that comes all of them are looked at again
NO_PROTOCOL = b"\x15\x03\x03\x00\x02\x02\x78"  # a fatal alert: no_application_protocol
_HTTP = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n"  # a method begins with one of these


class NotTls(Exception):
    """Bytes that no TLS client sends."""


def is_http(data: bytes | bytearray) -> bool:
    """Return whether these bytes begin a method of HTTP."""
    return data[:1] in _HTTP


def whole_hello(data: bytes | bytearray) -> bytes | None:
    """Return the client's first message without its records (RFC 8446 5.1), None while it is incomplete.
    Raises NotTls."""
    message, at, records = bytearray(), 0, 0
    while at + 5 <= len(data):
        records += 1
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        if data[at] != HANDSHAKE or data[at + 1] != 3 or not 0 < length <= MOST_RECORD:
            raise NotTls
        if records > MOST_RECORDS or (message and message[0] != CLIENT_HELLO):
            raise NotTls
        message += data[at + 5 : at + 5 + length]
        at += 5 + length
        if len(message) >= 4:
            need = 4 + int.from_bytes(message[1:4], "big")
            if message[0] != CLIENT_HELLO or need > MOST_BYTES:
                raise NotTls
            if len(message) >= need:
                return bytes(message[4:need])
    if not is_tls(data) or len(data) > MOST_BYTES:
        raise NotTls
    return None


def offered_protocols(hello: bytes) -> list[bytes]:
    """Return the names of a hello's ALPN extension; none when it has none or cannot be read."""
    try:
        for kind, body in _extensions(hello):
            if kind == ALPN:
                return list(_names(body))
    except IndexError:
        pass
    return []


def _extensions(hello: bytes) -> list[tuple[int, bytes]]:
    """Return the extensions of a hello. Raises IndexError."""
    at = 34  # the version and 32 random bytes
    at += 1 + hello[at]  # the session's id
    at += 2 + _int(hello, at)  # ciphers
    at += 1 + hello[at]  # compressions
    found, at = [], at + 2
    while at < len(hello):
        size = _int(hello, at + 2)
        found.append((_int(hello, at), hello[at + 4 : at + 4 + size]))
        at += 4 + size
    return found


def _names(body: bytes) -> list[bytes]:
    found, at = [], 2
    while at < len(body):
        found.append(body[at + 1 : at + 1 + body[at]])
        at += 1 + body[at]
    return found


def _int(data: bytes, at: int) -> int:
    return data[at] << 8 | data[at + 1]


PLAIN = "this port speaks TLS, and the request came in plain text: use https://"
_HEAD = b"HTTP/1.1 400 Bad Request\r\nContent-Type: %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
_BODY = error_body(PLAIN)
_ANSWER = _HEAD % (JSON, len(_BODY)) + _BODY


class Handshake(asyncio.BufferedProtocol):
    """The protocol of one socket, until it is a TlsTransport's.

        HELLO --complete--> SHAKING --done--> a TlsTransport, and on it the protocol that ALPN has chosen

    A client that only connects costs no more than this object: OpenSSL has no part before the hello is
    complete."""

    __slots__ = (
        "_hello", "_incoming", "_listener", "_outgoing", "_over", "_port", "_since_s", "_ssl",
        "_transport",
    )  # fmt: skip

    _transport: asyncio.Transport

    def __init__(self, listener: ListenerState, port: TlsPort) -> None:
        self._listener = listener
        self._port = port
        self._hello = bytearray()
        self._incoming: ssl.MemoryBIO | None = None
        self._outgoing: ssl.MemoryBIO | None = None
        self._ssl: ssl.SSLObject | None = None
        self._over = False  # input is read off, so that a reset does not eat what was sent
        self._since_s = -1.0

    @guarded
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
        try:
            data = self._port.view[:nbytes]
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
        except Exception as error:
            self.callback_failed(error)

    def callback_failed(self, error: Exception) -> None:
        self._port.end(self)
        self._listener.forget(self)
        self._listener.guard.end(error, self.abort, self.abort)

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
        """Hand the socket over to a TlsTransport."""
        assert self._ssl is not None
        assert self._incoming is not None
        assert self._outgoing is not None
        self._port.end(self)
        secured = TlsTransport(self._port, self._transport, self._ssl, self._incoming, self._outgoing)
        self._transport.set_protocol(secured)
        self._listener.secured(self, secured, self._ssl.selected_alpn_protocol())
        secured.begin()

    def _turn_away(self) -> None:
        """Answer a client without TLS in plain text, as far as its protocol can be told."""
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
        """End the connection; what is written goes out, and the client has a moment to read it."""
        self._listener.count_refusal(cause)
        self._port.end(self)
        self._over, self._since_s = True, -1.0
        send_fin(self._transport)

    def eof_received(self) -> bool:
        return False

    @guarded
    def connection_lost(self, exc: Exception | None) -> None:
        self._port.end(self)
        self._listener.forget(self)

    # ---- for the listener

    def look(self, now: float) -> Verdict:
        """Check the time of the handshake, however busily the client sends."""
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
        """Cut the connection: there is no protocol yet for an answer."""
        self.abort()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
