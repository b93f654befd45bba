"""Failure policy for the requests of one queue whose workers die.

    a worker dies        its batches run once more while another worker lives; else they fail
    no worker lives      requests that wait fail after NO_WORKER_LIMIT_S; later ones within NO_WORKER_LOOK_S
    a worker is back     requests wait for it again

The host of served models and the batching library both use it. Restarting workers is the worker group's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.text import TextQueue
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
