"""Endpoints and RPCs behind a secret in a header: with it, without it, with another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.serving.restricted import restrict_endpoint, restrict_method
from fastserve.wire.grpc import Method

FAULT = ServeError(Kind.UNAVAILABLE, "expecting a key")


def test_an_endpoint() -> None:
    told: list[str] = []
    guarded = restrict_endpoint(
        lambda call: told.append("served"), b"key", b"secret", lambda call: told.append("refused")
    )
    for sent in (b"secret", b"", b"Secret", b"secret2"):
        headers = {b"key": sent}
        guarded(cast("Any", SimpleNamespace(header=lambda name, sent=headers: sent.get(name, b""))))
    assert told == ["served", "refused", "refused", "refused"]
    assert not hasattr(guarded, "take")


async def answer(request: Any, rpc: Any) -> Any:
    return request


async def stream(request: Any, rpc: Any) -> AsyncIterator[Any]:
    yield request


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("metadata", "is_served"),
    [
        ((("key", "secret"),), True),
        ((("other", "x"), ("key", b"secret")), True),
        ((), False),
        ((("key", "x"),), False),
        ((("key", "x"), ("key", "secret")), False),
    ],
)
def test_an_rpc(streams: bool, metadata: Any, is_served: bool) -> None:
    run: Any = stream if streams else answer
    method = Method("/s/m", bytes, run, bytes, False, streams, start=lambda data, exchange: True)
    guarded = restrict_method(method, "key", b"secret", FAULT)
    assert guarded.start is None

    async def ask() -> Any:
        rpc = SimpleNamespace(metadata=metadata)
        if not streams:
            return await guarded.run(b"x", rpc)
        (piece,) = [piece async for piece in guarded.run(b"x", rpc)]
        return piece

    if is_served:
        assert asyncio.run(ask()) == b"x"
        return
    with pytest.raises(ServeError, match="expecting a key") as fault:
        asyncio.run(ask())
    assert fault.value.kind is Kind.UNAVAILABLE
    assert fault.value is not FAULT
