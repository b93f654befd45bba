"""How infer is answered: over HTTP with the original's headers in the original's order (spec 3), over gRPC
with a message (spec 8). Both paths answer here; faults are told in the original's words."""

from __future__ import annotations

from typing import Any, Protocol

from fastserve._ext.proto_wire import WireFault
from fastserve._ext.proto_wire_v1 import write_v1_response
from fastserve.dialects.triton_v1.answers import Answer, HeaderForms, write_id
from fastserve.dialects.triton_v1.service import GOOD, Service, as_v1
from fastserve.errors import ServeError, invalid
from fastserve.serving.exchange import RpcExchange
from fastserve.wire.call import Call

NV_RESPONSE = b"NV-InferResponse"
NV_STATUS = b"NV-Status"
BINARY = b"application/octet-stream"
CONTENT_TYPE = (b"Content-Type", BINARY)
_BEFORE = b"NV-InferResponse: %b\r\nNV-Status: "
_AFTER = b"\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"


class Replies(Protocol):
    """A transport's. `exchange` is what it makes of a request."""

    def answer(self, exchange: Any, request_id: int, answer: Answer) -> None:
        """Send an answer, copied. Raises ServeError when it cannot be sent."""

    def refuse(self, exchange: Any, request_id: int, fault: ServeError) -> None:
        """Send a fault, with nothing but the request's id beside it."""


class HttpReplies:
    """Raw outputs and their header behind them; `binary`: as a message, else in text."""

    def __init__(self, service: Service, *, binary: bool) -> None:
        self._service, self._binary = service, binary
        self.next_id = service.next_id

    def frame(self, forms: HeaderForms) -> tuple[bytes, bytes, bytes]:
        """What stands round the number and the outputs of a good answer without an id, all of them sent."""
        trailer = forms.trailer(binary=self._binary)
        return _BEFORE % forms.line() + GOOD, _AFTER % (forms.nbytes + len(trailer)), trailer

    def answer(self, call: Call, request_id: int, answer: Answer) -> None:
        forms, raws = answer
        trailer, status = forms.trailer(request_id, binary=self._binary), self._service.status_line(None)
        line, head = forms.line(request_id), call.raw_head(b"")
        if not head:
            headers = ((NV_RESPONSE, line), (NV_STATUS, status), CONTENT_TYPE)
            call.reply(200, b"".join((*raws, trailer)), b"", headers)
            return
        nbytes = len(trailer)
        for raw in raws:
            nbytes += len(raw)
        call.reply_raw(b"".join((head, _BEFORE % line, status, _AFTER % nbytes, *raws, trailer)))

    def refuse(self, call: Call, request_id: int, fault: ServeError) -> None:
        line = b"id: %d" % request_id if request_id else b""
        status = self._service.status_line(as_v1(fault))
        call.reply(400, b"", b"", ((NV_RESPONSE, line), (NV_STATUS, status), CONTENT_TYPE))


class RpcReplies:
    """InferResponses; the status of the RPC itself is always OK."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answer(self, exchange: RpcExchange, request_id: int, answer: Answer) -> None:
        forms, raws = answer
        try:
            exchange.reply(write_v1_response(self._service.status(None), forms.binary(request_id), raws))
        except (WireFault, OverflowError):
            size = sum(memoryview(raw).nbytes for raw in raws)
            text = f"Response has byte size {size} which exceeds gRPC's byte size limit {2**31}."
            raise invalid(text) from None

    def refuse(self, exchange: RpcExchange, request_id: int, fault: ServeError) -> None:
        exchange.reply(write_v1_response(self._service.status(as_v1(fault)), write_id(request_id), ()))
