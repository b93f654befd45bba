"""Headers and trailers of gRPC over HTTP/2: timeouts, metadata, encodings, error messages. No I/O.

grpc-timeout: 250m                  0.25 s
key-bin: AAEC                       base64, with or without its padding; several with commas
grpc-message: 50%25 of %C3%A9       percent-encoded beyond printable ASCII
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

from fastserve.errors import ServeError, malformed_call
from fastserve.net.compression import DEFLATE, GZIP, IDENTITY, inflate
from fastserve.net.deadlines import NEVER_NS
from fastserve.net.grpc.method import Metadata
from fastserve.protos import load
from fastserve.settings import Limits

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_NS = {b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 10**3, b"n": 1}
_NAME = re.compile(r"[0-9a-z_.\-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_UNPRINTABLE = re.compile(rb"[^\x20-\x24\x26-\x7e]")
# Headers that gRPC, HTTP/2 or the listener set themselves.
_NOT_METADATA = frozenset(
    (
        b"content-type", b"content-length", b"grpc-accept-encoding", b"grpc-encoding", b"grpc-message-type",
        b"grpc-timeout", b"host", b"te",
    )
)  # fmt: skip

Fields = list[tuple[bytes, bytes]]


def read_timeout(value: bytes) -> int:
    """Return the nanoseconds of a grpc-timeout, at most NEVER_NS. Raises ServeError."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        shown = value[:32].decode("latin-1")
        text = f"given {shown!r}, allowed: up to 8 digits and one of HMSmun"
        raise malformed_call(f"Error parsing 'grpc-timeout' metadata: {text}")
    return min(NEVER_NS, int(match[1]) * _UNIT_NS[match[2]])


def read_metadata(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """Return a client's metadata: text, or bytes under names that end with -bin. Raises ServeError."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name in _NOT_METADATA:
            continue
        if name.endswith(b"-bin"):
            found += [(name.decode(), _read_binary(name, part)) for part in value.split(b",")]
        else:
            found.append((name.decode(), _read_text(value)))
    return tuple(found)


def _read_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _read_binary(name: bytes, value: bytes) -> bytes:
    value = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        raise malformed_call(f"metadata {name.decode()}: the value is not base64") from None


def write_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Fields:
    """Return metadata as fields of a header block. Raises ValueError for what cannot be sent."""
    return [_write_one(name, value) for name, value in metadata]


def _write_one(name: str, value: str | bytes) -> tuple[bytes, bytes]:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"metadata {name!r}: the name holds a character that must not be sent")
    if name.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        return name.encode(), base64.b64encode(raw).rstrip(b"=")
    text = value if isinstance(value, str) else value.decode("latin-1")
    if _VALUE.fullmatch(text) is None or text != text.strip(" "):
        raise ValueError(f"metadata {name!r}: the value holds a character that must not be sent")
    return name.encode(), text.encode()


def write_message(text: str) -> bytes:
    """Return the value of grpc-message: percent-encoded UTF-8."""
    return _UNPRINTABLE.sub(lambda match: b"%%%02X" % match[0][0], text.encode("utf-8", "replace"))


ACCEPTED = b"identity, deflate, gzip"


def decode_message(message: bytes, encoding: bytes, limits: Limits) -> bytes:
    """Decompress a message of at most `limits.inflated_bytes`. Raises ServeError."""
    if encoding not in (DEFLATE, GZIP):
        raise malformed_call("a compressed message without grpc-encoding")
    return inflate(message, limits, setting="grpc_options.message_bytes")


def choose_encoding(accepted: bytes) -> bytes:
    """Return an encoding of grpc-accept-encoding for replies, IDENTITY where it has none."""
    named = {one.strip() for one in accepted.split(b",")}
    return GZIP if GZIP in named else DEFLATE if DEFLATE in named else IDENTITY


PUSHBACK = "grpc-retry-pushback-ms"
DETAILS = "grpc-status-details-bin"
RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
# Clients take 8 KiB of trailers, and the text stands in them a second time.
MOST_CHARS = 1000


def advise(error: ServeError, text: str) -> Metadata:
    """Return trailers that say when to try again; none without a time to wait.

    grpc-retry-pushback-ms: 500         for retry policies of channels (gRFC A6)
    grpc-status-details-bin: ...        google.rpc.Status with a RetryInfo, for grpcio-status and its like"""
    if error.retry_after_s is None:
        return ()
    told_ms = int(error.retry_after_s * 1000)
    pushback = (PUSHBACK, str(told_ms))
    if len(text) > MOST_CHARS:
        return (pushback,)
    return (pushback, (DETAILS, _details(error.kind.value, text, told_ms)))


def _details(code: int, text: str, told_ms: int) -> bytes:
    rpc = load("google_rpc")
    retry = rpc.RetryInfo()
    retry.retry_delay.FromMilliseconds(told_ms)
    status = rpc.Status(code=code, message=text)
    status.details.add(type_url=RETRY_INFO, value=retry.SerializeToString())
    raw: bytes = status.SerializeToString()
    return raw
