"""Compressed messages: gzip, and deflate, which is zlib's format (RFC 1950). What comes out is bounded before
it exists, as with every body.
"""

from __future__ import annotations

import zlib

from fastserve.config import Limits
from fastserve.errors import Kind, ServeError
from fastserve.wire.inflate import inflate

IDENTITY, DEFLATE, GZIP = b"identity", b"deflate", b"gzip"
ACCEPTED = b"identity, deflate, gzip"
_WINDOW_BITS = {DEFLATE: zlib.MAX_WBITS, GZIP: zlib.MAX_WBITS | 16}
LEVEL = 1  # tensors hardly shrink more at a higher one, at several times the cost


def decode(message: bytes, encoding: bytes, limits: Limits) -> bytes:
    """`limits.inflated_bytes` are those of a message. Raises ServeError."""
    if encoding not in _WINDOW_BITS:
        raise ServeError(Kind.INTERNAL, "a compressed message without grpc-encoding")
    return inflate(message, limits, setting="grpc_options.message_bytes")


def encode(message: bytes, encoding: bytes) -> bytes:
    """The other way."""
    writer = zlib.compressobj(LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return writer.compress(message) + writer.flush()


def choose(accepted: bytes) -> bytes:
    """An encoding of grpc-accept-encoding for replies; IDENTITY where there is none."""
    named = {one.strip() for one in accepted.split(b",")}
    return GZIP if GZIP in named else DEFLATE if DEFLATE in named else IDENTITY
