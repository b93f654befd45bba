"""What the head of a predict says of its body (spec 3.6)."""

from __future__ import annotations

from fastserve.config import GrpsOptions
from fastserve.errors import invalid
from fastserve.wire.call import Call

JSON_BODY, BIN = "json", "bin"
_KINDS = {b"application/json": JSON_BODY, b"application/octet-stream": BIN}
NO_TYPE, OTHER_TYPE = "No content type in headers.", "Unsupported content type."


def content_kind(call: Call, options: GrpsOptions) -> str:
    """JSON_BODY or BIN, found out once for equal heads. Raises ServeError."""
    if call.head.memo:
        return str(call.head.memo)
    given = call.header(b"content-type")
    if not given:
        raise invalid(NO_TYPE)
    if call.header(b"content-encoding") not in (b"", b"identity"):
        raise invalid("Unsupported content encoding.")
    kind = _KINDS.get(given if options.strict_content_type else given.partition(b";")[0].strip().lower())
    if kind is None:
        raise invalid(OTHER_TYPE)
    call.head.memo = kind
    return kind
