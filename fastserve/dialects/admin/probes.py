"""The dialect `ops`, probes and metrics on every HTTP listener, and `metrics`, Triton's metrics port.

    GET /healthz/live     200 while the event loop turns, 503 when its heartbeat is stale
    GET /healthz/ready    200 {"ready": true, ...} or 503 with the reason in the body
    GET /healthz/startup  200 once the models of the start are loaded or have failed, and from then on
    GET /metrics          Prometheus text, summed over all front processes; an API may have its own there

HEAD works on each. Readiness comes from the server (metrics/readiness.py). Probes make no I/O, no thread and
no task, so they answer while the server is full (hardening R15); a scrape is rendered in a thread, one at a
time.

On Triton's metrics port (spec 12) every target is answered: GET /metrics[/] has the nv_* metrics alone, GET
of anything else 200 without a body, another verb 405.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from fastserve.metrics import CONTENT_TYPE, ServerState
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.limits import JSON
from fastserve.net.router import Route, Yields
from fastserve.serving.api_operations import TEXT_TYPE, ApiOperation, ModelFacts, json_content, object_schema
from fastserve.serving.dialect import (
    Dialect,
    DialectSpec,
    HttpRoute,
    ListenerPolicy,
    NoOptions,
    ServingContext,
)
from fastserve.settings import Settings

if TYPE_CHECKING:
    from fastserve.net import Call
    from fastserve.net.request import Endpoint


PROBE_METHODS = ("GET", "HEAD")
NO_STORE = ((b"Cache-Control", b"no-store"),)
LIVE = HttpRoute("live", "/healthz/live", dict.fromkeys(PROBE_METHODS, Scope.HEALTH))
READY = HttpRoute("ready", "/healthz/ready", dict.fromkeys(PROBE_METHODS, Scope.HEALTH))
STARTUP = HttpRoute("startup", "/healthz/startup", dict.fromkeys(PROBE_METHODS, Scope.HEALTH))
METRICS_ROUTE = HttpRoute("metrics", "/metrics", dict.fromkeys(PROBE_METHODS, Scope.METRICS))


class Ops(Dialect):
    """Routes of the `ops` dialect."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._readiness = context.readiness
        self._heartbeat = context.heartbeat
        self._registry = context.registry
        self._model_metrics = context.model_metrics
        self._render: asyncio.Future[bytes] | None = None
        self._routes: dict[str, tuple[HttpRoute, Endpoint]] = {
            LIVE.path: (LIVE, self.show_live),
            READY.path: (READY, self.show_ready),
            STARTUP.path: (STARTUP, self.show_startup),
        }
        if context.settings.allow_metrics:
            self._routes[METRICS_ROUTE.path] = METRICS_ROUTE, self.show_metrics

    def route(self, method: str, target: str) -> Route | None:
        row, endpoint = self._routes.get(target.partition("?")[0], (None, refuse_probe_method))
        if row is None:
            return None
        if method not in row.scopes:
            return Route(refuse_probe_method, Scope.HEALTH, resources=NOTHING)
        return Route(
            endpoint, row.scopes[method], gives_way=Yields.FIRST if row is METRICS_ROUTE else Yields.NEVER
        )

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

    def show_startup(self, call: Call) -> None:
        state = self._readiness.state
        started = state is not ServerState.STARTING
        write_json(call, 200 if started else 503, {"started": started, "state": state})

    async def show_metrics(self, call: Call) -> None:
        call.reply(200, await self._render_once(), CONTENT_TYPE, NO_STORE)

    async def _render_once(self) -> bytes:
        """Return the page. Overlapping scrapes share one rendering, which outlives a client that leaves."""
        if self._render is None:
            self._render = asyncio.ensure_future(self._write())
            self._render.add_done_callback(self._forget_render)
        return await asyncio.shield(self._render)

    async def _write(self) -> bytes:
        more, registry = await self._model_metrics(), self._registry
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: registry.expose() + more())

    def _forget_render(self, done: asyncio.Future[bytes]) -> None:
        self._render = None


def write_json(call: Call, status: int, body: object) -> None:
    call.reply(status, msgspec.json.encode(body), JSON, NO_STORE)


def refuse_probe_method(call: Call) -> None:
    call.reply(405, b'{"error":"use GET or HEAD"}', JSON, ((b"Allow", b"GET, HEAD"),))


TAG = "Server"
_PROBED = json_content(object_schema({}))


def describe_server(settings: Settings, models: Sequence[ModelFacts]) -> Iterator[ApiOperation]:
    """Yield the operations for /openapi.json."""
    yield ApiOperation("GET", LIVE.path, TAG, "Tell whether the server is alive", answer=_PROBED)
    yield ApiOperation("GET", READY.path, TAG, "Tell whether the server is ready", answer=_PROBED)
    yield ApiOperation("GET", STARTUP.path, TAG, "Tell whether the server has started", answer=_PROBED)
    if settings.allow_metrics:
        text = {TEXT_TYPE: {"schema": {"type": "string"}}}
        yield ApiOperation("GET", METRICS_ROUTE.path, TAG, "Metrics of Prometheus", answer=text)


OPS = DialectSpec(
    name="ops",
    options=NoOptions,
    build=Ops,
    routes=(LIVE, READY, STARTUP, METRICS_ROUTE),
    listeners=ListenerPolicy.EVERY_HTTP,
    describe_server=describe_server,
)

PAGE_TYPE = b"text/plain; charset=utf-8"


# A port for what scrapes: restrictions of the APIs are not for it, as in the original.
SCRAPE_ROUTE = HttpRoute("metrics", "/metrics[/]", {"GET": Scope.METRICS}, NOTHING)


class MetricsPort(Dialect):
    """Answers every target of its listener, as Triton's metrics port does."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._model_metrics = context.model_metrics

    def route(self, method: str, target: str) -> Route:
        if method != "GET":
            return Route(refuse_scrape_method, Scope.METRICS, resources=NOTHING)
        known = target.partition("?")[0] in ("/metrics", "/metrics/")
        endpoint = self.show if known else show_nothing
        return Route(endpoint, SCRAPE_ROUTE.scopes[method], resources=SCRAPE_ROUTE.resources)

    def answer_unknown(self, call: Call) -> None:
        show_nothing(call)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        return refuse_scrape_method

    async def show(self, call: Call) -> None:
        page = await asyncio.get_running_loop().run_in_executor(None, await self._model_metrics())
        call.reply(200, page, PAGE_TYPE)


def show_nothing(call: Call) -> None:
    call.reply(200, b"", PAGE_TYPE)


def refuse_scrape_method(call: Call) -> None:
    call.reply(405, b"", PAGE_TYPE)


def find_port(settings: Settings) -> int:
    return settings.metrics_port if settings.allow_metrics else 0


METRICS_PORT = DialectSpec(
    name="metrics",
    options=NoOptions,
    build=MetricsPort,
    routes=(SCRAPE_ROUTE,),
    listeners=ListenerPolicy.EXCLUSIVE,
    own_port=find_port,
)
