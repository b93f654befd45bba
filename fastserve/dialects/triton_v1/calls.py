"""Calls besides inference, and their HTTP: health, status, control, repository, shared memory.

Each raises ServeError with the original's texts and is counted when it went well (spec 2, 4 to 7).
ServerStatus has every model with its configuration, versions and counts.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from functools import partial
from time import monotonic_ns
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from fastserve.backends.registry import find_backend
from fastserve.dialects.triton_v1.routes import V1Target
from fastserve.dialects.triton_v1.service import (
    BINARY,
    NV_STATUS,
    SERVER_ID,
    V1Service,
    durations,
    refusal_status,
)
from fastserve.engine import Took, counters_of
from fastserve.errors import Kind, NoDeviceError, ServeError, invalid
from fastserve.metrics import ServerState
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.net.router import fault_headers
from fastserve.protos import load
from fastserve.protos.text import print_lines
from fastserve.repository.triton_config.reading import config_json
from fastserve.repository.version import Model, Version, VersionState
from fastserve.serving.client_shared_memory import HANDLE_BYTES
from fastserve.serving.dialect import show_answer
from fastserve.serving.model_control import must_be_explicit, triton_state

# The last release with this API; its clients print it and act on nothing in it.
API_VERSION = "1.15.0"
SERVER_READY = 2
SERVER_EXITING = 3

# Triton's names of states -> MODEL_READY_STATE (spec 11).
STATES = {"READY": 1, "UNAVAILABLE": 2, "LOADING": 3, "UNLOADING": 4}
CUSTOM = "custom"  # the platform of every backend that V1 did not know


def write_status(service: V1Service, model: str) -> Any:
    """Return the ServerStatus of one model, or of all for "". Raises ServeError for an unknown one."""
    models = service.catalog.models
    if model and model not in models:
        service.catalog.check_allowed(model)
        raise invalid(f"no status available for unknown model '{model}'")
    message = load("triton_v1").ServerStatus(
        id=SERVER_ID,
        version=API_VERSION,
        uptime_ns=monotonic_ns() - service.started_ns,
        ready_state=SERVER_EXITING if service.readiness.state is ServerState.STOPPING else SERVER_READY,
    )
    for name in (model,) if model else models:
        _fill_model(service, message.model_status[name], models[name])
    if not model:
        counts = service.statistics
        _fill_durations(message.status_stats.success, counts.of("status"))
        _fill_durations(message.health_stats.success, counts.of("health"))
        _fill_durations(message.model_control_stats.success, counts.of("control"))
        _fill_durations(message.repository_stats.success, counts.of("repository"))
    return message


def _fill_durations(target: Any, took: Took) -> None:
    target.count = took.count
    target.total_time_ns = took.ns


def _fill_model(service: V1Service, target: Any, model: Model) -> None:
    shown = model.latest or max(model.versions.values(), key=lambda v: v.number, default=None)
    if shown is not None:
        fill_config(target.config, shown)
    target.config.name = model.name
    for number, version in model.versions.items():
        _fill_version(target.version_status[number], version)


def _fill_version(target: Any, version: Version) -> None:
    counters = counters_of(version)
    known = counters.read()
    state, reason = triton_state(version)
    target.ready_state = STATES[state]
    if reason:
        target.ready_state_reason.message = reason
    for batch_size, counts in counters.by_size().items():
        stats = target.infer_stats[batch_size]
        for name, took in durations(known, counts):
            if took.count:
                _fill_durations(getattr(stats, name), took)
    target.model_execution_count = known.executions
    target.model_inference_count = known.inferences
    target.last_inference_timestamp_milliseconds = known.last_ms


def fill_config(target: Any, version: Version) -> None:
    """Fill the ModelConfig message of a version: Triton's as given, or one made of a native model's."""
    config = version.config
    shown = config_json(config, version) if config.triton is None else config.triton
    ParseDict(shown, target, ignore_unknown_fields=True)  # it may have newer fields and types
    target.platform = target.platform or find_backend(config.backend).triton_platform or CUSTOM


class V1Calls:
    """The calls of one front process. They take and return messages, which each transport encodes."""

    def __init__(self, service: V1Service) -> None:
        self._service, self._counts = service, service.statistics
        self._messages = load("triton_v1")

    def health(self, mode: str) -> bool:
        """Return whether the server is `live`, or `ready`. Raises ServeError for another mode."""
        with self._counts.counted("health"):
            if mode not in ("live", "ready"):
                raise ServeError(Kind.UNKNOWN, f"unknown health mode '{mode}'")
            return mode == "live" or self._service.readiness.ready

    def status(self, name: str) -> Any:
        """Return the ServerStatus of one model, or of all for ""."""
        with self._counts.counted("status"):
            return write_status(self._service, name)

    async def index(self) -> Any:
        """Return the ModelRepositoryIndex: every model folder, loaded or not."""
        with self._counts.counted("repository"):
            message = self._messages.ModelRepositoryIndex()
            for name in sorted(await self._service.repository.names()):
                message.models.add(name=name)
            return message

    async def control(self, name: str, *, load: bool) -> None:
        """Load, reload or unload a model; unloading an unknown one does nothing."""
        with self._counts.counted("control"):
            repository = self._service.repository
            must_be_explicit(repository)
            try:
                await (repository.load(name, None) if load else repository.unload(name, False))
            except ServeError as fault:
                if load:
                    raise self._why_not(name, fault) from None
                if fault.kind is not Kind.NOT_FOUND:
                    raise ServeError(Kind.INTERNAL, f"failed to unload '{name}'") from None

    def _why_not(self, name: str, fault: ServeError) -> ServeError:
        model = self._service.catalog.models.get(name)
        if fault.kind is Kind.NOT_FOUND or model is None or not model.versions:
            reason = "failed to poll from model repository"
            if model is not None and model.error is None:
                reason = "no version is available"
        else:
            down = [n for n, v in sorted(model.versions.items()) if v.state is not VersionState.AVAILABLE]
            reason = f"versions that are not available: {','.join(map(str, down))}"
        return ServeError(Kind.INTERNAL, f"failed to load '{name}', {reason}")

    def regions(self) -> Any:
        """Return the SharedMemoryStatus of every region."""
        message = self._messages.SharedMemoryStatus()
        for region in self._service.regions.list_files():
            one = message.shared_memory_region.add(name=region.name, byte_size=region.byte_size)
            one.system_shared_memory.shared_memory_key = region.key
            one.system_shared_memory.offset = region.offset
        for lent in self._service.regions.list_devices():
            one = message.shared_memory_region.add(name=lent.name, byte_size=lent.byte_size)
            one.cuda_shared_memory.device_id = lent.device
        return message

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Register memory of a GPU. Raises ServeError, without a GPU as the original does (spec 6)."""
        if len(handle) != HANDLE_BYTES:
            raise invalid("unexpected size for CUDA shared-memory handle, expecting 64 bytes")
        failed = "failed to register CUDA shared memory region"
        try:
            await self._service.regions.register_device(name, handle, device, byte_size)
        except NoDeviceError:
            raise invalid(f"{failed}: '{name}', GPUs not supported") from None
        except ServeError as fault:
            if fault.kind is not Kind.INVALID_ARGUMENT:
                raise
            raise invalid(f"{failed} '{name}'") from None


