"""What is asked besides inference: health, metadata, statistics, settings, memory, models (spec 2, 6 to 9).

Functions of plain values, one for both transports. These read what was sent and write what comes back
(`http_calls`, `rpc_calls`); which path and RPC is which: `operations`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from fastserve import __version__
from fastserve.dialects.kserve_v2.service import Service, read_version
from fastserve.dialects.kserve_v2.settings import check_trace, read_trace
from fastserve.engine import BatchCounts, counts_of
from fastserve.errors import Kind, ServeError, internal, invalid, unsupported
from fastserve.repository.catalog import Catalog
from fastserve.repository.triton_config import config_json
from fastserve.repository.version import Model, Version, VersionState
from fastserve.serving.device_regions import DeviceRegion
from fastserve.serving.model_control import must_be_explicit
from fastserve.serving.model_view import ModelView, TensorView
from fastserve.serving.shared_memory import Region
from fastserve.tensor import kserve_name

SERVER_NAME = "triton"
"""What clients of the original look for; `version` says which server this is."""
EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
)  # fmt: skip
_ENABLE = "Start the server with '--admin-%s' to enable."
# InferStatistics' fields, which VersionCounts has by the same names.
KINDS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip


@dataclass(slots=True)
class Asked:
    """What a call is about. `name` is a model's or a region's. `given` reads what else was sent, and looks at
    `given_bytes`; None when nothing was. A few texts differ over HTTP."""

    name: str = ""
    version: str = ""
    repository: str = ""
    given: Callable[[], Any] | None = None
    given_bytes: int = 0
    over_http: bool = False

    def read(self) -> Any:
        """What was sent besides names. Raises ServeError."""
        return None if self.given is None else self.given()


# --- health and metadata --------------------------------------------------------------------------------


def show_live(service: Service, asked: Asked) -> bool:
    return True


def show_ready(service: Service, asked: Asked) -> bool:
    return service.readiness.ready


def show_model_ready(service: Service, asked: Asked) -> bool:
    ready = service.catalog.available(asked.name, read_version(asked.version)) is not None
    if asked.over_http and not ready:
        raise invalid("Model version not ready")
    return ready


def show_server(service: Service, asked: Asked) -> dict[str, Any]:
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


def show_model(service: Service, asked: Asked) -> dict[str, Any]:
    """The ready versions, or the one that was asked for. Raises ServeError."""
    view = service.find(asked.name, asked.version)
    ready = [view.version] if asked.version else service.catalog.models[asked.name].available()
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


def show_config(service: Service, asked: Asked) -> Mapping[str, Any]:
    """The configuration as the original's ModelConfig message in JSON, defaults and all."""
    version = service.find(asked.name, asked.version).version
    shown = config_json(version.config, version)
    scheduling = shown.get("ensemble_scheduling", {})
    if not scheduling.get("max_inflight_requests"):  # 24.10 does not know it yet
        scheduling.pop("max_inflight_requests", None)
    if scheduling:
        shown.setdefault("model_transaction_policy", {"decoupled": False})
    return shown


# --- statistics: of every dialect's requests, since the version was loaded -------------------------------


def show_statistics(service: Service, asked: Asked) -> dict[str, Any]:
    """One entry per ready version, of one model or of all. A request that never reached the model's queue, as
    its inputs were wrong, is no inference request, as in the original. Raises ServeError."""
    chosen = _choose(service.catalog, asked.name, read_version(asked.version))
    return {"model_stats": [_show_counts(version) for version in chosen]}


def _choose(catalog: Catalog, name: str, number: int | None) -> list[Version]:
    if not name:
        return [version for known in sorted(catalog.models) for version in catalog.models[known].available()]
    if name not in catalog.models or not catalog.models[name].available():
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


def set_trace(service: Service, asked: Asked) -> dict[str, Any]:
    if asked.name and service.catalog.available(asked.name, None) is None:
        raise invalid(f"Request for unknown model : {asked.name}")
    if asked.given is not None:
        changes = read_trace(asked.read(), gap="" if asked.over_http else " ")
        service.traces.change(changes, asked.name, check_trace)
    return dict(service.traces.show(asked.name))


def set_logging(service: Service, asked: Asked) -> dict[str, Any]:
    if asked.given is not None:
        if not service.admin.log_settings:
            raise unsupported("Changes of log settings are disabled. " + _ENABLE % "log-settings")
        service.log.change(asked.read(), asked.over_http)
    return dict(service.log.show())


