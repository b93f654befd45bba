"""Compression of bodies (spec 3.4): what a request is packed with, and what its reply is to be."""

from __future__ import annotations

import zlib
from typing import Literal

from msgspec.structs import replace

from fastserve.config import Limits
from fastserve.dialects.kserve_v2.errors import invalid, too_large, unsupported
from fastserve.errors import Kind, ServeError
from fastserve.wire.inflate import inflate

Coding = Literal["identity", "gzip", "deflate"]
SUPPORTED = ((b"Accept-Encoding", b"gzip, deflate"),)
UNSUPPORTED = "Unsupported compression type"
_GZIP_WINDOW = zlib.MAX_WBITS | 16
_LEVEL = 1  # replies are packed while nobody else is served


def unpack(body: bytes | bytearray, coding: bytes, limits: Limits, most: int) -> bytes | bytearray:
    """The body without its Content-Encoding, of at most `most` bytes. Raises ServeError."""
    name = coding.strip().lower()
    if name in (b"", b"identity"):
        return body
    if name not in (b"gzip", b"deflate"):
        raise unsupported(UNSUPPORTED)
    within = replace(limits, inflated_bytes=most) if most < limits.inflated_bytes else limits
    try:
        return inflate(body, within)
    except ServeError as fault:  # also one that grows too large is the request's own fault here
        if fault.kind is not Kind.RESOURCE_EXHAUSTED:
            raise
        if within is not limits and "limits.inflated_bytes" in fault.message:
            raise too_large("Decompressed data size exceeds the maximum allowed value", most) from None
        raise invalid(fault.message) from None


def choose_coding(accepted: bytes) -> Coding:
    """The coding of a reply: the highest q wins, the first of equals; only these three are seen."""
    best: Coding = "identity"
    best_q = 0.0
    if not accepted:
        return best
    for item in accepted.decode("latin-1").split(","):
        name, _, rest = item.partition(";")
        quality = _quality(rest)
        for coding in ("identity", "gzip", "deflate"):
            if name.strip().lower() == coding and quality > best_q:
                best, best_q = coding, quality
    return best


def pack(body: bytes, coding: Coding) -> bytes:
    """The body with a coding other than identity."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW if coding == "gzip" else zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def _quality(text: str) -> float:
    name, _, number = text.partition("=")
    if name.strip().lower() != "q":
        return 1.0
    try:
        return float(number)
    except ValueError:
        return 0.0
