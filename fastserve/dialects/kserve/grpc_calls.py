"""The calls of `calls` over gRPC, with messages of the protobuf library.

An answer is HTTP's JSON put into the form of its message: the fields have the same names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.json_format import ParseDict

from fastserve._ext.json_value import Members
from fastserve.dialects.kserve.calls import CALLS, CallArguments
from fastserve.dialects.kserve.routes import SERVICE, Operation
from fastserve.dialects.kserve.service import LOG_SETTINGS, RANGES, KServeService, triton_error
from fastserve.errors import ServeError, internal, invalid, unsupported
from fastserve.net.grpc import Method, Rpc
from fastserve.protos import load
from fastserve.serving.client_shared_memory import HANDLE_BYTES
from fastserve.serving.model_control import LoadOverride
from fastserve.serving.rpc import parse_message, serialize

# A setting's type -> its field of the oneof, and Triton's name for that.
_LOG_KINDS = {
    bool: ("bool_param", "boolean"),
    int: ("uint32_param", "int32"),
    str: ("string_param", "string"),
}
ANY_BYTES = 1 << 62
# The field that holds the whole answer.
_WRAPPED = {
    "live": "live",
    "ready": "ready",
    "model_ready": "ready",
    "index": "models",
    "model_config": "config",
}


def make_method(service: KServeService, operation: Operation) -> Method:
    """Return the RPC of an operation, over bytes."""
    messages, name, do = load("kserve_v2"), operation.name, CALLS[operation.name]
    read = partial(parse_message, getattr(messages, f"{operation.rpc}Request"), internal)
    make = getattr(messages, f"{operation.rpc}Response")

    async def run(request: Any, rpc: Rpc) -> Any:
        try:
            shown = do(service, read_arguments(name, request))
            answer = await shown if isinstance(shown, Awaitable) else shown
        except ServeError as fault:
            raise triton_error(fault) from None
        # A config may have newer fields than the message.
        return ParseDict(_form(name, answer), make(), ignore_unknown_fields=name == "model_config")

    most = _most_bytes(service, name)
    return Method(SERVICE + operation.rpc, read, run, serialize, scope=operation.scope, most_bytes=most)


def _most_bytes(service: KServeService, name: str) -> int:
    """Return the most bytes of a request, 0 for the default.

    A load may bring a model's files, where clients may send code.
    """
    return ANY_BYTES if name == "load" and service.admin.file_overrides else 0


def read_arguments(name: str, request: Any) -> CallArguments:
    """Return the arguments in a message."""
    model = getattr(request, "model_name", "") or getattr(request, "name", "")
    arguments = CallArguments(model, getattr(request, "version", ""), getattr(request, "repository_name", ""))
    if name in READERS and getattr(request, "settings", True):  # no settings: nothing is changed
        arguments.given = partial(READERS[name], request)
    return arguments


def _form(name: str, answer: Any) -> dict[str, Any]:
    """Return an answer as the JSON form of its message."""
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


# --- read messages; all raise ServeError --------------------------------------------------------------


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
    """Return True when models that only this one needed are unloaded too."""
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
    """Return trace settings in their JSON form: strings, a list of levels, None for a reset."""
    found: list[tuple[bytes, Any]] = []
    for name, given in request.settings.items():
        values = [text.encode() for text in given.value]
        if name != "trace_level" and len(values) > 1 and name in RANGES:
            raise invalid(f"expect only 1 value for '{name}'")
        value: Any = values if name == "trace_level" else values[0] if values else None
        found.append((name.encode(), value if values else None))
    return Members(found)


def _read_log(request: Any) -> dict[str, bool | int | str]:
    """Read changes of log settings; unknown settings are ignored."""
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
