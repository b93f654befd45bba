"""What this API calls what went wrong. The only such table of this dialect."""

from __future__ import annotations

from fastserve.errors import Kind

# Spec 1: RequestStatusCode, by the name of the server's own code.
SUCCESS = "SUCCESS"
STATUS_OF: dict[Kind, str] = {
    Kind.CANCELLED: "UNKNOWN",
    Kind.UNKNOWN: "UNKNOWN",
    Kind.INVALID_ARGUMENT: "INVALID_ARG",
    Kind.DEADLINE_EXCEEDED: "UNAVAILABLE",
    Kind.NOT_FOUND: "NOT_FOUND",
    Kind.ALREADY_EXISTS: "ALREADY_EXISTS",
    Kind.PERMISSION_DENIED: "UNSUPPORTED",
    Kind.RESOURCE_EXHAUSTED: "UNAVAILABLE",
    Kind.FAILED_PRECONDITION: "INVALID_ARG",
    Kind.ABORTED: "UNAVAILABLE",
    Kind.OUT_OF_RANGE: "INVALID_ARG",
    Kind.UNIMPLEMENTED: "UNSUPPORTED",
    Kind.INTERNAL: "INTERNAL",
    Kind.UNAVAILABLE: "UNAVAILABLE",
    Kind.DATA_LOSS: "INTERNAL",
    Kind.UNAUTHENTICATED: "UNSUPPORTED",
}
