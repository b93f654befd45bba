"""Compressed messages. What comes out is bounded before it exists, as with every body."""

from __future__ import annotations

from fastserve.config import Limits
from fastserve.errors import Kind, ServeError
from fastserve.wire.coding import DEFLATE, GZIP, IDENTITY
from fastserve.wire.inflate import inflate

ACCEPTED = b"identity, deflate, gzip"


def decode(message: bytes, encoding: bytes, limits: Limits) -> bytes:
    """`limits.inflated_bytes` are those of a message. Raises ServeError."""
    if encoding not in (DEFLATE, GZIP):
        raise ServeError(Kind.INTERNAL, "a compressed message without grpc-encoding")
    return inflate(message, limits, setting="grpc_options.message_bytes")


def choose(accepted: bytes) -> bytes:
    """An encoding of grpc-accept-encoding for replies; IDENTITY where there is none."""
    named = {one.strip() for one in accepted.split(b",")}
    return GZIP if GZIP in named else DEFLATE if DEFLATE in named else IDENTITY
