"""Codings of what is sent, bodies over HTTP and messages of gRPC: gzip, and deflate, which is zlib's format
(RFC 1950). The way back, which is bounded, is `inflate`.
"""

from __future__ import annotations

import zlib

IDENTITY, DEFLATE, GZIP = b"identity", b"deflate", b"gzip"
LEVEL = 1  # tensors hardly shrink more at a higher one, at several times the cost
_WINDOW_BITS = {DEFLATE: zlib.MAX_WBITS, GZIP: zlib.MAX_WBITS | 16}


def pack(body: bytes, coding: bytes) -> bytes:
    """The body with a coding other than IDENTITY."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    return packer.compress(body) + packer.flush()


def choose_coding(accepted: bytes) -> bytes:
    """The coding of a reply, of its request's Accept-Encoding: the highest q wins, the first of equals. Only
    these three are seen."""
    best, best_q = IDENTITY, 0.0
    for item in accepted.lower().split(b",") if accepted else ():
        name, _, rest = item.partition(b";")
        quality = _quality(rest)
        if name.strip() in (IDENTITY, GZIP, DEFLATE) and quality > best_q:
            best, best_q = name.strip(), quality
    return best


def _quality(text: bytes) -> float:
    name, _, number = text.partition(b"=")
    if name.strip() != b"q":
        return 1.0
    try:
        return float(number)
    except ValueError:
        return 0.0
