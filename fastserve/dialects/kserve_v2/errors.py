"""Error kind -> HTTP status (spec 1.2), and the error body. The only such table of this half of the dialect.

Whatever is wrong with a request's JSON is INTERNAL here, as it is in the original.
"""

from __future__ import annotations

from fastserve._ext.json_writer import write_string
from fastserve.codec.client_text import to_bytes
from fastserve.engine import QUEUED_TOO_LONG
from fastserve.errors import DeadlineError, Kind, ServeError, invalid
from fastserve.wire.dialect import CANONICAL_STATUS

QUEUE_FULL = "Exceeds maximum queue size"
HTTP_STATUS = CANONICAL_STATUS | {
    Kind.CANCELLED: 400,
    Kind.UNKNOWN: 400,
    Kind.DEADLINE_EXCEEDED: 503,
    Kind.ALREADY_EXISTS: 400,
    Kind.RESOURCE_EXHAUSTED: 503,
    Kind.ABORTED: 503,
}


def too_large(what: str, most: int) -> ServeError:
    """What is over `--http-max-input-size` (spec 3.3)."""
    return invalid(f"{what} of {most} bytes. Use --http-max-input-size to increase the limit.")


def not_in_json(doing: str, datatype: str, what: str) -> ServeError:
    """Of the types that have no JSON form."""
    return invalid(
        f"{doing} {datatype} data via JSON is not supported. Please use the binary data format for {what}"
    )


def in_own_words(fault: ServeError) -> ServeError:
    """A fault of the engine as this dialect tells it."""
    if isinstance(fault, DeadlineError) and fault.queued:
        return ServeError(Kind.UNAVAILABLE, "Request timeout expired")
    return fault


def tag(request_id: str) -> str:
    """What many texts begin with."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def tell(fault: ServeError, request_id: str) -> ServeError:
    """The same over gRPC, where a full queue's words name the request."""
    if fault.message == QUEUED_TOO_LONG:  # the call's own deadline, not one of the model's queue policy
        return fault
    told = in_own_words(fault)
    if told.kind is Kind.UNAVAILABLE and (told.retry_after_s is not None or told.message == QUEUE_FULL):
        return ServeError(Kind.UNAVAILABLE, tag(request_id) + QUEUE_FULL, retry_after_s=told.retry_after_s)
    return told


def error_body(message: str) -> bytes:
    """`message` as the body of an error reply. Bytes that were not UTF-8 pass through (surrogateescape)."""
    return b'{"error":%b}' % write_string(to_bytes(message))
