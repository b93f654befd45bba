"""The methods of inference.GRPCInferenceService, as the gRPC listener takes them (spec 11, 16)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from fastserve.config.triton import parse_restrictions
from fastserve.dialects.kserve_v2.errors import in_own_words, internal
from fastserve.dialects.kserve_v2.grpc_calls import Calls
from fastserve.dialects.kserve_v2.grpc_infer import Infer, read_sent
from fastserve.dialects.kserve_v2.grpc_restricted import restrict_methods
from fastserve.dialects.kserve_v2.grpc_stream import stream
from fastserve.dialects.kserve_v2.routes import RPCS, SERVICE
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.wire.grpc import Method, Rpc


def make_methods(service: Service) -> list[Method]:
    """Every RPC, over bytes."""
    messages = load("kserve_v2")
    calls = Calls(service, messages)
    plain: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "ServerLive": calls.server_live,
        "ServerReady": calls.server_ready,
        "ModelReady": calls.model_ready,
        "ServerMetadata": calls.server_metadata,
        "ModelMetadata": calls.model_metadata,
        "ModelConfig": calls.model_config,
        "ModelStatistics": calls.model_statistics,
        "RepositoryIndex": calls.repository_index,
        "RepositoryModelLoad": calls.repository_model_load,
        "RepositoryModelUnload": calls.repository_model_unload,
        "SystemSharedMemoryStatus": calls.system_shared_memory_status,
        "SystemSharedMemoryRegister": calls.system_shared_memory_register,
        "SystemSharedMemoryUnregister": calls.system_shared_memory_unregister,
        "CudaSharedMemoryStatus": calls.cuda_shared_memory_status,
        "CudaSharedMemoryRegister": calls.cuda_shared_memory_register,
        "CudaSharedMemoryUnregister": calls.cuda_shared_memory_unregister,
        "TraceSetting": calls.trace_setting,
        "LogSettings": calls.log_settings,
    }
    methods = [
        _method(name, _reader(f"{name}Request"), _runner(run), _serialize) for name, run in plain.items()
    ]
    infer = Infer(service)
    methods.append(replace(_method("ModelInfer", bytes, infer, bytes), start=infer.start))
    methods.append(_method("ModelStreamInfer", read_sent, partial(stream, service), bytes, streams=True))
    restricted = service.options.grpc_restricted_protocol
    return restrict_methods(methods, parse_restrictions("grpc_restricted_protocol", restricted))


def _method(
    name: str,
    read: Callable[[bytes], Any],
    run: Callable[[Any, Any], Any],
    write: Callable[[Any], bytes],
    streams: bool = False,
) -> Method:
    path = SERVICE + name
    return Method(path, read, run, write, streams, streams, scope=RPCS[path])


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
