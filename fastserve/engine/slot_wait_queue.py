"""Requests of one front process that wait for a slot of a queue, each key's in a line of its own.

    room.stand(rows, given, account)       `given` receives a lease, or a ServeError
    room.leave(waiter)

Lines are FIFO. Of several lines the one goes on whose key has had least for its weight: start-time fair
queueing, by positions that all front processes share (share_board.py). While several keys send requests,
`share` has few rows in slots ahead of the workers, since what is there runs in the order in which it came: as
many as fill a batch for when a worker is done. A request of a key that seldom comes would find that batch
full, and wait for one more; so a part of it stays free for those whose line is new.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from fastserve.engine.share_board import NOBODY
from fastserve.errors import ServeError
from fastserve.util.rate_limited_log import run_all

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve._ext.fast_path import Account
    from fastserve.engine.share_board import ModelTurns

# Slots freed in another front process are found by looking.
SLOT_LOOK_S = 0.005

PATIENCE_NS = 250_000_000

NEW_LINE_NS = 100_000_000
"""For how long a line counts as new, at least: a key that sends more than it is given has one for longer."""


OnSlot = Callable[["int | ServeError"], object]


class SlotWaiter:
    """A request that waits for a lease; `given` is called once, and not after `leave`."""

    __slots__ = ("account", "given", "rows", "since_ns")

    def __init__(self, rows: int, given: OnSlot, account: Account | None = None) -> None:
        self.rows, self.given, self.account = rows, given, account
        self.since_ns = time.monotonic_ns()

    @property
    def key(self) -> str:
        """The name of its key; "" without one."""
        return "" if self.account is None else self.account.name


class KeyLine:
    """The waiting requests of one key. `since` is the clock of its model when the first of them came, and
    `began_ns` the time."""

    __slots__ = ("began_ns", "key", "rows", "since", "waiters", "weight")

    def __init__(self, key: str, since: float) -> None:
        self.key, self.since, self.weight = key, since, 1.0
        self.began_ns = time.monotonic_ns()
        self.waiters: deque[SlotWaiter] = deque()
        self.rows = 0

    @property
    def crowd(self) -> float:
        """Its rows, by its weight."""
        return self.rows / self.weight


class KeyLines:
    """The lines of all keys, in the order in which they are served."""

    def __init__(self) -> None:
        self.rows = 0
        self.turns: ModelTurns | None = None
        """The positions of keys; None where nobody has one."""
        self._lines: dict[str, KeyLine] = {}
        self._new: dict[str, KeyLine] = {}  # oldest first; those before were looked at when they were old
        self._order: list[tuple[float, int, KeyLine]] = []  # a heap; a line may have moved on since
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[SlotWaiter]:
        return (waiter for line in self._lines.values() for waiter in line.waiters)

    def join(self, waiter: SlotWaiter) -> bool:
        """Add a request at the end of its key's line; return whether none was there."""
        key, line = waiter.key, self._lines.get(waiter.key)
        fresh = line is None
        if line is None:
            since = 0.0 if self.turns is None else self.turns.clock
            line = self._lines[key] = self._new[key] = KeyLine(key, since)
            self._push(line)
        if waiter.account is not None:
            line.weight = waiter.account.weight
        line.waiters.append(waiter)
        line.rows += waiter.rows
        self.rows += waiter.rows
        return fresh

    def leave(self, waiter: SlotWaiter) -> bool:
        """Remove a request; return whether it waited."""
        line = self._lines.get(waiter.key)
        if line is None or waiter not in line.waiters:
            return False
        line.waiters.remove(waiter)
        self._took(line, waiter)
        return True

    def first(self) -> tuple[KeyLine, float]:
        """Return the line whose first request is next, of those that wait, and the position of its key."""
        order = self._order
        while True:
            noted, _, line = order[0]
            if self._lines.get(line.key) is not line:
                heappop(order)
                continue
            position = self._position(line)
            if position <= noted or len(order) == 1:
                return line, position
            self._pushed += 1
            heapreplace(order, (position, self._pushed, line))

    def first_new(self, since_ns: int) -> KeyLine | None:
        """Return the oldest line that began after `since_ns`, which is never less than before; None for
        none."""
        while self._new:
            line = next(iter(self._new.values()))
            if line.began_ns > since_ns:
                return line
            del self._new[line.key]
        return None

    def serve(self, early: KeyLine | None = None) -> SlotWaiter:
        """Remove the next request, or the first of a line that goes before its turn, and return it."""
        line = early or self.first()[0]
        waiter = line.waiters.popleft()
        if self.turns is not None:
            position, cost = self._position(line), waiter.rows / line.weight
            self.turns.serve(line.key, position, cost, in_turn=early is None)
        self._took(line, waiter)
        return waiter

    def last_of_most(self, key: str, rows: int, weight: float) -> SlotWaiter | None:
        """Return the last request of the line that is longest for its weight; None where no line is longer
        than that of this key with `rows` rows more."""
        most = max(self._lines.values(), key=lambda line: line.crowd, default=None)
        own = self._lines.get(key)
        if most is None or most.crowd <= ((own.rows if own else 0) + rows) / weight:
            return None
        return most.waiters[-1] if most.key != key else None

    def clear(self) -> None:
        """Forget all."""
        self._lines.clear()
        self._new.clear()
        self._order.clear()
        self.rows = 0

    def _position(self, line: KeyLine) -> float:
        return 0.0 if self.turns is None else max(line.since, self.turns.position(line.key))

    def _push(self, line: KeyLine) -> None:
        self._pushed += 1
        heappush(self._order, (self._position(line), self._pushed, line))

    def _took(self, line: KeyLine, waiter: SlotWaiter) -> None:
        line.rows -= waiter.rows
        self.rows -= waiter.rows
        if not line.waiters:
            del self._lines[line.key]
            self._new.pop(line.key, None)
            if not self._lines:
                self._order.clear()


