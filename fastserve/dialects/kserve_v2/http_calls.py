"""The calls of `calls` over HTTP: bodies read, answers written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from fastserve.codec.base64_text import decode_base64
from fastserve.codec.client_text import to_bytes, to_text
from fastserve.dialects.kserve_v2.calls import CALLS, Asked, Shown
from fastserve.dialects.kserve_v2.errors import error_body
from fastserve.dialects.kserve_v2.operations import Target
from fastserve.dialects.kserve_v2.service import JSON, TEXT, Service
from fastserve.dialects.kserve_v2.settings import LOG_SETTINGS
from fastserve.dialects.kserve_v2.values import (
    Value,
    as_bool,
    as_string,
    as_uint,
    find,
    members_of,
    need,
    read_json,
)
from fastserve.errors import ServeError, internal, invalid, unsupported
from fastserve.serving.device_regions import HANDLE_BYTES
from fastserve.serving.model_control import LoadOverride
from fastserve.serving.showing import show_answer
from fastserve.wire.call import Call

Body = bytes | bytearray
_AS: dict[type, Callable[[Value], bool | int | str]] = {bool: as_bool, int: as_uint, str: as_string}


class Ask:
    """The endpoint of a target."""

    __slots__ = ("_do", "_read", "_service", "_target")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._target = target
        self._do = CALLS[target.asked]
        self._read = READERS.get(target.asked)

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        parts, body = self._target.parts, call.body
        name = parts.get("model") or parts.get("region", "")
        asked = Asked(name, self._target.version, parts.get("repository", ""), over_http=True)
        if self._read is not None and call.method == "POST":
            asked.given, asked.given_bytes = partial(self._read, body), len(body)
        return show_answer(call, partial(self._do, self._service, asked), show, self._refuse)

    def _refuse(self, call: Call, fault: ServeError) -> None:
        self._service.refuse(call, fault, self._target.model)


def show(call: Call, value: Shown) -> None:
    """Reply with a value as JSON; yes and no are told by the status, and None is that it is done."""
    if value is None:
        call.reply(200, b"", JSON)
    elif isinstance(value, bool):
        call.reply(200 if value else 400, b"", TEXT)
    else:
        call.reply(200, msgspec.json.encode(value), JSON)


def answer_not_found(call: Call) -> None:
    call.reply(404, error_body("Not Found"), TEXT)


def answer_wrong_verb(call: Call) -> None:
    # To HEAD as well, as the original does; the connection ends, so that it cannot be taken for a next reply.
    call.reply(405, error_body("Method Not Allowed"), TEXT, close=call.method == "HEAD", even_to_head=True)


# --- what bodies say; all raise ServeError --------------------------------------------------------------


def _read_region(body: Body) -> tuple[str, int, int]:
    request = read_json(body)
    key = as_string(_required(request, "key"))
    found, offset = find(request, "offset")
    return key, as_uint(offset) if found else 0, as_uint(_required(request, "byte_size"))


def _read_cuda_region(body: Body) -> tuple[bytes, int, int]:
    request = read_json(body)
    text = as_string(need(_required(request, "raw_handle"), "b64"))
    byte_size, device = as_uint(need(request, "byte_size")), as_uint(need(request, "device_id"))
    handle = decode_base64(to_bytes(text)) or b""
    if len(handle) != HANDLE_BYTES:
        raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle, device, byte_size


def _required(request: Value, field: str) -> Value:
    found, value = find(request, field)
    if not found:
        raise invalid(f"Shared memory register request has no '{field}' field")
    return value


def _read_log(body: Body) -> dict[str, bool | int | str]:
    """null and unknown settings are passed over."""
    given = read_json(body)  # all but an object changes nothing, as in the original
    if find(given, "log_file")[1] is not None:
        raise unsupported("log file location can not be updated through network protocol")
    values = ((name, kind, find(given, name)[1]) for name, kind in LOG_SETTINGS.items())
    return {name: _AS[kind](value) for name, kind, value in values if value is not None}


def _read_index(body: Body) -> bool:
    """Whether only ready models are wanted."""
    found, ready = find(read_json(body), "ready") if body else (False, None)
    return found and as_bool(ready)


def _read_load(body: Body) -> LoadOverride | None:
    """What a load brings along, None for nothing."""
    found, parameters = find(read_json(body), "parameters") if body else (False, None)
    override = LoadOverride()
    for key, value in members_of(parameters) if found else ():
        name, text = to_text(key), as_string(value)
        if name == "config":
            override.config = text
        elif name.startswith("file:"):
            data = decode_base64(to_bytes(text))
            if data is None:
                raise invalid("failed to decode the file's content: it is not base64")
            override.files[name.removeprefix("file:")] = data
        else:
            raise internal("unexpected error on creating Triton parameter")
    return override if override.config is not None or override.files else None


def _read_unload(body: Body) -> bool:
    """Whether models that only this one needed are unloaded too. The original unloads whatever the body is:
    what it cannot read says no."""
    try:
        _, parameters = find(read_json(body), "parameters")
    except ServeError:
        return False
    return find(parameters, "unload_dependents")[1] is True


READERS: dict[str, Callable[[Body], Any]] = {
    "system_register": _read_region,
    "cuda_register": _read_cuda_region,
    "trace": read_json,
    "logging": _read_log,
    "index": _read_index,
    "load": _read_load,
    "unload": _read_unload,
}
