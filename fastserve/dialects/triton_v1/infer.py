"""POST /api/infer/MODEL[/VERSION]: header in NV-InferRequest, tensors in the body (spec 3)."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

from fastserve.dialects.triton_v1.general import GeneralRequest
from fastserve.dialects.triton_v1.header import read_header
from fastserve.dialects.triton_v1.http_fast import FastHttp
from fastserve.dialects.triton_v1.inputs import Body
from fastserve.dialects.triton_v1.lookup import LATEST
from fastserve.dialects.triton_v1.replies import HttpReplies
from fastserve.dialects.triton_v1.routes import Target
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import ConfigError
from fastserve.serving.paths import LastPath
from fastserve.serving.slow_path import answer_slowly
from fastserve.wire.call import Call

HEADER = b"nv-inferrequest"
NO_HEADER = b"The request header should contain 'NV-InferRequest'"


class Infer:
    """The endpoint of one target."""

    __slots__ = ("_available", "_fast", "_name", "_number", "_replies", "_service")

    def __init__(self, service: Service, target: Target) -> None:
        self._service, self._available = service, service.catalog.available
        self._name, self._number = target.name, target.version
        replies = self._replies = HttpReplies(service, binary=target.format == "binary")
        self._fast: LastPath[FastHttp] = LastPath(
            service.keepers, lambda version: FastHttp.open(service, version, replies)
        )

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        given = call.header(HEADER)
        if not given and not any(name == HEADER for name, _ in call.headers):
            call.reply(400, NO_HEADER, b"")
            return None
        version, fast = self._available(self._name, self._number), self._fast.path
        if fast is None or fast.version is not version:
            fast = self._fast.find(version)
        if fast is not None and fast.start(call, given):
            return None
        return self._answer(call, given)

    def _answer(self, call: Call, given: bytes) -> Coroutine[Any, Any, None] | None:
        """The general path."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            call.reply(400, b"", b"")
            return None
        service, number = self._service, LATEST if self._number is None else self._number
        make_data = partial(Body, call.body)
        request = GeneralRequest(service, self._replies, call, self._name, number, header, make_data)
        return answer_slowly(call, request, service.traffic)
