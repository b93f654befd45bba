"""What the wire asks of a client API: which targets are its own, what each lets its caller do, and how it
says no. Not what any of them answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from fastserve.errors import Kind, ServeError
from fastserve.wire.faults import error_body

if TYPE_CHECKING:
    from fastserve.wire.call import Call, Endpoint
    from fastserve.wire.scope import Scope


class Route(NamedTuple):
    """Where a target leads. What its scope asks for, the wire sees to before the endpoint is called."""

    endpoint: Endpoint
    scope: Scope
    gives_way: bool = False
    """Taken where no other dialect of the listener has a route that does not: an API with a catch-all leaves
    the paths of others beside it, and two that share a path agree on whose it is."""


class HttpDialect(Protocol):
    """One client API on the listeners of one process."""

    def route(self, method: str, target: str) -> Route | None:
        """The route of a target, None when it is not this dialect's. Depends on its arguments only."""

    def refuse(self, call: Call, fault: ServeError) -> None:
        """Answer a call that its scope holds back: UNAVAILABLE before the server has opened,
        PERMISSION_DENIED for pages of other sites."""


@runtime_checkable
class KnowsTheUnknown(Protocol):
    """A dialect with words of its own for what is nobody's. They are used where no other dialect of the
    listener has some."""

    def answer_unknown(self, call: Call) -> None:
        """The endpoint of targets that no dialect has a route for."""

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        """The endpoint of a method that is none of HTTP's (fastserve.wire.head.METHODS), None for the wire's
        own refusal. Nothing of the request is read but its first line, and the connection closes."""


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
"""What google.rpc.Code says of each kind over HTTP. A dialect whose original says otherwise writes down what
is otherwise."""


def answer_not_found(call: Call) -> None:
    """What nobody has words for."""
    call.reply(404, error_body("no API of this listener has this path"))


def refuse_plainly(call: Call, fault: ServeError) -> None:
    """`HttpDialect.refuse` for who has no form of its own."""
    call.reply(held_back_status(fault), error_body(fault.message), headers=retry_after(fault))


def held_back_status(fault: ServeError) -> int:
    """What proxies and pages look at."""
    return 403 if fault.kind is Kind.PERMISSION_DENIED else 503


def retry_after(fault: ServeError) -> tuple[tuple[bytes, bytes], ...]:
    """The header that says when to come again, where the fault knows."""
    again = fault.retry_after_s
    return () if again is None else ((b"Retry-After", b"%d" % max(1, round(again))),)
