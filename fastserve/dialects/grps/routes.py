"""Method and path -> what is asked for (spec 2). No lookups here: a model may well not exist."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from fastserve.net.access_control import NOTHING, Resource, Resources, Scope
from fastserve.serving.dialect import HttpRoute
from fastserve.settings import GrpsOptions

_BOTH = ("GET", "POST")
ROOT = "/grps/v1/"
PREDICT = "predict"
_HEALTH = (Resource.HEALTH,)
# A model's metadata is its configuration.
_DESCRIBED = (Resource.METADATA, Resource.MODEL_CONFIG)
ROUTES = (
    HttpRoute("online", ROOT + "health/online", dict.fromkeys(_BOTH, Scope.ADMIN), _HEALTH),
    HttpRoute("offline", ROOT + "health/offline", dict.fromkeys(_BOTH, Scope.ADMIN), _HEALTH),
    HttpRoute("live", ROOT + "health/live", dict.fromkeys(_BOTH, Scope.HEALTH)),
    HttpRoute("ready", ROOT + "health/ready", dict.fromkeys(_BOTH, Scope.HEALTH)),
    HttpRoute(PREDICT, ROOT + "infer/predict", {"POST": Scope.INFER}),
    HttpRoute("server", ROOT + "metadata/server", dict.fromkeys(_BOTH, Scope.METADATA), _DESCRIBED),
    HttpRoute("model", ROOT + "metadata/model", {"POST": Scope.METADATA}, _DESCRIBED),
    HttpRoute("page", "/", {"GET": Scope.METRICS}),
    HttpRoute("page", ROOT + "monitor/metrics", {"GET": Scope.METRICS}),
    HttpRoute("series", ROOT + "monitor/series", {"GET": Scope.METRICS}),
    HttpRoute("script", ROOT + "js/jquery_min", {"GET": Scope.METRICS}, NOTHING),
    HttpRoute("script", ROOT + "js/flot_min", {"GET": Scope.METRICS}, NOTHING),
    HttpRoute("customized", "/CUSTOMIZED-PATH", dict.fromkeys(_BOTH, Scope.INFER)),
)
BY_PATH = {route.path: route for route in ROUTES}
CUSTOMIZED = ROUTES[-1]
SERVICE = "/grps.protos.v1.GrpsService/"
RPCS = {
    SERVICE + "Predict": Scope.INFER,
    SERVICE + "PredictStreaming": Scope.INFER,
    SERVICE + "Online": Scope.ADMIN,
    SERVICE + "Offline": Scope.ADMIN,
    SERVICE + "CheckLiveness": Scope.HEALTH,
    SERVICE + "CheckReadiness": Scope.HEALTH,
    SERVICE + "ServerMetadata": Scope.METADATA,
    SERVICE + "ModelMetadata": Scope.METADATA,
}
RPC_RESOURCES: dict[str, Resources] = {
    SERVICE + "Online": _HEALTH,
    SERVICE + "Offline": _HEALTH,
    SERVICE + "ServerMetadata": _DESCRIBED,
    SERVICE + "ModelMetadata": _DESCRIBED,
}


@dataclass(frozen=True, slots=True)
class Query:
    """The query of a predict's URL. The first of a name counts; `true` in any case is the only yes."""

    model: str = ""
    streaming: bool = False
    ndarray: bool = False


def find_route(target: str, options: GrpsOptions) -> HttpRoute | None:
    """The row of the table a path has; None for none."""
    path = target.partition("?")[0]
    if options.customized_path and path == options.customized_path:
        return CUSTOMIZED
    return BY_PATH.get(path)


def parse_query(target: str, streaming_key: str) -> Query:
    """The query of a predict; `streaming_key` "" for calls that say it elsewhere."""
    text = target.partition("?")[2].encode("latin-1").decode("utf-8", "replace")
    said = dict(reversed(parse_qsl(text, keep_blank_values=True)))
    return Query(
        model=said.get("model", ""),
        streaming=bool(streaming_key) and said.get(streaming_key, "").lower() == "true",
        ndarray=said.get("return-ndarray", "").lower() == "true",
    )
