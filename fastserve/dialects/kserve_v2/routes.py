"""Method and path -> what is asked for (spec 1.1). Anchored matches of the raw path; the query is ignored.

No lookups here: a model or version may well not exist. The first pattern that fits decides; another verb
on it is 405, and a path that fits none is 404.

    GET /v2/models/m/versions/3/ready  ->  Target("model_ready", {"model": "m", "version": "3"})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastserve.serving.dialect import HttpRoute
from fastserve.wire.scope import Scope

_MODEL = r"/v2/models/(?P<model>[^/]+)"
_VERSION = r"(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = r"/v2/repository(?:/(?P<repository>[^/]+))?"
_REGION = r"sharedmemory(?:/region/(?P<region>[^/]+))?"

NOT_FOUND = "not_found"
WRONG_VERB = "wrong_verb"

_ASK, _TEND = {"GET": Scope.METADATA}, {"GET": Scope.METADATA, "POST": Scope.ADMIN}
_PROBE, _INFER, _CHANGE = {"GET": Scope.HEALTH}, {"POST": Scope.INFER}, {"POST": Scope.ADMIN}

# name of what is asked -> its pattern, and its verbs with their scopes, in the order they are tried
_TABLE: tuple[tuple[str, str, Mapping[str, Scope]], ...] = (
    ("server_metadata", r"/v2", _ASK),
    ("live", r"/v2/health/live", _PROBE),
    ("ready", r"/v2/health/ready", _PROBE),
    ("statistics", r"/v2/models/stats", _ASK),
    ("infer", _MODEL + _VERSION + r"/infer", _INFER),
    ("generate", _MODEL + _VERSION + r"/generate", _INFER),
    ("generate_stream", _MODEL + _VERSION + r"/generate_stream", _INFER),
    ("model_ready", _MODEL + _VERSION + r"/ready", _PROBE),
    ("model_config", _MODEL + _VERSION + r"/config", _ASK),
    ("statistics", _MODEL + _VERSION + r"/stats", _ASK),
    ("trace", _MODEL + r"/trace/setting", _TEND),
    ("model_metadata", _MODEL + _VERSION, _ASK),
    ("trace", r"/v2/trace/setting", _TEND),
    ("logging", r"/v2/logging", _TEND),
    ("index", _REPOSITORY + r"/index", {"POST": Scope.METADATA}),
    ("load", _REPOSITORY + r"/models/(?P<model>[^/]+)/load", _CHANGE),
    ("unload", _REPOSITORY + r"/models/(?P<model>[^/]+)/unload", _CHANGE),
    *(
        (f"{kind}_{verb}", rf"/v2/{kind}{_REGION}/{verb}", _ASK if verb == "status" else _CHANGE)
        for kind in ("system", "cuda")
        for verb in ("status", "register", "unregister")
    ),
)
_PATTERNS = tuple((name, re.compile(pattern), verbs) for name, pattern, verbs in _TABLE)


def _readable(pattern: str) -> str:
    """`/v2/models/MODEL[/versions/VERSION]/infer`"""
    named = re.sub(r"\(\?P<(\w+)>[^)]*\)", lambda match: match[1].upper(), pattern)
    return re.sub(r"\(\?:([^)]*)\)\?", r"[\1]", named)


ROUTES = tuple(HttpRoute(name, _readable(pattern), verbs) for name, pattern, verbs in _TABLE)
SERVICE = "/inference.GRPCInferenceService/"
RPCS = {
    SERVICE + name: scope
    for scope, names in (
        (Scope.HEALTH, ("ServerLive", "ServerReady", "ModelReady")),
        (Scope.METADATA, ("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics")),
        (Scope.METADATA, ("RepositoryIndex", "SystemSharedMemoryStatus", "CudaSharedMemoryStatus")),
        (Scope.INFER, ("ModelInfer", "ModelStreamInfer")),
        (Scope.ADMIN, ("RepositoryModelLoad", "RepositoryModelUnload")),
        (Scope.ADMIN, ("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister")),
        (Scope.ADMIN, ("CudaSharedMemoryRegister", "CudaSharedMemoryUnregister")),
        (Scope.ADMIN, ("TraceSetting", "LogSettings")),  # the same calls show and change
    )
    for name in names
}


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
    path = target.partition("?")[0].encode("latin-1").decode("utf-8", "surrogateescape")
    for name, pattern, verbs in _PATTERNS:
        match = pattern.fullmatch(path)
        if match is not None:
            if method not in verbs:
                return Target(WRONG_VERB, {"of": name})
            parts = {key: text for key, text in match.groupdict().items() if text is not None}
            return Target(name, parts, verbs[method])
    return Target(NOT_FOUND)
