"""The Open Inference Protocol V2 with Triton's extensions: which targets and RPCs are its own (spec 1.1).

Some may ask for a header before anything else (spec 4), which is a shared secret, no more:

    --http-restricted-api model-repository,shared-memory:admin-key=secret        admin-key: secret
    --grpc-restricted-protocol model-repository:admin-key=secret     triton-grpc-protocol-admin-key: secret

Everything under /v2 belongs to this dialect; another one on the same listener is not held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.config import TritonOptions
from fastserve.config.triton import Restrictions, parse_restrictions
from fastserve.dialects.kserve_v2.calls import CALLS
from fastserve.dialects.kserve_v2.errors import error_body
from fastserve.dialects.kserve_v2.generate import Generate
from fastserve.dialects.kserve_v2.http_calls import Ask, answer_not_found, answer_wrong_verb
from fastserve.dialects.kserve_v2.infer import Infer
from fastserve.dialects.kserve_v2.operations import (
    CATEGORIES,
    TABLE,
    WRONG_VERB,
    Target,
    is_own,
    parse_target,
)
from fastserve.dialects.kserve_v2.service import JSON, Service
from fastserve.errors import Kind, ServeError
from fastserve.serving.dialect import Dialect, ServingContext
from fastserve.serving.restricted import restrict_endpoint, restrict_method
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.dialect import Route

if TYPE_CHECKING:
    from fastserve.wire.grpc import Method


class KServeV2(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: TritonOptions) -> None:
        self._service = Service(context, options)
        self.traces = self._service.traces
        self._restrictions = parse_restrictions("http_restricted_api", options.http_restricted_api)

    def route(self, method: str, target: str) -> Route | None:
        """The route of a target, None when it is not under /v2."""
        if not is_own(target):
            return None
        parsed = parse_target(method, target)
        if parsed.asked == WRONG_VERB:  # which is told to those only who may ask
            refusal = restrict(answer_wrong_verb, parsed.parts["of"], self._restrictions)
            return Route(refusal, parsed.scope)
        return Route(restrict(self._choose(parsed), parsed.asked, self._restrictions), parsed.scope)

    def refuse(self, call: Call, fault: ServeError) -> None:
        self._service.refuse(call, fault)

    def answer_unknown(self, call: Call) -> None:
        answer_not_found(call)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        """As 24.10: a word in capitals is a verb, the wrong one; anything else breaks the request line."""
        if method == "CONNECT" or not (method.isalpha() and method.isupper()):
            return None
        route = self.route(method, target)
        return answer_not_found if route is None else route.endpoint

    def grpc_methods(self) -> list[Method]:
        """The RPCs of inference.GRPCInferenceService."""
        from fastserve.dialects.kserve_v2.rpc_calls import make_method
        from fastserve.dialects.kserve_v2.rpc_infer import make_infer, make_stream

        service = self._service
        made = {row.name: make_method(service, row) for row in TABLE if row.rpc and row.name in CALLS}
        restricted = parse_restrictions("grpc_restricted_protocol", service.options.grpc_restricted_protocol)
        methods = [*made.items(), ("infer", make_infer(service)), ("infer", make_stream(service))]
        return [restrict_rpc(method, name, restricted) for name, method in methods]

    def close(self) -> None:
        self.traces.close()

    def _choose(self, target: Target) -> Endpoint:
        service, asked = self._service, target.asked
        if asked == "infer":
            return Infer(service, target)
        if asked in ("generate", "generate_stream"):
            return Generate(service, target, events=asked == "generate_stream")
        return Ask(service, target) if asked in CALLS else answer_not_found


PREFIX = "triton-grpc-protocol-"


def restrict(endpoint: Endpoint, asked: str, restrictions: Restrictions) -> Endpoint:
    """The endpoint of what is asked, behind the header that its category wants."""
    wanted = restrictions.get(CATEGORIES.get(asked, ""))
    if wanted is None:
        return endpoint
    header, value = wanted
    refusal = error_body(f"This API is restricted, expecting header '{header}'")
    name = header.lower().encode()
    return restrict_endpoint(endpoint, name, value.encode(), lambda call: call.reply(403, refusal, JSON))


def restrict_rpc(method: Method, asked: str, restrictions: Restrictions) -> Method:
    """The same of an RPC, whose metadata has the header under a longer name."""
    wanted = restrictions.get(CATEGORIES[asked])
    if wanted is None:
        return method
    header, value = wanted
    text = f"This protocol is restricted, expecting header '{PREFIX}{header}'"
    fault = ServeError(Kind.UNAVAILABLE, text)
    return restrict_method(method, PREFIX + header.lower(), value.encode(), fault)
