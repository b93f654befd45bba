"""The headers of gRPC over HTTP/2: timeouts, metadata, messages of errors, as they travel. No I/O.

grpc-timeout: 250m                  0.25 s
key-bin: AAEC                       base64, with or without its padding; several with commas
grpc-message: 50%25 of %C3%A9       what is not printable ASCII, byte by byte
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

from fastserve.errors import Kind, ServeError
from fastserve.wire.grpc.method import Metadata

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_NS = {b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 10**3, b"n": 1}
_NAME = re.compile(r"[0-9a-z_.\-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_UNPRINTABLE = re.compile(rb"[^\x20-\x24\x26-\x7e]")
# What gRPC or HTTP/2 says itself of a call, and what a listener puts beside it.
_NOT_METADATA = frozenset(
    (
        b"content-type", b"content-length", b"grpc-accept-encoding", b"grpc-encoding", b"grpc-message-type",
        b"grpc-timeout", b"host", b"te",
    )
)  # fmt: skip
NEVER_NS = 1 << 62  # 146 years; a clock's time and this fit into 64 bits
Fields = list[tuple[bytes, bytes]]


def read_timeout(value: bytes) -> int:
    """Nanoseconds, NEVER_NS at most. Raises ServeError."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        shown = value[:32].decode("latin-1")
        raise ServeError(Kind.INTERNAL, f"grpc-timeout: given {shown!r}, allowed: up to 8 digits and HMSmun")
    return min(NEVER_NS, int(match[1]) * _UNIT_NS[match[2]])


def read_metadata(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """What a client sent of its own: text, or bytes under names that end with -bin. Raises ServeError."""
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
        raise ServeError(Kind.INTERNAL, f"metadata {name.decode()}: the value is not base64") from None


def write_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Fields:
    """Fields of a header block. Raises ValueError for what cannot be sent."""
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
    """The value of grpc-message."""
    return _UNPRINTABLE.sub(lambda match: b"%%%02X" % match[0][0], text.encode("utf-8", "replace"))
