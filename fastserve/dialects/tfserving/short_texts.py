"""Why a predict body was refused, in a few words: for bodies too large to be read again (see `predict`)."""

from __future__ import annotations

from fastserve._ext.json_reader import Fault, JSONFault
from fastserve.errors import ServeError, invalid

_SYNTAX: dict[Fault, str] = {
    Fault.EMPTY: "The document is empty.",
    Fault.INVALID_VALUE: "Invalid value.",
    Fault.MISSING_NAME: "Missing a name for object member.",
    Fault.MISSING_COLON: "Missing a colon after a name of object member.",
    Fault.MISSING_COMMA_OR_BRACE: "Missing a comma or '}' after an object member.",
    Fault.MISSING_COMMA_OR_BRACKET: "Missing a comma or ']' after an array element.",
    Fault.BAD_HEX: "Incorrect hex digit after \\u escape in string.",
    Fault.BAD_SURROGATE: "The surrogate pair in string is invalid.",
    Fault.BAD_ESCAPE: "Invalid escape character in string.",
    Fault.MISSING_QUOTE: "Missing a closing quotation mark in string.",
    Fault.NUMBER_TOO_BIG: "Number too big to be stored in double.",
    Fault.MISSING_FRACTION: "Miss fraction part in number.",
    Fault.MISSING_EXPONENT: "Miss exponent in number.",
    Fault.TOO_DEEP: "Nesting too deep.",
}
_MEANING: dict[Fault, str] = {
    Fault.NOT_OBJECT: "The body is not an object",
    Fault.SIGNATURE_NOT_STRING: "'signature_name' key must be a string value",
    Fault.BOTH_FORMATS: "Expecting only one of 'inputs' or 'instances' keys to exist",
    Fault.NO_FORMAT: "Missing 'inputs' or 'instances' key",
    Fault.ROWS_NOT_LIST: "Expecting 'instances' to be an list/array",
    Fault.NO_ROWS: "No values in 'instances' array",
    Fault.NOT_NAMED: "Expecting objects as the signature has several inputs",
    Fault.MIXED_ROWS: "Objects and plain values are mixed in 'instances'",
    Fault.UNKNOWN_INPUT: "A key is not a named input of the signature",
    Fault.MISSING_INPUT: "A named input of the signature is missing",
    Fault.RAGGED: "A list has another size or shape than the ones before it",
    Fault.WRONG_TYPE: "A value is not of the type its input expects",
    Fault.UNSUPPORTED_DTYPE: "The type of an input cannot be written in JSON",
    Fault.BAD_BASE64: "Unable to base64 decode",
}


def short_error(fault: JSONFault) -> ServeError:
    """The error of a large body: the syntax error the original would name, or what the fault means."""
    reason = _SYNTAX.get(fault.code)
    if reason is not None:
        return invalid(f"JSON Parse error: {reason} at offset: {fault.offset}")
    return invalid(f"{_MEANING.get(fault.code, fault.code.name)} at offset: {fault.offset}")
