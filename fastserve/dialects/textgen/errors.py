"""Error kind -> MindIE's status, and its envelope (spec 1.3). The other APIs' are in their own files."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from fastserve.errors import Kind, ServeError
from fastserve.wire.dialect import retry_after

if TYPE_CHECKING:
    from fastserve.dialects.textgen.service import Service
    from fastserve.wire.call import Call

STATUS: dict[Kind, int] = {
    Kind.CANCELLED: 500,
    Kind.UNKNOWN: 500,
    Kind.INVALID_ARGUMENT: 422,
    Kind.DEADLINE_EXCEEDED: 500,
    Kind.NOT_FOUND: 404,
    Kind.ALREADY_EXISTS: 400,
    Kind.PERMISSION_DENIED: 403,
    Kind.RESOURCE_EXHAUSTED: 503,
    Kind.FAILED_PRECONDITION: 422,
    Kind.ABORTED: 500,
    Kind.OUT_OF_RANGE: 424,
    Kind.UNIMPLEMENTED: 501,
    Kind.INTERNAL: 500,
    Kind.UNAVAILABLE: 503,
    Kind.DATA_LOSS: 500,
    Kind.UNAUTHENTICATED: 401,
}
ERROR_TYPE = {
    400: "Bad Request",
    404: "NotFoundError",
    422: "Input Validation Error",
    424: "Generation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}
NO_ANSWER = "Failed to get engine response"


class Admission(ServeError):
    """A prompt of more tokens than the model takes."""

    def __init__(self, got: int, most: int) -> None:
        text = (
            "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than "
            f"{most},the input ids length is {got}"
        )
        super().__init__(Kind.OUT_OF_RANGE, text)


def envelope(status: int, message: str) -> bytes:
    """An error as JSON. Characters that UTF-8 has not are replaced."""
    told = ERROR_TYPE.get(status) or HTTPStatus(status).phrase
    text = msgspec.json.encode(message.encode("utf-8", "replace").decode())
    return b'{"error":%b,"error_type":"%b"}' % (text, told.encode())


class TooLarge(ServeError):
    """A body beyond maxRequestLength."""

    def __init__(self, most_mb: int) -> None:
        text = f"Request body too large. Maximum allowed size is {most_mb}MB."
        super().__init__(Kind.INVALID_ARGUMENT, text)


def refuse(service: Service, call: Call, fault: ServeError, model: str = "") -> None:
    """Reply with an error, count it, and close the connection as the original does."""
    service.traffic.refused(model, fault.kind.name)
    if isinstance(fault, TooLarge):
        call.reply(413, b'{"message":"%b"}' % fault.message.encode(), close=True)
        return
    status = STATUS[fault.kind]
    call.reply(status, envelope(status, fault.message), headers=retry_after(fault), close=True)


def tell(service: Service, fault: ServeError, model: str) -> bytes:
    """An error in a stream that has begun, which is the last of it; it is counted."""
    service.traffic.refused(model, fault.kind.name)
    if service.options.stream_errors == "event":
        return b"data: %b\n\n" % envelope(STATUS[fault.kind], fault.message)
    return (fault.message if fault.kind is Kind.DEADLINE_EXCEEDED else NO_ANSWER).encode()
