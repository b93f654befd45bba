"""The memory budget of one front process: one account of all bytes that clients make it hold.

    budget = MemoryBudget(512 << 20)               one for all listeners of a process
    claim = Claim(budget)                          one for each holder: a connection, a call, a stream
    claim.set(len(body))                           bytes that are there are charged, whatever the limit
    claim.wait(on_room, on_refused)                a holder that has to stop reading waits for room
    await claim.reserve(nbytes)                    memory that work is about to take: before it exists
    claim.release()

When three quarters of the limit are used, holders wait, first in first out. Requests that are complete go
before those that are still read, since their answers free memory. One holder of either kind at a time goes on
regardless, so that every request that has begun ends; the last quarter of the limit is for these two. A
single request that needs more than the limit runs while no other works. A holder that has waited
`patience_s` is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from fastserve.errors import Kind, ServeError
from fastserve.util.rate_limited_log import run_all

ALLOWANCE_BYTES = 16 << 10
"""Bytes that a connection may hold without a claim; charged once, when it is admitted."""
WORKING_SHARE = 2
"""Reading a request takes so many times its bytes again, for tensors or objects of JSON."""
PATIENCE_S = 5.0
RETRY_S = 1.0
RESERVE_SHARE = 4  # the part of the limit that is left to who goes on all the same
TURNOVER_SHARE = 16  # the part of the limit after whose return the allocator is looked at
REASON = "memory_bytes"
"""The cause that refusals are counted under: the setting's name."""


def no_room(limit: int) -> ServeError:
    """Return the error of a request that has waited in vain."""
    text = f"The memory for requests is used up: {limit} bytes (setting limits.memory_bytes)"
    return ServeError(Kind.UNAVAILABLE, text, retry_after_s=RETRY_S)


def _nothing() -> None:
    """Do nothing: no allocator is watched."""


