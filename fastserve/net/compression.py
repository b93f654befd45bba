"""gzip and deflate (zlib's format, RFC 1950) of HTTP bodies and gRPC messages, both ways.

Decompression is bounded before its result exists: at most limits.inflated_bytes, and at most
limits.inflate_ratio times the compressed size once that is more than RATIO_FLOOR_BYTES (a small, very regular
body is no attack).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from fastserve.errors import LimitError, ServeError, invalid
from fastserve.settings import Limits
from fastserve.util.memory_budget import WORKING_SHARE, Claim
from fastserve.util.offload import Offload

IDENTITY, DEFLATE, GZIP = b"identity", b"deflate", b"gzip"
LEVEL = 1  # tensors hardly shrink more at a higher one, at several times the cost
_WINDOW_BITS = {DEFLATE: zlib.MAX_WBITS, GZIP: zlib.MAX_WBITS | 16}


def pack(body: bytes, coding: bytes) -> bytes:
    """Return the compressed body; the coding is not IDENTITY."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    return packer.compress(body) + packer.flush()


def choose_coding(accepted: bytes) -> bytes:
    """Return the coding for a reply by Accept-Encoding: the highest q wins, the first of equals."""
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


INFLATED_BYTES = "limits.inflated_bytes"
RATIO_FLOOR_BYTES = 1 << 20
WINDOW_BYTES = 16384
_ANY_CONTAINER = zlib.MAX_WBITS | 32  # gzip or zlib: the first bytes decide
Out = TypeVar("Out", bound=bytes | bytearray)


async def inflate_offloaded(
    claim: Claim, offload: Offload, nbytes: int, limits: Limits, work: Callable[..., Out], *args: Any
) -> Out:
    """Decompress a body of `nbytes` bytes with `work`, in a thread if it may be large.

    The largest possible result, and the memory to read it, are reserved on `claim` before decompression;
    afterwards the claim keeps the actual size. Raises ServeError UNAVAILABLE where there is no room."""
    most = (1 + WORKING_SHARE) * largest_inflated(nbytes, limits)  # also while its pieces are joined
    await claim.reserve(most)
    kept = 0
    try:
        inflated = await offload(min(nbytes * limits.inflate_ratio, limits.inflated_bytes), work, *args)
        kept = min(most, (1 + WORKING_SHARE) * len(inflated))
        return inflated
    finally:
        claim.add(kept - most)


def largest_inflated(nbytes: int, limits: Limits) -> int:
    """Return the most bytes that a compressed body of `nbytes` may become."""
    return min(limits.inflated_bytes, max(RATIO_FLOOR_BYTES, limits.inflate_ratio * nbytes))


def inflate(body: bytes | bytearray, limits: Limits, *, setting: str = INFLATED_BYTES) -> bytes:
    """Decompress a whole body. `setting` is the name of the limit in errors.

    Raises ServeError: INVALID_ARGUMENT for a broken or truncated body, RESOURCE_EXHAUSTED for one that
    grows beyond a limit."""
    ceiling = largest_inflated(len(body), limits)
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
    """Append one member's bytes to `pieces`; return where the next member begins and the bytes added.

    The count is `room` + 1 when the member went over. Input goes in by windows, which keep `unused_data`
    small: many tiny members stay linear."""
    reader = zlib.decompressobj(_ANY_CONTAINER)
    size = 0
    while not reader.eof:
        if start >= len(view):
            raise invalid("The compressed body is truncated")
        window = view[start : start + WINDOW_BYTES]
        try:
            piece = reader.decompress(window, room - size + 1)
        except zlib.error:
            raise invalid("The compressed body cannot be decompressed") from None
        size += len(piece)
        pieces.append(piece)
        start += len(window) - len(reader.unused_data)
        if size > room:
            break
    return start, size


def _too_large(what: str, limit: int, setting: str) -> ServeError:
    return LimitError(f"{what} over the limit of {limit} (setting {setting})", setting)
