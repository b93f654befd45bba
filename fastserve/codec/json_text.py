"""Text of clients: the one reader of their JSON besides tensors, target text, base64.

    CHAT = FreeJSON(ChatRequest)                        CHAT.read(body)  ->  ChatRequest(...)
    FreeJSON(Any, Bounds(values=64)).read(text)         ->  plain values, 64 at most

A compiled pass over the bytes (`_ext.json_bounds`, without the GIL, about 1 GB/s) checks grammar and bounds
before an object is made: a body of any shape costs its own bytes and what the bounds allow. Fields that a
type does not have are skipped as bytes. Tensors have readers of their own, which make no object for a number.
Escapes of large documents are undone without the GIL: msgspec, which holds it, takes ten times longer.
"""

from __future__ import annotations

import re
from base64 import b64decode
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from fastserve._ext.json_bounds import Bounds, JSONBoundError, check_json, find_not_utf8, write_plain
from fastserve._ext.json_value import JSONSyntaxError
from fastserve.errors import Kind, ServeError

__all__ = ["DEFAULT", "Bounds", "DocumentFault", "FreeJSON", "JSONProblem", "check"]
T = TypeVar("T")
DEFAULT = Bounds()
"""100 levels; 16384 values that are no numbers, and as many numbers; 4096 keys of one object; keys of 1024
bytes, 1 MiB together; 1 Mi escapes besides \\uXXXX of a large document."""

LARGE_BYTES = 1 << 20

WORDS = {
    "values": "more than {} values besides numbers",
    "numbers": "more than {} numbers",
    "object_keys": "more than {} keys in one object",
    "key_bytes": "more than {} bytes of keys",
    "longest_key": "a key of more than {} bytes",
    "longest_number": "a number of more than {} characters",
    "escapes": "more than {} escapes that UTF-8 cannot replace",
}


class JSONProblem(Enum):
    """Problem of a refused document."""

    MALFORMED = "malformed"
    NOT_UTF8 = "not_utf8"
    TOO_DEEP = "too_deep"
    TOO_LARGE = "too_large"
    MISTYPED = "mistyped"


class DocumentFault(ServeError):
    """A refused document.

    `message` leaves out the document's name ("more than 16384 numbers, at byte 81921").

    `field` is the key of the root object that has the problem, "" for none.
    """

    def __init__(self, problem: JSONProblem, words: str, field: str = "") -> None:
        super().__init__(Kind.INVALID_ARGUMENT, words)
        self.problem = problem
        self.field = field


def check(data: bytes | bytearray | memoryview, bounds: Bounds = DEFAULT) -> tuple[int, int, int]:
    """Return a document's counts of (other values, numbers, keys). Raises DocumentFault."""
    try:
        return check_json(data, bounds)
    except JSONSyntaxError as fault:
        raise DocumentFault(JSONProblem.MALFORMED, f"{fault.reason} at byte {fault.offset}") from None
    except JSONBoundError as fault:
        raise _beyond(fault) from None


def _beyond(fault: JSONBoundError) -> DocumentFault:
    if fault.bound == "depth":
        words = f"more than {fault.limit} objects and lists within each other"
        problem = JSONProblem.TOO_DEEP
    else:
        words, problem = WORDS[fault.bound].format(fault.limit), JSONProblem.TOO_LARGE
    return DocumentFault(problem, f"{words}, at byte {fault.offset}", fault.key)


class FreeJSON(Generic[T]):
    """Reads documents of one type."""

    def __init__(self, kind: type[T] | Any = Any, bounds: Bounds = DEFAULT) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._bounds = bounds

    def read(self, data: bytes | bytearray | str, bounds: Bounds | None = None) -> T:
        """Return a document; `bounds` replace the reader's own. Raises DocumentFault."""
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogatepass")
        bounds = bounds or self._bounds
        check(data, bounds)
        if (at := find_not_utf8(data)) >= 0:  # msgspec checks no value of type Raw, and none that it skips
            raise DocumentFault(JSONProblem.NOT_UTF8, f"not UTF-8, at byte {at}")
        if len(data) >= LARGE_BYTES:
            data = _make_plain(data, bounds)
        try:
            read: T = self._decode(data)
            return read
        except RecursionError:
            raise DocumentFault(
                JSONProblem.TOO_DEEP, "objects and lists within each other, too many"
            ) from None
        except msgspec.ValidationError as fault:
            raise DocumentFault(JSONProblem.MISTYPED, str(fault)) from None
        except (msgspec.DecodeError, ValueError) as fault:
            raise DocumentFault(JSONProblem.MALFORMED, str(fault)) from None


def _make_plain(data: bytes | bytearray, bounds: Bounds) -> bytes:
    try:
        return write_plain(data, bounds)
    except JSONBoundError as fault:
        raise _beyond(fault) from None


_LEADING = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_BEYOND = 1 << 64


def to_text(data: bytes) -> str:
    """Return bytes as text; bytes that are no UTF-8 survive the way back."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """Return the bytes of a text that `to_text` made."""
    return text.encode("utf-8", "surrogateescape")


def leading_int(text: str) -> int | None:
    """Return the number that a text begins with, as C's `strtol` reads it, None without one.

    A number of more than 20 digits becomes one beyond 64 bits.
    """
    match = _LEADING.match(text)
    if match is None:
        return None
    digits = match[1]
    return int(digits) if len(digits) <= 20 else -_BEYOND if digits.startswith("-") else _BEYOND


def target_text(target: str) -> str:
    """Return the text of a request's target, which `net` has as latin-1."""
    return to_text(target.encode("latin-1"))


_STANDARD, _URL_SAFE = re.compile(rb"[A-Za-z0-9+/]*"), re.compile(rb"[A-Za-z0-9_-]*")


def decode_base64(text: bytes, *, url_safe: bool = False) -> bytes | None:
    """Return decoded bytes, None for invalid base64. Padding may be left out.

    With `url_safe` either alphabet is taken, but not both at once.
    """
    digits = text.rstrip(b"=")
    missing = -len(digits) % 4
    if missing == 3 or len(text) - len(digits) not in (0, missing):
        return None
    if _STANDARD.fullmatch(digits):
        return b64decode(digits + b"=" * missing)
    if url_safe and _URL_SAFE.fullmatch(digits):
        return b64decode(digits + b"=" * missing, altchars=b"-_")
    return None
