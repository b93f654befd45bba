"""TensorFlow Serving's API, as the server knows it: its targets and their endpoints (spec 1.1, 1.2).

`route` does the URL's work once; the wire remembers the endpoint of every target that was answered 200.
Everything under /v1/ is answered, if only with `Malformed request`; what names no model gives way to dialects
that have paths of their own there.

The first half of this file describes its operations for /openapi.json: status, metadata, predict, classify
and regress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastserve.codec.json_text import target_text
from fastserve.dialects.tfserving.classify import VERBS, ExamplesEndpoint
from fastserve.dialects.tfserving.errors import html_page
from fastserve.dialects.tfserving.metadata import find_versions, write_metadata, write_status
from fastserve.dialects.tfserving.monitoring import BatchesPart
from fastserve.dialects.tfserving.predict import PredictEndpoint
from fastserve.dialects.tfserving.routes import (
    MONITORING,
    PREFLIGHT,
    ROUTES,
    RPC_RESOURCES,
    RPCS,
    Target,
    VersionOverflow,
    is_api,
    parse_target,
)
from fastserve.dialects.tfserving.service import TFServingService, find_version
from fastserve.errors import ServeError, invalid
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route, Yields
from fastserve.protos import load
from fastserve.repository.model_config import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version, VersionState
from fastserve.request import Recorded
from fastserve.serving.api_operations import (
    MANY_TENSORS,
    MOST_TENSORS,
    ApiOperation,
    ModelFacts,
    Schema,
    array_schema,
    count_values,
    example_array,
    example_text,
    example_value,
    fits_example,
    json_content,
    object_schema,
    value_schema,
)
from fastserve.serving.dialect import Dialect, DialectSpec, ServingContext, alive_route, is_root
from fastserve.serving.model_control import waits_for_demand
from fastserve.serving.text.models import card_of
from fastserve.settings import Settings, TFServingOptions
from fastserve.tensor import TensorSpec

if TYPE_CHECKING:
    from fastserve.net.grpc import Method


TAG = "TensorFlow Serving"
ROWS = "`instances` has a row of each; `inputs` has a whole tensor of each."
_BASE64 = object_schema({"b64": {"type": "string"}}, ["b64"])
_STATUS = object_schema({"model_version_status": {"type": "array", "items": {"type": "object"}}})
_METADATA = object_schema({"model_spec": {"type": "object"}, "metadata": {"type": "object"}})
_ANSWER = {"anyOf": [object_schema({}, ["predictions"]), object_schema({}, ["outputs"])]}
_RESULTS = object_schema({"results": {"type": "array"}}, ["results"])


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operations of a model."""
    path = f"/v1/models/{facts.quoted}"
    yield ApiOperation("GET", path, TAG, f"Status of {facts.name}", answer=json_content(_STATUS))
    yield ApiOperation(
        "GET", f"{path}/metadata", TAG, f"Signatures of {facts.name}", answer=json_content(_METADATA)
    )
    by_method: dict[str, dict[str, Signature]] = {}
    for name, signature in sorted(
        facts.version.signatures.items(), key=lambda item: item[0] != DEFAULT_SIGNATURE
    ):
        if signature.inputs:
            by_method.setdefault(signature.method, {})[name] = signature
    for method, signatures in by_method.items():
        body, answer = (
            (_predict_body(facts, signatures), _ANSWER)
            if method == "predict"
            else (_examples_body(facts, signatures), _RESULTS)
        )
        yield ApiOperation(
            "POST",
            f"{path}:{method}",
            TAG,
            f"{method.title()} by {facts.name}",
            body=body,
            answer=json_content(answer),
            description=ROWS if method == "predict" else "",
        )


