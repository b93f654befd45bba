"""Header lists to request heads (RFC 9113 8.3), and the heads of replies as header blocks.

The strict rules and limits of HTTP/1.1's parser hold here too; a malformed message (RFC 9113 8.1.1) resets
its stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.utils import formatdate

from fastserve._ext.hpack import static_block
from fastserve.net.http1.parser import METHODS, REQUEST_ID, TOKEN, is_authority, read_number
from fastserve.net.http2.stream import malformed
from fastserve.net.limits import UnknownMethod, WireFault, bad_request, over_limit
from fastserve.net.request import CHUNKED, RequestHead, check_header
from fastserve.settings import Limits

Fields = list[tuple[bytes, bytes]]
# RFC 9113 8.2.1: a name is lower case; a value has no NUL, CR or LF and no space at its ends.
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]|\A[ \t]|[ \t]\Z")
_OF_CONNECTIONS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_SCHEMES = frozenset((b"http", b"https"))
_ONCE = frozenset((b"content-length", b"host", b"expect"))
_CACHED_BLOCKS = 256
CONTINUE = static_block([(b":status", b"100")])


def check_fields(fields: Fields, first: int) -> None:
    """Raise StreamFault for fields[first:] that a message must not have, late pseudo-headers among them."""
    for name, value in fields[first:]:
        if _NAME.fullmatch(name) is None:
            raise malformed("a header's name is not one in lower case, or a pseudo-header follows others")
        if _BAD_VALUE.search(value) is not None:
            raise malformed("a header's value holds a character that must not be sent")
        if name in _OF_CONNECTIONS or (name == b"te" and value.lower() != b"trailers"):
            raise malformed("a header of HTTP/1.1's connections")


def read_head(fields: Fields, limits: Limits) -> RequestHead:
    """Return a request's head. Raises StreamFault, or WireFault for a fault that is answered with a
    status."""
    pseudo, first = _read_pseudo(fields)
    check_fields(fields, first)
    if len(fields) - first > limits.header_count:
        raise over_limit(431, "Header lines", "header_count", limits.header_count)
    head = RequestHead(b"")
    head.headers = fields[first:]
    head.slow = head.identified = head.find(REQUEST_ID) is not None
    _read_request(head, pseudo, limits)
    _read_authority(head, pseudo)
    _read_framing(head, limits)
    _join_cookies(head)
    return head


def _read_pseudo(fields: Fields) -> tuple[dict[bytes, bytes], int]:
    pseudo: dict[bytes, bytes] = {}
    for name, value in fields:
        if not name.startswith(b":"):
            break
        if name not in _PSEUDO or name in pseudo:
            raise malformed("a pseudo-header that requests do not have, or have once")
        if _BAD_VALUE.search(value) is not None:
            raise malformed("a pseudo-header holds a character that must not be sent")
        pseudo[name] = value
    return pseudo, len(pseudo)


def _read_request(head: RequestHead, pseudo: dict[bytes, bytes], limits: Limits) -> None:
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if method == b"CONNECT":
        raise UnknownMethod("CONNECT", target.decode("latin-1"))
    if not method or not target or not pseudo.get(b":scheme"):
        raise malformed("a request without :method, :scheme or :path")
    if pseudo[b":scheme"].lower() not in _SCHEMES:
        raise bad_request("Malformed request: :scheme is neither http nor https")
    if len(target) > limits.target_bytes:
        raise over_limit(414, "Request target bytes", "target_bytes", limits.target_bytes)
    if method not in METHODS:
        if TOKEN.fullmatch(method) is None:
            raise malformed(":method is not a token")
        raise UnknownMethod(method.decode(), target.decode("latin-1"))
    if not target.startswith(b"/") and not (target == b"*" and method == b"OPTIONS"):
        raise malformed(":path does not begin with a slash")
    if not target.isascii() or b" " in target:
        raise malformed(":path holds a character that must not be sent")
    head.method, head.target = method.decode(), target.decode()
    head.bodiless = method == b"HEAD"


def _read_authority(head: RequestHead, pseudo: dict[bytes, bytes]) -> None:
    """Add `:authority` as Host, which the rest of the server reads. One of the two is required, and not
    empty (RFC 9113 8.3.1)."""
    authority, host = pseudo.get(b":authority"), head.find(b"host")
    if authority is None:
        authority = host
    elif host is None:
        head.headers.append((b"host", authority))
    elif host != authority:
        raise malformed("host differs from :authority")
    if not authority:
        raise bad_request("Malformed request: neither an :authority nor a host header that is not empty")
    if authority and not is_authority(authority):
        raise bad_request("Malformed host header")


def _read_framing(head: RequestHead, limits: Limits) -> None:
    head.body_bytes = CHUNKED  # END_STREAM is the end
    seen = [name for name, _ in head.headers if name in _ONCE]
    if len(seen) != len(set(seen)):
        raise malformed("more than one content-length, host or expect header")
    length = head.find(b"content-length")
    if length is not None:
        number = read_number(length)
        if number is None:
            raise malformed("content-length is not a number")
        if number > limits.body_bytes:
            raise over_limit(413, "Request body bytes", "body_bytes", limits.body_bytes)
        head.body_bytes = number
    expectation = head.find(b"expect")
    if expectation is not None:
        if expectation.lower() != b"100-continue":
            raise WireFault(417, "Only the expectation 100-continue can be met", "expectation")
        head.expects_continue = True


def _join_cookies(head: RequestHead) -> None:
    """Join cookies that a client has split (RFC 9113 8.2.3)."""
    crumbs = [value for name, value in head.headers if name == b"cookie"]
    if len(crumbs) > 1:
        head.headers = [field for field in head.headers if field[0] != b"cookie"]
        head.headers.append((b"cookie", b"; ".join(crumbs)))


class ReplyBlocks:
    """Header blocks of replies with the date of the last `tick`. One per listener. They insert nothing
    into a client's table, so each is right for every connection."""

    __slots__ = ("_blocks", "_date", "_second", "_whole")

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, bytes], bytes] = {}
        self._whole: dict[tuple[int, bytes, int], bytes] = {}
        self._second = -1
        self._date: Sequence[tuple[bytes, bytes]] = ()

    def tick(self, unix_s: float) -> None:
        """Set the date, and drop the blocks with an older one."""
        if int(unix_s) != self._second:
            self._second = int(unix_s)
            self._date = ((b"date", formatdate(self._second, usegmt=True).encode()),)
            self._blocks.clear()
            self._whole.clear()

    def find(self, status: int, content_type: bytes, nbytes: int) -> bytes:
        """Return the block of a reply with a body of `nbytes`, -1 for an unknown length."""
        key = (status, content_type, nbytes)
        block = self._whole.get(key)
        if block is None:
            if len(self._whole) >= _CACHED_BLOCKS:
                self._whole.clear()
            length = static_block([(b"content-length", b"%d" % nbytes)]) if nbytes >= 0 else b""
            block = self._whole[key] = self._begin(status, content_type) + length
        return block

    def _begin(self, status: int, content_type: bytes) -> bytes:
        block = self._blocks.get((status, content_type))
        if block is None:
            if len(self._blocks) >= _CACHED_BLOCKS:
                self._blocks.clear()
            kind = write_fields([(b"content-type", content_type)]) if content_type else b""
            block = static_block([(b":status", b"%d" % status), *self._date]) + kind
            self._blocks[status, content_type] = block
        return block


def write_fields(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return reply headers as part of a block. Raises ValueError for one that HTTP/1.1 could not carry."""
    for name, value in headers:
        check_header(name, value)
    return static_block([(name.lower(), value.strip(b" \t")) for name, value in headers])
