"""What clients can ask, over both transports, in one table: paths, scopes, RPCs (spec 1.1).

Paths are anchored matches of the raw path; the query is ignored. No lookups here: a model or version may well
not exist. The first pattern that fits decides; another verb on it is 405, and a path that fits none is 404.

    GET /v2/models/m/versions/3/ready  ->  Target("model_ready", {"model": "m", "version": "3"})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fastserve.codec.client_text import target_text
from fastserve.serving.dialect import HttpRoute
from fastserve.wire.scope import Scope

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
    """One row. `category` is what the settings of restricted APIs call it. The RPC has the scope of the verb
    that changes something, where there is one: the same RPC shows and changes."""

    name: str
    category: str
    rpc: str
    path: str
    verbs: Mapping[str, Scope]

    @property
    def scope(self) -> Scope:
        """The RPC's."""
        return self.verbs.get("POST") or self.verbs["GET"]


# In the order in which paths are tried.
TABLE = (
    Operation("server_metadata", "metadata", "ServerMetadata", r"/v2", _ASK),
    Operation("live", "health", "ServerLive", r"/v2/health/live", _PROBE),
    Operation("ready", "health", "ServerReady", r"/v2/health/ready", _PROBE),
    Operation("statistics", "statistics", "", r"/v2/models/stats", _ASK),
    Operation("infer", "inference", "ModelInfer", _MODEL + _VERSION + r"/infer", _INFER),
    Operation("generate", "inference", "", _MODEL + _VERSION + r"/generate", _INFER),
    Operation("generate_stream", "inference", "", _MODEL + _VERSION + r"/generate_stream", _INFER),
    Operation("model_ready", "health", "ModelReady", _MODEL + _VERSION + r"/ready", _PROBE),
    Operation("model_config", "model-config", "ModelConfig", _MODEL + _VERSION + r"/config", _ASK),
    Operation("statistics", "statistics", "ModelStatistics", _MODEL + _VERSION + r"/stats", _ASK),
    Operation("trace", "trace", "TraceSetting", _MODEL + r"/trace/setting", _TEND),
    Operation("model_metadata", "metadata", "ModelMetadata", _MODEL + _VERSION, _ASK),
    Operation("trace", "trace", "", r"/v2/trace/setting", _TEND),
    Operation("logging", "logging", "LogSettings", r"/v2/logging", _TEND),
    Operation(
        "index", "model-repository", "RepositoryIndex", _REPOSITORY + r"/index", {"POST": Scope.METADATA}
    ),
    Operation("load", "model-repository", "RepositoryModelLoad", _LOADED + r"/load", _CHANGE),
    Operation("unload", "model-repository", "RepositoryModelUnload", _LOADED + r"/unload", _CHANGE),
    *(
        Operation(
            f"{kind}_{verb}",
            "shared-memory",
            f"{kind.title()}SharedMemory{verb.title()}",
            rf"/v2/{kind}{_REGION}/{verb}",
            _ASK if verb == "status" else _CHANGE,
        )
        for kind in ("system", "cuda")
        for verb in ("status", "register", "unregister")
    ),
)
_PATTERNS = tuple((row, re.compile(row.path)) for row in TABLE)
CATEGORIES = {row.name: row.category for row in TABLE}


def _readable(pattern: str) -> str:
    """`/v2/models/MODEL[/versions/VERSION]/infer`"""
    named = re.sub(r"\(\?P<(\w+)>[^)]*\)", lambda match: match[1].upper(), pattern)
    return re.sub(r"\(\?:([^)]*)\)\?", r"[\1]", named)


ROUTES = tuple(HttpRoute(row.name, _readable(row.path), row.verbs) for row in TABLE)
SERVICE = "/inference.GRPCInferenceService/"
STREAM = "ModelStreamInfer"
RPCS = {SERVICE + row.rpc: row.scope for row in TABLE if row.rpc} | {SERVICE + STREAM: Scope.INFER}


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL asks for. `parts` are the path's own texts: model, version, repository, region; with
    WRONG_VERB `of` what another verb would ask for."""

    asked: str
    parts: Mapping[str, str] = field(default_factory=dict)
    scope: Scope = Scope.METADATA

    @property
    def model(self) -> str:
        return self.parts.get("model", "")

    @property
    def version(self) -> str:
        """Digits, or "" for the latest."""
        return self.parts.get("version", "")


def is_own(target: str) -> bool:
    """Whether a path belongs to this API on a listener that speaks several."""
    path = target.partition("?")[0]
    return path == "/v2" or path.startswith("/v2/")


def parse_target(method: str, target: str) -> Target:
    """What is asked for; NOT_FOUND or WRONG_VERB when nothing is."""
    path = target_text(target.partition("?")[0])
    for row, pattern in _PATTERNS:
        match = pattern.fullmatch(path)
        if match is not None:
            if method not in row.verbs:
                return Target(WRONG_VERB, {"of": row.name})
            parts = {key: text for key, text in match.groupdict().items() if text is not None}
            return Target(row.name, parts, row.verbs[method])
    return Target(NOT_FOUND)
