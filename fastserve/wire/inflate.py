"""Bounded decompression of request bodies: gzip (several members) and zlib. Called by dialects.

The bound is on what comes out, before it exists: at most limits.inflated_bytes, and at most
limits.inflate_ratio times what was sent once that is more than RATIO_FLOOR_BYTES (a small, very
regular body is no attack).
"""

from __future__ import annotations

import zlib

from fastserve.config import Limits
from fastserve.errors import Kind, ServeError

RATIO_FLOOR_BYTES = 1 << 20
WINDOW_BYTES = 16384
_ANY_CONTAINER = zlib.MAX_WBITS | 32  # gzip or zlib, told apart by the first bytes


def work_of(body: bytes | bytearray, limits: Limits) -> int:
    """What a body may come to, for `Apart`."""
    return len(body) * limits.inflate_ratio


def inflate(body: bytes | bytearray, limits: Limits, *, setting: str = "limits.inflated_bytes") -> bytes:
    """Decompress a whole body. Raises ServeError: INVALID_ARGUMENT for a broken or truncated one,
    RESOURCE_EXHAUSTED for one that grows too large, which names the limit: `setting` is what
    limits.inflated_bytes is called where it stands for another."""
    ceiling = min(limits.inflated_bytes, max(RATIO_FLOOR_BYTES, limits.inflate_ratio * len(body)))
    pieces: list[bytes] = []
    try:
        _inflate_members(body, limits, ceiling, pieces, setting)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        pieces.clear()  # an error's traceback must not keep a bomb's output alive


def _inflate_members(
    body: bytes | bytearray, limits: Limits, ceiling: int, pieces: list[bytes], setting: str
) -> None:
    view = memoryview(body)
    size = members = start = 0
    while start < len(view) or not members:
        members += 1
        if members > limits.body_chunks:
            raise _too_large("Members of the compressed body", limits.body_chunks, "limits.body_chunks")
        start, grown = _inflate_member(view, start, ceiling - size, pieces)
        size += grown
        if size > ceiling:
            if ceiling == limits.inflated_bytes:
                raise _too_large("Decompressed body", ceiling, setting)
            raise _too_large("Decompressed body", limits.inflate_ratio, "limits.inflate_ratio")
        while start < len(view) and view[start] == 0:  # gzip allows zero padding after a member
            start += 1


def _inflate_member(view: memoryview, start: int, room: int, pieces: list[bytes]) -> tuple[int, int]:
    """Append one member's bytes to `pieces`. Returns where the next one begins and the bytes added,
    which are `room` + 1 when it went over. Windows keep `unused_data` small, so that many tiny members
    stay linear."""
    reader = zlib.decompressobj(_ANY_CONTAINER)
    size = 0
    while not reader.eof:
        if start >= len(view):
            raise ServeError(Kind.INVALID_ARGUMENT, "The compressed body is truncated")
        window = view[start : start + WINDOW_BYTES]
        try:
            piece = reader.decompress(window, room - size + 1)
        except zlib.error:
            raise ServeError(Kind.INVALID_ARGUMENT, "The compressed body cannot be decompressed") from None
        size += len(piece)
        pieces.append(piece)
        start += len(window) - len(reader.unused_data)
        if size > room:
            break
    return start, size


def _too_large(what: str, limit: int, setting: str) -> ServeError:
    return ServeError(Kind.RESOURCE_EXHAUSTED, f"{what} over the limit of {limit} (setting {setting})")
