"""The batch loop of a worker with a device: it takes batches while others are in flight, and sleeps only when
there is nothing to look at.

Whether a batch has landed is asked, not waited for. Right after something has happened the next thing is
near, and it asks all the time; then it naps, and a doorbell wakes it: with two batches on the device nothing
stands still because this process does.

The owner is listened to under load as well, when there is always a batch to take: a client that takes back
its memory waits until this worker has let go of it.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastserve.workers.loop import CONTROL_SPOKE, answer

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

# Asked all the time for this long after something happened: a small model's batch is over in it. Then every
# NAP.
EAGER_NS, NAP_NS = 100_000, 50_000
LISTEN_NS = 5_000_000


class _Owner:
    """Whether the owner has spoken: looked at every LISTEN_NS, beside what a wait in the ring tells."""

    def __init__(self, control_fd: int) -> None:
        self._line = select.poll()
        self._line.register(control_fd, select.POLLIN)
        self._next_ns = 0

    def spoke(self) -> bool:
        now = time.monotonic_ns()
        if now < self._next_ns:
            return False
        self._next_ns = now + LISTEN_NS
        return bool(self._line.poll(0))


def run_flights(
    ring: BatchRing, runner: Any, stopped: Callable[[], bool], spin_ns: int, control_fd: int
) -> None:
    """Until told to stop; everything in flight then lands first. Raises DeviceLost."""
    eager_until, owner = 0, _Owner(control_fd)
    while True:
        if owner.spoke() and stopped():
            runner.drain()
            return
        if not runner.in_flight:
            slot = ring.take_or_wait(spin_ns)
        elif not runner.room:
            slot = -1
        elif time.monotonic_ns() < eager_until:
            slot = ring.take()
        else:
            slot = ring.take_or_wait(0, NAP_NS)
        if slot >= 0:
            answer(ring, runner, slot)
        elif slot == CONTROL_SPOKE and stopped():
            runner.drain()
            return
        if runner.land() or slot >= 0:
            eager_until = time.monotonic_ns() + EAGER_NS
        elif not runner.room and time.monotonic_ns() > eager_until:
            time.sleep(NAP_NS / 1e9)
