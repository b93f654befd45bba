"""Method and request target -> what is asked for (spec 1.1). No lookups here: a name may well not exist.

The target is matched whole: a query string is part of it, path words match in any case, the captured
verb and `metadata` are compared exactly by the caller.

    POST /v1/models/digits/labels/new:predict  ->  Target("digits", None, "new", "predict")
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from fastserve.codec.json_text import to_text
from fastserve.net.access_control import NOTHING, Resource, Resources, Scope
from fastserve.serving.dialect import ALIVE, HttpRoute

_WHICH = rb"(?:(?:/versions/(\d+))|(?:/labels/([^/:]+)))?"
_POST = re.compile(rb"/v1/models/([^/:]+)" + _WHICH + rb":(classify|regress|predict)", re.IGNORECASE)
_GET = re.compile(rb"/v1/models(?:/([^/:]+))?" + _WHICH + rb"(?:/(metadata))?", re.IGNORECASE)
_ANY = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH")
_MODEL = "/v1/models/NAME[/versions/N or /labels/L]"
DESCRIBE = HttpRoute("describe", _MODEL + "[/metadata]", {"GET": Scope.METADATA})
INFER = HttpRoute("infer", _MODEL + ":predict|classify|regress", {"POST": Scope.INFER})
PREFLIGHT = HttpRoute("preflight", "/v1/...", {"OPTIONS": Scope.METADATA}, NOTHING)
MONITORING = HttpRoute("monitoring", "tfserving.monitoring_path", dict.fromkeys(_ANY, Scope.METRICS))
ROUTES = (DESCRIBE, INFER, PREFLIGHT, MONITORING, ALIVE)
PREDICTION_SERVICE = "/tensorflow.serving.PredictionService/"
MODEL_SERVICE = "/tensorflow.serving.ModelService/"
RPCS = {
    PREDICTION_SERVICE + "Predict": Scope.INFER,
    PREDICTION_SERVICE + "Classify": Scope.INFER,
    PREDICTION_SERVICE + "Regress": Scope.INFER,
    PREDICTION_SERVICE + "MultiInference": Scope.INFER,
    PREDICTION_SERVICE + "GetModelMetadata": Scope.METADATA,
    MODEL_SERVICE + "GetModelStatus": Scope.METADATA,
    MODEL_SERVICE + "HandleReloadConfigRequest": Scope.ADMIN,
}
RPC_RESOURCES: dict[str, Resources] = {
    MODEL_SERVICE + "HandleReloadConfigRequest": (Resource.MODEL_REPOSITORY,),
}
INT64_MAX = 2**63 - 1
INT64_DIGITS = 19


class VersionOverflow(ValueError):
    """A version number beyond int64: answered 400 with an empty body, the one API error without JSON."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model and the verb of a URL. `name` may be empty on GET; `verb` is "" for model status."""

    name: str
    version: int | None
    label: str | None
    verb: str

    @property
    def scope(self) -> Scope:
        """The scope that a caller needs."""
        describes = self.verb in ("", "metadata")
        return DESCRIBE.scopes["GET"] if describes else INFER.scopes["POST"]


def is_api(target: str) -> bool:
    """Whether the REST API answers this target at all, if only with `Malformed request`."""
    return target[:4].lower() == "/v1/"


def parse_target(method: str, target: str) -> Target | None:
    """The target's parts, or None when method and target do not fit together.

    `target` is the raw request target as latin-1 text, query included. Raises VersionOverflow.
    """
    pattern = {"POST": _POST, "GET": _GET}.get(method)
    match = pattern.fullmatch(target.encode("latin-1")) if pattern else None
    if match is None:
        return None
    name, version, label, verb = match.groups()
    return Target(
        name=_decoded(name or b""),
        version=_version(version) if version is not None else None,
        label=_decoded(label) if label is not None else None,
        verb=(verb or b"").decode(),
    )


def _decoded(part: bytes) -> str:
    return to_text(unquote_to_bytes(part))


def _version(digits: bytes) -> int:
    significant = digits.lstrip(b"0") or b"0"
    if len(significant) > INT64_DIGITS or int(significant) > INT64_MAX:
        raise VersionOverflow(f"Failed to convert version: {digits.decode()} to numeric.")
    return int(significant)
