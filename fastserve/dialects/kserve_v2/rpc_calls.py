"""The calls of `calls` over gRPC: messages of the protobuf library read, answers written as such.

An answer is what HTTP shows, put into the message's form; field names are those of the JSON.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.json_format import ParseDict

from fastserve._ext.json_value import Members
from fastserve.dialects.kserve_v2.calls import CALLS, Asked
from fastserve.dialects.kserve_v2.errors import in_own_words
from fastserve.dialects.kserve_v2.operations import SERVICE, Operation
from fastserve.dialects.kserve_v2.service import Service
from fastserve.dialects.kserve_v2.settings import LOG_SETTINGS, RANGES
from fastserve.errors import ServeError, internal, invalid, unsupported
from fastserve.protos import load
from fastserve.serving.device_regions import HANDLE_BYTES
from fastserve.serving.model_control import LoadOverride
from fastserve.serving.rpc import parse_message, serialize
from fastserve.wire.grpc import Method, Rpc

# A setting's type -> the field of the oneof it is in, and what the original calls that.
_LOG_KINDS = {
    bool: ("bool_param", "boolean"),
    int: ("uint32_param", "int32"),
    str: ("string_param", "string"),
}
# What the field is called that holds all of an answer.
_WRAPPED = {
    "live": "live",
    "ready": "ready",
    "model_ready": "ready",
    "index": "models",
    "model_config": "config",
}


def make_method(service: Service, operation: Operation) -> Method:
    """The RPC of an operation, over bytes."""
    messages, name, do = load("kserve_v2"), operation.name, CALLS[operation.name]
    read = partial(parse_message, getattr(messages, f"{operation.rpc}Request"), internal)
    make = getattr(messages, f"{operation.rpc}Response")

    async def run(request: Any, rpc: Rpc) -> Any:
        try:
            shown = do(service, read_asked(name, request))
            answer = await shown if isinstance(shown, Awaitable) else shown
        except ServeError as fault:
            raise in_own_words(fault) from None
        # A config may say more than the message of its time knows.
        return ParseDict(_form(name, answer), make(), ignore_unknown_fields=name == "model_config")

    return Method(SERVICE + operation.rpc, read, run, serialize, scope=operation.scope)


def read_asked(name: str, request: Any) -> Asked:
    """What a message asks for."""
    model = getattr(request, "model_name", "") or getattr(request, "name", "")
    asked = Asked(model, getattr(request, "version", ""), getattr(request, "repository_name", ""))
    if name in READERS and getattr(request, "settings", True):  # no settings: nothing is changed
        asked.given = partial(READERS[name], request)
    return asked


def _form(name: str, answer: Any) -> dict[str, Any]:
    """An answer as the JSON form of its message."""
    if name in _WRAPPED:
        return {_WRAPPED[name]: answer}
    if name.endswith("_status"):
        return {"regions": {region["name"]: region for region in answer}}
    if name == "trace":
        values = {key: [value] if isinstance(value, str) else value for key, value in answer.items()}
        return {"settings": {key: {"value": value} for key, value in values.items()}}
    if name == "logging":
        return {"settings": {key: {_LOG_KINDS[type(value)][0]: value} for key, value in answer.items()}}
    return answer or {}


# --- what messages say; all raise ServeError ------------------------------------------------------------


def _read_override(request: Any) -> LoadOverride | None:
    override = LoadOverride()
    for name, value in request.parameters.items():
        if name == "config":
            override.config = _read_load_parameter(name, value, "string_param")
        elif name.startswith("file:"):
            override.files[name.removeprefix("file:")] = _read_load_parameter(name, value, "bytes_param")
        else:
            raise invalid(f"unrecognized load parameter '{name}'.")
    return override if override.config is not None or override.files else None


def _read_load_parameter(name: str, value: Any, wanted: str) -> Any:
    if value.WhichOneof("parameter_choice") != wanted:
        raise invalid(f"invalid value type for load parameter '{name}', expected {wanted}.")
    return getattr(value, wanted)


def _read_dependents(request: Any) -> bool:
    """Whether models that only this one needed are unloaded too."""
    if "unload_dependents" not in request.parameters:
        return False
    value = request.parameters["unload_dependents"]
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return bool(value.bool_param)


def _read_cuda_region(request: Any) -> tuple[bytes, int, int]:
    if len(request.raw_handle) != HANDLE_BYTES:
        raise invalid("failed to register shared memory region: invalid args")
    return request.raw_handle, request.device_id, request.byte_size


def _read_trace(request: Any) -> Members:
    """As the JSON form has them: strings, a list of levels, None for what is to be reset."""
    found: list[tuple[bytes, Any]] = []
    for name, given in request.settings.items():
        values = [text.encode() for text in given.value]
        if name != "trace_level" and len(values) > 1 and name in RANGES:
            raise invalid(f"expect only 1 value for '{name}'")
        value: Any = values if name == "trace_level" else values[0] if values else None
        found.append((name.encode(), value if values else None))
    return Members(found)


def _read_log(request: Any) -> dict[str, bool | int | str]:
    """Unknown settings are passed over."""
    changes: dict[str, bool | int | str] = {}
    for name, given in request.settings.items():
        if name == "log_file":
            raise unsupported("log file location can not be updated through network protocol")
        if name not in LOG_SETTINGS:
            continue
        field, called = _LOG_KINDS[LOG_SETTINGS[name]]
        if given.WhichOneof("parameter_choice") != field:
            raise invalid(f"expect {called} for '{name}'")
        changes[name] = getattr(given, field)
    return changes


READERS: dict[str, Callable[[Any], Any]] = {
    "index": lambda request: request.ready,
    "load": _read_override,
    "unload": _read_dependents,
    "system_register": lambda request: (request.key, request.offset, request.byte_size),
    "cuda_register": _read_cuda_region,
    "trace": _read_trace,
    "logging": _read_log,
}
