"""URLs of the V1 HTTP API (spec 2), matched whole on the raw path.

    POST /api/infer/MODEL[/VERSION]     GET /api/status[/MODEL]     ...

An unknown URL is 400 without a body, a wrong verb 405; neither has an NV-Status.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastserve.net.access_control import NOTHING, Resource, Resources, Scope
from fastserve.serving.dialect import ALIVE, HttpRoute

_PLACE = re.compile(r"/api/([a-z]+)(.*)")
_NUMBER = "[0-9]{1,18}"
_REGION = rf"/(?P<key>/.*)/(?P<offset>{_NUMBER})/(?P<byte_size>{_NUMBER})"
_DEVICE = rf"/(?P<byte_size>{_NUMBER})/(?P<device>[0-9]{{1,9}})"
_NUMBERS = {"version", "offset", "byte_size", "device"}
_REST = {
    place: [re.compile(pattern) for pattern in patterns]
    for place, patterns in {
        "health": [r"/(?P<action>live|ready)"],
        "infer": [rf"/(?P<name>[^/]+)(?:/(?P<version>{_NUMBER}))?"],
        "status": [r"(?:/(?P<name>.*))?"],
        "modelcontrol": [r"/(?P<action>load|unload)/(?P<name>[^/]+)"],
        "sharedmemorycontrol": [
            r"/(?P<action>register)/(?P<name>[^/]+)" + _REGION,
            r"/(?P<action>cudaregister)/(?P<name>[^/]+)" + _DEVICE,
            r"/(?P<action>unregister)/(?P<name>[^/]+)",
            r"/(?P<action>unregisterall|status)",
        ],
        "repository": [r"/(?P<action>index)"],
    }.items()
}
_SHARED_STATUS = "sharedmemorycontrol/status"
_REPOSITORY, _MEMORY = (Resource.MODEL_REPOSITORY,), (Resource.SHARED_MEMORY,)
# A status has a model's config and its counts.
_STATUS = (Resource.METADATA, Resource.MODEL_CONFIG, Resource.STATISTICS)
ROUTES = (
    HttpRoute("health", "/api/health/live|ready", {"GET": Scope.HEALTH}),
    HttpRoute("infer", "/api/infer/MODEL[/VERSION]", {"POST": Scope.INFER}),
    HttpRoute("status", "/api/status[/MODEL]", {"GET": Scope.METADATA}, _STATUS),
    HttpRoute("modelcontrol", "/api/modelcontrol/load|unload/MODEL", {"POST": Scope.ADMIN}, _REPOSITORY),
    HttpRoute("sharedmemorycontrol", "/api/sharedmemorycontrol/...", {"POST": Scope.ADMIN}, _MEMORY),
    HttpRoute(_SHARED_STATUS, "/api/sharedmemorycontrol/status", {"GET": Scope.METADATA}, _MEMORY),
    HttpRoute("repository", "/api/repository/index", {"GET": Scope.METADATA}, _REPOSITORY),
    ALIVE,
)
_ROWS = {route.name: route for route in ROUTES}
SERVICE = "/nvidia.inferenceserver.GRPCService/"
RPCS = {
    SERVICE + "Health": Scope.HEALTH,
    SERVICE + "Status": Scope.METADATA,
    SERVICE + "Repository": Scope.METADATA,
    SERVICE + "Infer": Scope.INFER,
    SERVICE + "StreamInfer": Scope.INFER,
    SERVICE + "ModelControl": Scope.ADMIN,
    SERVICE + "SharedMemoryControl": Scope.ADMIN,
}
RPC_RESOURCES: dict[str, Resources] = {
    SERVICE + "Status": _STATUS,
    SERVICE + "Repository": _REPOSITORY,
    SERVICE + "ModelControl": _REPOSITORY,
    SERVICE + "SharedMemoryControl": _MEMORY,
}


@dataclass(frozen=True, slots=True)
class V1Target:
    """The meaning of a URL. `place` is its first word, `action` the word after it, `format` the query's."""

    place: str
    action: str = ""
    name: str = ""
    version: int | None = None
    key: str = ""
    offset: int = 0
    byte_size: int = 0
    device: int = 0
    format: str = ""
    scope: Scope = Scope.METADATA
    resources: Resources | None = NOTHING


def is_api(target: str) -> bool:
    """Return True for a path of this API, on a listener that speaks several."""
    return target.startswith("/api/") or target.partition("?")[0] == "/api"


def parse_target(method: str, target: str) -> V1Target | int:
    """Return the meaning of a URL, or the status for a malformed one."""
    path, _, query = target.partition("?")
    top = _PLACE.fullmatch(path)
    if top is None or top[1] not in _REST:
        return 400
    place, rest = top.groups()
    shows = place == "sharedmemorycontrol" and rest == "/status"
    row = _ROWS[_SHARED_STATUS if shows else place]
    if method not in row.scopes:
        return 405
    found = next((match for pattern in _REST[place] if (match := pattern.fullmatch(rest))), None)
    if found is None:
        return 400
    given: dict[str, Any] = {name: value for name, value in found.groupdict().items() if value}
    for name in given.keys() & _NUMBERS:
        given[name] = int(given[name])
    form = dict(parse_qsl(query)).get("format", "") if query else ""
    return V1Target(place, format=form, scope=row.scopes[method], resources=row.resources, **given)
