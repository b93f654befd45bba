"""Requests that run again. One for a model that is not in memory stops where it looks its model up; one whose
inputs lead to another version (`sticky` by an input) stops before it runs.

    refuse_or_demand("m")                     a lookup in vain of a model that the server loads on demand
    await run_again(want, demand, again)      the model is loaded, and `again` runs the request anew

ModelDemand passes every handler that answers errors, as asyncio.CancelledError does: it is no answer. A load
that fails is raised by the second lookup, so each dialect answers it in its own form and counts it. So does
VersionDrawn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from fastserve.errors import Kind, ServeError

T = TypeVar("T")
Want = Callable[[str], Awaitable[None]]
Work = Coroutine[Any, Any, None] | None

MOST_LOADS = 8
"""Models that one request may want, one after the other; it may be unloaded before it is asked again."""
AGAIN_S = 1.0


class ModelDemand(BaseException):
    """A request is for `model`, which the server loads on demand."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class VersionDrawn(BaseException):
    """The inputs of a request lead to another version than the one that it was read for."""


class ValueDraw(Protocol):
    """The draw of a request that may run again. `version` is the one that it was read for, None where it has
    named its version."""

    version: object

    def leads_away(self, model: str, value: bytes) -> bool:
        """Return whether requests of the model with this value go to another version. Those of this task run
        where they are from then on."""


DRAW: ContextVar[ValueDraw | None] = ContextVar("value_draw", default=None)
"""Of the request of this task; None where it cannot run again."""

_FAULTS: ContextVar[dict[str, ServeError] | None] = ContextVar("demand_faults", default=None)
"""Why models could not be loaded for the request of this task."""


def refuse_or_demand(model: str) -> None:
    """Raise ModelDemand; ServeError where the model could not be loaded for this very request."""
    fault = (_FAULTS.get() or {}).get(model)
    if fault is not None:
        raise fault
    raise ModelDemand(model)


async def run_again(want: Want, demand: ModelDemand, again: Callable[[], Work]) -> bool:
    """Load the model and run the request again; as often as it wants another. Return False when `again`
    returned None: its answer is on the way."""
    for left in reversed(range(MOST_LOADS)):
        await load_for_request(want, demand, last=not left)
        try:
            work = again()
            if work is None:
                return False
            await work
            return True
        except ModelDemand as other:
            demand = other
    raise AssertionError("the last lookup has the fault of its model")


async def await_again(want: Want, run: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `run`, which is called again once the model that it wants is loaded."""
    for left in reversed(range(MOST_LOADS)):
        try:
            return await run()
        except ModelDemand as demand:
            await load_for_request(want, demand, last=not left)
    return await run()


async def load_for_request(want: Want, demand: ModelDemand, *, last: bool = False) -> None:
    """Load the model for the request of this task. A failure, also that this was the `last` try, is what its
    next lookup raises."""
    try:
        await want(demand.model)
        if not last:
            return
        text = f"model {demand.model} was unloaded again before this request could use it"
        fault = ServeError(Kind.UNAVAILABLE, text, retry_after_s=AGAIN_S)
    except ServeError as failure:
        fault = failure
    _FAULTS.set({**(_FAULTS.get() or {}), demand.model: fault})
