"""The HTTP endpoints that move no tensors: health, status, control, repository (spec 2, 4-7)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine
from time import monotonic_ns
from typing import Any

from google.protobuf.json_format import MessageToDict

from fastserve.dialects.triton_v1.replies import BINARY, NV_STATUS
from fastserve.dialects.triton_v1.routes import Target
from fastserve.dialects.triton_v1.service import Service
from fastserve.dialects.triton_v1.shared_memory import list_regions, register_cuda
from fastserve.dialects.triton_v1.status import write_status
from fastserve.dialects.triton_v1.text import print_lines
from fastserve.engine import Took
from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.wire.call import Call

TEXT = b"text/plain"
JSON = b"application/json"


class Page:
    """The endpoint of one target."""

    __slots__ = ("_service", "_target")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._target = target

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        target = self._target
        if target.place == "modelcontrol":
            return self._control(call)
        if target.place == "repository":
            return self._index(call)
        _ANSWERS[target.place](self, call)
        return None

    # --- health ---------------------------------------------------------------------------------

    def _health(self, call: Call) -> None:
        good = self._target.action == "live" or self._service.readiness.ready
        self._reply(call, 200 if good else 400)
        self._service.statistics.health.add(monotonic_ns() - call.received_ns)

    # --- status and repository --------------------------------------------------------------------

    def _status(self, call: Call) -> None:
        self._show(
            call, lambda: write_status(self._service, self._target.name), self._service.statistics.status
        )

    async def _index(self, call: Call) -> None:
        index = await write_index(self._service)
        self._show(call, lambda: index, self._service.statistics.repository)

    def _show(self, call: Call, write: Callable[[], Any], took: Took | None = None) -> None:
        try:
            message = write()
        except ServeError as fault:
            self._refuse(call, fault)
            return
        body, content_type = encode(message, self._choose_format(call))
        self._reply(call, 200, body, content_type)
        if took is not None:
            took.add(monotonic_ns() - call.received_ns)

    def _choose_format(self, call: Call) -> str:
        target = self._target
        json_too = target.place == "status"
        if json_too and not target.format and call.header(b"accept") == JSON:
            return "json"
        return (
            target.format if target.format == "binary" or (json_too and target.format == "json") else "text"
        )

    # --- control --------------------------------------------------------------------------------

    async def _control(self, call: Call) -> None:
        control, name = self._service.control, self._target.name
        work: Awaitable[None] = (control.load if self._target.action == "load" else control.unload)(name)
        try:
            await work
        except ServeError as fault:
            self._refuse(call, fault)
            return
        self._reply(call, 200)
        self._service.statistics.control.add(monotonic_ns() - call.received_ns)

    def _shared_memory(self, call: Call) -> None:
        target, shared = self._target, self._service.shared
        if target.action == "status":
            self._show(call, lambda: list_regions(shared, load("triton_v1").SharedMemoryStatus()))
            return
        try:
            if target.action == "register":
                shared.register(target.name, target.key, target.offset, target.byte_size)
            elif target.action == "cudaregister":
                register_cuda(target.name, bytes(call.body))
            elif target.action == "unregister":
                shared.unregister(target.name)
            else:
                shared.unregister_all()
        except ServeError as fault:
            self._refuse(call, fault)
        else:
            self._reply(call, 200)

    # --- replies --------------------------------------------------------------------------------

    def _reply(self, call: Call, status: int, body: bytes = b"", content_type: bytes = b"") -> None:
        call.reply(status, body, content_type, ((NV_STATUS, self._service.status_line(None)),))

    def _refuse(self, call: Call, fault: ServeError) -> None:
        call.reply(400, b"", b"", ((NV_STATUS, self._service.status_line(fault)),))


_ANSWERS: dict[str, Callable[[Page, Call], None]] = {
    "health": Page._health,
    "status": Page._status,
    "sharedmemorycontrol": Page._shared_memory,
}


async def write_index(service: Service) -> Any:
    """ModelRepositoryIndex: every model folder, loaded or not (spec 7)."""
    message = load("triton_v1").ModelRepositoryIndex()
    for name in await service.control.names():
        message.models.add(name=name)
    return message


def encode(message: Any, form: str) -> tuple[bytes, bytes]:
    """A message and its content type as "binary", "json" (names as in the proto) or text."""
    if form == "binary":
        return message.SerializeToString(), BINARY
    if form == "json":
        plain = MessageToDict(message, preserving_proto_field_name=True)
        return json.dumps(plain, separators=(",", ":")).encode(), JSON
    return print_lines(message).encode(), TEXT
