"""Endpoints and RPCs of a server that loads models on demand: a request runs again once its model is there.

Only such a server has them. A request whose model is loaded pays one more call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastserve.net.request import Call, Endpoint
from fastserve.util.model_demand import (
    MOST_LOADS,
    ModelDemand,
    Want,
    await_again,
    load_for_request,
    run_again,
)

if TYPE_CHECKING:
    from fastserve.net.grpc.method import Method
    from fastserve.net.http1.large_bodies import ArrivedBody


def demand_endpoint(want: Want | None, endpoint: Endpoint) -> Endpoint:
    """Return the HTTP endpoint; where models are loaded on demand, one that waits for them. It runs for every
    request: a closure costs half of a method."""
    if want is None:
        return endpoint
    calls = DemandCalls(want, endpoint)

    def waiting(call: Call) -> Coroutine[Any, Any, None] | None:
        try:
            work = endpoint(call)
        except ModelDemand as demand:
            return calls.run_again(call, demand)
        return None if work is None else calls.follow(call, work)

    if hasattr(endpoint, "take"):
        waiting.take = calls.take  # type: ignore[attr-defined]
    return waiting


class DemandCalls:
    """Calls of an HTTP endpoint that wait for their models."""

    __slots__ = ("_endpoint", "_want")

    def __init__(self, want: Want, endpoint: Endpoint) -> None:
        self._want, self._endpoint = want, endpoint

    async def follow(self, call: Call, work: Coroutine[Any, Any, None]) -> None:
        """Run the endpoint's coroutine, and the endpoint again where it wants a model."""
        try:
            await work
        except ModelDemand as demand:
            await self.run_again(call, demand)

    async def run_again(self, call: Call, demand: ModelDemand) -> None:
        """Run the endpoint again once the model is loaded, or could not be."""
        if not await run_again(self._want, demand, lambda: self._endpoint(call)):
            call.leave_open()

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Offer a large body to an endpoint that reads it out of the socket itself; it takes the body only if
        its model is there."""
        try:
            taken: bool = self._endpoint.take(call, body)  # type: ignore[attr-defined]
        except ModelDemand:
            return False
        return taken


def demand_method(want: Want | None, method: Method) -> Method:
    """Return the RPC; where models are loaded on demand, one that waits for them. The requests of a stream
    wait by themselves (`serving.streams.answer_stream`)."""
    if want is None or method.takes_stream:
        return method
    return DemandRpc(want, method).method


class DemandRpc:
    """An RPC whose calls wait for their models; `method` is it for the transport."""

    def __init__(self, want: Want, method: Method) -> None:
        self._want, self._method = want, method
        run = self._run_many if method.gives_stream else self._run
        self.method = replace(method, run=run)

    async def _run(self, request: Any, rpc: Any) -> Any:
        return await await_again(self._want, lambda: self._method.run(request, rpc))

    async def _run_many(self, request: Any, rpc: Any) -> AsyncIterator[Any]:
        for left in reversed(range(MOST_LOADS + 1)):
            try:
                async with aclosing(self._method.run(request, rpc)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except ModelDemand as demand:  # before the first piece
                await load_for_request(self._want, demand, last=left < 2)
