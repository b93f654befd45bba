"""Endpoints and RPCs behind a secret in a header: with it, without it, with another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import (
    NO_RESTRICTIONS,
    NOTHING,
    Resource,
    Resources,
    Restrictions,
    Scope,
    resources_of,
)
from fastserve.net.grpc import Method
from fastserve.net.grpc.method import guard_method
from fastserve.settings.kserve_options import CATEGORIES

GIVEN = {"inference": ("Key", "secret"), "statistics": ("other", "s2")}
OVER_HTTP, OVER_GRPC = Restrictions.over_http(GIVEN), Restrictions.over_grpc(GIVEN)
BOTH = (Resource.INFERENCE, Resource.STATISTICS)


def test_resources_are_the_categories_of_the_settings() -> None:
    assert [resource.value for resource in Resource] == list(CATEGORIES)


def test_resources_of_a_scope_that_administers_are_all_that_can_be_changed() -> None:
    """A route that declares nothing is held back rather than open."""
    assert {*resources_of(Scope.ADMIN, None)} == {
        Resource.SHARED_MEMORY,
        Resource.MODEL_REPOSITORY,
        Resource.TRACE,
        Resource.LOGGING,
    }
    assert resources_of(None, None) == tuple(Resource)
    for scope in Scope:
        assert resources_of(scope, None)
        assert resources_of(scope, NOTHING) == ()
        assert resources_of(scope, BOTH) == BOTH


def ask(restrictions: Restrictions, resources: Resources | None, headers: dict[bytes, bytes]) -> str:
    told: list[str] = []
    guarded = restrictions.guard_endpoint(
        lambda call: told.append("served"),
        Scope.INFER,
        resources,
        lambda call, fault: told.append(f"{fault.kind.name} {fault.message}"),
    )
    assert not hasattr(guarded, "take")
    guarded(cast("Any", SimpleNamespace(header=lambda name: headers.get(name, b""))))
    (one,) = told
    return one


def test_endpoint_is_served_with_its_header_alone() -> None:
    refusal = "PERMISSION_DENIED This API is restricted, expecting header '%s'"
    for sent in (b"", b"Secret", b"secret2"):
        assert ask(OVER_HTTP, None, {b"key": sent}) == refusal % "Key"
    assert ask(OVER_HTTP, None, {b"key": b"secret"}) == "served"
    assert ask(OVER_HTTP, BOTH, {b"key": b"secret"}) == refusal % "other"
    assert ask(OVER_HTTP, BOTH, {b"other": b"s2"}) == refusal % "Key"
    assert ask(OVER_HTTP, BOTH, {b"key": b"secret", b"other": b"s2"}) == "served"
    assert ask(OVER_HTTP, (Resource.TRACE,), {}) == "served"
    assert ask(OVER_HTTP, NOTHING, {}) == "served"


def test_endpoint_without_restrictions_is_itself() -> None:
    def endpoint(call: Any) -> None: ...

    for restrictions, resources in ((NO_RESTRICTIONS, None), (OVER_HTTP, NOTHING)):
        given = restrictions.guard_endpoint(endpoint, Scope.INFER, resources, lambda call, fault: None)
        assert given is endpoint


PREFIX = "triton-grpc-protocol-"
KEY = PREFIX + "key"


async def answer(request: Any, rpc: Any) -> Any:
    return request


async def stream(request: Any, rpc: Any) -> AsyncIterator[Any]:
    yield request


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("metadata", "is_served"),
    [
        (((KEY, "secret"),), True),
        ((("other", "x"), (KEY, b"secret")), True),
        ((), False),
        ((("key", "secret"),), False),
        (((KEY, "x"),), False),
        (((KEY, "x"), (KEY, "secret")), False),
    ],
)
def test_an_rpc(streams: bool, metadata: Any, is_served: bool) -> None:
    run: Any = stream if streams else answer
    start = {"start": lambda data, exchange: True}
    method = Method("/s/m", bytes, run, bytes, False, streams, scope=Scope.INFER, **start)
    guarded = guard_method(OVER_GRPC, method)
    assert guarded.start is None
    assert guard_method(OVER_GRPC, replace(method, resources=NOTHING)).start is method.start

    async def ask_rpc() -> Any:
        rpc = SimpleNamespace(metadata=metadata)
        if not streams:
            return await guarded.run(b"x", rpc)
        (piece,) = [piece async for piece in guarded.run(b"x", rpc)]
        return piece

    if is_served:
        assert asyncio.run(ask_rpc()) == b"x"
        return
    with pytest.raises(ServeError, match=f"protocol is restricted, expecting header '{PREFIX}Key'") as fault:
        asyncio.run(ask_rpc())
    assert fault.value.kind is Kind.UNAVAILABLE
