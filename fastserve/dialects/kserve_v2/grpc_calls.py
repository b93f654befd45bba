"""The RPCs without tensors, over messages of the protobuf library (spec 2, 6 to 9).

What they say is what the HTTP half says; only the form differs.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict

from fastserve._ext.json_value import Members
from fastserve.dialects.kserve_v2.controls import RANGES
from fastserve.dialects.kserve_v2.errors import invalid, unsupported
from fastserve.dialects.kserve_v2.lookup import read_version, ready_versions
from fastserve.dialects.kserve_v2.memory_calls import cuda_status, system_status, unregister
from fastserve.dialects.kserve_v2.metadata import model_config, model_metadata, server_metadata
from fastserve.dialects.kserve_v2.repository import (
    check_repository,
    list_models,
    load_model,
    unload_model,
)
from fastserve.dialects.kserve_v2.service import Service
from fastserve.protos import Messages
from fastserve.serving.model_control import LoadOverride
from fastserve.serving.model_view import ModelView, find_version

_LOG_KINDS = {
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}


class Calls:
    """One method for each RPC: a request message in, a response message out."""

    def __init__(self, service: Service, messages: Messages) -> None:
        self._service = service
        self._messages = messages

    # --- health and metadata ------------------------------------------------------------------------

    async def server_live(self, request: Any) -> Any:
        return self._messages.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any) -> Any:
        return self._messages.ServerReadyResponse(ready=self._service.readiness.ready)

    async def model_ready(self, request: Any) -> Any:
        version = self._service.catalog.available(request.name, read_version(request.version))
        return self._messages.ModelReadyResponse(ready=version is not None)

    async def server_metadata(self, request: Any) -> Any:
        return self._messages.ServerMetadataResponse(**server_metadata())

    async def model_metadata(self, request: Any) -> Any:
        number = read_version(request.version)
        plan = self._plan(request.name, number)
        numbers = [v.number for v in ready_versions(self._service.catalog, request.name)]
        shown = model_metadata(plan, numbers if number is None else [number])
        return ParseDict(shown, self._messages.ModelMetadataResponse())

    async def model_config(self, request: Any) -> Any:
        plan = self._plan(request.name, read_version(request.version))
        response = self._messages.ModelConfigResponse()
        ParseDict(dict(model_config(plan.version)), response.config, ignore_unknown_fields=True)
        return response

    def _plan(self, name: str, number: int | None) -> ModelView:
        return self._service.plans.of(find_version(self._service.catalog, name, number))

    async def model_statistics(self, request: Any) -> Any:
        shown = self._service.statistics.show(request.name, read_version(request.version))
        return ParseDict(shown, self._messages.ModelStatisticsResponse())

    # --- repository ---------------------------------------------------------------------------------

    async def repository_index(self, request: Any) -> Any:
        check_repository(request.repository_name)
        service = self._service
        entries = await list_models(service.repository, service.catalog, request.ready)
        return ParseDict({"models": entries}, self._messages.RepositoryIndexResponse())

    async def repository_model_load(self, request: Any) -> Any:
        check_repository(request.repository_name)
        override = _read_override(request.parameters)
        service = self._service
        service.must_allow_files(override)
        await load_model(service.repository, service.catalog, request.model_name, override)
        return self._messages.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any) -> Any:
        check_repository(request.repository_name)
        dependents = False
        for name, value in request.parameters.items():
            if name == "unload_dependents":
                if value.WhichOneof("parameter_choice") != "bool_param":
                    raise invalid(f"invalid value type for '{name}' parameter, expected bool_param.")
                dependents = value.bool_param
        await unload_model(self._service.repository, request.model_name, dependents)
        return self._messages.RepositoryModelUnloadResponse()

    # --- shared memory ------------------------------------------------------------------------------

    async def system_shared_memory_status(self, request: Any) -> Any:
        response = self._messages.SystemSharedMemoryStatusResponse()
        for region in system_status(self._service.regions, request.name):
            ParseDict(region, response.regions[region["name"]])
        return response

    async def system_shared_memory_register(self, request: Any) -> Any:
        regions = self._service.regions
        regions.register(request.name, request.key, request.offset, request.byte_size)
        return self._messages.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(self, request: Any) -> Any:
        unregister(self._service.regions, request.name)
        return self._messages.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, request: Any) -> Any:
        cuda_status(self._service.regions, request.name)  # there are none: it is a fault to name one
        return self._messages.CudaSharedMemoryStatusResponse()

    async def cuda_shared_memory_register(self, request: Any) -> Any:
        """Always refused: there is no GPU whose memory could be opened."""
        self._service.regions.must_be_allowed()
        raise invalid("failed to register shared memory region: invalid args")

    async def cuda_shared_memory_unregister(self, request: Any) -> Any:
        self._service.regions.must_be_allowed()
        return self._messages.CudaSharedMemoryUnregisterResponse()

    # --- trace and logging --------------------------------------------------------------------------

    async def trace_setting(self, request: Any) -> Any:
        service, model = self._service, request.model_name
        if model and service.catalog.available(model, None) is None:
            raise invalid(f"Request for unknown model : {model}")
        if request.settings:
            service.trace.change(Members(_read_trace(request.settings)), model, gap=" ")
        response = self._messages.TraceSettingResponse()
        for name, value in service.trace.show(model).items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log_settings(self, request: Any) -> Any:
        log = self._service.log
        if request.settings:
            self._service.must_allow_log_settings()
        log.put(_read_log(request.settings))
        response = self._messages.LogSettingsResponse()
        for name, value in log.show().items():
            kind = _LOG_KINDS[name][0] if name in _LOG_KINDS else "string_param"
            setattr(response.settings[name], kind, value)
        return response


def _read_override(parameters: Any) -> LoadOverride | None:
    override = LoadOverride()
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if name == "config":
            _must_be(name, kind, "string_param")
            override.config = value.string_param
        elif name.startswith("file:"):
            _must_be(name, kind, "bytes_param")
            override.files[name.removeprefix("file:")] = value.bytes_param
        else:
            raise invalid(f"unrecognized load parameter '{name}'.")
    return override if override.config is not None or override.files else None


def _must_be(name: str, kind: str | None, wanted: str) -> None:
    if kind != wanted:
        raise invalid(f"invalid value type for load parameter '{name}', expected {wanted}.")


def _read_trace(settings: Any) -> list[tuple[bytes, Any]]:
    """As the JSON form has them: strings, a list of levels, None for what is to be reset."""
    found: list[tuple[bytes, Any]] = []
    for name, given in settings.items():
        values = [text.encode() for text in given.value]
        if name == "trace_level":
            found.append((name.encode(), values or None))
        elif len(values) > 1 and name in RANGES:
            raise invalid(f"expect only 1 value for '{name}'")
        else:
            found.append((name.encode(), values[0] if values else None))
    return found


def _read_log(settings: Any) -> dict[str, bool | int | str]:
    changes: dict[str, bool | int | str] = {}
    for name, given in settings.items():
        if name == "log_file":
            raise unsupported("log file location can not be updated through network protocol")
        kind = _LOG_KINDS.get(name)
        if kind is None:
            continue
        if given.WhichOneof("parameter_choice") != kind[0]:
            raise invalid(f"expect {kind[1]} for '{name}'")
        changes[name] = getattr(given, kind[0])
    return changes
