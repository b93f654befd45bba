"""What the owner does for a lane every now and then: gives unused memory back, and ends workers that hang.

Not what answers requests: everything here is a look at shared memory on a timer of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastserve._ext.trim import Trim
from fastserve.engine.lane import Lane

# Memory is given back that was free for two looks: a load that comes in waves keeps what it uses.
TRIM_S, TRIM_ON_S = 5.0, 0.02
WATCH_S = 0.05


class Upkeep:
    """Looks after one lane from `open` to `close`. `kill(worker, reason)` ends a worker whose batch has run
    longer than `limit_ms`; 0: however long."""

    def __init__(self, lane: Lane, kill: Callable[[int, str], None], *, limit_ms: int) -> None:
        self._ring, self._kill, self._limit_ms = lane.ring, kill, limit_ms
        self._trim = Trim(lane.arena.memory)

    def open(self) -> None:
        """Begin, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._trimming = self._loop.call_later(TRIM_S, self.give_back)
        self._watching = self._loop.call_later(WATCH_S, self._watch) if self._limit_ms else None

    def close(self) -> None:
        """No more looks."""
        self._trimming.cancel()
        if self._watching is not None:
            self._watching.cancel()
        del self._trim  # it holds the arena's memory

    def give_back(self) -> None:
        """Look for memory that nobody has used since the last look, and when to look again."""
        self._trimming.cancel()
        more = self._trim.look()
        self._trimming = self._loop.call_later(TRIM_ON_S if more else TRIM_S, self.give_back)

    def _watch(self) -> None:
        ring, now = self._ring, time.monotonic_ns()
        for slot in range(ring.slots):
            state, _, _, worker = ring.describe(slot)
            taken_ns = ring.times_ns(slot)[1]
            if state == "running" and taken_ns and now - taken_ns > self._limit_ms * 1_000_000:
                self._kill(worker, f"a batch ran longer than run_timeout_ms {self._limit_ms}")
        self._watching = self._loop.call_later(WATCH_S, self._watch)
