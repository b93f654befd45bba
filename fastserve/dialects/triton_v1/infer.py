"""POST /api/infer/MODEL[/VERSION]: header in NV-InferRequest, tensors in the body (spec 3)."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

from fastserve.dialects.triton_v1.header import RequestHeader, read_header
from fastserve.dialects.triton_v1.inputs import Body
from fastserve.dialects.triton_v1.lookup import LATEST
from fastserve.dialects.triton_v1.pages import BINARY, NV_STATUS
from fastserve.dialects.triton_v1.routes import Target
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import ConfigError, ServeError
from fastserve.wire.call import Call

NV_RESPONSE = b"NV-InferResponse"
CONTENT_TYPE = (b"Content-Type", BINARY)
NO_HEADER = b"The request header should contain 'NV-InferRequest'"


class Infer:
    """The endpoint of one target."""

    __slots__ = ("_binary", "_name", "_number", "_service")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._name = target.name
        self._number = LATEST if target.version is None else target.version
        self._binary = target.format == "binary"

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        given = call.header(b"nv-inferrequest")
        if not given:
            call.reply(400, NO_HEADER, b"")
            return None
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            call.reply(400, b"", b"")
            return None
        return self._answer(call, header)

    async def _answer(self, call: Call, header: RequestHeader) -> None:
        service = self._service
        make_data = partial(Body, call.body)
        try:
            async with service.infer(self._name, self._number, header, make_data) as answer:
                trailer = answer.binary if self._binary else answer.lines.encode()
                body = b"".join([*answer.raws, trailer])
                line = answer.line
        except ServeError as fault:
            self._reply(call, 400, b"", f"id: {header.id}" if header.id else "", fault)
        else:
            self._reply(call, 200, body, line, None)

    def _reply(self, call: Call, status: int, body: bytes, line: str, fault: ServeError | None) -> None:
        headers = (
            (NV_RESPONSE, line.encode()),
            (NV_STATUS, self._service.status_line(fault)),
            CONTENT_TYPE,
        )
        call.reply(status, body, b"", headers)
