"""The dialect triton_v1: the TensorRT Inference Server V1 API. Everything under /api/ belongs to it.

The first half of this file describes its operations for /openapi.json: status, and inference with raw
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from fastserve.dialects.triton_v1.calls import CallPage, V1Calls
from fastserve.dialects.triton_v1.infer import V1InferEndpoint
from fastserve.dialects.triton_v1.routes import ROUTES, RPC_RESOURCES, RPCS, is_api, parse_target
from fastserve.dialects.triton_v1.service import NV_STATUS, V1Service
from fastserve.errors import ServeError
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route, fault_headers, held_back_status
from fastserve.protos import load
from fastserve.serving.api_operations import MOST_TENSORS, TEXT_TYPE, ApiOperation, ModelFacts, count_values
from fastserve.serving.dialect import (
    Dialect,
    DialectSpec,
    ListenerPolicy,
    NoOptions,
    ServingContext,
    alive_route,
    is_root,
)
from fastserve.serving.model_control import exposes
from fastserve.serving.model_view import TensorView

if TYPE_CHECKING:
    from fastserve.net.grpc import Method


TAG = "V1 (TensorRT Inference Server)"
RAW = "application/octet-stream"
REQUEST = "NV-InferRequest"
MOST_RAW_BYTES = 4096
ABOUT = (
    f"The header {REQUEST} says what is asked, as text of protobuf; the body has the inputs' values one "
    "behind the other, little-endian. The answer begins with the outputs' values, and its header "
    "NV-InferResponse describes them."
)
_TEXT = {"schema": {"type": "string"}}


def describe_server(settings: object, models: Sequence[ModelFacts]) -> Iterator[ApiOperation]:
    """Yield the operations that are of no model."""
    yield ApiOperation(
        "GET", "/api/status", TAG, "Describe the server", answer={TEXT_TYPE: _TEXT}, error_type=""
    )
    for word in ("live", "ready"):
        summary = f"Tell whether the server is {word}"
        yield ApiOperation("GET", f"/api/health/{word}", TAG, summary, error_type="")


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operations of a model; none where its tensors have no fixed size."""
    yield ApiOperation(
        "GET",
        f"/api/status/{facts.quoted}",
        TAG,
        f"Status of {facts.name}",
        answer={TEXT_TYPE: _TEXT},
        error_type="",
    )
    inputs, outputs = list(facts.view.inputs.values()), list(facts.view.outputs.values())
    if not inputs or not outputs or facts.view.decoupled or len(inputs) + len(outputs) > MOST_TENSORS:
        return
    if not all(_is_fixed(tensor) for tensor in inputs):
        return
    size = sum(count_values(tensor.dims) * tensor.dtype.item_bytes for tensor in inputs)
    media: dict[str, Any] = {"schema": {"type": "string", "contentMediaType": RAW}}
    if size <= MOST_RAW_BYTES:
        media["example"] = "\0" * size  # zeros of any type
    header = _header(facts, inputs, outputs)
    yield ApiOperation(
        "POST",
        f"/api/infer/{facts.quoted}",
        TAG,
        f"Infer by {facts.name}",
        body={RAW: media},
        answer={RAW: {}},
        description=ABOUT,
        parameters=[
            {
                "name": REQUEST,
                "in": "header",
                "required": True,
                "schema": {"type": "string"},
                "example": header,
            }
        ],
        error_type="",
    )


def _is_fixed(tensor: TensorView) -> bool:
    return bool(tensor.dtype.item_bytes and tensor.dims is not None and -1 not in tensor.dims)


def _header(facts: ModelFacts, inputs: Sequence[TensorView], outputs: Sequence[TensorView]) -> str:
    """Return the header of a request of one row."""
    parts = ["batch_size: 1"]
    for tensor in inputs:
        dims = "".join(f" dims: {size}" for size in tensor.dims or ())
        wanted = dims if prod(tensor.dims or ()) else ""
        parts.append(f"input {{ name: {_quoted(tensor.name)}{wanted} }}")
    parts += [f"output {{ name: {_quoted(tensor.name)} }}" for tensor in outputs]
    return " ".join(parts)


def _quoted(name: str) -> str:
    """Return a string of protobuf's text format."""
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in name.encode()
    )
    return f'"{escaped}"'


class TritonV1(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._service = V1Service(context)
        self._calls = V1Calls(self._service)
        self._says_alive = context.settings.kserve_replies

    def route(self, method: str, target: str) -> Route | None:
        """Return the route of a target, None when another dialect may have it."""
        if not is_api(target):
            return alive_route() if self._says_alive and is_root(method, target) else None
        parsed = parse_target(method, target)
        if isinstance(parsed, int):
            malformed = answer_malformed if parsed == 400 else answer_wrong_verb
            return Route(malformed, Scope.METADATA, resources=NOTHING)
        infers, service = parsed.place == "infer", self._service
        endpoint = V1InferEndpoint(service, parsed) if infers else CallPage(service, self._calls, parsed)
        return Route(endpoint, parsed.scope, resources=parsed.resources)

    def refuse(self, call: Call, fault: ServeError) -> None:
        """Reply with the statuses that proxies and pages look at, where the original would say 400."""
        headers = ((NV_STATUS, self._service.status_line(fault)), *fault_headers(fault))
        call.reply(held_back_status(fault), b"", b"", headers)

    def answer_unknown(self, call: Call) -> None:
        answer_malformed(call)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        return None

    def grpc_methods(self) -> list[Method]:
        """Return the RPCs of nvidia.inferenceserver.GRPCService."""
        from fastserve.dialects.triton_v1.rpcs import V1Rpcs

        return V1Rpcs(self._service, self._calls).methods()


def answer_malformed(call: Call) -> None:
    """Reply to an unknown URL: no body, no NV-Status."""
    call.reply(400, b"", b"")


def answer_wrong_verb(call: Call) -> None:
    """Reply to a known URL with the wrong verb."""
    call.reply(405, b"", b"")


SPEC = DialectSpec(
    name="triton_v1",
    options=NoOptions,
    build=TritonV1,
    routes=ROUTES,
    rpcs=RPCS,
    rpc_resources=RPC_RESOURCES,
    descriptors=lambda: [load("triton_v1").descriptor_set],
    exposes=exposes,
    describe_server=describe_server,
    describe_model=describe_model,
    listeners=ListenerPolicy.REPLACES_ORIGINAL,
)
