"""RPCs that ask for metadata before anything else (spec 4): the gRPC twin of `restricted`.

--grpc-restricted-protocol model-repository:admin-key=secret     triton-grpc-protocol-admin-key: secret
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from hmac import compare_digest
from typing import Any

from fastserve.config.triton import Restrictions
from fastserve.errors import Kind, ServeError
from fastserve.wire.grpc import Method, Rpc

PREFIX = "triton-grpc-protocol-"
# How the names of the RPCs begin -> their category; the first that fits.
_CATEGORIES = {
    "ServerMetadata": "metadata",
    "Server": "health",
    "ModelMetadata": "metadata",
    "ModelReady": "health",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "Repository": "model-repository",
    "SystemSharedMemory": "shared-memory",
    "CudaSharedMemory": "shared-memory",
    "Trace": "trace",
    "Log": "logging",
}


def restrict_methods(methods: Sequence[Method], restrictions: Restrictions) -> list[Method]:
    """The methods, behind the metadata that their categories want."""
    return [_restrict(method, restrictions.get(category_of(method.path))) for method in methods]


def category_of(path: str) -> str:
    """The category of an RPC."""
    name = path.rpartition("/")[2]
    return next(category for begin, category in _CATEGORIES.items() if name.startswith(begin))


def _restrict(method: Method, wanted: tuple[str, str] | None) -> Method:
    if wanted is None:
        return method
    key, value = PREFIX + wanted[0].lower(), wanted[1].encode()

    def check(rpc: Rpc) -> None:
        given = next((sent for name, sent in rpc.metadata if name == key), "")
        if not compare_digest(given.encode() if isinstance(given, str) else given, value):
            text = f"This protocol is restricted, expecting header '{PREFIX}{wanted[0]}'"
            raise ServeError(Kind.UNAVAILABLE, text)

    async def run(request: Any, rpc: Rpc) -> Any:
        check(rpc)
        return await method.run(request, rpc)

    async def stream(request: Any, rpc: Rpc) -> AsyncIterator[Any]:
        check(rpc)
        async for piece in method.run(request, rpc):
            yield piece

    return replace(method, run=stream if method.gives_stream else run, start=None)
