"""Base64 as clients of JSON write it: the padding may be left out, and is right where it is not."""

from __future__ import annotations

import re
from base64 import b64decode

_STANDARD, _URL_SAFE = re.compile(rb"[A-Za-z0-9+/]*"), re.compile(rb"[A-Za-z0-9_-]*")


def decode_base64(text: bytes, *, url_safe: bool = False) -> bytes | None:
    """The bytes, None for what is no base64; with `url_safe` in either alphabet, but not in both."""
    digits = text.rstrip(b"=")
    missing = -len(digits) % 4
    if missing == 3 or len(text) - len(digits) not in (0, missing):
        return None
    if _STANDARD.fullmatch(digits):
        return b64decode(digits + b"=" * missing)
    if url_safe and _URL_SAFE.fullmatch(digits):
        return b64decode(digits + b"=" * missing, altchars=b"-_")
    return None
