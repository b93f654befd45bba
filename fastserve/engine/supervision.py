"""Supervision of one queue by the owner of its workers: deaths, workers stalled in a batch, and idle memory.

    a worker dies        its batches run once more while another worker lives; else they fail
    no worker lives      requests that wait fail after NO_WORKER_LIMIT_S; later ones within NO_WORKER_LOOK_S
    a worker is back     requests wait for it again

The loader of served models and the batching library use the DeathPolicy. Maintenance scans shared memory on a
timer of the loop. Restarting workers is the worker group's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from fastserve._ext.arena_maintenance import ArenaScanner
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.text_queue import TextQueue
from fastserve.errors import Kind, Reason, pack_status, worker_lost

log = logging.getLogger(__name__)

# A batch whose worker died runs once more when another worker lives; its requests fail otherwise.
MOST_ATTEMPTS = 2
LOST = pack_status(Kind.UNAVAILABLE, Reason.WORKER_LOST)
ENDED = "the worker process that ran this request was ended: {}"
# With no worker left, requests wait this long for one to come back; those that come later as long as a look.
NO_WORKER_LIMIT_S, NO_WORKER_LOOK_S = 10.0, 1.0
# While a look still finds requests, the next one is near: schedulers and other fronts send on what they hold.
NO_WORKER_DRAIN_S = 0.005
# Memory is given back that was free for two looks: a load that comes in waves keeps what it uses.
TRIM_S, TRIM_ON_S = 5.0, 0.02
# An instance counts as stuck after half of what its model's runs may take, so that a load
# balancer looks elsewhere before callers get an error; where a run has no limit, after this long.
STUCK_S = 60.0
WATCH_MOST_S, WATCH_LEAST_S = 1.0, 0.05


class DeathPolicy:
    """Fail or retry the requests of `queue`.

    `alive` counts the workers that are ready now. `died` is the error text of a batch whose worker died,
    `nobody` makes the error of a request that waited too long for a worker.
    """

    def __init__(
        self,
        who: str,
        queue: BatchQueue,
        alive: Callable[[], int],
        died: str,
        nobody: Callable[[], str],
    ) -> None:
        self._who, self._queue, self._alive = who, queue, alive
        self._died, self._nobody = died, nobody
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False  # the look before found requests

    def open(self) -> None:
        """Begin, on the running loop. Workers may have died already."""
        self._watch()

    def close(self) -> None:
        """Stop failing requests."""
        if self._timer is not None:
            self._timer.cancel()

    def worker_died(self, worker: int, ended: str = "") -> tuple[int, int]:
        """Retry or fail the batches of a dead worker; `ended` says why it was killed here, "" when it died
        by itself. Return how many were retried and how many failed."""
        # Parts of an answer have gone out already: it is not begun again. What hung would hang the next.
        # Of text, what has begun says so itself, and the rest waits for the next worker.
        retry = (self._alive() or isinstance(self._queue, TextQueue)) and not self._queue.decoupled
        attempts = MOST_ATTEMPTS if retry and not ended else 1
        status, text = (Kind.DEADLINE_EXCEEDED.value, ENDED.format(ended)) if ended else (LOST, self._died)
        counts: tuple[int, int] = self._queue.ring.worker_died(worker, attempts, status, text)
        self._watch()
        return counts

    def worker_back(self) -> None:
        """Let requests wait: a worker is ready again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        if self._timer is None and not self._alive():
            self._timer = asyncio.get_running_loop().call_later(NO_WORKER_LIMIT_S, self._fail_waiting)

    def _fail_waiting(self) -> None:
        """Fail all requests that wait for a worker, again and again until one is back."""
        text = self._nobody()
        failed = self._queue.ring.fail_ready(LOST, text)
        turned_away = self._queue.room.turn_away(lambda: worker_lost(text))
        if failed and not self._draining:
            log.error("%s: %d batches failed: no worker is alive", self._who, failed)
        self._draining = bool(failed or turned_away)
        wait_s = NO_WORKER_DRAIN_S if self._draining else NO_WORKER_LOOK_S
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._fail_waiting)


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
        self._scanner = ArenaScanner(queue.arena.memory)
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
        del self._scanner, self._kill, self._on_stuck  # these keep the arena's memory alive

    def give_back(self) -> None:
        """Give back memory that was not used since the last look, and set the time of the next look."""
        self._trimming.cancel()
        more = not self._pinned and self._scanner.trim()
        self._trimming = self._loop.call_later(TRIM_ON_S if more else TRIM_S, self.give_back)

    def ended(self, worker: int) -> str:
        """Return why Maintenance killed this dead worker; "" when it died by itself."""
        if worker not in self._killed:
            return ""
        self._killed.discard(worker)
        return f"a batch ran longer than run_timeout_ms {self._limit_ms}"

    def end(self, worker: int) -> None:
        """Kill a worker whose time is up, once; never where there is no limit."""
        if self._limit_ms and worker not in self._killed:
            self._killed.add(worker)
            self._kill(worker, f"a batch ran longer than run_timeout_ms {self._limit_ms}")

    def _watch(self) -> None:
        self._watching = self._loop.call_later(self._watch_s, self._watch)
        now, stuck = time.monotonic_ns(), set()
        for worker, since_ns, ran in self._scanner.running():
            if self._decoupled and ran:  # execute() is over, its answers may come whenever they like
                continue
            took_s = (now - since_ns) / 1e9
            if took_s > self.stuck_s:
                stuck.add(worker)
            if took_s * 1000 > self._limit_ms:
                self.end(worker)
        if stuck != self.stuck:
            self.stuck = frozenset(stuck)
            self._on_stuck()
