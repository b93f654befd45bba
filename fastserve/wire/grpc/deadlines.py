"""Calls whose clients wait no longer than so long: one timer for all of them, set for the first.

A call that is answered in time costs an entry in a dict and starts no timer unless it is the only one.
"""

from __future__ import annotations

import asyncio
from operator import methodcaller
from time import monotonic_ns
from typing import TYPE_CHECKING

from fastserve.each import each

if TYPE_CHECKING:
    from fastserve.wire.grpc.call import Call

NEVER_NS = 1 << 63
SHORTEST_S = 0.001  # between two looks, however many deadlines there are


class Deadlines:
    """One listener's."""

    __slots__ = ("_calls", "_next_ns", "_timer")

    def __init__(self) -> None:
        self._calls: dict[Call, None] = {}
        self._next_ns = NEVER_NS
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Call) -> None:
        self._calls[call] = None
        if call.deadline_ns < self._next_ns:
            self._arm(call.deadline_ns)

    def remove(self, call: Call) -> None:
        self._calls.pop(call, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next_ns = None, NEVER_NS

    def _arm(self, at_ns: int) -> None:
        self.close()
        self._next_ns = at_ns
        left_s = max(SHORTEST_S, (at_ns - monotonic_ns()) / 1e9)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def _look(self) -> None:
        self.close()
        now = monotonic_ns()
        late = [call for call in self._calls if call.deadline_ns <= now]
        for call in late:
            self.remove(call)
        if self._calls:
            self._arm(min(call.deadline_ns for call in self._calls))
        each(late, methodcaller("expire"))
