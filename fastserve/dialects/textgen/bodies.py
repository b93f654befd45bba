"""A body as JSON, as MindIE's parser takes it: strict, UTF-8, and no deeper than it may be.

Whole numbers beyond 64 bits are no whole numbers there, but floats: `is_integer` says so too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fastserve.dialects.textgen.errors import TooLarge
from fastserve.dialects.textgen.service import Service
from fastserve.errors import invalid
from fastserve.wire.call import Call

NOT_JSON = "Failed to parse request context to json"
WORK = 16
"""Times a body read into memory: an object is made for each value."""
_decode = msgspec.json.Decoder().decode


async def read_body(service: Service, call: Call) -> Any:
    """What a call's body says. Raises ServeError."""
    options, body = service.options, call.body
    if len(body) > options.request_mb << 20:
        raise TooLarge(options.request_mb)
    return await service.apart(len(body) * WORK, read_json, body, options.json_depth)


def read_json(body: bytes | bytearray, most_deep: int) -> Any:
    """A document. Raises ServeError."""
    try:
        document = _decode(body)
    except (ValueError, RecursionError):
        raise invalid(NOT_JSON) from None
    if body.count(b"[") + body.count(b"{") > most_deep and is_deeper(document, most_deep):
        raise invalid(NOT_JSON)
    return document


def is_deeper(document: Any, most: int) -> bool:
    """Whether objects and lists are within each other more than so many times."""
    level = [document]
    for _ in range(most + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return False
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return True


def is_integer(value: object) -> bool:
    """Whether it is a whole number of at most 64 bits, signed or not."""
    return type(value) is int and -(1 << 63) <= value < 1 << 64