class MemoryBudget:
    """The account. `limit` and `used` are bytes; `refused` counts holders that have waited in vain."""

    def __init__(
        self, limit: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.room = limit - limit // RESERVE_SHARE
        self.workers = 0  # claims that have reserved memory
        self.patience_s = patience_s
        self.used = 0
        self.peak = 0  # since it was last set back
        self.refused = 0
        self.on_turnover: Callable[[], object] = _nothing  # called when another TURNOVER_SHARE was given back
        self.on_strain: Callable[[], object] = _nothing  # called when there is no room, once or more
        self._given_back = 0  # bytes, since then
        self._clock = clock
        self._working = _Queue(self)
        self._reading = _Queue(self)

    @property
    def waiting(self) -> int:
        """The number of holders that wait for room."""
        return len(self._working) + len(self._reading)

    @property
    def strained(self) -> bool:
        """Whether there is no room: slow clients have less time then."""
        return self.used > self.room or self.waiting > 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing more may be held, not even for holders that wait."""
        return self.used > self.limit

    def charge(self, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to the account."""
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used
            if self.used > self.room:
                self.on_strain()
        elif nbytes < 0:
            self._given_back -= nbytes
            if self._given_back * TURNOVER_SHARE >= self.limit:
                self._given_back = 0
                self.on_turnover()
            self._grant()

    def take_peak(self) -> int:
        """Return the most bytes used since the last call."""
        peak, self.peak = self.peak, self.used
        return peak

    def expire(self) -> None:
        """Refuse holders that have waited too long. Every listener calls this about once a second."""
        latest = self._clock() - self.patience_s
        for queue in (self._working, self._reading):
            queue.expire(latest)
        self._grant()

    def _grant(self) -> None:
        if self.used <= self.room:
            self._working.settle()
            self._reading.settle()
        if self._working.grant():
            self._reading.grant()

    def refuse(self) -> ServeError:
        """Count a refusal."""
        self.refused += 1
        return no_room(self.limit)

    def now(self) -> float:
        return self._clock()


class Claim:
    """The bytes that one holder has charged. The holder calls `release` however it ends."""

    __slots__ = ("_waiter", "_works", "budget", "nbytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.nbytes = 0
        self._waiter: _Waiter | None = None
        self._works = False

    def set(self, nbytes: int) -> None:
        """Charge `nbytes` in place of what was charged before."""
        change = nbytes - self.nbytes
        if change:
            self.nbytes = nbytes
            self.budget.charge(change)

    def add(self, change: int) -> None:
        """Charge `change` bytes more, or fewer."""
        self.set(max(0, self.nbytes + change))

    def release(self) -> None:
        """Give everything back, and wait for nothing any more."""
        if self._waiter is not None:
            self._waiter.leave()
            self._waiter = None
        self.budget._reading.settle(self)
        self.budget._working.settle(self)
        if self._works:
            self._works = False
            self.budget.workers -= 1
        self.set(0)

    # ---- a holder that reads: what it has read is charged already

    def may_read(self) -> bool:
        """Whether the holder may read on at once; else it should stop, and `wait`."""
        budget = self.budget  # who was just granted may, though others wait
        return self._waiter is None and (budget.used <= budget.room or budget._reading.admits(self, 0))

    def wait(self, on_room: Callable[[], object], on_refused: Callable[[ServeError], object]) -> None:
        """Call one of the two once, unless the claim is released first."""
        if self._waiter is None:
            self._waiter = self.budget._reading.join(self, 0, on_room, on_refused)

    # ---- a holder that works

    async def reserve(self, nbytes: int) -> None:
        """Charge memory that is about to be taken, as soon as there is room. Raises ServeError UNAVAILABLE
        with a time to try again, when `patience_s` has passed."""
        queue = self.budget._working
        if queue.admits(self, nbytes, works=True):
            self._work(nbytes)
            return
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter = queue.join(self, nbytes, partial(_settle, granted, True), partial(_settle, granted, False))
        self._waiter = waiter
        try:
            if not await granted:
                raise no_room(self.budget.limit)
        except BaseException:
            waiter.leave()
            if waiter.granted:  # cancelled in the turn it was granted
                self.add(-nbytes)
            raise
        finally:
            self._waiter = None

    def _work(self, nbytes: int) -> None:
        if not self._works:
            self._works = True
            self.budget.workers += 1
        self.add(nbytes)


def _settle(granted: asyncio.Future[bool], answer: bool, fault: ServeError | None = None) -> None:
    if not granted.done():
        granted.set_result(answer)


class _Waiter:
    """One holder that waits in a queue."""

    __slots__ = ("_queue", "claim", "granted", "need", "on_refused", "on_room", "since_s")

    def __init__(
        self,
        queue: _Queue,
        claim: Claim,
        need: int,
        since_s: float,
        on_room: Callable[[], object],
        on_refused: Callable[[ServeError], object],
    ) -> None:
        self._queue, self.claim, self.need, self.since_s = queue, claim, need, since_s
        self.on_room, self.on_refused = on_room, on_refused
        self.granted = False

    def go_on(self) -> None:
        """Call `on_room`: there is room."""
        self.on_room()

    def give_up(self) -> None:
        """Call `on_refused`: it has waited too long."""
        self.on_refused(self.claim.budget.refuse())

    def leave(self) -> None:
        """Leave the queue."""
        self._queue.drop(self)


class _Queue:
    """The waiting holders of one kind, and the one of them that may go over the limit."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._waiters: dict[_Waiter, None] = {}
        self._over: Claim | None = None  # who has gone over the limit, until it fits or is released

    def __len__(self) -> int:
        return len(self._waiters)

    def admits(self, claim: Claim, need: int, *, works: bool = False) -> bool:
        """Whether this holder may go on without waiting; from now on it may be the one that goes on all the
        same."""
        return self._over is claim or (not self._waiters and self._takes(claim, need, works=works))

    def _takes(self, claim: Claim, need: int, *, works: bool) -> bool:
        budget = self._budget
        if budget.used + need <= budget.room:
            return True
        if self._over is None and (
            not works or budget.used + need <= budget.limit or budget.workers <= claim._works
        ):
            self._over = claim
        return self._over is claim

    def join(
        self,
        claim: Claim,
        need: int,
        on_room: Callable[[], object],
        on_refused: Callable[[ServeError], object],
    ) -> _Waiter:
        waiter = _Waiter(self, claim, need, self._budget.now(), on_room, on_refused)
        self._waiters[waiter] = None
        return waiter

    def drop(self, waiter: _Waiter) -> None:
        self._waiters.pop(waiter, None)

    def settle(self, claim: Claim | None = None) -> None:
        """Note that `claim` has ended; without a claim, that all of them fit."""
        if claim is None or self._over is claim:
            self._over = None

    def grant(self) -> bool:
        """Let holders go on in their order while there is room. Return whether none waits any more."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            works = waiter.need > 0
            if not self._takes(waiter.claim, waiter.need, works=works):
                return False
            self.drop(waiter)
            waiter.granted = True
            waiter.claim._waiter = None
            if works:
                waiter.claim._work(waiter.need)
            run_all((waiter,), _Waiter.go_on)
        return True

    def expire(self, latest: float) -> None:
        """Refuse holders that have waited since `latest` or longer."""
        for waiter in list(self._waiters):
            if waiter.since_s > latest:
                return
            if waiter in self._waiters:  # else what another one's refusal gave back was its turn
                self.drop(waiter)
                waiter.claim._waiter = None
                run_all((waiter,), _Waiter.give_up)
