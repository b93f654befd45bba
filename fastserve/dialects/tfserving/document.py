"""A JSON body as TensorFlow Serving sees it: syntax errors, kinds of values, base64 objects (spec 2.1, 2.5).

The slow and exact way into a body, on top of the general JSON reader. What the members of a
predict or classify body mean is told in `explain` and `examples`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastserve._ext.json_value import JSONSyntaxError, Members, debug_text, parse
from fastserve.codec.base64_text import decode_base64
from fastserve.codec.client_text import to_text
from fastserve.errors import ServeError, invalid

if TYPE_CHECKING:
    from fastserve._ext.json_value import Value

_BASE64_SPACE = re.compile(rb"[ \t\n\v\f\r]+")
_KIND_WORD = {type(None): "Null", Members: "Object", list: "Array", bytes: "String"}

MAX_DEPTH = 100
"""Nesting of a JSON body; the original has no bound (a deliberate deviation)."""
MOST_VALUES = 1 << 19
"""Objects of up to 100 bytes that one body may become."""


def read_document(body: bytes | bytearray) -> Members:
    """The body's top-level object. Raises ServeError with the text of the first syntax error."""
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        document = parse(body, max_depth=MAX_DEPTH, max_values=MOST_VALUES)
    except JSONSyntaxError as fault:
        raise invalid(f"JSON Parse error: {fault.reason} at offset: {fault.offset}") from None
    if not isinstance(document, Members):
        raise invalid(f"JSON Value: {debug_text(document)} Is not object")
    return document


def read_signature_name(document: Members) -> str:
    """The body's signature_name, "" when it has none. Raises ServeError unless it is a string."""
    name = document.get(b"signature_name", b"") if b"signature_name" in document else b""
    if not isinstance(name, bytes):
        raise format_error(document, "not formatted correctly. 'signature_name' key must be a string value.")
    return to_text(name)


def format_error(value: Value, words: str) -> ServeError:
    """The error that shows a value and says what is wrong with it."""
    return invalid(f"JSON Value: {debug_text(value)} {words}")


def kind_word(value: Value) -> str:
    """The kind of a JSON value in the words of the error texts."""
    if isinstance(value, bool):
        return "True" if value else "False"
    return _KIND_WORD.get(type(value), "Number")


def is_base64_object(value: Value) -> bool:
    """Whether a value is `{"b64": "..."}`, which stands for bytes wherever a string may stand."""
    if not isinstance(value, Members) or len(value) != 1:
        return False
    name, text = value.pairs[0]
    return name == b"b64" and isinstance(text, bytes)


def decode_base64_object(value: Members) -> bytes:
    """Its bytes: standard alphabet, padding optional, spaces skipped. Raises ServeError."""
    text = value.pairs[0][1] if is_base64_object(value) else None
    if not isinstance(text, bytes):
        raise format_error(value, "not formatted correctly for base64 data")
    data = decode_base64(_BASE64_SPACE.sub(b"", text))
    if data is None:
        raise invalid("Unable to base64 decode")
    return data