class SlotWaitQueue:
    """Requests of this front process that wait for a slot of one queue: lines of ordinary and a FIFO of
    patient waiters. `on_empty` is called when the last waiter has left."""

    def __init__(self, ring: BatchRing, max_queued: int, on_empty: Callable[[], object]) -> None:
        self.anyone = False
        self.piece_rows = min(max(max_queued // 4, 1), ring.max_rows) if max_queued else ring.max_rows
        self.light_rows = 0
        """Rows of keys that had none waiting, since somebody looked."""
        self._ring, self._half, self._on_empty = ring, max_queued // 2, on_empty
        self._lines = KeyLines()
        self._patient: deque[SlotWaiter] = deque()
        self._quantum = max(1, ring.max_rows // 4)
        self._kept = 0  # of the rows ahead, for new lines
        self._new_ns = NEW_LINE_NS
        self._looking: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def rows(self) -> int:
        """Rows of those who stand in lines."""
        return self._lines.rows

    @property
    def turns(self) -> ModelTurns | None:
        """The positions of keys; None where nobody has one."""
        return self._lines.turns

    @turns.setter
    def turns(self, turns: ModelTurns) -> None:
        self._lines.turns = turns

    @property
    def keys(self) -> int:
        """The number of keys whose requests stand in lines."""
        return len(self._lines)

    def share(self, turns: ModelTurns, keep: int, new_ns: int) -> None:
        """Have no more rows in slots than run and fill another batch for every worker. `keep` so many of that
        batch for lines that are new, for `new_ns` or NEW_LINE_NS, but not more than half of it."""
        self._lines.turns, self._new_ns = turns, max(new_ns, NEW_LINE_NS)
        self._kept = min(keep, -(-self._ring.max_rows // 2))
        self._ring.ahead = self._ring.max_rows - self._kept
        self._ring.set_lined(bool(self._lines))

    def stop_sharing(self) -> None:
        """Have as many rows in slots as fit: one key sends requests."""
        if self._ring.ahead >= 0:
            self._ring.ahead = -1
            self._ring.set_lined(False)

    def fits(self, rows: int) -> bool:
        """Whether `rows` more rows may wait beside those that already do."""
        return self._lines.rows + rows <= self._ring.rows_left()

    def make_room(self, rows: int, account: Account | None, make_error: Callable[[], ServeError]) -> bool:
        """Have so many rows fit, by turning away the newest requests of keys that have more waiting for their
        weight than this one would; return whether they do."""
        key, weight = ("", 1.0) if account is None else (account.name, account.weight)
        while not self.fits(rows):
            waiter = self._lines.last_of_most(key, rows, weight)
            if waiter is None:
                return False
            self._lines.leave(waiter)
            waiter.given(make_error())
        return True

    def spares(self, rows: int) -> bool:
        """Whether half of the queue stays free after `rows` more rows."""
        return self._ring.rows_left() - rows >= self._half

    def stand(
        self, rows: int, given: OnSlot, account: Account | None = None, *, patient: bool = False
    ) -> SlotWaiter:
        """Wait for a lease of `rows` rows; `given` receives it, or a ServeError."""
        standing = SlotWaiter(rows, given, account)
        self.anyone = True
        if patient:
            self._patient.append(standing)
        else:
            self._join(standing)
        self.look_soon()
        return standing

    def leave(self, standing: SlotWaiter) -> None:
        """Remove a waiter. No effect once it was given its lease."""
        if not self._lines.leave(standing):
            if standing not in self._patient:
                return
            self._patient.remove(standing)
        self._settle()

    def look_soon(self) -> None:
        """Look for a free slot at the end of this turn of the loop."""
        if self._looking is None and self.anyone:
            self._looking = asyncio.get_running_loop().call_soon(self._look)

    def turn_away(self, make_error: Callable[[], ServeError]) -> int:
        """Fail all waiters with an error. Return how many there were."""
        left = [*self._lines, *self._patient]
        self._lines.clear()
        self._patient.clear()
        if left:
            self._settle()
            run_all(left, lambda standing: standing.given(make_error()))
        return len(left)

    def close(self, make_error: Callable[[], ServeError]) -> None:
        """Fail all waiters, and drop the reference to the queue: a reference cycle would keep its memory."""
        self._on_empty = _nobody
        for handle in (self._looking, self._timer):
            if handle is not None:
                handle.cancel()
        self._looking = self._timer = None
        self.turn_away(make_error)

    def _join(self, standing: SlotWaiter) -> None:
        if self._lines.join(standing):
            self.light_rows += standing.rows
            self._tell()
        self._ring.line = True

    def _look(self) -> None:
        self._looking = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late_ns = time.monotonic_ns() - PATIENCE_NS
        while self._patient and self._patient[0].since_ns <= late_ns:
            self._join(self._patient.popleft())
        self._tell()
        while self._lines and self._give():
            pass
        while self._patient and not self._lines and self.spares(self._patient[0].rows):
            if not self._give_patient():
                break
        self._settle()
        if self.anyone and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SLOT_LOOK_S, self._look)

    def _give(self) -> bool:
        """Give the next request a lease, unless there is none, or another front has one that goes before.
        Where only the rows are left that are kept for new lines, the first of those is next, before all
        others."""
        line, position = self._lines.first()
        turns, early = self._lines.turns, None
        if not self._ring.near(line.waiters[0].rows):
            early = self._lines.first_new(time.monotonic_ns() - self._new_ns) if self._kept else None
            if early is None or not self._ring.near(early.waiters[0].rows, self._kept):
                return False
        elif turns is not None:
            front = turns.find_needier(position - self._quantum)
            if front >= 0:
                self._ring.nudge(front)
                return False
        lease = self._ring.reserve((early or line).waiters[0].rows, True)
        if lease < 0:
            return False
        self._lines.serve(early).given(lease)
        return True

    def _give_patient(self) -> bool:
        rows = self._patient[0].rows
        lease = self._ring.reserve(rows, True) if self._ring.near(rows) else -1
        if lease < 0:
            return False
        self._patient.popleft().given(lease)
        return True

    def _tell(self) -> None:
        """Tell other fronts who waits here."""
        turns = self._lines.turns
        if turns is not None:
            turns.tell(self._lines.first()[1] if self._lines else NOBODY)

    def _settle(self) -> None:
        waits = bool(self._lines)
        if waits != self._ring.line or waits:
            self._tell()
        if self._ring.ahead >= 0:
            self._ring.set_lined(waits)
        self._ring.line = waits
        self.anyone = bool(self._lines or self._patient)
        if not self.anyone:
            self._on_empty()


def _nobody() -> None:
    """Do nothing: the `on_empty` of a closed SlotWaitQueue."""
