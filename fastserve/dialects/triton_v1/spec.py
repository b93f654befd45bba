"""The dialect triton_v1: the TensorRT Inference Server V1 API. Everything under /api/ belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.dialects.triton_v1.calls import CallPage, V1Calls
from fastserve.dialects.triton_v1.infer import V1InferEndpoint
from fastserve.dialects.triton_v1.operations import describe_model, describe_server
from fastserve.dialects.triton_v1.routes import ROUTES, RPC_RESOURCES, RPCS, is_api, parse_target
from fastserve.dialects.triton_v1.service import NV_STATUS, V1Service
from fastserve.errors import ServeError
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route, fault_headers, held_back_status
from fastserve.protos import load
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

if TYPE_CHECKING:
    from fastserve.net.grpc import Method


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
