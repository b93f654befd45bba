"""The dialect `metrics`: a port that answers as Triton's metrics port does (spec 12), for what scrapes that.

GET /metrics[/]       the nv_* metrics alone: a scaler that looks every second pays for nothing else
GET anything else     200 and nothing
another verb          405
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastserve.config import Settings
from fastserve.serving.dialect import Dialect, DialectSpec, HttpRoute, NoOptions, ServingContext
from fastserve.wire.dialect import Route
from fastserve.wire.scope import Scope

if TYPE_CHECKING:
    from fastserve.wire import Call
    from fastserve.wire.call import Endpoint

CONTENT_TYPE = b"text/plain; charset=utf-8"


ROUTE = HttpRoute("metrics", "/metrics[/]", {"GET": Scope.METRICS})


class MetricsPort(Dialect):
    """Answers every target of its listener."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._model_metrics = context.model_metrics

    def route(self, method: str, target: str) -> Route:
        if method != "GET":
            return Route(refuse_method, Scope.METRICS)
        known = target.partition("?")[0] in ("/metrics", "/metrics/")
        return Route(self.show if known else show_nothing, ROUTE.scopes[method])

    def answer_unknown(self, call: Call) -> None:
        show_nothing(call)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        return refuse_method

    async def show(self, call: Call) -> None:
        page = await asyncio.get_running_loop().run_in_executor(None, self._model_metrics())
        call.reply(200, page, CONTENT_TYPE)


def show_nothing(call: Call) -> None:
    call.reply(200, b"", CONTENT_TYPE)


def refuse_method(call: Call) -> None:
    call.reply(405, b"", CONTENT_TYPE)


def find_port(settings: Settings) -> int:
    return settings.metrics_port if settings.allow_metrics else 0


SPEC = DialectSpec(
    name="metrics",
    options=NoOptions,
    build=MetricsPort,
    routes=(ROUTE,),
    unasked=False,
    stands_in=True,
    never_mixed=True,
    own_port=find_port,
)
