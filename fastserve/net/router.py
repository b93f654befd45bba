"""Routes of the dialects of a listener: from method and target to an endpoint.

The first dialect that knows a target has it. Its route() must depend on nothing but its arguments: the state
of models and versions is for the endpoint to look up. Only targets that were answered 200 are cached, so
random paths neither fill the memory nor push good ones out. The cache holds CachedRoute objects that the
router made: the endpoint of one connection or one call never gets into it.

The router also applies scopes and resources (access_control.py) for every dialect: before the server has
opened, for web pages of other sites, for calls without a required header, and for requests without an API key
where keys are on (api_keys.py), the dialect's own refusal replaces the endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from enum import IntEnum
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from fastserve.errors import Kind, RateLimitError, Reason, ServeError, detach
from fastserve.net.access_control import (
    NO_RESTRICTIONS,
    Opening,
    Refuse,
    Resources,
    Restrictions,
    Scope,
    guard,
)
from fastserve.net.api_keys import ApiKeyGate, Compartment, KeyedEndpoint, KeyTerms, keyed
from fastserve.net.deadlines import (
    ENVOY_TIMEOUT,
    TIMEOUT,
    bound_timeout,
    read_timeout_headers,
    time_is_up,
)
from fastserve.net.demand_endpoints import demand_endpoint
from fastserve.net.key_usage import limit_headers
from fastserve.net.limits import BodyRefused, KeyRefused, UnknownMethod, WireFault, error_body
from fastserve.net.request import CLOSE, CachedRoute, Call, Endpoint, RequestHead
from fastserve.net.traced_endpoints import Tracer
from fastserve.net.traffic_split import TrafficSplit, split_endpoint
from fastserve.settings import Limits
from fastserve.util.model_demand import Want

CHECKED_BYTES = 1 << 20
"""Content-Length from which a route is asked whether it takes such a body."""


class Yields(IntEnum):
    """Name the routes of a listener that a route gives way to."""

    NEVER = 0
    FIRST = 1
    """It gives way to routes that never do: two APIs that share a path agree on whose it is."""
    LAST = 2
    """It gives way to FIRST too: a catch-all, which refuses unknown targets."""


class Route(NamedTuple):
    """The endpoint of a target, and what its callers need. Scope and resources are checked before the
    endpoint is called."""

    endpoint: Endpoint
    scope: Scope
    gives_way: Yields = Yields.NEVER
    """Several dialects may have a route for a target: the one that gives way least is taken, then the first
    dialect's. So a catch-all leaves the paths of others to them in whatever order."""
    resources: Resources | None = None
    """The resources it reaches; None: those of its scope (`access_control.resources_of`)."""
    body_fault: Callable[[int], ServeError | None] | None = None
    """The fault of a body of so many bytes, asked before a large one is read; None: `limits.body_bytes` alone
    bounds it. What comes without a Content-Length is the endpoint's to look at."""


class HttpDialect(Protocol):
    """One client API on the listeners of one process."""

    def route(self, method: str, target: str) -> Route | None:
        """Return the route of a target, None when it is not this dialect's. Depends on its arguments only."""

    def refuse(self, call: Call, fault: ServeError) -> None:
        """Answer a call that is refused before its endpoint: UNAVAILABLE before the server has opened,
        PERMISSION_DENIED for pages of other sites."""


@runtime_checkable
class KnowsTheUnknown(Protocol):
    """A dialect with answers of its own to unknown targets. They are used where no other dialect of the
    listener has some."""

    def answer_unknown(self, call: Call) -> None:
        """Answer a target that no dialect has a route for."""

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        """Return the endpoint of a method that is none of HTTP's (http1.parser.METHODS), None for the
        usual refusal. Only the first line of the request is read, and the connection closes."""


