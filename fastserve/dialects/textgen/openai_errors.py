"""Error kind -> OpenAI's status, type and code (spec 8), in its envelope or MindIE's flat one. The only such
table of this API. Its client makes a class of its own of each status.

    {"error":{"message":"The model 'x' does not exist.","type":"invalid_request_error","param":"model",
     "code":"model_not_found"}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fastserve.dialects.textgen import errors
from fastserve.dialects.textgen.inputs import in_mindies_words
from fastserve.dialects.textgen.typed import Misread
from fastserve.errors import Kind, ServeError
from fastserve.serving.text import PromptFault, PromptTooLong
from fastserve.wire.dialect import retry_after

if TYPE_CHECKING:
    from fastserve.dialects.textgen.service import Service
    from fastserve.wire.call import Call

INVALID, SERVER = "invalid_request_error", "server_error"


class Told(NamedTuple):
    """How a kind is told."""

    status: int
    type: str
    code: str | None = None


TOLD: dict[Kind, Told] = {
    Kind.CANCELLED: Told(503, SERVER, "cancelled"),
    Kind.UNKNOWN: Told(500, SERVER),
    Kind.INVALID_ARGUMENT: Told(400, INVALID),
    Kind.DEADLINE_EXCEEDED: Told(504, "timeout_error", "timeout"),
    Kind.NOT_FOUND: Told(404, INVALID, "model_not_found"),
    Kind.ALREADY_EXISTS: Told(409, INVALID),
    Kind.PERMISSION_DENIED: Told(403, "permission_error"),
    Kind.RESOURCE_EXHAUSTED: Told(429, "rate_limit_error", "rate_limit_exceeded"),
    Kind.FAILED_PRECONDITION: Told(422, INVALID),
    Kind.ABORTED: Told(503, SERVER),
    Kind.OUT_OF_RANGE: Told(400, INVALID),
    Kind.UNIMPLEMENTED: Told(400, INVALID, "not_supported"),
    Kind.INTERNAL: Told(500, SERVER),
    Kind.UNAVAILABLE: Told(503, SERVER, "unavailable"),
    Kind.DATA_LOSS: Told(500, SERVER),
    Kind.UNAUTHENTICATED: Told(401, "authentication_error", "invalid_api_key"),
}
TOO_LONG = "context_length_exceeded"


def status_of(fault: ServeError, *, flat: bool) -> int:
    """Its status."""
    return errors.STATUS[fault.kind] if flat else TOLD[fault.kind].status


def error_body(fault: ServeError, *, flat: bool) -> bytes:
    """A fault as JSON."""
    if flat:
        return errors.envelope(errors.STATUS[fault.kind], fault.message)
    told = TOLD[fault.kind]
    message = fault.message.encode("utf-8", "replace").decode()
    code = TOO_LONG if isinstance(fault, PromptTooLong) else told.code
    error = {"message": message, "type": told.type, "param": param_of(fault), "code": code}
    return msgspec.json.encode({"error": error})


def param_of(fault: ServeError) -> str | None:
    """Which of the keys is at fault, if one is."""
    if isinstance(fault, Misread):
        return fault.field or None
    if isinstance(fault, PromptFault):
        return fault.field or ("prompt" if fault.prompt < 0 else f"input[{fault.prompt}]")
    return "model" if fault.kind is Kind.NOT_FOUND else None


def refuse(service: Service, call: Call, fault: ServeError, model: str = "") -> None:
    """Reply with an error, and count it."""
    service.traffic.refused(model, fault.kind.name)
    flat = service.options.openai_flavor == "mindie"
    fault = in_mindies_words(fault) if flat else fault
    call.reply(status_of(fault, flat=flat), error_body(fault, flat=flat), headers=retry_after(fault))


def tell(service: Service, fault: ServeError) -> bytes:
    """An error in the midst of a stream: clients raise on the event."""
    return b"data: %b\n\n" % error_body(fault, flat=service.options.openai_flavor == "mindie")
