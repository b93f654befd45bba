"""`Upgrade: h2c`: a request of HTTP/1.1 that offers to go on in HTTP/2 (RFC 7540 3.2).

RFC 9113 has dropped it, and clients still make it: curl --http2, Java's own. Only the first request of a
connection can be taken up on it; every other goes on as HTTP/1.1, which leaves an offer alone.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from fastserve.wire.head import CHUNKED, Head
from fastserve.wire.http2.errors import ConnectionFault
from fastserve.wire.http2.settings import read_settings

if TYPE_CHECKING:
    from fastserve.wire.call import Call, Endpoint
    from fastserve.wire.http2.shared import Shared

SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
_OFFER = frozenset((b"connection", b"upgrade", b"http2-settings", b"transfer-encoding", b"content-length"))


def offered_settings(head: Head) -> bytes | None:
    """The payload of SETTINGS a client offers to go on with, None when it does not, or not rightly."""
    offers = [value for name, value in head.headers if name == b"upgrade"]
    if not offers or b"h2c" not in _tokens(offers[0]) or head.http_1_0:
        return None
    coded = [value for name, value in head.headers if name == b"http2-settings"]
    named = set().union(*(_tokens(value) for name, value in head.headers if name == b"connection"))
    if len(coded) != 1 or not {b"upgrade", b"http2-settings"} <= named:
        return None
    try:
        settings = base64.b64decode(coded[0] + b"=" * (-len(coded[0]) % 4), altchars=b"-_", validate=True)
        list(read_settings(settings))
    except (binascii.Error, ConnectionFault):
        return None
    return settings if len(settings) % 6 == 0 else None


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip(b" \t") for token in value.lower().split(b",")}


class Upgrade:
    """The endpoint of a request with such an offer."""

    __slots__ = ("_endpoint", "_settings", "_shared")

    def __init__(self, shared: Shared, settings: bytes, endpoint: Endpoint) -> None:
        self._shared = shared
        self._settings = settings
        self._endpoint = endpoint

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        successor = call.switch(SWITCHING)
        if successor is None:
            return self._endpoint(call)
        successor.start_upgraded(self._settings, self._head(call), bytes(call.body))
        return None

    def _head(self, call: Call) -> Head:
        """The same request without what was about the connection."""
        head = Head(b"")
        head.method, head.target = call.method, call.target
        head.bodiless, head.body_bytes = call.head.bodiless, CHUNKED
        head.headers = [field for field in call.headers if field[0] not in _OFFER]
        self._shared.serve(head)
        return head
