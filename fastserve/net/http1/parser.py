"""The parser of HTTP/1.1 requests: heads and chunked bodies. No I/O.

The connection cuts a head out of the stream and hands it over whole, so every limit and every rule sees the
same bytes however the network split them. llhttp checks the grammar; this file refuses what it lets through:
HTTP/0.9, other protocols, two spaces in the request line, `Content-Length` with a leading zero or padding, a
first empty coding in `Transfer-Encoding`, no Host.
"""

from __future__ import annotations

import re

import httptools

from fastserve.net.limits import UnknownMethod, WireFault, bad_request, is_tls, over_limit, stray_tls
from fastserve.net.request import CHUNKED, CLOSE, KEEP_1_0, LENGTH, RequestHead
from fastserve.settings import Limits

METHODS = frozenset((b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"))
TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_METHOD_BYTES = 32  # room for a method and the version beside the target in an unfinished request line
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
REQUEST_ID = b"x-request-id"
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host", b"expect"))


class _Fields:
    """Collect the headers that llhttp finds in one head."""

    __slots__ = ("framing", "headers")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.framing: list[tuple[bytes, bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in _FRAMING:
            self.framing.append((lower, name, value))
        self.headers.append((lower, value.rstrip(b" \t")))


def read_head(raw: bytes, limits: Limits) -> RequestHead:
    """Read a head that ends in an empty line. Raises WireFault; `endpoint` is left for the router."""
    head = RequestHead(raw)
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
    head.slow = head.identified = head.find(REQUEST_ID) is not None
    _read_framing(head, fields.framing, limits)
    _read_connection(head)
    return head


def _read_request_line(head: RequestHead, raw: bytes, limits: Limits) -> None:
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
    """Return path and query. The absolute form means the same resource as its path (RFC 9112 3.2.2)."""
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
    """Return whether this is HOST or HOST:PORT; an empty host is none (RFC 9110 4.2.1)."""
    found = _AUTHORITY.fullmatch(written)
    return found is not None and int(found["port"] or 0) <= 65535


def _read_framing(head: RequestHead, framing: list[tuple[bytes, bytes, bytes]], limits: Limits) -> None:
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
    """Return a Content-Length, None for anything but plain digits."""
    return int(text) if LENGTH.fullmatch(text) is not None else None


def _find_plain(raw: bytes, name: bytes, value: bytes) -> int:
    """Return where a value stands with at most one space before it and nothing after, so that it has one
    reading; -1 otherwise."""
    for colon in (b": ", b":"):
        line = b"\r\n%b%b%b\r\n" % (name, colon, value)
        at = raw.find(line)
        if at >= 0:
            return at + 2 + len(name) + len(colon)
    return -1


def _read_length(head: RequestHead, name: bytes, value: bytes, limits: Limits) -> int:
    at = _find_plain(head.raw, name, value)
    if at < 0 or LENGTH.fullmatch(value) is None:
        raise bad_request("Malformed content-length header")
    length = int(value)
    if length > limits.body_bytes:
        raise over_limit(413, "Request body bytes", "body_bytes", limits.body_bytes)
    head.before_length = head.raw[:at]
    head.after_length = head.raw[at + len(value) :]
    return length


def _check_coding(head: RequestHead, name: bytes, value: bytes) -> None:
    if value.lower() != b"chunked" or head.http_1_0 or _find_plain(head.raw, name, value) < 0:
        raise bad_request("Malformed transfer-encoding header: only HTTP/1.1 chunked is read")
    head.body_bytes = CHUNKED


def _read_connection(head: RequestHead) -> None:
    """Read the Connection headers, which llhttp forgets at the end of a message."""
    tokens: set[bytes] = set()
    for name, value in head.headers:
        if name == b"connection":
            tokens.update(token.strip(b" \t") for token in value.lower().split(b","))
    if b"close" in tokens or (head.http_1_0 and b"keep-alive" not in tokens):
        head.mode = CLOSE
    elif head.http_1_0:
        head.mode = KEEP_1_0


def _read_expect(head: RequestHead, value: bytes) -> None:
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


SIZE, DATA, DATA_END, TRAILER = range(4)
STEP_CHUNKS = 2  # taken by one call of `feed`: of one byte each, a read of 256 KiB has forty thousand
SMALL_BYTES = 4096  # smaller pieces are gathered: an object each would cost more memory than the body
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")


def append_piece(pieces: list[bytes | bytearray], piece: bytes) -> None:
    """Add a piece of a body, gathering small ones."""
    if len(piece) >= SMALL_BYTES or not pieces:
        pieces.append(piece)
        return
    last = pieces[-1]
    if type(last) is bytearray and len(last) < 16 * SMALL_BYTES:
        last += piece
    else:
        pieces.append(bytearray(piece))


def join_pieces(pieces: list[bytes | bytearray]) -> bytes:
    """Return the whole body; a single piece is not copied."""
    if len(pieces) == 1 and type(pieces[0]) is bytes:
        return pieces[0]
    return b"".join(pieces)


class ChunkReader:
    """Read one chunked body (RFC 9112 7.1). Feed until `done`; then call `body()` once.

        SIZE --"0"--> TRAILER --empty line--> done
        SIZE --"n"--> DATA --n bytes--> DATA_END --CRLF--> SIZE

    Strict where readers differ: CRLF only, no sign, prefix or padding round a size. Extensions and
    trailers are checked, counted against limits.header_bytes, and dropped."""

    __slots__ = (
        "_chunks", "_limits", "_line", "_need", "_overhead", "_pieces", "_state", "_trailers", "done",
        "received",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._state = SIZE
        self._line = bytearray()
        self._need = 0
        self._chunks = 0
        self._overhead = 0
        self._trailers = 0
        self._pieces: list[bytes | bytearray] = []
        self.received = 0  # body bytes declared so far
        self.done = False

    @property
    def held(self) -> int:
        """Return the bytes of the body that have come."""
        return self.received - (self._need if self._state == DATA else 0)

    def body(self) -> bytes:
        return join_pieces(self._pieces) if self._pieces else b""

    def feed(self, data: bytes | bytearray, start: int = 0) -> int:
        """Use data[start:] up to the end of this body, or of STEP_CHUNKS. Returns where it stopped; raises
        WireFault."""
        end = len(data)
        most = self._chunks + STEP_CHUNKS
        while start < end and not self.done and (self._chunks < most or self._state == DATA):
            if self._state == DATA:
                start = self._take_data(data, start)
                continue
            newline = data.find(b"\n", start)
            stop = end if newline < 0 else newline + 1
            self._line += data[start:stop]
            start = stop
            self._check_overhead()
            if newline >= 0:
                self._take_line(bytes(self._line))
                self._line.clear()
        return start

    def _take_data(self, data: bytes | bytearray, start: int) -> int:
        stop = min(start + self._need, len(data))
        append_piece(self._pieces, bytes(data[start:stop]))
        self._need -= stop - start
        if self._need == 0:
            self._state = DATA_END
        return stop

    def _check_overhead(self) -> None:
        if self._overhead + len(self._line) > self._limits.header_bytes:
            raise over_limit(
                431, "Chunk extension and trailer bytes", "header_bytes", self._limits.header_bytes
            )
        if self._state == DATA_END and not b"\r\n".startswith(self._line):
            raise bad_request("Malformed chunk: its data does not end with CRLF")

    def _take_line(self, line: bytes) -> None:
        if self._state == DATA_END:
            self._state = SIZE
        elif self._state == SIZE:
            self._take_size(line)
        else:
            self._take_trailer(line)

    def _take_size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise bad_request("Malformed chunk size")
        limits = self._limits
        size = int(match[1], 16)
        self._overhead += len(line) - len(match[1]) - 2  # extensions; plain sizes have their own limit
        if size == 0:
            self._state = TRAILER
            return
        self._chunks += 1
        self.received += size
        if self.received > limits.body_bytes:
            raise over_limit(413, "Request body bytes", "body_bytes", limits.body_bytes)
        if self._chunks > limits.body_chunks:
            raise over_limit(413, "Chunks of the request body", "body_chunks", limits.body_chunks)
        self._need = size
        self._state = DATA

    def _take_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.done = True
            return
        self._overhead += len(line)
        self._trailers += 1
        if self._trailers > self._limits.header_count:
            raise over_limit(431, "Trailer lines", "header_count", self._limits.header_count)
        if _TRAILER_LINE.fullmatch(line) is None:
            raise bad_request("Malformed trailer")
