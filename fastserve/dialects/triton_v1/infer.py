"""POST /api/infer/MODEL[/VERSION]: header in NV-InferRequest, tensors in the body (spec 3)."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

from fastserve.dialects.triton_v1.header import RequestHeader, read_header
from fastserve.dialects.triton_v1.hot import HotDoor
from fastserve.dialects.triton_v1.inputs import Body
from fastserve.dialects.triton_v1.lookup import LATEST
from fastserve.dialects.triton_v1.replies import answer, refuse
from fastserve.dialects.triton_v1.routes import Target
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.version import Version
from fastserve.wire.call import Call

HEADER = b"nv-inferrequest"
NO_HEADER = b"The request header should contain 'NV-InferRequest'"


class Infer:
    """The endpoint of one target."""

    __slots__ = ("__weakref__", "_binary", "_door", "_doorless", "_name", "_number", "_service")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._name = target.name
        self._number = target.version
        self._binary = target.format == "binary"
        self._door: HotDoor | None = None
        self._doorless: Version | None = None  # the version last found to have no fast path

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        given = call.header(HEADER)
        if not given and not any(name == HEADER for name, _ in call.headers):
            call.reply(400, NO_HEADER, b"")
            return None
        version = self._service.catalog.available(self._name, self._number)
        door = self._door
        if door is None or door.version is not version:
            door = self._open_door(version)
        if door is not None and door.start(call, given):
            return None
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            call.reply(400, b"", b"")
            return None
        return self._answer(call, header)

    def _open_door(self, version: Version | None) -> HotDoor | None:
        if version is None or version is self._doorless:
            return None
        self._door = HotDoor.of(self._service, version, binary=self._binary)
        self._doorless = version if self._door is None else None
        self._service.keepers.add(self)
        return self._door

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        if self._door is not None and self._door.version is version:
            self._door = None
        if self._doorless is version:
            self._doorless = None

    async def _answer(self, call: Call, header: RequestHeader) -> None:
        service = self._service
        number = LATEST if self._number is None else self._number
        try:
            async with service.infer(self._name, number, header, partial(Body, call.body)) as found:
                body = b"".join([*found.raws, found.trailer(binary=self._binary)])
                line = found.line
        except ServeError as fault:
            refuse(call, service, header.id, fault)
        else:
            answer(call, service, line, body)
