"""APIs that ask for a header before anything else (spec 4). The header is a shared secret, no more.

    --http-restricted-api model-repository,shared-memory:admin-key=secret        admin-key: secret
    --grpc-restricted-protocol model-repository:admin-key=secret     triton-grpc-protocol-admin-key: secret

Only this dialect's paths and RPCs are held back: another dialect on the same listener has its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from hmac import compare_digest
from typing import Any

from fastserve.config.triton import Restrictions
from fastserve.dialects.kserve_v2.errors import error_body
from fastserve.dialects.kserve_v2.operations import CATEGORIES
from fastserve.dialects.kserve_v2.service import JSON
from fastserve.errors import Kind, ServeError
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.grpc import Method, Rpc

PREFIX = "triton-grpc-protocol-"


def restrict(endpoint: Endpoint, asked: str, restrictions: Restrictions) -> Endpoint:
    """The endpoint of what is asked, behind the header that its category wants."""
    wanted = restrictions.get(CATEGORIES.get(asked, ""))
    if wanted is None:
        return endpoint
    header, value = wanted[0], wanted[1].encode()
    name, refusal = (
        header.lower().encode(),
        error_body(f"This API is restricted, expecting header '{header}'"),
    )

    def guarded(call: Call) -> Coroutine[Any, Any, None] | None:
        if compare_digest(call.header(name), value):
            return endpoint(call)
        call.reply(403, refusal, JSON)
        return None

    return guarded


def restrict_method(method: Method, asked: str, restrictions: Restrictions) -> Method:
    """The same of an RPC, whose metadata has the header under a longer name."""
    wanted = restrictions.get(CATEGORIES[asked])
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
