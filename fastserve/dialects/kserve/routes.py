"""The operations of this API in one table: paths, RPCs and their scopes (spec 1.1).

Paths are anchored matches of the raw path; the query is ignored. Nothing is looked up: a model or version may
not exist. The first pattern that fits decides; another verb on it is 405, and a path that fits none is 404.

    GET /v2/models/m/versions/3/ready  ->  KServeTarget("model_ready", {"model": "m", "version": "3"})
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fastserve.codec.json_text import target_text
from fastserve.net.access_control import NOTHING, Resource, Resources, Scope
from fastserve.serving.dialect import HttpRoute

_MODEL = r"/v2/models/(?P<model>[^/]+)"
_VERSION = r"(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = r"/v2/repository(?:/(?P<repository>[^/]+))?"
_LOADED = _REPOSITORY + r"/models/(?P<model>[^/]+)"
_REGION = r"sharedmemory(?:/region/(?P<region>[^/]+))?"
_ASK, _TEND = {"GET": Scope.METADATA}, {"GET": Scope.METADATA, "POST": Scope.ADMIN}
_PROBE, _INFER, _CHANGE = {"GET": Scope.HEALTH}, {"POST": Scope.INFER}, {"POST": Scope.ADMIN}
NOT_FOUND = "not_found"
WRONG_VERB = "wrong_verb"


class Operation(NamedTuple):
    """One row. An RPC that both shows and changes has the scope of the verb that changes."""

    name: str
    resource: Resource
    rpc: str
    path: str
    verbs: Mapping[str, Scope]

    @property
    def scope(self) -> Scope:
        """The scope of the RPC."""
        return self.verbs.get("POST") or self.verbs["GET"]


# Paths are tried in this order.
TABLE = (
    Operation("server_metadata", Resource.METADATA, "ServerMetadata", r"/v2", _ASK),
    Operation("live", Resource.HEALTH, "ServerLive", r"/v2/health/live", _PROBE),
    Operation("ready", Resource.HEALTH, "ServerReady", r"/v2/health/ready", _PROBE),
    Operation("statistics", Resource.STATISTICS, "", r"/v2/models/stats", _ASK),
    Operation("infer", Resource.INFERENCE, "ModelInfer", _MODEL + _VERSION + r"/infer", _INFER),
    Operation("generate", Resource.INFERENCE, "", _MODEL + _VERSION + r"/generate", _INFER),
    Operation("generate_stream", Resource.INFERENCE, "", _MODEL + _VERSION + r"/generate_stream", _INFER),
    Operation("model_ready", Resource.HEALTH, "ModelReady", _MODEL + _VERSION + r"/ready", _PROBE),
    Operation("model_config", Resource.MODEL_CONFIG, "ModelConfig", _MODEL + _VERSION + r"/config", _ASK),
    Operation("statistics", Resource.STATISTICS, "ModelStatistics", _MODEL + _VERSION + r"/stats", _ASK),
    Operation("trace", Resource.TRACE, "TraceSetting", _MODEL + r"/trace/setting", _TEND),
    Operation("model_metadata", Resource.METADATA, "ModelMetadata", _MODEL + _VERSION, _ASK),
    Operation("trace", Resource.TRACE, "", r"/v2/trace/setting", _TEND),
    Operation("logging", Resource.LOGGING, "LogSettings", r"/v2/logging", _TEND),
    Operation(
        "index",
        Resource.MODEL_REPOSITORY,
        "RepositoryIndex",
        _REPOSITORY + r"/index",
        {"POST": Scope.METADATA},
    ),
    Operation("load", Resource.MODEL_REPOSITORY, "RepositoryModelLoad", _LOADED + r"/load", _CHANGE),
    Operation("unload", Resource.MODEL_REPOSITORY, "RepositoryModelUnload", _LOADED + r"/unload", _CHANGE),
    *(
        Operation(
            f"{kind}_{verb}",
            Resource.SHARED_MEMORY,
            f"{kind.title()}SharedMemory{verb.title()}",
            rf"/v2/{kind}{_REGION}/{verb}",
            _ASK if verb == "status" else _CHANGE,
        )
        for kind in ("system", "cuda")
        for verb in ("status", "register", "unregister")
    ),
)
_PATTERNS = tuple((row, re.compile(row.path)) for row in TABLE)
_LABEL = r"(?:/versions/(?P<version>[^/]+))"
_LABELLED = tuple(
    (row, re.compile(row.path.replace(_VERSION, _LABEL))) for row in TABLE if _VERSION in row.path
)


def _readable(pattern: str) -> str:
    """Return a pattern for readers: `/v2/models/MODEL[/versions/VERSION]/infer`."""
    named = re.sub(r"\(\?P<(\w+)>[^)]*\)", lambda match: match[1].upper(), pattern)
    return re.sub(r"\(\?:([^)]*)\)\?", r"[\1]", named)


ROUTES = tuple(HttpRoute(row.name, _readable(row.path), row.verbs, (row.resource,)) for row in TABLE)
SERVICE = "/inference.GRPCInferenceService/"
STREAM = "ModelStreamInfer"
RPCS = {SERVICE + row.rpc: row.scope for row in TABLE if row.rpc} | {SERVICE + STREAM: Scope.INFER}
RPC_RESOURCES: dict[str, Resources] = {SERVICE + row.rpc: (row.resource,) for row in TABLE if row.rpc}


@dataclass(frozen=True, slots=True)
class KServeTarget:
    """The operation that a URL asks for.

    `parts` are the path's own texts: model, version, repository, region. With WRONG_VERB `resources` are
    those of the right verb.
    """

    operation: str
    parts: Mapping[str, str] = field(default_factory=dict)
    scope: Scope = Scope.METADATA
    resources: Resources = NOTHING

    @property
    def model(self) -> str:
        return self.parts.get("model", "")

    @property
    def version(self) -> str:
        """The version's digits, its label, or "" for the latest."""
        return self.parts.get("version", "")


def is_own(target: str) -> bool:
    """Return True for a path of this API, on a listener that speaks several."""
    path = target.partition("?")[0]
    return path == "/v2" or path.startswith("/v2/")


def parse_labelled(method: str, target: str) -> KServeTarget:
    """Return the operation of a URL whose version is a label, as parse_target does."""
    return parse_target(method, target, _LABELLED)


def parse_target(
    method: str, target: str, patterns: Iterable[tuple[Operation, re.Pattern[str]]] = _PATTERNS
) -> KServeTarget:
    """Return the operation of a URL, NOT_FOUND or WRONG_VERB where there is none."""
    path = target_text(target.partition("?")[0])
    for row, pattern in patterns:
        match = pattern.fullmatch(path)
        if match is not None:
            if method not in row.verbs:
                return KServeTarget(WRONG_VERB, resources=(row.resource,))
            parts = {key: text for key, text in match.groupdict().items() if text is not None}
            return KServeTarget(row.name, parts, row.verbs[method], (row.resource,))
    return KServeTarget(NOT_FOUND)
