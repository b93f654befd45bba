"""Who waits for a slot of a queue, in the order they came. Not what waits in a slot: that is the queue's.

    standing = room.stand(rows, given)       given(place) once it is there; given(None) when the queue closes
    room.leave(standing)                     gave up

Slots are fewer than rows that may wait: batches are sealed before they are full, and their slots are held
while they run and are answered. Who finds none free stands here instead of being refused. Whoever waits must
not hold what others here wait for: answers are copied out of their slots before that.

The next piece of a request that was split is in no hurry: it waits until nobody else does and it leaves half
of the queue free, but no longer than PATIENCE_NS, so that neither starves the other. A piece is no larger
than a quarter of the queue: where one batch fills it, a whole one that waits would have all others refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastserve.each import each

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

# Slots freed in another front process are found by looking.
LOOK_S = 0.005
PATIENCE_NS = 250_000_000


class Standing:
    """One who waits for a place; `given` is called once, and not after `leave`."""

    __slots__ = ("given", "rows", "since_ns")

    def __init__(self, rows: int, given: Callable[[int | None], object]) -> None:
        self.rows, self.given = rows, given
        self.since_ns = time.monotonic_ns()


class Room:
    """The two lines of one queue in this front process. `on_empty` is told when nobody stands any more."""

    def __init__(self, ring: BatchRing, max_queued: int, on_empty: Callable[[], object]) -> None:
        self.anyone = False
        self.rows = 0  # of those who stand in line
        self.piece_rows = min(max(max_queued // 4, 1), ring.max_rows) if max_queued else ring.max_rows
        self._ring, self._half, self._on_empty = ring, max_queued // 2, on_empty
        self._line: deque[Standing] = deque()
        self._patient: deque[Standing] = deque()
        self._looking: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def fits(self, rows: int) -> bool:
        """Whether so many more rows may wait, those who stand here counted."""
        return self.rows + rows <= self._ring.rows_left()

    def spares(self, rows: int) -> bool:
        """Whether so many more rows leave half of the queue free."""
        return self._ring.rows_left() - rows >= self._half

    def stand(self, rows: int, given: Callable[[int | None], object], *, patient: bool = False) -> Standing:
        """Wait for a place of so many rows."""
        standing = Standing(rows, given)
        self.anyone = True
        if patient:
            self._patient.append(standing)
        else:
            self._join(standing)
        self.look_soon()
        return standing

    def leave(self, standing: Standing) -> None:
        """It waits no more. No effect once it was given its place."""
        if standing in self._line:
            self._line.remove(standing)
            self.rows -= standing.rows
        elif standing in self._patient:
            self._patient.remove(standing)
        else:
            return
        self._settle()

    def look_soon(self) -> None:
        """There may be a free slot: look at the end of this turn."""
        if self._looking is None and self.anyone:
            self._looking = asyncio.get_running_loop().call_soon(self._look)

    def close(self) -> None:
        """Everybody is told that there will be no place. Lets go of the queue: a circle keeps memory."""
        self._on_empty = _nobody
        left = [*self._line, *self._patient]
        self._line.clear()
        self._patient.clear()
        self.rows, self.anyone, self._ring.line = 0, False, False
        for handle in (self._looking, self._timer):
            if handle is not None:
                handle.cancel()
        self._looking = self._timer = None
        each(left, _turn_away)

    def _join(self, standing: Standing) -> None:
        self._line.append(standing)
        self.rows += standing.rows
        self._ring.line = True

    def _look(self) -> None:
        self._looking = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late_ns = time.monotonic_ns() - PATIENCE_NS
        while self._patient and self._patient[0].since_ns <= late_ns:
            self._join(self._patient.popleft())
        while self._line and self._give(self._line):
            pass
        while self._patient and not self._line and self.spares(self._patient[0].rows):
            if not self._give(self._patient):
                break
        self._settle()
        if self.anyone and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _give(self, line: deque[Standing]) -> bool:
        place = self._ring.reserve(line[0].rows, True)
        if place < 0:
            return False
        standing = line.popleft()
        if line is self._line:
            self.rows -= standing.rows
        standing.given(place)
        return True

    def _settle(self) -> None:
        self._ring.line = bool(self._line)
        self.anyone = bool(self._line or self._patient)
        if not self.anyone:
            self._on_empty()


def _turn_away(standing: Standing) -> None:
    standing.given(None)


def _nobody() -> None:
    """Nobody is left to tell."""
