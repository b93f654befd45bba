"""JSON bodies as structs, and what is wrong with one in words: the field, and what it may be.

    read_typed(Decoder(ChatRequest), b'{"temperature": 3}')
    -> Misread("`temperature`: expected float <= 2.0", field="temperature")

Bodies are bounded by the wire, their depth by the decoder.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from fastserve.errors import Kind, ServeError

Body = TypeVar("Body")
_PLACE = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")
TOO_DEEP = "The request body is nested too deeply."
NOT_JSON = "The request body is not valid JSON"
NOT_UTF8 = "The request body is not valid UTF-8."
MOST_FLOAT = 3.4028234663852886e38
"""Weights and scores are float32 at most."""


class Misread(ServeError):
    """A body that is not what it should be. `field` is the path of what is wrong, "" for the whole;
    `malformed`, that it is no JSON at all."""

    def __init__(self, message: str, field: str = "", *, malformed: bool = False) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, message)
        self.field = field
        self.malformed = malformed


def read_typed(decoder: msgspec.json.Decoder[Body], body: bytes | bytearray) -> Body:
    """The body as its struct. Raises Misread."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise Misread(TOO_DEEP, malformed=True) from None
    except UnicodeDecodeError:
        raise Misread(NOT_UTF8, malformed=True) from None
    except msgspec.ValidationError as error:
        raise _in_words(str(error)) from None
    except msgspec.DecodeError as error:
        raise Misread(f"{NOT_JSON}: {error}", malformed=True) from None


def _in_words(text: str) -> Misread:
    found = _PLACE.match(text)
    what, field = found.groups() if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return Misread(f"`{field}` is required", field)
    what = what.replace("`", "")
    what = what[:1].lower() + what[1:]
    return Misread(f"`{field}`: {what}" if field else f"The request body: {what}", field)


def check(good: bool, field: str, what: str) -> None:
    """Raises Misread, which names the field, unless it is good."""
    if not good:
        raise Misread(f"`{field}` {what}", field)


def is_nothing(raw: msgspec.Raw | msgspec.UnsetType) -> bool:
    """Whether a key is absent, or says what it would say if it were: null, false, 0, "" or empty."""
    return raw is msgspec.UNSET or not msgspec.json.decode(raw)
