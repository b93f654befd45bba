"""Error bodies and error texts of TensorFlow Serving (spec 1.4, 1.5), and its names for element types."""

from __future__ import annotations

from fastserve._ext.json_reader import Fault, JSONFault
from fastserve._ext.json_writer import WriterCode, WriterFault, write_error
from fastserve.codec.json_text import to_bytes
from fastserve.errors import Kind, ServeError, invalid
from fastserve.tensor import DTYPES, TENSORFLOW_NAME

TF_NAME: dict[int, str] = {DTYPES[name].code: word for name, word in TENSORFLOW_NAME.items()}
"""DType.code -> the enum's name, such as `DT_FLOAT`."""
TF_WORD: dict[int, str] = {code: name[3:].lower() for code, name in TF_NAME.items()}
"""DType.code -> the word of an error text, such as `float` or `string`."""


def shape_text(shape: tuple[int, ...]) -> str:
    """`[2,3]`, and `[]` for a scalar: how TensorFlow prints a shape."""
    return "[" + ",".join("?" if size < 0 else str(size) for size in shape) + "]"


def error_body(message: str) -> bytes:
    """`message` as the body of an error reply. Bytes that were not UTF-8 pass through (surrogateescape)."""
    return write_error(to_bytes(message))


def html_page(status: int, phrase: str) -> bytes:
    """Return the original's page for targets outside of its API (spec 1.2)."""
    return (
        f"<HTML><HEAD>\n<TITLE>{status} {phrase}</TITLE>\n</HEAD><BODY>\n<H1>{phrase}</H1>\n</BODY></HTML>\n"
    ).encode()


def writer_error(fault: WriterFault) -> ServeError:
    """Why outputs cannot be written, in the original's words (spec 3.1)."""
    if fault.code is WriterCode.NO_OUTPUTS:
        return invalid("Cannot convert empty tensor map to JSON")
    if fault.code is WriterCode.NO_LEADING_DIMENSION:
        return invalid(f"Tensor name: {fault.name} has no shape information ")
    if fault.code is WriterCode.UNEQUAL_ROWS:
        words = f"has inconsistent batch size: {fault.got} expecting: {fault.expected}"
        return invalid(f"Tensor name: {fault.name} {words}")
    if fault.code is WriterCode.UNSUPPORTED_DTYPE:
        return invalid(f"Failed to write JSON value for tensor type: {TF_WORD[fault.got]}")
    return ServeError(Kind.INTERNAL, f"Output {fault.name} cannot be written: {fault.code.name}")


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
