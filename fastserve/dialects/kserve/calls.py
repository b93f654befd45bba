"""Calls besides inference: health, metadata, statistics, settings, memory, models (spec 2, 6 to 9).

The first half are functions of plain values, for both transports. The second half is their HTTP: bodies are
read and answers written as JSON. `grpc_calls` is their gRPC; `routes` has the paths and RPCs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from fastserve import __version__
from fastserve.codec.json_text import decode_base64, to_bytes, to_text
from fastserve.dialects.kserve.json_values import (
    Value,
    as_bool,
    as_string,
    as_uint,
    find,
    members_of,
    need,
    read_json,
)
from fastserve.dialects.kserve.routes import KServeTarget
from fastserve.dialects.kserve.service import (
    LOG_SETTINGS,
    TEXT,
    KServeService,
    error_body,
    read_trace,
    read_version,
)
from fastserve.engine import BatchCounts, counts_of
from fastserve.errors import Kind, ServeError, internal, invalid, unsupported
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.repository.catalog import Catalog
from fastserve.repository.triton_config.reading import config_json
from fastserve.repository.version import Model, Version
from fastserve.serving.client_shared_memory import HANDLE_BYTES, DeviceRegion, Region
from fastserve.serving.dialect import show_answer
from fastserve.serving.model_control import LoadOverride, must_be_explicit, triton_state
from fastserve.serving.model_view import ModelView, TensorView
from fastserve.tensor import kserve_name

SERVER_NAME = "triton"
"""The name that Triton's clients look for; `version` tells this server from it."""

EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
)  # fmt: skip

_FILES = " FASTSERVE_ADMIN_FILE_OVERRIDES=true does too, and FASTSERVE_KEYS with `fastserve tritonserver`."
_ENABLE = "Start the server with '--admin-%s' to enable."

# Fields of InferStatistics and of VersionCounts.
KINDS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip


@dataclass(slots=True)
class CallArguments:
    """The arguments of one call, from either transport.

    `name` is a model's or a region's. `given` reads the rest of `given_bytes` bytes, None without any. Some
    error texts differ over HTTP.
    """

    name: str = ""
    version: str = ""
    repository: str = ""
    given: Callable[[], Any] | None = None
    given_bytes: int = 0
    over_http: bool = False

    def read(self) -> Any:
        """Return the arguments besides names. Raises ServeError."""
        return None if self.given is None else self.given()


# --- health and metadata --------------------------------------------------------------------------------


def show_live(service: KServeService, arguments: CallArguments) -> bool:
    return True


def show_ready(service: KServeService, arguments: CallArguments) -> bool:
    return service.readiness.ready


def show_model_ready(service: KServeService, arguments: CallArguments) -> bool:
    ready = service.catalog.ready(arguments.name, service.read_number(arguments.name, arguments.version))
    if not ready:
        service.catalog.check_allowed(arguments.name)
    if arguments.over_http and not ready:
        raise invalid("Model version not ready")
    return ready


def show_server(service: KServeService, arguments: CallArguments) -> dict[str, Any]:
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


def show_model(service: KServeService, arguments: CallArguments) -> dict[str, Any]:
    """Return the metadata of a model: all its ready versions, or the one in the path. Raises ServeError."""
    view = service.find(arguments.name, arguments.version)
    ready = [view.version] if arguments.version else service.catalog.models[arguments.name].available()
    config = view.version.config
    triton = config.triton or {}
    return {
        "name": view.model,
        "versions": [str(version.number) for version in ready],
        "platform": str(triton.get("platform") or triton.get("backend") or config.backend),
        "inputs": [_describe(view, tensor) for tensor in view.inputs.values()],
        "outputs": [_describe(view, tensor) for tensor in view.outputs.values()],
    }


def _describe(view: ModelView, tensor: TensorView) -> dict[str, Any]:
    shape = list(view.full_dims(tensor))
    return {"name": tensor.name, "datatype": kserve_name(tensor.dtype), "shape": shape}


