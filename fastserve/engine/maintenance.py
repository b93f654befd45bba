"""Maintenance of a queue by the owner: give memory back, notice workers stalled in a batch, and end them.

Everything here is a scan of shared memory on a timer of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastserve._ext.upkeep import Looks
from fastserve.engine.batch_queue import BatchQueue

# Memory is given back that was free for two looks: a load that comes in waves keeps what it uses.
TRIM_S, TRIM_ON_S = 5.0, 0.02
# An instance counts as stuck after half of what its model's runs may take, so that a load
# balancer looks elsewhere before callers get an error; where a run has no limit, after this long.
STUCK_S = 60.0
WATCH_MOST_S, WATCH_LEAST_S = 1.0, 0.05


class Maintenance:
    """Look after one queue from `open` to `close`.

    `kill(worker, reason)` ends a worker whose batch has run longer than `limit_ms` (0: no limit). `stuck` are
    the workers whose batch has run longer than `stuck_s`; `on_stuck` is called whenever that set changes.
    A worker that answers in parts runs as long as execute() goes on without sending one.
    """

    def __init__(
        self,
        queue: BatchQueue,
        kill: Callable[[int, str], None],
        on_stuck: Callable[[], None],
        *,
        limit_ms: int,
    ) -> None:
        self.stuck: frozenset[int] = frozenset()
        self.stuck_s = limit_ms / 2000 if limit_ms else STUCK_S
        self._limit_ms, self._decoupled = limit_ms, queue.decoupled
        self._kill, self._on_stuck = kill, on_stuck
        self._killed: set[int] = set()
        self._looks = Looks(queue.arena.memory)
        # A page that a device has registered is read by DMA where it lies: taken out of the arena and put in
        # anew, it would be read as it was.
        self._pinned = queue.arena.geometry.pinned
        self._watch_s = min(max(self.stuck_s / 4, WATCH_LEAST_S), WATCH_MOST_S)

    def open(self) -> None:
        """Begin, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._trimming = self._loop.call_later(TRIM_S, self.give_back)
        self._watching = self._loop.call_later(self._watch_s, self._watch)

    def close(self) -> None:
        """Stop both timers."""
        self._trimming.cancel()
        self._watching.cancel()
        del self._looks, self._kill, self._on_stuck  # these keep the arena's memory alive

    def give_back(self) -> None:
        """Give back memory that was not used since the last look, and set the time of the next look."""
        self._trimming.cancel()
        more = not self._pinned and self._looks.give_back()
        self._trimming = self._loop.call_later(TRIM_ON_S if more else TRIM_S, self.give_back)

    def ended(self, worker: int) -> str:
        """Return why Maintenance killed this dead worker; "" when it died by itself."""
        if worker not in self._killed:
            return ""
        self._killed.discard(worker)
        return f"a batch ran longer than run_timeout_ms {self._limit_ms}"

    def _watch(self) -> None:
        self._watching = self._loop.call_later(self._watch_s, self._watch)
        now, stuck = time.monotonic_ns(), set()
        for worker, since_ns, ran in self._looks.running():
            if self._decoupled and ran:  # execute() is over, its answers may come whenever they like
                continue
            took_s = (now - since_ns) / 1e9
            if took_s > self.stuck_s:
                stuck.add(worker)
            if self._limit_ms and took_s * 1000 > self._limit_ms and worker not in self._killed:
                self._killed.add(worker)
                self._kill(worker, f"a batch ran longer than run_timeout_ms {self._limit_ms}")
        if stuck != self.stuck:
            self.stuck = frozenset(stuck)
            self._on_stuck()