def _predict_body(facts: ModelFacts, signatures: Mapping[str, Signature]) -> dict[str, Any]:
    """Return the content of a predict request; its tensors are those of the first signature."""
    name, signature = next(iter(signatures.items()))
    batching = facts.version.batching
    described = dict(list(signature.inputs.items())[:MOST_TENSORS])
    rows = {alias: _tensor_schema(spec, spec.shape) for alias, spec in described.items()}
    if len(signature.inputs) == 1:
        (row,) = rows.values()
        row = {"anyOf": [row, object_schema(rows, list(rows))]}
    else:
        row = object_schema(rows, [] if facts.version.config.options.optional_inputs else list(rows))
    columns = {alias: _tensor_schema(spec, _full(spec.shape, batching)) for alias, spec in described.items()}
    schema = {
        "type": "object",
        "properties": {
            "signature_name": {"type": "string", "enum": list(signatures)},
            "instances": {"type": "array", "minItems": 1, "items": row},
            "inputs": object_schema(columns) if 1 < len(columns) <= MANY_TENSORS else {},
        },
        "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    }
    example: dict[str, Any] = {} if name == DEFAULT_SIGNATURE else {"signature_name": name}
    sizes = (count_values(spec.shape) for spec in signature.inputs.values())
    if facts.text is not None or not fits_example(sizes):  # a text model's strings are JSON, and more
        return json_content(schema)
    values = {alias: _example(facts, spec, spec.shape) for alias, spec in signature.inputs.items()}
    if not batching:
        return json_content(schema, {**example, "inputs": values})
    instance = next(iter(values.values())) if len(signature.inputs) == 1 else values
    return json_content(schema, {**example, "instances": [instance]})


def _examples_body(facts: ModelFacts, signatures: Mapping[str, Signature]) -> dict[str, Any]:
    """Return the content of a classify or regress request: examples of features."""
    name, signature = next(iter(signatures.items()))
    features = {feature: signature.inputs[alias] for feature, alias in signature.features.items()}
    properties = {feature: _feature_schema(spec) for feature, spec in features.items()}
    item = object_schema(dict(list(properties.items())[:MOST_TENSORS]))
    schema = object_schema(
        {
            "signature_name": {"type": "string", "enum": list(signatures)},
            "examples": {"type": "array", "minItems": 1, "items": item},
        },
        ["examples"],
    )
    if not fits_example(count_values(spec.shape) for spec in features.values()):
        return json_content(schema)
    example = {
        feature: [example_value(spec.dtype, example_text(facts.version))] * count_values(spec.shape)
        for feature, spec in features.items()
    }
    named = {} if name == DEFAULT_SIGNATURE else {"signature_name": name}
    return json_content(schema, {**named, "examples": [example]})


def _feature_schema(spec: TensorSpec) -> Schema:
    """Return the schema of a feature: a value, or a flat list of them."""
    value = _value_schema(spec)
    return {"anyOf": [value, {"type": "array", "items": value}]}


def _tensor_schema(spec: TensorSpec, shape: tuple[int, ...] | None) -> Schema:
    return array_schema(_value_schema(spec), shape)


def _value_schema(spec: TensorSpec) -> Schema:
    value = value_schema(spec.dtype)
    return {"anyOf": [value, _BASE64]} if spec.dtype.name == "bytes" else value


def _full(shape: tuple[int, ...] | None, batching: bool) -> tuple[int, ...] | None:
    """Return a whole tensor's shape."""
    return shape if shape is None else tuple(chain((-1,) if batching else (), shape))


def _example(facts: ModelFacts, spec: TensorSpec, shape: tuple[int, ...] | None) -> Any:
    return example_array(example_value(spec.dtype, example_text(facts.version)), shape)


HTML = b"text/html; charset=ISO-8859-1"
PAGE = b"text/html"
TEXT = b"text/plain"


class TFServing(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: TFServingOptions) -> None:
        self._service = TFServingService(context, options)
        self._batches = BatchesPart(context)

    def route(self, method: str, target: str) -> Route | None:
        """The route of a target, None when it is not under /v1/, KServe's / or the metrics page."""
        if is_api(target):
            return self._route_api(method, target)
        if self._service.tells_ready and is_root(method, target):
            return alive_route()
        options = self._service.options
        if options.monitoring and target.partition("?")[0].partition("#")[0] == options.monitoring_path:
            page = self._page if target == options.monitoring_path else self._wrong_page
            return Route(page, MONITORING.scopes[method])
        return None

    def _route_api(self, method: str, target: str) -> Route:
        if method == "OPTIONS":
            return Route(self._preflight, PREFLIGHT.scopes[method], Yields.LAST, PREFLIGHT.resources)
        try:
            parsed = parse_target(method, target)
        except VersionOverflow:
            return Route(self._overflow, Scope.METADATA, resources=NOTHING)
        if parsed is None or (method == "POST" and parsed.verb not in ("predict", *VERBS)):
            fault = invalid(f"Malformed request: {method} {target_text(target)}")
            return Route(partial(self.refuse, fault=fault), Scope.METADATA, Yields.LAST, NOTHING)
        if method == "GET":
            gives_way = Yields.NEVER if parsed.name else Yields.FIRST
            return Route(partial(self._describe, target=parsed), parsed.scope, gives_way)
        return Route(
            (PredictEndpoint if parsed.verb == "predict" else ExamplesEndpoint)(self._service, parsed),
            parsed.scope,
        )

    def grpc_methods(self) -> list[Method]:
        """The RPCs of PredictionService and ModelService."""
        from fastserve.dialects.tfserving.rpcs import make_methods

        return make_methods(self._service)

    def refuse(self, call: Call, fault: ServeError) -> None:
        self._service.refuse(call, "", fault)

    def answer_unknown(self, call: Call) -> None:
        call.reply(404, html_page(404, "Not Found"), PAGE, close=True)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        return answer_not_implemented

    def _describe(self, call: Call, target: Target) -> None:
        """A model's status, or a version's metadata."""
        service = self._service
        try:
            if not target.name:
                raise invalid("Missing model name in request.")
            # `/METADATA` matches the URL and is then not the word that was meant: status (spec 1.1).
            if target.verb == "metadata":
                body = write_metadata(find_version(service.catalog, target))
            else:
                versions = find_versions(service.catalog, target)
                more = card_of(service.engine, service.catalog, target.name)
                if service.tells_ready:  # KServe's V1
                    more["ready"] = any(
                        one.state is VersionState.AVAILABLE or waits_for_demand(one) for one in versions
                    )
                body = write_status(versions, more)
        except ServeError as fault:
            service.refuse(call, target.name, fault)
        else:
            service.answer(call, target.name, body)

    def _preflight(self, call: Call) -> None:
        origin = call.header(b"origin")
        allowed = b"http://" in origin or b"https://" in origin
        call.reply(200 if allowed else 400, b"", HTML, self._service.headers)

    def _overflow(self, call: Call) -> None:
        call.reply(400, b"", headers=self._service.headers)

    async def _page(self, call: Call) -> None:
        more = await self._batches.lines()
        call.reply(200, self._service.monitor.write(more), TEXT)

    def _wrong_page(self, call: Call) -> None:
        given = call.target.encode("latin-1")
        wanted = self._service.options.monitoring_path.encode()
        call.reply(400, b"Unexpected path: " + given + b". Should be " + wanted, TEXT)


def answer_not_implemented(call: Call) -> None:
    """A method that is none of HTTP's (spec 1.2)."""
    call.reply(501, html_page(501, "Not Implemented"), PAGE, close=True)


def exposes(settings: Settings) -> Sequence[str]:
    """A list of models says where their code lies."""
    if settings.admin.reload_config:
        return ("replace the models, and so run code of its own",)
    return ("replace the models by other SavedModels",) if settings.admin.reload_saved else ()


def recorded(settings: Settings, version: Version) -> Iterator[Recorded]:
    """Yield the requests of a version's warm-up file."""
    from fastserve.dialects.tfserving.warmup import read_recorded  # messages of protobuf cost some MB

    return read_recorded(settings, version)


SPEC = DialectSpec(
    name="tfserving",
    options=TFServingOptions,
    section="tfserving",
    build=TFServing,
    routes=ROUTES,
    rpcs=RPCS,
    rpc_resources=RPC_RESOURCES,
    health_names=("PredictionService", "ModelService"),  # spec 4
    descriptors=lambda: [load("tfserving").descriptor_set],
    exposes=exposes,
    recorded=recorded,
    describe_model=describe_model,
)
