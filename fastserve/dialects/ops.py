"""The dialect `ops`: what an operator's machinery asks, on every HTTP listener.

    GET /healthz/live     200 while the event loop turns, 503 when its heartbeat is stale
    GET /healthz/ready    200 {"ready": true, ...} or 503 with the reason in the body
    GET /metrics          Prometheus text, summed over all front processes; an API may have its own there

HEAD works on each; the wire leaves the body out. Nothing here decides anything: readiness is filled
in by the server (metrics/readiness.py). Probes make no I/O, no thread and no task, so they answer
while the server is full (hardening R15); a scrape is rendered beside the loop, one at a time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from fastserve.metrics import CONTENT_TYPE
from fastserve.serving.dialect import Dialect, DialectSpec, HttpRoute, NoOptions, ServingContext
from fastserve.wire.dialect import Route
from fastserve.wire.scope import Scope

if TYPE_CHECKING:
    from fastserve.wire import Call
    from fastserve.wire.call import Endpoint

JSON = b"application/json"
METHODS = ("GET", "HEAD")
NO_STORE = ((b"Cache-Control", b"no-store"),)
LIVE = HttpRoute("live", "/healthz/live", dict.fromkeys(METHODS, Scope.HEALTH))
READY = HttpRoute("ready", "/healthz/ready", dict.fromkeys(METHODS, Scope.HEALTH))
METRICS = HttpRoute("metrics", "/metrics", dict.fromkeys(METHODS, Scope.METRICS))


class Ops(Dialect):
    """Routes of the `ops` dialect. What it shows of the context stays the server's, and is only read."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._readiness = context.readiness
        self._heartbeat = context.heartbeat
        self._registry = context.registry
        self._model_metrics = context.model_metrics
        self._render: asyncio.Future[bytes] | None = None
        self._routes: dict[str, tuple[HttpRoute, Endpoint]] = {
            LIVE.path: (LIVE, self.show_live),
            READY.path: (READY, self.show_ready),
        }
        if context.settings.allow_metrics:
            self._routes[METRICS.path] = METRICS, self.show_metrics

    def route(self, method: str, target: str) -> Route | None:
        row, endpoint = self._routes.get(target.partition("?")[0], (None, refuse_method))
        if row is None:
            return None
        if method not in row.scopes:
            return Route(refuse_method, Scope.HEALTH)
        return Route(endpoint, row.scopes[method], gives_way=row is METRICS)

    def show_live(self, call: Call) -> None:
        heart = self._heartbeat
        if heart.stale:
            write_json(
                call, 503, {"live": False, "reason": f"the event loop has not turned for {heart.age_s:.1f} s"}
            )
        else:
            write_json(call, 200, {"live": True})

    def show_ready(self, call: Call) -> None:
        write_json(call, 200 if self._readiness.ready else 503, self._readiness)

    async def show_metrics(self, call: Call) -> None:
        call.reply(200, await self._render_once(), CONTENT_TYPE, NO_STORE)

    async def _render_once(self) -> bytes:
        """Scrapes that overlap share one rendering, which outlives a scraper that hangs up."""
        if self._render is None:
            loop = asyncio.get_running_loop()
            more, registry = self._model_metrics(), self._registry
            self._render = loop.run_in_executor(None, lambda: registry.expose() + more())
            self._render.add_done_callback(self._forget_render)
        return await asyncio.shield(self._render)

    def _forget_render(self, done: asyncio.Future[bytes]) -> None:
        self._render = None


def write_json(call: Call, status: int, body: object) -> None:
    call.reply(status, msgspec.json.encode(body), JSON, NO_STORE)


def refuse_method(call: Call) -> None:
    call.reply(405, b'{"error":"use GET or HEAD"}', JSON, ((b"Allow", b"GET, HEAD"),))


SPEC = DialectSpec(
    name="ops",
    options=NoOptions,
    build=Ops,
    routes=(LIVE, READY, METRICS),
    unasked=False,
    beside_others=True,
)
