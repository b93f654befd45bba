"""The dialect kserve_v2: the Open Inference Protocol V2 with Triton's extensions (spec 1.1).

Everything under /v2 belongs to it. The resources of its routes are the categories of restricted APIs (spec
4), which hold for the other dialects too (net/access_control.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.dialects.kserve.calls import CALLS, CallEndpoint, answer_not_found, answer_wrong_verb
from fastserve.dialects.kserve.generate import GenerateEndpoint
from fastserve.dialects.kserve.http_infer import InferEndpoint
from fastserve.dialects.kserve.operations import describe_model, describe_server
from fastserve.dialects.kserve.routes import (
    ROUTES,
    RPC_RESOURCES,
    RPCS,
    TABLE,
    WRONG_VERB,
    KServeTarget,
    is_own,
    parse_target,
)
from fastserve.dialects.kserve.service import KServeService
from fastserve.errors import ServeError
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route
from fastserve.protos import load
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
from fastserve.settings import TritonOptions

if TYPE_CHECKING:
    from fastserve.net.grpc import Method


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
