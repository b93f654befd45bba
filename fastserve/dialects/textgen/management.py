"""MindIE's management endpoints (spec 4): probes, figures, and those that are refused by their name."""

from __future__ import annotations

from fastserve.dialects.textgen.errors import refuse
from fastserve.dialects.textgen.paths import Named, Path
from fastserve.dialects.textgen.service import Service
from fastserve.serving.dialect import HttpRoute
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import Scope

_PROBE = dict.fromkeys(("GET", "HEAD"), Scope.HEALTH)


def show_health(service: Service, named: Named) -> Endpoint:
    """Nothing but a status."""

    def show(call: Call) -> None:
        call.reply(200 if service.readiness.ready else 503, b"", b"")

    return show


PATHS = (
    Path(HttpRoute("health", "/health", _PROBE), show_health, refuse, gives_way=True),
    Path(HttpRoute("ready", "/v2/health/ready", _PROBE), show_health, refuse, gives_way=True),
)
