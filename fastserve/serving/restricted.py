"""Endpoints and RPCs behind a header with a secret in it, which clients and the server share, and no more.

Whoever does not send it is refused before anything else. So that nothing is taken unasked, what is behind one
has no `take` and no `start` (Endpoint, Method).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from fastserve.errors import ServeError

if TYPE_CHECKING:
    from fastserve.wire.call import Call, Endpoint
    from fastserve.wire.grpc import Method, Rpc


def restrict_endpoint(endpoint: Endpoint, header: bytes, secret: bytes, refusal: Endpoint) -> Endpoint:
    """The endpoint, for calls with this header (in lower case); `refusal` answers the others."""

    def guarded(call: Call) -> Coroutine[Any, Any, None] | None:
        return (endpoint if compare_digest(call.header(header), secret) else refusal)(call)

    return guarded


def restrict_method(method: Method, key: str, secret: bytes, fault: ServeError) -> Method:
    """The RPC, for calls with this metadata; the others are refused with `fault`."""

    def check(rpc: Rpc) -> None:
        given = next((sent for name, sent in rpc.metadata if name == key), "")
        if not compare_digest(given.encode() if isinstance(given, str) else given, secret):
            raise ServeError(fault.kind, fault.message)  # one that is raised again keeps what raised it

    async def run(request: Any, rpc: Rpc) -> Any:
        check(rpc)
        return await method.run(request, rpc)

    async def stream(request: Any, rpc: Rpc) -> AsyncIterator[Any]:
        check(rpc)
        async for piece in method.run(request, rpc):
            yield piece

    return replace(method, run=stream if method.gives_stream else run, start=None)
