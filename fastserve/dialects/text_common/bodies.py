"""JSON bodies of the text APIs: bounded readers, and errors that name the field.

    read_typed(FreeJSON(ChatRequest, BOUNDS), b'{"temperature": 3}')
    -> InvalidBody("`temperature`: expected float <= 2.0", field="temperature")

Bodies are within BOUNDS before an object is made of them; large ones are read in a thread. MindIE's API takes
any document (`read_json`): whole numbers beyond 64 bits are floats there, as `is_integer` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import msgspec

from fastserve.codec.json_text import Bounds, DocumentFault, FreeJSON, JSONProblem
from fastserve.dialects.text_common.service import TextService
from fastserve.errors import Kind, ServeError, invalid
from fastserve.net.request import Call

NOT_MINDIE_JSON = "Failed to parse request context to json"
WORK = 16
"""Times a body read into memory: an object is made for each value."""
P = ParamSpec("P")
T = TypeVar("T")


async def read_offloaded(
    service: TextService, call: Call, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what `read` makes of a call's body; a large one is read beside the loop. Raises ServeError."""
    return await service.offload(len(call.body) * WORK, read, *args, **kwargs)


async def read_body(service: TextService, call: Call) -> Any:
    """Return the JSON document of a call's body. Raises ServeError."""
    return await read_offloaded(service, call, read_json, call.body, service.options.json_depth)


@lru_cache(maxsize=8)
def _reader(most_deep: int) -> FreeJSON[Any]:
    return FreeJSON(Any, Bounds(depth=most_deep, values=MOST_VALUES, numbers=MOST_NUMBERS))


def read_json(body: bytes | bytearray, most_deep: int) -> Any:
    """A document. Raises ServeError."""
    try:
        return _reader(most_deep).read(body)
    except DocumentFault as fault:
        more = f": it has {fault.message}" if fault.problem is JSONProblem.TOO_LARGE else ""
        raise invalid(NOT_MINDIE_JSON + more) from None


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number of at most 64 bits, signed or not."""
    return type(value) is int and -(1 << 63) <= value < 1 << 64


Body = TypeVar("Body")
_PLACE = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")
_NOTHING = re.compile(rb"null|false|-?0+(?:\.0*)?(?:[eE][+-]?[0-9]+)?|\"\"|\[\s*\]|\{\s*\}")
MOST_NOTHING = 64
"""Bytes of a value that may say nothing."""
MOST_VALUES, MOST_NUMBERS = 1 << 16, (1 << 20) + (1 << 14)
"""Limits of one body: a long conversation, and the tokens of the longest prompts."""
BOUNDS = Bounds(values=MOST_VALUES, numbers=MOST_NUMBERS)
TOO_DEEP = "The request body is nested too deeply."
TOO_LARGE = "The request body has "
NOT_JSON = "The request body is not valid JSON"
NOT_UTF8 = "The request body is not valid UTF-8."
MOST_FLOAT = 3.4028234663852886e38
"""Weights and scores are float32 at most."""


class InvalidBody(ServeError):
    """A body that is not what it should be. `field` is the path of what is wrong, "" for the whole;
    `malformed`, that it is no JSON at all."""

    def __init__(self, message: str, field: str = "", *, malformed: bool = False) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, message)
        self.field = field
        self.malformed = malformed


def read_typed(reader: FreeJSON[Body], body: bytes | bytearray) -> Body:
    """The body as its struct. Raises InvalidBody."""
    try:
        return reader.read(body)
    except DocumentFault as fault:
        raise _misread(fault) from None


def _misread(fault: DocumentFault) -> InvalidBody:
    if fault.problem is JSONProblem.MISTYPED:
        return _in_words(fault.message)
    if fault.problem is JSONProblem.TOO_LARGE:
        return InvalidBody(f"{TOO_LARGE}{fault.message}", fault.field)
    if fault.problem is JSONProblem.TOO_DEEP:
        return InvalidBody(TOO_DEEP, malformed=True)
    words = NOT_UTF8 if fault.problem is JSONProblem.NOT_UTF8 else f"{NOT_JSON}: {fault.message}"
    return InvalidBody(words, malformed=True)


def _in_words(text: str) -> InvalidBody:
    found = _PLACE.match(text)
    what, field = found.groups() if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return InvalidBody(f"`{field}` is required", field)
    what = what.replace("`", "")
    what = what[:1].lower() + what[1:]
    return InvalidBody(f"`{field}`: {what}" if field else f"The request body: {what}", field)


def check(good: bool, field: str, what: str) -> None:
    """Raises InvalidBody, which names the field, unless it is good."""
    if not good:
        raise InvalidBody(f"`{field}` {what}", field)


def is_neutral(raw: msgspec.Raw | msgspec.UnsetType, neutral: tuple[bytes, ...] = ()) -> bool:
    """Return whether a key is absent or has no effect: null, false, 0, "" or empty, or one of `neutral`.
    Where true is neutral, null is, and nothing else."""
    if raw is msgspec.UNSET:
        return True
    if len(memoryview(raw)) > MOST_NOTHING:
        return False
    text = bytes(raw).strip()
    if text in neutral or b"true" in neutral:
        return text in (*neutral, b"null")
    return _NOTHING.fullmatch(text) is not None
