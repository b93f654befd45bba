"""The dialect kserve_v2: the Open Inference Protocol V2 with Triton's extensions (spec 1.1).

Everything under /v2 belongs to it. The resources of its routes are the categories of restricted APIs (spec
4), which hold for the other dialects too (net/access_control.py).

The first half of this file describes its operations over HTTP for /openapi.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastserve.dialects.kserve.calls import CALLS, CallEndpoint, answer_not_found, answer_wrong_verb
from fastserve.dialects.kserve.generate import GenerateEndpoint
from fastserve.dialects.kserve.http_infer import InferEndpoint
from fastserve.dialects.kserve.routes import (
    NOT_FOUND,
    ROUTES,
    RPC_RESOURCES,
    RPCS,
    TABLE,
    WRONG_VERB,
    KServeTarget,
    is_own,
    parse_labelled,
    parse_target,
)
from fastserve.dialects.kserve.service import KServeService
from fastserve.errors import ServeError
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route
from fastserve.protos import load
from fastserve.serving.api_operations import (
    EVENTS_TYPE,
    MANY_TENSORS,
    MOST_TENSORS,
    ApiOperation,
    ModelFacts,
    Schema,
    count_values,
    example_text,
    example_value,
    fits_example,
    json_content,
    object_schema,
    value_schema,
)
from fastserve.serving.dialect import (
    ALIVE,
    Dialect,
    DialectSpec,
    ListenerPolicy,
    ServingContext,
    alive_route,
    is_root,
)
from fastserve.serving.model_control import exposes
from fastserve.serving.model_view import TensorView
from fastserve.settings import TritonOptions
from fastserve.tensor import KSERVE_NAME

if TYPE_CHECKING:
    from fastserve.net.grpc import Method


TAG = "V2 (Open Inference Protocol)"
BINARY = "Tensors may be sent as raw bytes behind the JSON: see the protocol's binary extension."
TEXT_INPUT = "text_input"
_NAMES = {"type": "array", "items": {"type": "string"}}
_SERVER = object_schema({"name": {"type": "string"}, "version": {"type": "string"}, "extensions": _NAMES})
_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TENSOR = object_schema(
    {"name": {"type": "string"}, "datatype": {"type": "string"}, "shape": _SHAPE, "data": {"type": "array"}},
    ["name", "datatype", "shape"],
)
_ANSWER = object_schema(
    {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "outputs": {"type": "array", "items": _TENSOR},
    },
    ["model_name", "outputs"],
)
_TENSORS = {"type": "array", "items": object_schema({}, ["name", "datatype", "shape"])}
_METADATA = object_schema(
    {"name": {"type": "string"}, "versions": _NAMES, "inputs": _TENSORS, "outputs": _TENSORS}, ["name"]
)
_UNREADABLE = ("float16", "bfloat16")
"""Types that have no form in the protocol's JSON."""


