"""The Open Inference Protocol V2 with Triton's extensions: which targets and RPCs are its own (spec 1.1).

Everything under /v2 belongs to this dialect. On a listener that speaks nothing else (`alone`) it answers
every other path too, as the original does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.config.triton import parse_restrictions
from fastserve.dialects.kserve_v2.calls import (
    PLAIN,
    SLOW,
    Ask,
    AskSlowly,
    answer_forbidden,
    answer_not_found,
    answer_wrong_verb,
)
from fastserve.dialects.kserve_v2.generate import Generate
from fastserve.dialects.kserve_v2.infer import Infer
from fastserve.dialects.kserve_v2.restricted import restrict
from fastserve.dialects.kserve_v2.routes import WRONG_VERB, Target, is_own, parse_target
from fastserve.dialects.kserve_v2.service import Service
from fastserve.wire.call import Endpoint
from fastserve.wire.scope import guard

if TYPE_CHECKING:
    from fastserve.wire.grpc import Method


class KServeV2:
    """The dialect of one listener. The state is the service's, one per front process."""

    name = "kserve_v2"

    def __init__(self, service: Service, *, alone: bool = False) -> None:
        self._service = service
        self._alone = alone
        self._restrictions = parse_restrictions("http_restricted_api", service.options.http_restricted_api)

    def route(self, method: str, target: str) -> Endpoint | None:
        """The endpoint of a target, None when it is not under /v2 and other dialects may know it."""
        if not self._alone and not is_own(target):
            return None
        parsed = parse_target(method, target)
        if parsed.asked == WRONG_VERB:  # which is told to those only who may ask
            return restrict(answer_wrong_verb, parsed.parts["of"], self._restrictions)
        endpoint = guard(self._choose(parsed), parsed.scope, self._service.admin.origins, answer_forbidden)
        endpoint = self._service.opening.hold(endpoint, parsed.scope, self._service.refuse)
        return restrict(endpoint, parsed.asked, self._restrictions)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        """As 24.10: a word in capitals is a verb, the wrong one; anything else breaks the request line."""
        if not self._alone or method == "CONNECT" or not (method.isalpha() and method.isupper()):
            return None
        return self.route(method, target)

    def grpc_methods(self) -> list[Method]:
        """The RPCs of inference.GRPCInferenceService."""
        from fastserve.dialects.kserve_v2.grpc_methods import make_methods

        return make_methods(self._service)

    def grpc_descriptors(self) -> list[bytes]:
        """What reflection shows: serialized FileDescriptorSets."""
        from fastserve.dialects.kserve_v2.grpc_methods import descriptors

        return descriptors()

    def _choose(self, target: Target) -> Endpoint:
        service, asked = self._service, target.asked
        if asked == "infer":
            return Infer(service, target)
        if asked in ("generate", "generate_stream"):
            return Generate(service, target, events=asked == "generate_stream")
        if asked in PLAIN:
            return Ask(service, target, PLAIN[asked])
        return AskSlowly(service, target, SLOW[asked]) if asked in SLOW else answer_not_found
