"""The V1 dialect: which targets are its own, and its RPCs. Everything under /api/ belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.dialects.triton_v1.calls import Calls
from fastserve.dialects.triton_v1.infer import Infer
from fastserve.dialects.triton_v1.pages import Page
from fastserve.dialects.triton_v1.replies import NV_STATUS
from fastserve.dialects.triton_v1.routes import is_api, parse_target
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import ServeError
from fastserve.serving.dialect import Dialect, NoOptions, ServingContext
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.dialect import Route, held_back_status, retry_after
from fastserve.wire.scope import Scope

if TYPE_CHECKING:
    from fastserve.wire.grpc import Method


class TritonV1(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._service = Service(context)
        self._calls = Calls(self._service)

    def route(self, method: str, target: str) -> Route | None:
        """The route of a target, None when another dialect may have it."""
        if not is_api(target):
            return None
        parsed = parse_target(method, target)
        if isinstance(parsed, int):
            return Route(answer_malformed if parsed == 400 else answer_wrong_verb, Scope.METADATA)
        if parsed.place == "infer":
            return Route(Infer(self._service, parsed), parsed.scope)
        return Route(Page(self._service, self._calls, parsed), parsed.scope)

    def refuse(self, call: Call, fault: ServeError) -> None:
        """With the statuses that proxies and pages look at, where the original would say 400."""
        headers = ((NV_STATUS, self._service.status_line(fault)), *retry_after(fault))
        call.reply(held_back_status(fault), b"", b"", headers)

    def answer_unknown(self, call: Call) -> None:
        answer_malformed(call)

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        return None

    def grpc_methods(self) -> list[Method]:
        """The RPCs of nvidia.inferenceserver.GRPCService."""
        from fastserve.dialects.triton_v1.rpcs import Rpcs

        return Rpcs(self._service, self._calls).methods()


def answer_malformed(call: Call) -> None:
    """A URL that means nothing: no body, no NV-Status."""
    call.reply(400, b"", b"")


def answer_wrong_verb(call: Call) -> None:
    """A URL that means something to another verb."""
    call.reply(405, b"", b"")