CANONICAL_STATUS: dict[Kind, int] = {
    Kind.CANCELLED: 499,
    Kind.UNKNOWN: 500,
    Kind.INVALID_ARGUMENT: 400,
    Kind.DEADLINE_EXCEEDED: 504,
    Kind.NOT_FOUND: 404,
    Kind.ALREADY_EXISTS: 409,
    Kind.PERMISSION_DENIED: 403,
    Kind.RESOURCE_EXHAUSTED: 429,
    Kind.FAILED_PRECONDITION: 400,
    Kind.ABORTED: 409,
    Kind.OUT_OF_RANGE: 400,
    Kind.UNIMPLEMENTED: 501,
    Kind.INTERNAL: 500,
    Kind.UNAVAILABLE: 503,
    Kind.DATA_LOSS: 500,
    Kind.UNAUTHENTICATED: 401,
}
"""The HTTP status of each kind by google.rpc.Code; dialects declare where their originals differ."""


def answer_not_found(call: Call) -> None:
    """Answer 404 to a target that no dialect has."""
    call.reply(404, error_body("no API of this listener has this path"))


def refuse_plainly(call: Call, fault: ServeError) -> None:
    """Refuse a call without a dialect's form."""
    call.reply(held_back_status(fault), error_body(fault.message), headers=fault_headers(fault))


def held_back_status(fault: ServeError) -> int:
    """Return the status of a call that is refused before its endpoint."""
    return _HELD_BACK.get(fault.kind, 503)


_HELD_BACK = {
    Kind.PERMISSION_DENIED: 403,
    Kind.UNAUTHENTICATED: 401,
    Kind.RESOURCE_EXHAUSTED: 429,
    Kind.INVALID_ARGUMENT: 400,
    Kind.DEADLINE_EXCEEDED: 504,
}


def common_status(fault: ServeError) -> int | None:
    """Return the status of an error that has the same one in every dialect: 429, 504, and 400 for a time that
    cannot be read. None for other errors."""
    everywhere = fault.reason in (Reason.KEY_LIMIT, Reason.REQUEST_TIMEOUT)
    return held_back_status(fault) if everywhere else None


_CHALLENGES: dict[Kind, tuple[tuple[bytes, bytes], ...]] = {
    Kind.UNAUTHENTICATED: ((b"WWW-Authenticate", b'Bearer realm="fastserve"'),),
    Kind.PERMISSION_DENIED: ((b"WWW-Authenticate", b'Bearer realm="fastserve", error="insufficient_scope"'),),
}