# --- client memory --------------------------------------------------------------------------------------


def show_regions(service: Service, asked: Asked) -> list[dict[str, Any]]:
    """Raises ServeError NOT_FOUND."""
    return [
        {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size}
        for one in service.regions.list_files(asked.name)
    ]


def register_region(service: Service, asked: Asked) -> None:
    _must_be_named(service, asked, "system")
    key, offset, byte_size = asked.read()
    service.regions.register(asked.name, key, offset, byte_size)


def show_cuda_regions(service: Service, asked: Asked) -> list[dict[str, Any]]:
    """Raises ServeError NOT_FOUND."""
    return [
        {"name": one.name, "device_id": one.device, "byte_size": one.byte_size}
        for one in service.regions.list_devices(asked.name)
    ]


async def register_cuda_region(service: Service, asked: Asked) -> None:
    """Raises ServeError; where there is no GPU, in the words of one that cannot open the handle."""
    _must_be_named(service, asked, "cuda")
    handle, device, byte_size = asked.read()
    try:
        await service.regions.register_device(asked.name, handle, device, byte_size)
    except ServeError as fault:
        if fault.kind is not Kind.INVALID_ARGUMENT:
            raise
        raise invalid("failed to register shared memory region: invalid args") from None


def unregister(kind: type[Region | DeviceRegion], service: Service, asked: Asked) -> Awaitable[None] | None:
    """One region, or all of a kind for "". Raises ServeError."""
    if asked.name:
        return service.regions.unregister(asked.name, kind)
    return service.regions.unregister_all(kind)


def _must_be_named(service: Service, asked: Asked, kind: str) -> None:
    service.regions.must_be_allowed()
    if asked.over_http and not asked.name:
        raise invalid(f"'region name' is necessary to register {kind} shared memory region")


# --- the model repository -------------------------------------------------------------------------------


_STATES = {
    VersionState.START: "LOADING",
    VersionState.LOADING: "LOADING",
    VersionState.AVAILABLE: "READY",
    VersionState.UNLOADING: "UNLOADING",
    VersionState.END: "UNAVAILABLE",
}


async def show_index(service: Service, asked: Asked) -> list[dict[str, Any]]:
    """Every model and version, in the order of their names."""
    if not asked.over_http:
        check_repository(asked.repository)
    only_ready, models = asked.read(), service.catalog.models
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
    entry = {"name": version.model, "version": str(version.number), "state": _STATES[version.state]}
    if version.error is not None:
        entry["reason"] = version.error.message
    elif version.state is VersionState.END:
        entry["reason"] = "unloaded"
    return entry


async def load(service: Service, asked: Asked) -> None:
    """Load one model and wait for it. Raises ServeError in the original's words."""
    check_repository(asked.repository)
    override, name = await service.apart(asked.given_bytes, asked.read), asked.name
    has_files = override is not None and bool(override.files)
    if has_files and not service.admin.file_overrides:  # which run as code
        raise unsupported("Files in a load are disabled. " + _ENABLE % "file-overrides")
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
    """Why versions of a model did not load, "" for none."""
    versions = sorted(model.versions.items()) if model else ()
    told = [(number, version.error.message) for number, version in versions if version.error is not None]
    return "".join(f"version {number} is at UNAVAILABLE state: {reason};\n" for number, reason in told)


async def unload(service: Service, asked: Asked) -> None:
    """Unload one model; one that is not loaded is no fault. Raises ServeError."""
    check_repository(asked.repository)
    dependents = asked.read()
    must_be_explicit(service.repository)
    try:
        await service.repository.unload(asked.name, dependents)
    except ServeError as fault:
        if fault.kind is not Kind.NOT_FOUND:
            raise


def check_repository(name: str) -> None:
    """Raises ServeError for a repository named in the path: there is one, and it has no name."""
    if name:
        raise unsupported("'repository_name' specification is not supported")


def check_name(name: str) -> None:
    """Raises ServeError for what cannot be a model's folder."""
    if not name:
        raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise invalid(f"invalid model name '{name}', model name must not contain path traversal characters")


Shown = Mapping[str, Any] | list[dict[str, Any]] | bool | None
Do = Callable[[Service, Asked], Shown | Awaitable[Shown]]
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