def describe_server(settings: object, models: Sequence[ModelFacts]) -> Iterator[ApiOperation]:
    """Yield the operations that are of no model."""
    yield ApiOperation("GET", "/v2", TAG, "Describe the server", answer=json_content(_SERVER))
    for word in ("live", "ready"):
        yield ApiOperation("GET", f"/v2/health/{word}", TAG, f"Tell whether the server is {word}")


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operations of a model."""
    path, name = f"/v2/models/{facts.quoted}", facts.name
    yield ApiOperation("GET", path, TAG, f"Tensors of {name}", answer=json_content(_METADATA))
    yield ApiOperation("GET", f"{path}/ready", TAG, f"Tell whether {name} is ready")
    if facts.view.whole:
        yield ApiOperation(
            "POST",
            f"{path}/infer",
            TAG,
            f"Infer by {name}",
            body=_infer_body(facts),
            answer={**json_content(_ANSWER), "application/octet-stream": {}},
            description=BINARY,
        )
    if facts.text is not None and facts.text.writes and TEXT_INPUT in facts.view.inputs:
        yield from _describe_generate(path, name)


def _describe_generate(path: str, name: str) -> Iterator[ApiOperation]:
    schema = object_schema({TEXT_INPUT: {"type": "string", "minLength": 1}}, [TEXT_INPUT])
    answer = object_schema({"model_name": {"type": "string"}, "text_output": {"type": "string"}})
    body = json_content(schema, {TEXT_INPUT: "Once"})
    yield ApiOperation(
        "POST", f"{path}/generate", TAG, f"Write by {name}", body=body, answer=json_content(answer)
    )
    events: dict[str, Any] = {EVENTS_TYPE: {}}
    yield ApiOperation(
        "POST", f"{path}/generate_stream", TAG, f"Write by {name}, as events", body=body, answer=events
    )


def _infer_body(facts: ModelFacts) -> dict[str, Any]:
    """Return the content of an inference request."""
    view = facts.view
    described = [tensor for tensor in view.inputs.values() if tensor.dtype.name in KSERVE_NAME]
    items = (
        _TENSOR
        if len(described) > MANY_TENSORS
        else {"anyOf": [_input_schema(facts, tensor) for tensor in described]}
    )
    outputs = {"type": "array", "items": object_schema({"name": {"enum": list(view.outputs)}}, ["name"])}
    inputs: Schema = {"type": "array", "minItems": len(view.required), "maxItems": len(view.inputs)}
    schema = object_schema(
        {
            "id": {"type": "string"},
            "inputs": {**inputs, "items": items} if described else inputs,
            **({"outputs": outputs} if len(view.outputs) <= MOST_TENSORS else {}),
        },
        ["inputs"],
    )
    wanted = [view.inputs[name] for name in view.required]
    readable = all(one.dtype.name in KSERVE_NAME and one.dtype.name not in _UNREADABLE for one in wanted)
    if not readable or not fits_example(count_values(one.dims) for one in wanted):
        return json_content(schema)
    return json_content(schema, {"inputs": [_example(facts, tensor) for tensor in wanted]})


def _input_schema(facts: ModelFacts, tensor: TensorView) -> Schema:
    """Return the schema of an input. Its data may be flat or nested; only flat data is described."""
    shape: Schema = _SHAPE
    if tensor.dims is not None:
        sizes = ([-1] if facts.view.batching else []) + list(tensor.dims)
        items = [{"type": "integer", "minimum": 0} if size < 0 else {"const": size} for size in sizes]
        shape = {"type": "array", "minItems": len(items), "maxItems": len(items)}
        if items:
            shape["prefixItems"] = items
    return object_schema(
        {
            "name": {"const": tensor.name},
            "datatype": {"const": KSERVE_NAME[tensor.dtype.name]},
            "shape": shape,
            "data": {"type": "array", "items": value_schema(tensor.dtype)},
        },
        ["name", "datatype", "shape", "data"],
    )


def _example(facts: ModelFacts, tensor: TensorView) -> dict[str, Any]:
    dims = [1 if size < 0 else size for size in tensor.dims or ()]
    shape = [1, *dims] if facts.view.batching else dims
    value = example_value(tensor.dtype, example_text(facts.version))
    return {
        "name": tensor.name,
        "datatype": KSERVE_NAME[tensor.dtype.name],
        "shape": shape,
        "data": [value] * count_values(dims),
    }


class KServeV2(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: TritonOptions) -> None:
        self._service = KServeService(context, options)
        self.traces = self._service.traces

    def route(self, method: str, target: str) -> Route | None:
        """Return the route of a target, None when it is not under /v2 and not KServe's /."""
        if not is_own(target):
            return alive_route() if self._service.health_bodies and is_root(method, target) else None
        parsed = parse_target(method, target)
        if parsed.operation == NOT_FOUND:
            labelled = parse_labelled(method, target)
            if self._service.catalog.labelled(labelled.model, labelled.version) is not None:
                parsed = labelled
        # Access is checked before the verb: without it, a wrong verb is refused as the right one.
        endpoint = answer_wrong_verb if parsed.operation == WRONG_VERB else self._choose(parsed)
        return Route(endpoint, parsed.scope, resources=parsed.resources)

    def refuse(self, call: Call, fault: ServeError) -> None:
        self._service.refuse(call, fault)

    def answer_unknown(self, call: Call) -> None:
        answer_not_found(call)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        """Return the endpoint of an unknown method, as Triton: 405 for a word in capitals, else None."""
        if method == "CONNECT" or not (method.isalpha() and method.isupper()):
            return None
        route = self.route(method, target)
        return answer_not_found if route is None else route.endpoint

    def grpc_methods(self) -> list[Method]:
        """Return the RPCs of inference.GRPCInferenceService."""
        from fastserve.dialects.kserve.grpc_calls import make_method
        from fastserve.dialects.kserve.grpc_infer import make_infer, make_stream

        service = self._service
        made = [make_method(service, row) for row in TABLE if row.rpc and row.name in CALLS]
        return [*made, make_infer(service), make_stream(service)]

    def close(self) -> None:
        self.traces.hand_over()

    def _choose(self, target: KServeTarget) -> Endpoint:
        service, operation = self._service, target.operation
        if operation == "infer":
            return InferEndpoint(service, target)
        if operation in ("generate", "generate_stream"):
            return GenerateEndpoint(service, target, events=operation == "generate_stream")
        return CallEndpoint(service, target) if operation in CALLS else answer_not_found


SPEC = DialectSpec(
    name="kserve_v2",
    options=TritonOptions,
    section="triton",
    build=KServeV2,
    routes=(*ROUTES, ALIVE),
    rpcs=RPCS,
    rpc_resources=RPC_RESOURCES,
    descriptors=lambda: [load("kserve_v2").descriptor_set],
    exposes=exposes,
    listeners=ListenerPolicy.REPLACES_ORIGINAL,
    describe_server=describe_server,
    describe_model=describe_model,
    any_health_name=True,  # Triton ignores the name
)