TEXT = b"text/plain"


class CallPage:
    """The HTTP endpoint of one target."""

    __slots__ = ("_calls", "_service", "_target")

    def __init__(self, service: V1Service, calls: V1Calls, target: V1Target) -> None:
        self._service, self._calls, self._target = service, calls, target

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        return show_answer(call, partial(self._ask, call), self._show, self._refuse)

    def _ask(self, call: Call) -> Any:
        """Return the value to show, or an awaitable of it."""
        target, calls = self._target, self._calls
        if target.place == "repository":
            return calls.index()
        if target.place == "modelcontrol":
            return calls.control(target.name, load=target.action == "load")
        if target.place == "health":
            return calls.health(target.action)
        return calls.status(target.name) if target.place == "status" else self._share(call)

    def _share(self, call: Call) -> Any:
        """Run a call on shared memory."""
        target, shared = self._target, self._service.regions
        if target.action == "status":
            return self._calls.regions()
        if target.action == "register":
            return shared.register(target.name, target.key, target.offset, target.byte_size)
        if target.action == "cudaregister":
            handle = bytes(call.body)
            return self._calls.register_cuda(target.name, handle, target.device, target.byte_size)
        return shared.unregister(target.name) if target.action == "unregister" else shared.unregister_all()

    def _show(self, call: Call, shown: Any) -> None:
        """Reply with a message, with nothing for None, or with a boolean as the status."""
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
        headers = ((NV_STATUS, self._service.status_line(fault)), *fault_headers(fault))
        call.reply(refusal_status(fault), b"", b"", headers)


def encode(message: Any, form: str) -> tuple[bytes, bytes]:
    """Return a message and its content type, as "binary", "json" (the proto's names) or text."""
    if form == "binary":
        return message.SerializeToString(), BINARY
    if form == "json":
        plain = MessageToDict(message, preserving_proto_field_name=True)
        return json.dumps(plain, separators=(",", ":")).encode(), JSON
    return print_lines(message).encode(), TEXT
