"""Error kind -> HTTP status (spec 1.4) and the error body (spec 1.5). The only such table of this dialect."""

from __future__ import annotations

from fastserve._ext.json_writer import write_error
from fastserve.errors import Kind, ServeError

HTTP_STATUS: dict[Kind, int] = {
    Kind.CANCELLED: 499,
    Kind.UNKNOWN: 500,
    Kind.INVALID_ARGUMENT: 400,
    Kind.DEADLINE_EXCEEDED: 504,
    Kind.NOT_FOUND: 404,
    Kind.ALREADY_EXISTS: 409,
    Kind.PERMISSION_DENIED: 403,
    Kind.RESOURCE_EXHAUSTED: 429,
    Kind.FAILED_PRECONDITION: 400,
    Kind.ABORTED: 409,
    Kind.OUT_OF_RANGE: 400,
    Kind.UNIMPLEMENTED: 501,
    Kind.INTERNAL: 500,
    Kind.UNAVAILABLE: 503,
    Kind.DATA_LOSS: 500,
    Kind.UNAUTHENTICATED: 401,
}


def invalid(message: str) -> ServeError:
    """An INVALID_ARGUMENT with TensorFlow Serving's own words."""
    return ServeError(Kind.INVALID_ARGUMENT, message)


def error_body(message: str) -> bytes:
    """`message` as the body of an error reply. Bytes that were not UTF-8 pass through (surrogateescape)."""
    return write_error(message.encode("utf-8", "surrogateescape"))
