"""ServerStatus: every model with its configuration, versions and counts (spec 4), as a message."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from google.protobuf.json_format import ParseDict

from fastserve.backends.registry import find_backend
from fastserve.dialects.triton_v1.service import SERVER_ID, Service
from fastserve.dialects.triton_v1.statistics import Counts, durations
from fastserve.engine import Took, counts_of
from fastserve.errors import invalid
from fastserve.protos import load
from fastserve.repository.triton_config import config_json
from fastserve.repository.version import Model, Version, VersionState

# The last release with this API; its clients print it and act on nothing in it.
API_VERSION = "1.15.0"
SERVER_READY = 2
SERVER_EXITING = 3
# Kinds of MODEL_READY_STATE (spec 11).
READY, UNAVAILABLE, LOADING, UNLOADING = 1, 2, 3, 4
STATE_OF = {
    VersionState.START: LOADING,
    VersionState.LOADING: LOADING,
    VersionState.AVAILABLE: READY,
    VersionState.UNLOADING: UNLOADING,
    VersionState.END: UNAVAILABLE,
}
CUSTOM = "custom"  # every backend that V1 had no platform for


def write_status(service: Service, model: str) -> Any:
    """A ServerStatus of one model, or of all for "". Raises ServeError for an unknown one."""
    models = service.catalog.models
    if model and model not in models:
        raise invalid(f"no status available for unknown model '{model}'")
    message = load("triton_v1").ServerStatus(
        id=SERVER_ID,
        version=API_VERSION,
        uptime_ns=monotonic_ns() - service.started_ns,
        ready_state=SERVER_READY if service.readiness.ready or not _is_stopping(service) else SERVER_EXITING,
    )
    for name in (model,) if model else models:
        _fill_model(service, message.model_status[name], models[name])
    if not model:
        counts = service.statistics
        _fill_durations(message.status_stats.success, counts.status)
        _fill_durations(message.health_stats.success, counts.health)
        _fill_durations(message.model_control_stats.success, counts.control)
        _fill_durations(message.repository_stats.success, counts.repository)
    return message


def _is_stopping(service: Service) -> bool:
    return service.readiness.reason == "the server is stopping"


def _fill_durations(target: Any, took: Took) -> None:
    target.count = took.count
    target.total_time_ns = took.ns


def _fill_model(service: Service, target: Any, model: Model) -> None:
    shown = model.latest or max(model.versions.values(), key=lambda v: v.number, default=None)
    if shown is not None:
        fill_config(target.config, shown)
    target.config.name = model.name
    for number, version in model.versions.items():
        _fill_version(target.version_status[number], version, service.statistics.of(version))


def _fill_version(target: Any, version: Version, sizes: Counts) -> None:
    known = counts_of(version)
    target.ready_state = STATE_OF[version.state]
    if version.state is VersionState.END:
        target.ready_state_reason.message = version.error.message if version.error else "unloaded"
    for batch_size, counts in sizes.items():
        stats = target.infer_stats[batch_size]
        for name, took in durations(known, counts):
            if took.count:
                _fill_durations(getattr(stats, name), took)
    target.model_execution_count = known.executions
    target.model_inference_count = known.inferences
    target.last_inference_timestamp_milliseconds = known.last_ms


def fill_config(target: Any, version: Version) -> None:
    """The ModelConfig message of a version: the Triton one as given, or what a native model comes to."""
    config = version.config
    shown = config_json(config, version) if config.triton is None else config.triton
    ParseDict(shown, target, ignore_unknown_fields=True)  # newer fields and types than V1 knows
    target.platform = target.platform or find_backend(config.backend).triton_platform or CUSTOM
