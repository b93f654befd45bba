"""The dialect `traffic`: shows and changes which versions of a model requests go to, while the server runs.

    GET /traffic/MODEL      {"traffic": {"stable": 95.0, "canary": 5.0}, "sticky": ..., "set": false, ...}
    POST /traffic/MODEL     the fields of model.yaml: from the answer on they hold in all front processes
    DELETE /traffic/MODEL   those of model.yaml hold again

What is set holds until the fields of model.yaml change, or the server ends. Changes need the setting
`admin.traffic`, and where keys are on one with the scope `admin`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from fastserve.codec.json_text import DocumentFault, FreeJSON
from fastserve.errors import ConfigError, Kind, ServeError, invalid
from fastserve.net import Call
from fastserve.net.access_control import NOTHING, Resource, Scope
from fastserve.net.limits import JSON, error_body
from fastserve.net.router import CANONICAL_STATUS, Route, Yields, fault_headers
from fastserve.serving.api_operations import ApiOperation, ModelFacts, json_content, object_schema
from fastserve.serving.dialect import (
    Dialect,
    DialectSpec,
    HttpRoute,
    ListenerPolicy,
    NoOptions,
    ServingContext,
)
from fastserve.settings import Settings, convert
from fastserve.settings.model_options import TrafficRules

PREFIX = "/traffic/"
SCOPES = {"GET": Scope.METRICS, "POST": Scope.ADMIN, "DELETE": Scope.ADMIN}
RULES = HttpRoute("rules", f"{PREFIX}MODEL", SCOPES, resources=(Resource.MODEL_REPOSITORY,))
MOST_BYTES = 1 << 16
_BODY: FreeJSON[Any] = FreeJSON(Any)
NOT_ALLOWED = "traffic is not changed by clients of this server: the setting admin.traffic is false"


class TrafficDialect(Dialect):
    """The route of the `traffic` dialect."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._catalog, self._repository = context.catalog, context.repository
        self._allowed = context.settings.admin.traffic

    def route(self, method: str, target: str) -> Route | None:
        path = target.partition("?")[0]
        if not path.startswith(PREFIX) or len(path) == len(PREFIX):
            return None
        scope = SCOPES.get(method)
        if scope is None:
            return Route(refuse_method, Scope.METRICS, Yields.FIRST, resources=NOTHING)
        model = unquote(path[len(PREFIX) :])

        async def answer(call: Call) -> None:
            try:
                if method != "GET":
                    await self._change(model, call if method == "POST" else None)
                call.reply(200, msgspec.json.encode(self._show(model)))
            except ServeError as fault:
                self.refuse(call, fault)

        return Route(answer, scope, Yields.FIRST, resources=RULES.resources)

    def refuse(self, call: Call, fault: ServeError) -> None:
        body = error_body(fault.message)
        call.reply(CANONICAL_STATUS[fault.kind], body, JSON, fault_headers(fault))

    async def _change(self, name: str, call: Call | None) -> None:
        """Raises ServeError."""
        if not self._allowed:
            raise ServeError(Kind.PERMISSION_DENIED, NOT_ALLOWED)
        await self._repository.set_rules(name, None if call is None else read_rules(call.body))

    def _show(self, name: str) -> dict[str, Any]:
        model = self._catalog.models.get(name)
        if model is None:
            raise ServeError(Kind.NOT_FOUND, f"there is no model {name[:200]!r}")
        return {**msgspec.to_builtins(model.rules), "set": model.set_rules is not None}


def read_rules(body: bytes | bytearray) -> TrafficRules:
    """Return the rules of a body in JSON. Raises ServeError INVALID_ARGUMENT naming the field."""
    if len(body) > MOST_BYTES:
        raise invalid(f"the body has {len(body)} bytes, at most {MOST_BYTES} are allowed")
    try:
        given = _BODY.read(body)
        if not isinstance(given, Mapping):
            raise invalid("the body is no JSON object of traffic, sticky, shadow")
        return convert(given, TrafficRules, "body")
    except DocumentFault as fault:
        raise invalid(f"the body is no JSON that is taken: {fault.message}") from None
    except ConfigError as fault:
        raise invalid(str(fault)) from None


def refuse_method(call: Call) -> None:
    call.reply(405, error_body("use GET, POST or DELETE"), JSON, ((b"Allow", b"GET, POST, DELETE"),))


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operations for /openapi.json."""
    path, shown = f"{PREFIX}{facts.quoted}", json_content(object_schema({}))
    yield ApiOperation("GET", path, "Server", "Show which versions requests go to", answer=shown)


def exposes(settings: Settings) -> Sequence[str]:
    return ("change which versions requests go to",) if settings.admin.traffic else ()


TRAFFIC = DialectSpec(
    name="traffic",
    options=NoOptions,
    build=TrafficDialect,
    routes=(RULES,),
    listeners=ListenerPolicy.EVERY_HTTP,
    describe_model=describe_model,
    exposes=exposes,
)
