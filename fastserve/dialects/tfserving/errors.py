"""The error body (spec 1.5), and why outputs cannot be written. Statuses are the canonical (spec 1.4)."""

from __future__ import annotations

from fastserve._ext.json_writer import WriterCode, WriterFault, write_error
from fastserve.codec.client_text import to_bytes
from fastserve.dialects.tfserving.names import TF_WORD
from fastserve.errors import Kind, ServeError, invalid


def error_body(message: str) -> bytes:
    """`message` as the body of an error reply. Bytes that were not UTF-8 pass through (surrogateescape)."""
    return write_error(to_bytes(message))


def html_page(status: int, phrase: str) -> bytes:
    """What the original answers outside of its API (spec 1.2)."""
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
