"""The methods of inference.GRPCInferenceService, as the gRPC listener takes them (spec 11, 16)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from fastserve.config.triton import parse_restrictions
from fastserve.dialects.kserve_v2.errors import in_own_words, internal
from fastserve.dialects.kserve_v2.grpc_calls import Calls
from fastserve.dialects.kserve_v2.grpc_infer import Infer, read_sent
from fastserve.dialects.kserve_v2.grpc_restricted import restrict_methods
from fastserve.dialects.kserve_v2.grpc_stream import stream
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.wire.grpc import Method, Rpc
from fastserve.wire.scope import Scope

SERVICE = "/inference.GRPCInferenceService/"


def make_methods(service: Service) -> list[Method]:
    """Every RPC, over bytes."""
    messages = load("kserve_v2")
    calls = Calls(service, messages)
    plain: dict[str, tuple[Scope, Callable[[Any], Awaitable[Any]]]] = {
        "ServerLive": (Scope.HEALTH, calls.server_live),
        "ServerReady": (Scope.HEALTH, calls.server_ready),
        "ModelReady": (Scope.HEALTH, calls.model_ready),
        "ServerMetadata": (Scope.METADATA, calls.server_metadata),
        "ModelMetadata": (Scope.METADATA, calls.model_metadata),
        "ModelConfig": (Scope.METADATA, calls.model_config),
        "ModelStatistics": (Scope.METADATA, calls.model_statistics),
        "RepositoryIndex": (Scope.METADATA, calls.repository_index),
        "RepositoryModelLoad": (Scope.ADMIN, calls.repository_model_load),
        "RepositoryModelUnload": (Scope.ADMIN, calls.repository_model_unload),
        "SystemSharedMemoryStatus": (Scope.METADATA, calls.system_shared_memory_status),
        "SystemSharedMemoryRegister": (Scope.ADMIN, calls.system_shared_memory_register),
        "SystemSharedMemoryUnregister": (Scope.ADMIN, calls.system_shared_memory_unregister),
        "CudaSharedMemoryStatus": (Scope.METADATA, calls.cuda_shared_memory_status),
        "CudaSharedMemoryRegister": (Scope.ADMIN, calls.cuda_shared_memory_register),
        "CudaSharedMemoryUnregister": (Scope.ADMIN, calls.cuda_shared_memory_unregister),
        "TraceSetting": (Scope.ADMIN, calls.trace_setting),  # the same calls show and change
        "LogSettings": (Scope.ADMIN, calls.log_settings),
    }
    methods = [
        Method(SERVICE + name, _reader(f"{name}Request"), _runner(run), _serialize, scope=scope)
        for name, (scope, run) in plain.items()
    ]
    methods.append(Method(SERVICE + "ModelInfer", bytes, Infer(service), bytes, scope=Scope.INFER))
    run = partial(stream, service)
    methods.append(Method(SERVICE + "ModelStreamInfer", read_sent, run, bytes, True, True, scope=Scope.INFER))
    restricted = service.options.grpc_restricted_protocol
    return restrict_methods(methods, parse_restrictions("grpc_restricted_protocol", restricted))


def descriptors() -> list[bytes]:
    """What reflection shows: serialized FileDescriptorSets."""
    return [load("kserve_v2").descriptor_set]


def _reader(name: str) -> Callable[[bytes], Any]:
    parse = getattr(load("kserve_v2"), name).FromString

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise internal(f"malformed {name}") from None

    return read


def _runner(run: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Rpc], Awaitable[Any]]:
    async def answer(request: Any, rpc: Rpc) -> Any:
        try:
            return await run(request)
        except ServeError as fault:
            raise in_own_words(fault) from None

    return answer


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
