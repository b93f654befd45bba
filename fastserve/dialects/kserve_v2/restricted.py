"""APIs that ask for a header before anything else (spec 4). The header is a shared secret, no more.

    --http-restricted-api model-repository,shared-memory:admin-key=secret

Only this dialect's paths are held back: another dialect on the same listener has its own.
"""

from __future__ import annotations

from collections.abc import Coroutine
from hmac import compare_digest
from typing import Any

from fastserve.config.triton import Restrictions
from fastserve.dialects.kserve_v2.errors import error_body
from fastserve.dialects.kserve_v2.service import JSON
from fastserve.wire.call import Call, Endpoint

# What is asked for (`routes`) -> the category it is in.
_CATEGORIES = {
    "live": "health",
    "ready": "health",
    "model_ready": "health",
    "server_metadata": "metadata",
    "model_metadata": "metadata",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "model_config": "model-config",
    "index": "model-repository",
    "load": "model-repository",
    "unload": "model-repository",
    "statistics": "statistics",
    "trace": "trace",
    "logging": "logging",
    **dict.fromkeys(
        (f"{kind}_{verb}" for kind in ("system", "cuda") for verb in ("status", "register", "unregister")),
        "shared-memory",
    ),
}


class Restricted:
    """An endpoint behind a header."""

    __slots__ = ("_endpoint", "_header", "_value")

    def __init__(self, endpoint: Endpoint, header: str, value: str) -> None:
        self._endpoint = endpoint
        self._header = header
        self._value = value.encode()

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        if compare_digest(call.header(self._header.lower().encode()), self._value):
            return self._endpoint(call)
        text = f"This API is restricted, expecting header '{self._header}'"
        call.reply(403, error_body(text), JSON)
        return None


def restrict(endpoint: Endpoint, asked: str, restrictions: Restrictions) -> Endpoint:
    """The endpoint, behind the header that its category wants."""
    wanted = restrictions.get(_CATEGORIES.get(asked, ""))
    return endpoint if wanted is None else Restricted(endpoint, *wanted)