def fault_headers(fault: ServeError) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that an error has in every dialect: Retry-After where there is a time to try again,
    WWW-Authenticate where an API key is missing or does not suffice (RFC 6750 3), x-ratelimit-* over a limit
    of a key."""
    if fault.reason is Reason.API_KEY:
        return _CHALLENGES[fault.kind]
    if isinstance(fault, RateLimitError):
        told = limit_headers(fault.resource, fault.limit, fault.remaining, fault.reset_s)
        return (b"Retry-After", b"%d" % max(1, ceil(fault.retry_after_s or 1))), *told
    again = fault.retry_after_s
    return () if again is None else ((b"Retry-After", b"%d" % max(1, round(again))),)


REMEMBERED_TARGETS = 1024
DialectsOf = Callable[[Compartment], Sequence[HttpDialect]]


class UntimelyEndpoint:
    """Refuse requests that have no time left, or a time that cannot be read. Those without a valid key are
    told so by the endpoint `behind`."""

    __slots__ = ("_fault", "_router", "behind")

    def __init__(self, router: Router, behind: Endpoint, fault: ServeError) -> None:
        self._router, self.behind, self._fault = router, behind, fault

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        if isinstance(self.behind, KeyedEndpoint):
            try:
                self.behind.check(call.head)
            except ServeError:
                return self.behind(call)
        self._router.hold_back(call, self._fault)
        return None


class Router:
    """Find the endpoint of a target over the dialects of one listener, in their order. `origins` are
    those of web pages that may administer; with `gate` every endpoint is behind an API key, and `dialects_of`
    has the dialects of this listener for keys of some models; with `tracer` some requests that infer are
    traced; with `want` requests wait for models that are loaded on demand; `split` draws the dialects of
    those that infer."""

    __slots__ = (
        "_dialects", "_dialects_of", "_gate", "_limits", "_narrowed", "_opening", "_origins", "_remembered",
        "_restrictions", "_split", "_spokesman", "_tracer", "_want",
    )  # fmt: skip

    def __init__(
        self,
        dialects: Sequence[HttpDialect],
        opening: Opening | None = None,
        origins: Sequence[str] = (),
        restrictions: Restrictions = NO_RESTRICTIONS,
        gate: ApiKeyGate | None = None,
        dialects_of: DialectsOf | None = None,
        limits: Limits | None = None,
        tracer: Tracer | None = None,
        want: Want | None = None,
        split: TrafficSplit | None = None,
    ) -> None:
        self._split = split
        self._gate, self._dialects_of, self._tracer, self._want = gate, dialects_of, tracer, want
        self._limits = limits or Limits()
        self._narrowed: WeakKeyDictionary[Compartment, Router] = WeakKeyDictionary()
        self._dialects = tuple(dialects)
        self._opening = opening or Opening()
        self._origins = origins
        self._restrictions = restrictions
        knowing = [dialect for dialect in dialects if isinstance(dialect, KnowsTheUnknown)]
        self._spokesman = knowing[0] if len(knowing) == 1 else None
        self._remembered: dict[tuple[str, str], CachedRoute] = {}

    def route(self, head: RequestHead) -> None:
        """Set the endpoint of a new head, and how long its calls may take."""
        head.endpoint, head.found = self.find(head.method, head.target)
        limits = self._limits
        bounded = limits.request_timeout_s or limits.most_request_timeout_s
        if bounded or head.find(TIMEOUT) is not None or head.find(ENVOY_TIMEOUT) is not None:
            self._bound(head)

    def _bound(self, head: RequestHead) -> None:
        """Set the time of a request that infers; others have all they take. One without any time left, or
        with a time that cannot be read, is refused once its key has been looked at."""
        chosen = self.choose(head.method, head.target)
        if chosen is None or chosen[1].scope is not Scope.INFER:
            return
        try:
            timeout_ns = bound_timeout(read_timeout_headers(head.headers), self._limits)
            if timeout_ns == 0:
                raise time_is_up(timeout_ns)
        except ServeError as fault:
            head.endpoint = UntimelyEndpoint(self, head.endpoint, detach(fault))
            return
        if timeout_ns > 0:
            head.timeout_ns, head.slow = timeout_ns, True

    def find(self, method: str, target: str) -> tuple[Endpoint, CachedRoute | None]:
        """Return the endpoint, and the route to cache once it has answered 200: None for a cached or
        unknown target."""
        known = self._remembered.get((method, target))
        if known is not None:
            return known.endpoint, None
        chosen = self.choose(method, target)
        if chosen is None:
            unknown: Endpoint = (
                answer_not_found if self._spokesman is None else self._spokesman.answer_unknown
            )
            if self._gate is not None:
                unknown = keyed(self._terms(None, refuse_plainly), unknown)
            return unknown, None
        dialect, route = chosen
        scope, refuse = route.scope, dialect.refuse
        if not isinstance(scope, Scope):
            raise TypeError(f"{method} {target[:200]}: a route needs a Scope, given {scope!r}")
        endpoint = route.endpoint
        if self._split is not None and scope is Scope.INFER:
            endpoint = split_endpoint(self._split, endpoint, partial(self._find_arm, method, target))
        endpoint = demand_endpoint(self._want, endpoint)
        if self._tracer is not None and scope is Scope.INFER:
            endpoint = self._tracer.trace_endpoint(endpoint)
        endpoint = self._restrictions.guard_endpoint(endpoint, scope, route.resources, refuse)
        endpoint = guard(endpoint, scope, self._origins, refuse)
        if self._gate is not None:
            behind = keyed(self._terms(scope, refuse), endpoint)
            return behind, CachedRoute(method, target, behind)
        held = self._opening.hold(endpoint, scope, refuse)
        return held, CachedRoute(method, target, endpoint)

    def _terms(self, scope: Scope | None, refuse: Refuse) -> KeyTerms:
        assert self._gate is not None
        return KeyTerms(self._gate, self._opening, scope, refuse, self._narrow)

    def _narrow(self, compartment: Compartment, head: RequestHead) -> Endpoint:
        """Return the endpoint of a head's target in a compartment. Raises ServeError where there is none."""
        return self._open(compartment).find(head.method, head.target)[0]

    def _open(self, compartment: Compartment) -> Router:
        assert self._dialects_of is not None
        router = self._narrowed.get(compartment)
        if router is None:
            dialects = self._dialects_of(compartment)
            given = self._opening, self._origins, self._restrictions
            router = self._narrowed[compartment] = Router(
                dialects,
                *given,
                dialects_of=self._dialects_of,
                tracer=self._tracer,
                want=self._want,
                split=compartment.split,
            )
        return router

    def _find_arm(self, method: str, target: str, compartment: Compartment) -> Endpoint:
        """Return the bare endpoint of a target in a compartment that was drawn."""
        chosen = self._open(compartment).choose(method, target)
        assert chosen is not None, f"{method} {target} infers, and is in every compartment"
        return chosen[1].endpoint

    def choose(self, method: str, target: str) -> tuple[HttpDialect, Route] | None:
        """Return the route that gives way least, the first of several."""
        chosen: tuple[HttpDialect, Route] | None = None
        for dialect in self._dialects:
            route = dialect.route(method, target)
            if route is None or (chosen is not None and route.gives_way >= chosen[1].gives_way):
                continue
            if not route.gives_way:
                return dialect, route
            chosen = dialect, route
        return chosen

    def check_key(self, head: RequestHead) -> None:
        """Check the API key of a request whose body is still to come. Raises KeyRefused."""
        endpoint = head.endpoint
        if isinstance(endpoint, UntimelyEndpoint):
            endpoint = endpoint.behind
        if isinstance(endpoint, KeyedEndpoint):
            try:
                endpoint.check(head)
            except ServeError as fault:
                raise KeyRefused(fault) from None

    def check_body(self, head: RequestHead, length: int) -> None:
        """Check a Content-Length against its route. Raises BodyRefused."""
        chosen = self.choose(head.method, head.target)
        if chosen is not None and chosen[1].body_fault is not None:
            fault = chosen[1].body_fault(length)
            if fault is not None:
                raise BodyRefused(fault)

    def hold_back(self, call: Call, fault: ServeError) -> None:
        """Refuse a call of a known target in its dialect's form."""
        chosen = self.choose(call.method, call.target)
        if self._gate is not None and fault.reason is Reason.API_KEY:
            self._gate.note_refusal(call, None if chosen is None else chosen[1].scope)
        if chosen is None:
            refuse_plainly(call, fault)
        else:
            chosen[0].refuse(call, fault)

    def refuse(self, call: Call, fault: WireFault) -> None:
        """Answer a WireFault and close; an unknown method may be a dialect's to answer, but not where keys
        are on, since nothing but the first line of such a request is read."""
        call.head.mode = CLOSE
        if isinstance(fault, UnknownMethod) and self._spokesman is not None and self._gate is None:
            endpoint = self._spokesman.route_unknown(fault.method, fault.target)
            if endpoint is not None:
                endpoint(call)
                return
        call.reply(fault.status, fault.body)

    def remember(self, head: RequestHead) -> None:
        """Cache the route of a target that was answered 200."""
        found, head.found = head.found, None
        if found is not None and len(self._remembered) < REMEMBERED_TARGETS:
            self._remembered[found.method, found.target] = found
