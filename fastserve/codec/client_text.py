"""Text of clients, whose bytes need not be UTF-8: what is none survives the way to `str` and back. And the
numbers that it begins with."""

from __future__ import annotations

import re

_LEADING = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_BEYOND = 1 << 64


def to_text(data: bytes) -> str:
    """Bytes as text."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """The way back."""
    return text.encode("utf-8", "surrogateescape")


def leading_int(text: str) -> int | None:
    """The number that a text begins with, whatever follows, as C's `strtol` reads it; None for none. One with
    more digits than 64 bits have is beyond these, however many more."""
    match = _LEADING.match(text)
    if match is None:
        return None
    digits = match[1]
    return int(digits) if len(digits) <= 20 else -_BEYOND if digits.startswith("-") else _BEYOND


def target_text(target: str) -> str:
    """A request's target, which the wire has as latin-1."""
    return to_text(target.encode("latin-1"))
