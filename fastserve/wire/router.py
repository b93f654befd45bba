"""Chooses the endpoint of a call: the first dialect that knows the target, remembered.

A dialect's route() must depend on nothing but its arguments: what a model or a version is right now is
for the endpoint to look up. Only targets that were answered 200 are remembered, so random paths
neither fill the memory nor push good ones out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fastserve.wire.call import Call, Dialect, Endpoint
from fastserve.wire.faults import HTML, UnknownMethod, WireFault, html_page
from fastserve.wire.replies import CLOSE

if TYPE_CHECKING:
    from fastserve.wire.head import Head

REMEMBERED_TARGETS = 1024
_NOT_FOUND = html_page(404, "Not Found").encode()


def answer_not_found(call: Call) -> None:
    """The endpoint of targets no dialect of the listener knows (spec/tfserving.md 1.2)."""
    call.reply(404, _NOT_FOUND, HTML, close=True)


@runtime_checkable
class AnswersAnyMethod(Protocol):
    """A dialect that, alone on its listener, answers methods that are not HTTP's."""

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        """The endpoint, None for the wire's own refusal."""


class Router:
    """Targets to endpoints, over the dialects of one listener in their order."""

    __slots__ = ("_alone", "_dialects", "_remembered")

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._dialects = tuple(dialects)
        self._alone = (
            dialects[0] if len(dialects) == 1 and isinstance(dialects[0], AnswersAnyMethod) else None
        )
        self._remembered: dict[tuple[str, str], Endpoint] = {}

    def find(self, method: str, target: str) -> tuple[Endpoint, bool]:
        """The endpoint, and whether it was looked up anew (then a 200 makes it worth remembering)."""
        endpoint = self._remembered.get((method, target))
        if endpoint is not None:
            return endpoint, False
        for dialect in self._dialects:
            endpoint = dialect.route(method, target)
            if endpoint is not None:
                return endpoint, True
        return answer_not_found, False

    def refuse(self, call: Call, fault: WireFault) -> None:
        """Answer what the wire refuses, and close; an unknown method may be a dialect's to answer."""
        call.head.mode = CLOSE
        if isinstance(fault, UnknownMethod) and self._alone is not None:
            endpoint = self._alone.route_unknown(fault.method, fault.target)
            if endpoint is not None:
                endpoint(call)
                return
        call.reply(fault.status, fault.body, fault.content_type)

    def remember(self, head: Head) -> None:
        """A target was answered 200: keep its route."""
        head.routed_anew = False
        if len(self._remembered) < REMEMBERED_TARGETS:
            self._remembered[head.method, head.target] = head.endpoint
