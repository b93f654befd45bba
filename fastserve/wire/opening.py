"""The time in which a server listens and has no models yet: calls about health and scrapes of metrics are
answered, others are told to come again, in their dialect's form.

It listens first, so that an address that cannot be had is known before minutes of loading, and whoever asks
meanwhile hears what is going on.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastserve.errors import Kind, ServeError
from fastserve.wire.scope import Scope

if TYPE_CHECKING:
    from fastserve.wire.call import Call, Endpoint

Refuse = Callable[["Call", ServeError], None]
RETRY_AFTER_S = 1.0
AT_ONCE = (Scope.HEALTH, Scope.METRICS)


class Opening:
    """Whether the server has opened; one for all listeners of a process."""

    __slots__ = ("done",)

    def __init__(self, *, done: bool = True) -> None:
        self.done = done

    def check(self, scope: Scope | None) -> None:
        """Raises ServeError UNAVAILABLE for what cannot be answered yet."""
        if not self.done and scope not in AT_ONCE:
            raise starting()

    def hold(self, endpoint: Endpoint, scope: Scope | None, refuse: Refuse) -> Endpoint:
        """The endpoint, which `refuse` stands in for until the server has opened."""
        return endpoint if self.done or scope in AT_ONCE else Held(self, endpoint, refuse)


class Held:
    """An endpoint that was looked up before the server opened. A head is looked up once and shared by the
    calls that repeat it, so the decision is made for each of them."""

    __slots__ = ("_endpoint", "_opening", "_refuse")

    def __init__(self, opening: Opening, endpoint: Endpoint, refuse: Refuse) -> None:
        self._opening = opening
        self._endpoint = endpoint
        self._refuse = refuse

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        if not self._opening.done:
            self._refuse(call, starting())
            return None
        call.head.endpoint = self._endpoint  # from now on without the detour
        return self._endpoint(call)


def starting() -> ServeError:
    return ServeError(
        Kind.UNAVAILABLE, "The server is starting: its models are loading", retry_after_s=RETRY_AFTER_S
    )
