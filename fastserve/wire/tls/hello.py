"""The first bytes of a connection to a TLS port: is it TLS, and which protocols does its client offer?

Read before OpenSSL sees them, for two things it does not do from Python: who speaks plain text is told so in
plain text, and a client with whom there is no protocol in common gets the alert of RFC 7301 3.2. Nothing is
kept of it, and what is malformed is left for OpenSSL to refuse.
"""

from __future__ import annotations

HANDSHAKE, CLIENT_HELLO, ALPN = 22, 1, 16
MOST_BYTES = 1 << 15  # of a client's first message; browsers send 2 KiB, with certificates to resume 4 KiB
MOST_RECORD = 16384
MOST_RECORDS = 64  # it comes in: with every piece that comes all of them are looked at again
NO_PROTOCOL = b"\x15\x03\x03\x00\x02\x02\x78"  # a fatal alert: no_application_protocol
_HTTP = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n"  # a method begins with one of these


class NotTls(Exception):
    """No TLS client sends these bytes."""


def is_tls(data: bytes | bytearray) -> bool:
    """Whether these first bytes, few as they may be, begin a handshake."""
    return data[:1] == b"\x16" and (len(data) < 2 or data[1] == 3)


def is_http(data: bytes | bytearray) -> bool:
    return data[:1] in _HTTP


def whole_hello(data: bytes | bytearray) -> bytes | None:
    """The client's first message without its records (RFC 8446 5.1), None while more of it is to come.
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
    """The names of a hello's ALPN extension, none when it has none or cannot be read."""
    try:
        for kind, body in _extensions(hello):
            if kind == ALPN:
                return list(_names(body))
    except IndexError:
        pass
    return []


def _extensions(hello: bytes) -> list[tuple[int, bytes]]:
    """Raises IndexError."""
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
