"""Reads one whole request head: bytes up to and with the empty line -> Head. No I/O, no state.

The connection cuts the head out of the stream itself and hands it over whole, so every limit and every
rule sees the same bytes however the network split them. llhttp checks the grammar; this file adds what
it lets through (H2 of the hardening list): HTTP/0.9, other protocols, two spaces in the request line,
`Content-Length` with a leading zero or padding, a first empty coding in `Transfer-Encoding`, no Host.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httptools

from fastserve.config import Limits
from fastserve.wire.faults import UnknownMethod, WireFault, bad_request, over_limit, stray_tls
from fastserve.wire.replies import CLOSE, KEEP, KEEP_1_0
from fastserve.wire.tls.hello import is_tls

if TYPE_CHECKING:
    from fastserve.wire.call import Endpoint
    from fastserve.wire.http2.stream import Service

CHUNKED = -1
METHODS = frozenset((b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"))
TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_METHOD_BYTES = 32  # room for a method and the version beside the target in an unfinished request line
_LENGTH = re.compile(rb"0|[1-9][0-9]{0,18}")
# host [":" port] of RFC 9110 4.2.1 and 7.2: never user information, never a port without a host. A zone
# (RFC 6874) is let through with a bare percent sign too, as older HTTP libraries send it.
_AUTHORITY = re.compile(
    rb"""(?: \[ (?: [0-9A-Fa-f:.]+ (?: %[\w.~%\-]+ )? | v[0-9A-Fa-f]+ \. [\w.~!$&'()*+,;=:\-]+ ) \]
           | (?: [\w.~!$&'()*+,;=\-] | %[0-9A-Fa-f]{2} )+ )
         (?: : (?P<port> [0-9]{0,5} ) )?""",
    re.VERBOSE,
)
_ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/?#]*)", re.IGNORECASE)
_TOKEN_CHARS = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host", b"expect"))


class Head:
    """One request head. Immutable once read and routed: calls with equal heads share it."""

    __slots__ = (
        "after_length",
        "before_length",
        "bodiless",
        "body_bytes",
        "endpoint",
        "expects_continue",
        "headers",
        "http_1_0",
        "memo",
        "method",
        "mode",
        "raw",
        "routed_anew",
        "service",
        "target",
        "total_bytes",
    )

    endpoint: Endpoint
    service: Service  # of HTTP/2: who serves streams with this head

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.method = ""
        self.target = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.http_1_0 = False
        self.mode = KEEP  # KEEP, CLOSE or KEEP_1_0: what the client asked of the connection
        self.bodiless = False  # HEAD: the reply has no body
        self.body_bytes = 0  # CHUNKED, or the Content-Length
        self.total_bytes = 0  # head and body together; 0 with CHUNKED
        self.before_length = b""  # the head round the digits of its Content-Length, if it has one
        self.after_length = b""
        self.expects_continue = False
        self.routed_anew = True
        self.memo: Any = None  # of who serves it: what is worked out once for all requests with this head

    def find(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def match(self, data: bytes | bytearray, start: int, most_bytes: int) -> tuple[int, int]:
        """Where a head at data[start:] ends and its body's length (or CHUNKED), if nothing but that
        length differs from this one. (0, 0) when it is another head, and in every doubt."""
        if data.startswith(self.raw, start):
            return start + len(self.raw), self.body_bytes
        if not self.before_length or not data.startswith(self.before_length, start):
            return 0, 0
        begin = start + len(self.before_length)
        stop = data.find(b"\r", begin, begin + 20)
        digits = data[begin:stop]
        if stop < 0 or _LENGTH.fullmatch(digits) is None or not data.startswith(self.after_length, stop):
            return 0, 0
        length = int(digits)
        return (stop + len(self.after_length), length) if length <= most_bytes else (0, 0)


class _Fields:
    """Collects what llhttp finds in one head."""

    __slots__ = ("framing", "headers")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.framing: list[tuple[bytes, bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in _FRAMING:
            self.framing.append((lower, name, value))
        self.headers.append((lower, value.rstrip(b" \t")))


def read_head(raw: bytes, limits: Limits) -> Head:
    """Read a head that ends in an empty line. Raises WireFault; `endpoint` is left for the router."""
    head = Head(raw)
    _read_request_line(head, raw, limits)
    if raw.count(b"\r\n") - 2 > limits.header_count:
        raise over_limit(431, "Header lines", "header_count", limits.header_count)
    fields = _Fields()
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # an offer the server may leave alone (RFC 9110 7.8): the call goes on as HTTP/1.1
    except httptools.HttpParserError as error:
        raise bad_request(f"Malformed request: {error}") from None
    head.headers = fields.headers
    _read_framing(head, fields.framing, limits)
    _read_connection(head)
    return head


def _read_request_line(head: Head, raw: bytes, limits: Limits) -> None:
    parts = raw[: raw.find(b"\r\n")].split(b" ")
    if len(parts) != 3:
        raise bad_request("Malformed request line")
    method, target, version = parts
    if len(target) > limits.target_bytes:
        raise over_limit(414, "Request target bytes", "target_bytes", limits.target_bytes)
    if version == b"HTTP/1.0":
        head.http_1_0 = True
    elif version != b"HTTP/1.1":
        raise bad_request("Malformed request line: the version is neither HTTP/1.1 nor HTTP/1.0")
    if method not in METHODS:
        if TOKEN.fullmatch(method) is None:
            raise bad_request("Malformed method")
        raise UnknownMethod(method.decode(), target.decode("latin-1"))
    head.method = method.decode()
    head.bodiless = method == b"HEAD"
    head.target = _origin_form(method, target)


def _origin_form(method: bytes, target: bytes) -> str:
    """Path and query. The absolute form means the same resource as its path (RFC 9112 3.2.2)."""
    if not target.startswith(b"/") and not (target == b"*" and method == b"OPTIONS"):
        absolute = _ABSOLUTE.match(target)
        if absolute is None:
            raise bad_request("Malformed request target")
        if not is_authority(absolute["authority"]):
            raise bad_request("Malformed request target: what follows // is not a host, or a host and a port")
        target = target[absolute.end() :]
        if not target.startswith(b"/"):
            target = b"/" + target
    return target.decode("latin-1")


def is_authority(written: bytes) -> bool:
    """Whether this can name a place: an empty host is none (RFC 9110 4.2.1)."""
    found = _AUTHORITY.fullmatch(written)
    return found is not None and int(found["port"] or 0) <= 65535


def _read_framing(head: Head, framing: list[tuple[bytes, bytes, bytes]], limits: Limits) -> None:
    seen: set[bytes] = set()
    for lower, name, value in framing:
        if lower in seen:
            raise bad_request(f"Malformed request: more than one {lower.decode()} header")
        seen.add(lower)
        if lower == b"content-length":
            head.body_bytes = _read_length(head, name, value, limits)
        elif lower == b"transfer-encoding":
            _check_coding(head, name, value)
        elif lower == b"host":
            host = value.rstrip(b" \t")  # empty: the client's URI has none (RFC 9112 3.2)
            if host and not is_authority(host):
                raise bad_request("Malformed host header")
        else:
            _read_expect(head, value)
    if b"content-length" in seen and b"transfer-encoding" in seen:
        raise bad_request("Malformed request: both content-length and transfer-encoding")
    if b"host" not in seen and not head.http_1_0:
        raise bad_request("Malformed request: HTTP/1.1 without a host header")
    if head.body_bytes != CHUNKED:
        head.total_bytes = len(head.raw) + head.body_bytes


def read_number(text: bytes) -> int | None:
    """A Content-Length, None for what is not plainly one."""
    return int(text) if _LENGTH.fullmatch(text) is not None else None


def _find_plain(raw: bytes, name: bytes, value: bytes) -> int:
    """Where the value stands with at most one space before it and nothing after: no room for two
    readings. -1 when it does not."""
    for colon in (b": ", b":"):
        line = b"\r\n%b%b%b\r\n" % (name, colon, value)
        at = raw.find(line)
        if at >= 0:
            return at + 2 + len(name) + len(colon)
    return -1


def _read_length(head: Head, name: bytes, value: bytes, limits: Limits) -> int:
    at = _find_plain(head.raw, name, value)
    if at < 0 or _LENGTH.fullmatch(value) is None:
        raise bad_request("Malformed content-length header")
    length = int(value)
    if length > limits.body_bytes:
        raise over_limit(413, "Request body bytes", "body_bytes", limits.body_bytes)
    head.before_length = head.raw[:at]
    head.after_length = head.raw[at + len(value) :]
    return length


def _check_coding(head: Head, name: bytes, value: bytes) -> None:
    if value.lower() != b"chunked" or head.http_1_0 or _find_plain(head.raw, name, value) < 0:
        raise bad_request("Malformed transfer-encoding header: only HTTP/1.1 chunked is read")
    head.body_bytes = CHUNKED


def _read_connection(head: Head) -> None:
    """What the client wants of the connection; llhttp forgets it with the end of a message."""
    tokens: set[bytes] = set()
    for name, value in head.headers:
        if name == b"connection":
            tokens.update(token.strip(b" \t") for token in value.lower().split(b","))
    if b"close" in tokens or (head.http_1_0 and b"keep-alive" not in tokens):
        head.mode = CLOSE
    elif head.http_1_0:
        head.mode = KEEP_1_0


def _read_expect(head: Head, value: bytes) -> None:
    if value.strip().lower() != b"100-continue":
        raise WireFault(417, "Only the expectation 100-continue can be met", "expectation")
    head.expects_continue = not head.http_1_0


def check_unfinished(data: bytes | bytearray, start: int, scanned: int, limits: Limits) -> None:
    """Refuse a head that cannot become good, as early as its bytes show it.

    `data[start:]` is the head so far, without its empty line; bytes before `scanned` were seen here before.
    """
    if is_tls(data) and len(data) > 1:
        raise stray_tls()
    if len(data) > start and data[start] not in _TOKEN_CHARS and data[start:] != b"\r":
        raise bad_request("Malformed method")
    if _BARE_LINE_FEED.search(data, max(start, scanned), start + limits.header_bytes):
        raise bad_request("Malformed request: a line feed without a carriage return")
    if len(data) - start > limits.target_bytes + _METHOD_BYTES:
        line_end = data.find(b"\r\n", start, start + limits.target_bytes + _METHOD_BYTES)
        if line_end < 0:
            raise over_limit(414, "Request target bytes", "target_bytes", limits.target_bytes)
    if len(data) - start > limits.header_bytes:
        raise over_limit(431, "Header bytes", "header_bytes", limits.header_bytes)
