"""Error kind -> OpenAI's status, type and code (spec 8), in its envelope or MindIE's flat one.

    {"error":{"message":"The model 'x' does not exist.","type":"invalid_request_error","param":"model",
     "code":"model_not_found"}}

OpenAI's client raises a class of its own for each status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fastserve.codec.json_text import target_text
from fastserve.dialects.text_common import mindie
from fastserve.dialects.text_common.endpoint_parts import BodyTooLarge, InvalidBody
from fastserve.dialects.text_common.mindie import as_mindie_fault
from fastserve.errors import Kind, ServeError
from fastserve.net.router import common_status, fault_headers
from fastserve.serving.text import PromptFault, PromptTooLong, SettingFault, TextTooLong

if TYPE_CHECKING:
    from fastserve.dialects.text_common.endpoint_parts import TextService
    from fastserve.net.request import Call

INVALID, SERVER = "invalid_request_error", "server_error"


class ErrorForm(NamedTuple):
    """Status, type and code of an error kind."""

    status: int
    type: str
    code: str | None = None


ERROR_FORMS: dict[Kind, ErrorForm] = {
    Kind.CANCELLED: ErrorForm(503, SERVER, "cancelled"),
    Kind.UNKNOWN: ErrorForm(500, SERVER),
    Kind.INVALID_ARGUMENT: ErrorForm(400, INVALID),
    Kind.DEADLINE_EXCEEDED: ErrorForm(504, "timeout_error", "timeout"),
    Kind.NOT_FOUND: ErrorForm(404, INVALID, "model_not_found"),
    Kind.ALREADY_EXISTS: ErrorForm(409, INVALID),
    Kind.PERMISSION_DENIED: ErrorForm(403, "permission_error"),
    Kind.RESOURCE_EXHAUSTED: ErrorForm(429, "rate_limit_error", "rate_limit_exceeded"),
    Kind.FAILED_PRECONDITION: ErrorForm(422, INVALID),
    Kind.ABORTED: ErrorForm(503, SERVER),
    Kind.OUT_OF_RANGE: ErrorForm(400, INVALID),
    Kind.UNIMPLEMENTED: ErrorForm(400, INVALID, "not_supported"),
    Kind.INTERNAL: ErrorForm(500, SERVER),
    Kind.UNAVAILABLE: ErrorForm(503, SERVER, "unavailable"),
    Kind.DATA_LOSS: ErrorForm(500, SERVER),
    Kind.UNAUTHENTICATED: ErrorForm(401, "authentication_error", "invalid_api_key"),
}
TOO_LONG = "context_length_exceeded"
URL_CHARACTERS = 256  # of a URL in an error


def status_of(fault: ServeError, *, flat: bool) -> int:
    """Return the status of a fault."""
    if isinstance(fault, BodyTooLarge):
        return 413
    own = mindie.STATUS[fault.kind] if flat else ERROR_FORMS[fault.kind].status
    return common_status(fault) or own


def error_body(fault: ServeError, *, flat: bool) -> bytes:
    """A fault as JSON."""
    if flat:
        return mindie.envelope(mindie.STATUS[fault.kind], fault.message)
    told = ERROR_FORMS[fault.kind]
    message = fault.message.encode("utf-8", "replace").decode()
    code = TOO_LONG if is_too_long(fault) else told.code
    error = {"message": message, "type": told.type, "param": param_of(fault), "code": code}
    return msgspec.json.encode({"error": error})


def is_too_long(fault: ServeError) -> bool:
    """Return whether the fault is a prompt with more than the model takes."""
    return isinstance(fault, PromptTooLong) or (isinstance(fault, TextTooLong) and fault.got > fault.most)


def param_of(fault: ServeError) -> str | None:
    """Return the key at fault, None for none."""
    if isinstance(fault, InvalidBody | SettingFault):
        return fault.field or None
    if isinstance(fault, PromptFault):
        return fault.field or ("prompt" if fault.prompt < 0 else f"input[{fault.prompt}]")
    return "model" if fault.kind is Kind.NOT_FOUND else None


def refuse(service: TextService, call: Call, fault: ServeError, model: str = "") -> None:
    """Reply with an error, and count it."""
    service.count_fault(model, fault, call)
    flat = service.options.openai_flavor == "mindie"
    fault = as_mindie_fault(fault) if flat else fault
    call.reply(status_of(fault, flat=flat), error_body(fault, flat=flat), headers=fault_headers(fault))


def tell(service: TextService, fault: ServeError) -> bytes:
    """Return the event of an error within a stream, on which clients raise."""
    return b"data: %b\n\n" % error_body(fault, flat=service.options.openai_flavor == "mindie")


def answer_no_such_url(call: Call) -> None:
    """Answer a URL that no API has, with OpenAI's 404."""
    message = f"Invalid URL ({call.method} {target_text(call.target.partition('?')[0])[:URL_CHARACTERS]})"
    error = {"message": message, "type": INVALID, "param": None, "code": "unknown_url"}
    call.reply(404, msgspec.json.encode({"error": error}))
