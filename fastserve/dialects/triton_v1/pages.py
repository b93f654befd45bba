"""The HTTP endpoints that move no tensors: health, status, control, repository, regions (spec 2, 4-7)."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict

from fastserve.dialects.triton_v1.calls import Calls
from fastserve.dialects.triton_v1.replies import BINARY, NV_STATUS
from fastserve.dialects.triton_v1.routes import Target
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import ServeError
from fastserve.protos.text import print_lines
from fastserve.serving.showing import show_answer
from fastserve.wire.call import Call

TEXT = b"text/plain"
JSON = b"application/json"


class Page:
    """The endpoint of one target."""

    __slots__ = ("_calls", "_service", "_target")

    def __init__(self, service: Service, calls: Calls, target: Target) -> None:
        self._service, self._calls, self._target = service, calls, target

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        return show_answer(call, partial(self._ask, call), self._show, self._refuse)

    def _ask(self, call: Call) -> Any:
        """What to show, or something to wait for."""
        target, calls = self._target, self._calls
        if target.place == "repository":
            return calls.index()
        if target.place == "modelcontrol":
            return calls.control(target.name, load=target.action == "load")
        if target.place == "health":
            return calls.health(target.action)
        return calls.status(target.name) if target.place == "status" else self._share(call)

    def _share(self, call: Call) -> Any:
        """The same of regions."""
        target, shared = self._target, self._service.regions
        if target.action == "status":
            return self._calls.regions()
        if target.action == "register":
            shared.register(target.name, target.key, target.offset, target.byte_size)
            return None
        if target.action == "cudaregister":
            handle = bytes(call.body)
            return self._calls.register_cuda(target.name, handle, target.device, target.byte_size)
        return shared.unregister(target.name) if target.action == "unregister" else shared.unregister_all()

    def _show(self, call: Call, shown: Any) -> None:
        """Reply with a message, None for nothing; yes and no are told by the status."""
        if shown is None or isinstance(shown, bool):
            self._reply(call, 400 if shown is False else 200)
        else:
            self._reply(call, 200, *encode(shown, self._choose_format(call)))

    def _choose_format(self, call: Call) -> str:
        asked, has_json = self._target.format, self._target.place == "status"
        if has_json and not asked and call.header(b"accept") == JSON:
            return "json"
        return asked if asked == "binary" or (has_json and asked == "json") else "text"

    def _reply(self, call: Call, status: int, body: bytes = b"", content_type: bytes = b"") -> None:
        call.reply(status, body, content_type, ((NV_STATUS, self._service.status_line(None)),))

    def _refuse(self, call: Call, fault: ServeError) -> None:
        call.reply(400, b"", b"", ((NV_STATUS, self._service.status_line(fault)),))


def encode(message: Any, form: str) -> tuple[bytes, bytes]:
    """A message and its content type as "binary", "json" (names as in the proto) or text."""
    if form == "binary":
        return message.SerializeToString(), BINARY
    if form == "json":
        plain = MessageToDict(message, preserving_proto_field_name=True)
        return json.dumps(plain, separators=(",", ":")).encode(), JSON
    return print_lines(message).encode(), TEXT
