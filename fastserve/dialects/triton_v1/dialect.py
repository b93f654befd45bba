"""The V1 dialect: which targets are its own, and its RPCs.

Everything under /api/ belongs to it; on a listener of its own it answers everything, as the original does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.dialects.triton_v1.infer import Infer
from fastserve.dialects.triton_v1.pages import Page
from fastserve.dialects.triton_v1.replies import NV_STATUS
from fastserve.dialects.triton_v1.routes import is_api, parse_target
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import Kind, ServeError
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import guard

if TYPE_CHECKING:
    from fastserve.wire.grpc import Method


class TritonV1:
    """The dialect of one listener. `alone`: it is the listener's only one."""

    name = "triton_v1"

    def __init__(self, service: Service, *, alone: bool = False) -> None:
        self._service = service
        self._alone = alone

    def route(self, method: str, target: str) -> Endpoint | None:
        """The endpoint of a target, None when another dialect may have it."""
        if not (self._alone or is_api(target)):
            return None
        parsed = parse_target(method, target)
        if parsed == 400:
            return answer_malformed
        if isinstance(parsed, int):
            return answer_wrong_verb
        service = self._service
        endpoint = (Infer if parsed.place == "infer" else Page)(service, parsed)
        guarded = guard(endpoint, parsed.scope, service.origins, self._forbid)
        return service.opening.hold(guarded, parsed.scope, self._put_off)

    def _forbid(self, call: Call, text: str) -> None:
        fault = ServeError(Kind.PERMISSION_DENIED, text)
        call.reply(403, b"", b"", ((NV_STATUS, self._service.status_line(fault)),))

    def _put_off(self, call: Call, fault: ServeError) -> None:
        again = (b"Retry-After", b"%d" % round(fault.retry_after_s or 1))
        call.reply(503, b"", b"", ((NV_STATUS, self._service.status_line(fault)), again))

    def grpc_methods(self) -> list[Method]:
        """The RPCs of nvidia.inferenceserver.GRPCService."""
        from fastserve.dialects.triton_v1.rpcs import make_methods

        return make_methods(self._service)

    def grpc_descriptors(self) -> list[bytes]:
        """What reflection shows: serialized FileDescriptorSets."""
        from fastserve.protos import load

        return [load("triton_v1").descriptor_set]


def answer_malformed(call: Call) -> None:
    """A URL that means nothing: no body, no NV-Status."""
    call.reply(400, b"", b"")


def answer_wrong_verb(call: Call) -> None:
    """A URL that means something to another verb."""
    call.reply(405, b"", b"")
