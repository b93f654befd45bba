"""The HTTP replies of infer: the original's headers in the original's order (spec 3)."""

from __future__ import annotations

from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import ServeError
from fastserve.wire.call import Call

NV_RESPONSE = b"NV-InferResponse"
NV_STATUS = b"NV-Status"
BINARY = b"application/octet-stream"
CONTENT_TYPE = (b"Content-Type", BINARY)
_FRAME = (
    b"%bNV-InferResponse: %b\r\nNV-Status: %b\r\n"
    b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"
)


def write_frame(service: Service, head: bytes, line: bytes, nbytes: int) -> bytes:
    """All of a good answer but its body of `nbytes`; nothing when `head`, from `call.raw_head(b"")`, is."""
    return _FRAME % (head, line, service.status_line(None), nbytes) if head else b""


def answer(call: Call, service: Service, line: bytes, body: bytes) -> None:
    """Raw outputs and their trailer in `body`, the header that describes them in `line`."""
    call.reply(200, body, b"", ((NV_RESPONSE, line), (NV_STATUS, service.status_line(None)), CONTENT_TYPE))


def refuse(call: Call, service: Service, request_id: int, fault: ServeError) -> None:
    """A fault, in the original's words, with nothing but the request's id beside it."""
    line = b"id: %d" % request_id if request_id else b""
    call.reply(400, b"", b"", ((NV_RESPONSE, line), (NV_STATUS, service.status_line(fault)), CONTENT_TYPE))
