"""Text of clients, whose bytes need not be UTF-8: what is none survives the way to `str` and back."""

from __future__ import annotations


def to_text(data: bytes) -> str:
    """Bytes as text."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """The way back."""
    return text.encode("utf-8", "surrogateescape")


def target_text(target: str) -> str:
    """A request's target, which the wire has as latin-1."""
    return to_text(target.encode("latin-1"))