def show_config(service: KServeService, arguments: CallArguments) -> Mapping[str, Any]:
    """Return the configuration as Triton's ModelConfig message in JSON, defaults included.

    Raises ServeError.
    """
    version = service.find(arguments.name, arguments.version).version
    shown = config_json(version.config, version)
    scheduling = shown.get("ensemble_scheduling", {})
    if not scheduling.get("max_inflight_requests"):  # unknown to Triton 24.10
        scheduling.pop("max_inflight_requests", None)
    if scheduling:
        shown.setdefault("model_transaction_policy", {"decoupled": False})
    return shown


# --- statistics: of every dialect's requests, since the version was loaded -------------------------------


def show_statistics(service: KServeService, arguments: CallArguments) -> dict[str, Any]:
    """Return one entry per ready version, of one model or of all. Raises ServeError.

    A request that was refused before the model's queue is not counted, as in Triton.
    """
    chosen = _choose(service.catalog, arguments.name, read_version(arguments.version))
    return {"model_stats": [_show_counts(version) for version in chosen]}


def _choose(catalog: Catalog, name: str, number: int | None) -> list[Version]:
    if not name:
        return [version for known in sorted(catalog.models) for version in catalog.models[known].available()]
    if name not in catalog.models or not catalog.models[name].available():
        catalog.explain_absence(name)
        raise invalid(f"requested model '{name}' is not available")
    if number is None:
        return catalog.models[name].available()
    version = catalog.available(name, number)
    if version is None:
        raise invalid(f"requested model version is not available for model '{name}'")
    return [version]


def _show_counts(version: Version) -> dict[str, Any]:
    counts = counts_of(version)
    return {
        "name": version.model,
        "version": str(version.number),
        "last_inference": counts.last_ms,
        "inference_count": counts.inferences,
        "execution_count": counts.executions,
        "inference_stats": {kind: msgspec.to_builtins(getattr(counts, kind)) for kind in KINDS},
        "response_stats": msgspec.to_builtins(counts.responses, str_keys=True),
        "batch_stats": [_show_batch(batch) for batch in counts.batches],
        "memory_usage": [],
    }


def _show_batch(batch: BatchCounts) -> dict[str, Any]:
    times = {
        "compute_input": batch.input_ns,
        "compute_infer": batch.infer_ns,
        "compute_output": batch.output_ns,
    }
    return {
        "batch_size": batch.rows,
        **{stage: {"count": batch.runs, "ns": ns} for stage, ns in times.items()},
    }


# --- settings -------------------------------------------------------------------------------------------


async def set_trace(service: KServeService, arguments: CallArguments) -> dict[str, Any]:
    if arguments.name and service.catalog.available(arguments.name, None) is None:
        service.catalog.check_allowed(arguments.name)
        raise invalid(f"Request for unknown model : {arguments.name}")
    if arguments.given is not None:
        changes = read_trace(arguments.read(), gap="" if arguments.over_http else " ")
        await service.traces.change(changes, arguments.name)
    return dict(service.traces.show(arguments.name))


async def set_logging(service: KServeService, arguments: CallArguments) -> dict[str, Any]:
    if arguments.given is not None:
        if not service.admin.log_settings:
            raise unsupported("Changes of log settings are disabled. " + _ENABLE % "log-settings")
        await service.log.change(arguments.read(), arguments.over_http)
    return service.log.show()


# --- client memory --------------------------------------------------------------------------------------


def show_regions(service: KServeService, arguments: CallArguments) -> list[dict[str, Any]]:
    """Return the registered files in shared memory. Raises ServeError NOT_FOUND."""
    return [
        {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size}
        for one in service.regions.list_files(arguments.name)
    ]


def register_region(service: KServeService, arguments: CallArguments) -> Awaitable[None] | None:
    _must_be_named(service, arguments, "system")
    key, offset, byte_size = arguments.read()
    return service.regions.register(arguments.name, key, offset, byte_size)


def show_cuda_regions(service: KServeService, arguments: CallArguments) -> list[dict[str, Any]]:
    """Return the registered memory of GPUs. Raises ServeError NOT_FOUND."""
    return [
        {"name": one.name, "device_id": one.device, "byte_size": one.byte_size}
        for one in service.regions.list_devices(arguments.name)
    ]


