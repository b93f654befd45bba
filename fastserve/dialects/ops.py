"""The dialect `ops`: what an operator's machinery asks, on every HTTP listener.

    GET /healthz/live     200 while the event loop turns, 503 when its heartbeat is stale
    GET /healthz/ready    200 {"ready": true, ...} or 503 with the reason in the body
    GET /metrics          Prometheus text, summed over all front processes

HEAD works on each; the wire leaves the body out. Nothing here decides anything: readiness is filled
in by the server (metrics/readiness.py). Probes make no I/O, no thread and no task, so they answer
while the server is full (hardening R15); a scrape is rendered beside the loop, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from fastserve.metrics import CONTENT_TYPE, Heartbeat, Readiness, Registry
from fastserve.wire.scope import Scope

if TYPE_CHECKING:
    from fastserve.wire import Call
    from fastserve.wire.call import Endpoint

JSON = b"application/json"
METHODS = ("GET", "HEAD")
NO_STORE = ((b"Cache-Control", b"no-store"),)
SCOPES = {"/healthz/live": Scope.HEALTH, "/healthz/ready": Scope.HEALTH, "/metrics": Scope.METRICS}


class Ops:
    """Routes of the `ops` dialect. All three objects stay the server's, and are only read. Without a registry
    there is no page of metrics."""

    name = "ops"

    def __init__(
        self,
        readiness: Readiness,
        heartbeat: Heartbeat,
        registry: Registry | None,
        more: Callable[[], Callable[[], bytes]] | None = None,
    ) -> None:
        self._readiness = readiness
        self._heartbeat = heartbeat
        self._registry = registry
        self._more = more  # asked on the loop for what writes more of the page beside it
        self._render: asyncio.Future[bytes] | None = None
        self._endpoints: dict[str, Endpoint] = {
            "/healthz/live": self.show_live,
            "/healthz/ready": self.show_ready,
        }
        if registry is not None:
            self._endpoints["/metrics"] = self.show_metrics

    def route(self, method: str, target: str) -> Endpoint | None:
        endpoint = self._endpoints.get(target.partition("?")[0])
        if endpoint is None or method in METHODS:
            return endpoint
        return refuse_method

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
            more = self._more() if self._more is not None else bytes
            registry = self._registry
            assert registry is not None
            self._render = loop.run_in_executor(None, lambda: registry.expose() + more())
            self._render.add_done_callback(self._forget_render)
        return await asyncio.shield(self._render)

    def _forget_render(self, done: asyncio.Future[bytes]) -> None:
        self._render = None


def write_json(call: Call, status: int, body: object) -> None:
    call.reply(status, msgspec.json.encode(body), JSON, NO_STORE)


def refuse_method(call: Call) -> None:
    call.reply(405, b'{"error":"use GET or HEAD"}', JSON, ((b"Allow", b"GET, HEAD"),))
