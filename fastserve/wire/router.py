"""Chooses the endpoint of a call: the first dialect that knows the target, remembered.

A dialect's route() must depend on nothing but its arguments: what a model or a version is right now is
for the endpoint to look up. Only targets that were answered 200 are remembered, so random paths
neither fill the memory nor push good ones out.

What a route's scope asks for is done here, for every dialect: before the server has opened, and to web pages
of other sites, the dialect's own refusal stands in for the endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastserve.wire.call import Call, Endpoint
from fastserve.wire.dialect import HttpDialect, KnowsTheUnknown, Route, answer_not_found
from fastserve.wire.faults import UnknownMethod, WireFault
from fastserve.wire.opening import Opening
from fastserve.wire.replies import CLOSE
from fastserve.wire.scope import guard

if TYPE_CHECKING:
    from fastserve.wire.head import Head

REMEMBERED_TARGETS = 1024


class Router:
    """Targets to endpoints, over the dialects of one listener in their order. `origins` are of web pages that
    may administer."""

    __slots__ = ("_dialects", "_opening", "_origins", "_remembered", "_spokesman")

    def __init__(
        self, dialects: Sequence[HttpDialect], opening: Opening | None = None, origins: Sequence[str] = ()
    ) -> None:
        self._dialects = tuple(dialects)
        self._opening = opening or Opening()
        self._origins = origins
        knowing = [dialect for dialect in dialects if isinstance(dialect, KnowsTheUnknown)]
        self._spokesman = knowing[0] if len(knowing) == 1 else None
        self._remembered: dict[tuple[str, str], Endpoint] = {}

    def find(self, method: str, target: str) -> tuple[Endpoint, bool]:
        """The endpoint, and whether it was looked up anew (then a 200 makes it worth remembering)."""
        endpoint = self._remembered.get((method, target))
        if endpoint is not None:
            return endpoint, False
        found = self.choose(method, target)
        if found is not None:
            return self._admit(*found), True
        if self._spokesman is not None:
            return self._spokesman.answer_unknown, False
        return answer_not_found, False

    def choose(self, method: str, target: str) -> tuple[HttpDialect, Route] | None:
        """The first route; one that gives way only where all do."""
        yielding: tuple[HttpDialect, Route] | None = None
        for dialect in self._dialects:
            route = dialect.route(method, target)
            if route is not None and not route.gives_way:
                return dialect, route
            if route is not None and yielding is None:
                yielding = dialect, route
        return yielding

    def _admit(self, dialect: HttpDialect, route: Route) -> Endpoint:
        guarded = guard(route.endpoint, route.scope, self._origins, dialect.refuse)
        return self._opening.hold(guarded, route.scope, dialect.refuse)

    def refuse(self, call: Call, fault: WireFault) -> None:
        """Answer what the wire refuses, and close; an unknown method may be a dialect's to answer."""
        call.head.mode = CLOSE
        if isinstance(fault, UnknownMethod) and self._spokesman is not None:
            endpoint = self._spokesman.route_unknown(fault.method, fault.target)
            if endpoint is not None:
                endpoint(call)
                return
        call.reply(fault.status, fault.body)

    def remember(self, head: Head) -> None:
        """A target was answered 200: keep its route."""
        head.routed_anew = False
        if len(self._remembered) < REMEMBERED_TARGETS:
            self._remembered[head.method, head.target] = head.endpoint