async def register_cuda_region(service: KServeService, arguments: CallArguments) -> None:
    """Register memory of a GPU.

    Raises ServeError; without a GPU as Triton does for a handle it cannot open.
    """
    _must_be_named(service, arguments, "cuda")
    handle, device, byte_size = arguments.read()
    try:
        await service.regions.register_device(arguments.name, handle, device, byte_size)
    except ServeError as fault:
        if fault.kind is not Kind.INVALID_ARGUMENT:
            raise
        raise invalid("failed to register shared memory region: invalid args") from None


def unregister(
    kind: type[Region | DeviceRegion], service: KServeService, arguments: CallArguments
) -> Awaitable[None] | None:
    """Unregister one region, or all of a kind for "". Raises ServeError."""
    if arguments.name:
        return service.regions.unregister(arguments.name, kind)
    return service.regions.unregister_all(kind)


def _must_be_named(service: KServeService, arguments: CallArguments, kind: str) -> None:
    service.regions.must_be_allowed()
    if arguments.over_http and not arguments.name:
        raise invalid(f"'region name' is necessary to register {kind} shared memory region")


# --- the model repository -------------------------------------------------------------------------------


async def show_index(service: KServeService, arguments: CallArguments) -> list[dict[str, Any]]:
    """Return every model and version with its state, ordered by name. Raises ServeError."""
    if not arguments.over_http:
        check_repository(arguments.repository)
    only_ready, models = arguments.read(), service.catalog.models
    names = sorted({*models, *(await service.repository.names())})
    entries = [entry for name in names for entry in _list_model(name, models.get(name))]
    return [entry for entry in entries if not only_ready or entry.get("state") == "READY"]


def _list_model(name: str, model: Model | None) -> list[dict[str, Any]]:
    if model is not None and model.versions:
        return [_list_version(model.versions[number]) for number in sorted(model.versions)]
    if model is not None and model.error is not None:
        return [{"name": name, "version": "1", "state": "UNAVAILABLE", "reason": model.error.message}]
    return [{"name": name}]


def _list_version(version: Version) -> dict[str, Any]:
    state, reason = triton_state(version)
    entry = {"name": version.model, "version": str(version.number), "state": state}
    return {**entry, "reason": reason} if reason else entry


async def load(service: KServeService, arguments: CallArguments) -> None:
    """Load one model and wait for it. Raises ServeError with Triton's texts."""
    check_repository(arguments.repository)
    override, name = await service.offload(arguments.given_bytes, arguments.read), arguments.name
    has_files = override is not None and bool(override.files)
    if has_files and not service.admin.file_overrides:  # they run as code
        raise unsupported("Files in a load are disabled. " + _ENABLE % "file-overrides" + _FILES)
    must_be_explicit(service.repository)
    check_name(name)
    failed = internal(f"failed to load '{name}', failed to poll from model repository")
    if has_files and override.config is None:
        raise failed
    try:
        await service.repository.load(name, override)
    except ServeError as fault:
        if fault.kind is Kind.NOT_FOUND:
            raise failed from None
        reasons = _reasons(service.catalog.models.get(name)) or fault.message
        raise invalid(f"load failed for model '{name}': {reasons}") from None


def _reasons(model: Model | None) -> str:
    """Return why versions of a model did not load, "" for none."""
    versions = sorted(model.versions.items()) if model else ()
    errors = [(number, version.error.message) for number, version in versions if version.error is not None]
    return "".join(f"version {number} is at UNAVAILABLE state: {reason};\n" for number, reason in errors)


async def unload(service: KServeService, arguments: CallArguments) -> None:
    """Unload one model; a model that is not loaded is no error. Raises ServeError."""
    check_repository(arguments.repository)
    dependents = arguments.read()
    must_be_explicit(service.repository)
    try:
        await service.repository.unload(arguments.name, dependents)
    except ServeError as fault:
        if fault.kind is not Kind.NOT_FOUND:
            raise


def check_repository(name: str) -> None:
    """Raise ServeError for a repository named in the path: the only one has no name."""
    if name:
        raise unsupported("'repository_name' specification is not supported")


