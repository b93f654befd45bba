"""The dialect `metrics`: a port that answers as Triton's metrics port does (spec 12), for what scrapes that.

GET /metrics[/]       the nv_* metrics alone: a scaler that looks every second pays for nothing else
GET anything else     200 and nothing
another verb          405
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.wire import Call
    from fastserve.wire.call import Endpoint

CONTENT_TYPE = b"text/plain; charset=utf-8"


class MetricsPort:
    """Answers every target of its listener. `prepare` is asked on the loop for what writes the page."""

    name = "metrics"

    def __init__(self, prepare: Callable[[], Callable[[], bytes]]) -> None:
        self._prepare = prepare

    def route(self, method: str, target: str) -> Endpoint:
        if method != "GET":
            return refuse_method
        return self.show if target.partition("?")[0] in ("/metrics", "/metrics/") else show_nothing

    async def show(self, call: Call) -> None:
        page = await asyncio.get_running_loop().run_in_executor(None, self._prepare())
        call.reply(200, page, CONTENT_TYPE)


def show_nothing(call: Call) -> None:
    call.reply(200, b"", CONTENT_TYPE)


def refuse_method(call: Call) -> None:
    call.reply(405, b"", CONTENT_TYPE)