def check_name(name: str) -> None:
    """Raise ServeError for a name that cannot be a model's folder."""
    if not name:
        raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise invalid(f"invalid model name '{name}', model name must not contain path traversal characters")


CallResult = Mapping[str, Any] | list[dict[str, Any]] | bool | None
Do = Callable[[KServeService, CallArguments], CallResult | Awaitable[CallResult]]

CALLS: dict[str, Do] = {
    "live": show_live,
    "ready": show_ready,
    "model_ready": show_model_ready,
    "server_metadata": show_server,
    "model_metadata": show_model,
    "model_config": show_config,
    "statistics": show_statistics,
    "trace": set_trace,
    "logging": set_logging,
    "system_status": show_regions,
    "system_register": register_region,
    "system_unregister": partial(unregister, Region),
    "cuda_status": show_cuda_regions,
    "cuda_register": register_cuda_region,
    "cuda_unregister": partial(unregister, DeviceRegion),
    "index": show_index,
    "load": load,
    "unload": unload,
}

Body = bytes | bytearray
HEALTH = ("live", "ready")
_AS: dict[type, Callable[[Value], bool | int | str]] = {bool: as_bool, int: as_uint, str: as_string}


class CallEndpoint:
    """The HTTP endpoint of one target."""

    __slots__ = ("_do", "_read", "_service", "_show", "_target")

    def __init__(self, service: KServeService, target: KServeTarget) -> None:
        self._service = service
        self._target = target
        self._do = CALLS[target.operation]
        self._show = show
        if service.health_bodies and target.operation in HEALTH:
            self._show = partial(show_health, target.operation)
        self._read = READERS.get(target.operation)

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        parts, body = self._target.parts, call.body
        name = parts.get("model") or parts.get("region", "")
        arguments = CallArguments(name, self._target.version, parts.get("repository", ""), over_http=True)
        if self._read is not None and call.method == "POST":
            arguments.given, arguments.given_bytes = partial(self._read, body), len(body)
        return show_answer(call, partial(self._do, self._service, arguments), self._show, self._refuse)

    def _refuse(self, call: Call, fault: ServeError) -> None:
        self._service.refuse(call, fault, self._target.model)


def show(call: Call, value: CallResult) -> None:
    """Reply with a value as JSON, with a boolean as the status, or with an empty 200 for None."""
    if value is None:
        call.reply(200, b"", JSON)
    elif isinstance(value, bool):
        call.reply(200 if value else 400, b"", TEXT)
    else:
        call.reply(200, msgspec.json.encode(value), JSON)


def show_health(arguments: str, call: Call, value: CallResult) -> None:
    """Reply with the server's health in the body, as the Open Inference Protocol does."""
    call.reply(200 if value else 400, msgspec.json.encode({arguments: value}), JSON)


def answer_not_found(call: Call) -> None:
    call.reply(404, error_body("Not Found"), TEXT)


def answer_wrong_verb(call: Call) -> None:
    # Triton sends the body to HEAD too; closing keeps it from being read as the next reply.
    call.reply(405, error_body("Method Not Allowed"), TEXT, close=call.method == "HEAD", even_to_head=True)


# --- HTTP: read bodies; all raise ServeError -----------------------------------------------------------


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
    """Read changes of log settings; null and unknown settings are ignored."""
    given = read_json(body)  # all but an object changes nothing, as in Triton
    if find(given, "log_file")[1] is not None:
        raise unsupported("log file location can not be updated through network protocol")
    values = ((name, kind, find(given, name)[1]) for name, kind in LOG_SETTINGS.items())
    return {name: _AS[kind](value) for name, kind, value in values if value is not None}


def _read_index(body: Body) -> bool:
    """Return True when only ready models are wanted."""
    found, ready = find(read_json(body), "ready") if body else (False, None)
    return found and as_bool(ready)


def _read_load(body: Body) -> LoadOverride | None:
    """Read the configuration and files that a load brings, None without any."""
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
    """Return True when models that only this one needed are unloaded too.

    Triton unloads whatever the body is: an unreadable one means False.
    """
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
