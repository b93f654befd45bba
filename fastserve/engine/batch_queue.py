"""A queue: one available version as this front process sees it. Places out, batches in, answers back.

    pending = queue.submit(place, rows, done, deadline_ns)     after the place was reserved and written
    done(pending, None)            the outputs are readable; the callee calls queue.release(pending)
    done(pending, ServeError)      it failed; nothing is left to release

Everything here runs on the event loop's thread. `done` is called exactly once for every pending that
was not cancelled, never from inside `submit`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastserve._ext.batch_ring import CANCELED, FULL, OVER, PART, REJECTED
from fastserve._ext.fast_path import DEADLINE_TICK_NS, Pending, Pendings
from fastserve._ext.slab_tensors import SlabDesk
from fastserve.apart import Apart
from fastserve.each import each
from fastserve.engine.meters import QueueMeters
from fastserve.engine.room import Room
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError
from fastserve.request import Carry
from fastserve.tensor import TensorSpec
from fastserve.workers.arena import Arena

log = logging.getLogger(__name__)

Done = Callable[["Pending", "ServeError | None"], None]
Specs = Mapping[str, TensorSpec]
# A turn of the loop that took longer had other calls to serve, and more may be there for this batch.
BUSY_TURN_NS = 10_000
# Front and worker on one core: a worker that is woken while there is more to read takes the core from the
# front that would read it, and a batch of few rows costs nearly as much as one of many. How long it may sleep
# on while every turn brings more; decision 0006 has what that gains.
ONE_CORE_PATIENCE_NS = 500_000
QUEUED_TOO_LONG = "the request's time was up while it waited in the queue"
RAN_TOO_LONG = "the model took longer than the request's time"
DAMAGED = "a worker of this model has damaged the batch of this request"
FAILED_ALONE = "the model failed on this request"
GONE = "the model version was unloaded"


class BatchQueue(Pendings):
    """Reserve, submit, cancel, release; and the doorbell that brings answers."""

    def __init__(self, arena: Arena, front: int, inputs: Specs, outputs: Specs, meters: QueueMeters) -> None:
        super().__init__(arena.ring(front=front), arena.geometry.slots)
        self.arena = arena
        self.desk = None if arena.geometry.dense else SlabDesk(arena.memory, front=front)
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.dense = arena.geometry.dense
        self.on_device = False  # whether its workers read clients' memory on their device by themselves
        self.requests, self.decoupled = arena.geometry.requests, arena.geometry.decoupled
        self.max_rows, self.workers = arena.geometry.max_rows, arena.geometry.workers
        self.meters = meters
        self.room = Room(self.ring, arena.geometry.max_queued, self._wake_idle)
        self._apart = Apart()
        self._bell = arena.front_bells[front]
        self._one_core = arena.geometry.max_delay_ns == 0 and len(os.sched_getaffinity(0)) == 1
        self._turn_ns = 0  # when this turn began
        self._seen = 0  # of `submitted`, then
        self._more_by_ns = 0  # how long the kick may wait while turns bring more
        self._alarm: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Listen for answers on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._forsake(self.ring.drain())
        self._loop.add_reader(self._bell, self._on_bell)

    def _forsake(self, found: list[Any]) -> None:
        """What was sent to a front that died in this one's place: reclaimed with it, as parts are."""

    async def drain(self) -> None:
        """Return when no pending waits, nobody waits for a place, and no answer is being read."""
        if self.busy:
            assert self._loop is not None
            idle = self._loop.create_future()
            self.idle.append(idle)
            await idle

    def close(self) -> None:
        """Stop listening. Whoever still waits is told that the version is gone."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._bell)
        if self.kicking is not None:
            self.kicking.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        self.room.close()
        gone = ServeError(Kind.UNAVAILABLE, GONE)
        for waiting_here in self.by_slot:
            for pending in waiting_here:
                done, pending.done = pending.done, None
                if done is not None:
                    self.tell(done, pending, gone)
            waiting_here.clear()
        if self.idle:
            self._wake_idle()

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a place or an answer, or reads one."""
        return bool(self.waiting or self.unreleased or self.room.anyone)

    # --- places ----------------------------------------------------------------------------------

    async def reserve(self, rows: int, deadline_ns: int = 0, *, patient: bool = False) -> int:
        """A place for rows, as soon as a slot is free. Raises ServeError UNAVAILABLE, with the time to wait,
        when more rows wait than may, and DeadlineError. Who is patient waits for those too, and leaves half
        of the queue free while it can."""
        waits = patient and (self.room.anyone or not self.room.spares(rows))
        place = FULL if waits else self.ring.reserve(rows)
        if place >= 0:
            return place
        if not patient and (place == OVER or not self.room.fits(rows)):
            self.rejected("queue_rows")
            raise self.too_many()
        return await self._stand(rows, deadline_ns, patient=patient)

    def too_many(self) -> ServeError:
        """What a request gets when more rows wait than may."""
        return ServeError(
            Kind.UNAVAILABLE,
            "the queue of this model is full (max_queue_rows, max_queue_bytes)",
            retry_after_s=self.meters.seconds_for(self.ring.queued()),
        )

    async def _stand(self, rows: int, deadline_ns: int, *, patient: bool) -> int:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[int | None] = loop.create_future()
        standing = self.room.stand(rows, came.set_result, patient=patient)
        left_s = max(deadline_ns - time.monotonic_ns(), 0) / 1e9 if deadline_ns else None
        try:
            await asyncio.wait([came], timeout=left_s)
        except asyncio.CancelledError:
            self.room.leave(standing)
            if came.done() and (place := came.result()) is not None:
                self.abandon(place, rows)
            raise
        if not came.done():
            self.room.leave(standing)
            self.rejected("deadline")
            raise DeadlineError(QUEUED_TOO_LONG, queued=True)
        place = came.result()
        if place is None:
            raise ServeError(Kind.UNAVAILABLE, GONE)
        return place

    def rejected(self, cause: str) -> None:
        """A request was turned away before it ran."""
        self.meters.rejected(cause)
        self.ring.count(REJECTED)

    async def fill(
        self, place: int, rows: int, nbytes: int, write: Callable[[], Sequence[tuple[Carry, memoryview]]]
    ) -> None:
        """Have so many bytes written into a reserved place, and then what `write` leaves to others. Many are
        apart from the loop: pages that nobody has touched cost as much again as the copy. Whatever fails
        gives the place back."""
        self.unreleased += 1  # who waits for the queue's end waits for this, too
        try:
            for carry, room in await self._apart(nbytes, write):
                await carry(room)
        except BaseException:
            self.unreleased -= 1
            self.abandon(place, rows)
            raise
        self.unreleased -= 1

    def abandon(self, place: int, rows: int) -> None:
        """The inputs could not be written."""
        self.ring.abandon(place, rows)
        if self.kicking is None:
            self.kick_soon()
        if self.idle or self.room.anyone:
            self.settle()

    def cancel(self, pending: Pending) -> None:
        """Nobody waits any more; `done` will not be called. No effect on a pending already answered."""
        if pending.done is None:
            return
        self.meters.cancelled("queued" if self._is_queued(pending) else "running")
        self._forget(pending, CANCELED)
        self.waiting -= 1
        if self.idle or self.room.anyone:
            self.settle()

    def _is_queued(self, pending: Pending) -> bool:
        return self.ring.describe(pending.place >> 16)[0] in ("open", "sealed", "ready")

    def _forget(self, pending: Pending, end: int) -> None:
        pending.done = None
        if self.ring.drop(pending.place, pending.rows, end):
            self.by_slot[pending.place >> 16].remove(pending)
        # else a worker has answered and counted it: _finish releases it when the message comes

    # --- answers ---------------------------------------------------------------------------------

    def kick_soon(self, patience_ns: int = 0) -> None:
        assert self._loop is not None
        if patience_ns or self._one_core:
            self._turn_ns, self._seen = time.monotonic_ns(), self.submitted
            self.kick_by_ns = self._turn_ns + patience_ns if patience_ns else 0
            self._more_by_ns = self._turn_ns + ONE_CORE_PATIENCE_NS if self._one_core else 0
        self.kicking = self._loop.call_soon(self._kick)

    def _kick(self) -> None:
        if (self.kick_by_ns or self._more_by_ns) and self._may_wait():
            assert self._loop is not None
            self.kicking = self._loop.call_soon(self._kick)
            return
        self.kick_by_ns, self.kicking = 0, None
        self.ring.kick()

    def _may_wait(self) -> bool:
        """Whether the next turn may bring rows for this batch too: by how long this one took, or what it
        brought."""
        now, more = time.monotonic_ns(), self.submitted > self._seen
        busy = now - self._turn_ns > BUSY_TURN_NS
        self._turn_ns, self._seen = now, self.submitted
        return (busy and now < self.kick_by_ns) or (more and now < self._more_by_ns)

    def _on_bell(self) -> None:
        each(self.ring.drain(), self.hear_one)

    def hear_one(self, entry: tuple[int, Any]) -> None:
        """What the ring has told: a batch is done, a part of an answer is here, or there is more to find."""
        slot, seq = entry
        if slot < 0:
            self._part(*seq) if slot == PART else self._rescan()
        elif self.ring.is_done(slot, seq):
            self.finish(slot)

    def _part(self, slot: int, seq: int, row: int, offset: int, nbytes: int, final: bool) -> None:
        """One part of an answer, whose slab is this front's now: for a context that takes parts."""
        if self.seqs[slot] == seq:
            for pending in self.by_slot[slot]:
                take = getattr(pending.context, "part", None)
                if pending.place & 0xFFFF == row and pending.done is not None and take is not None:
                    take(offset, nbytes, final)
                    return
        if offset:  # its caller has left
            self.ring.return_lease(offset)

    def _rescan(self) -> None:
        """A worker died, perhaps between answering and saying so, or a batch ended that everybody had left:
        look at every place waited for."""
        self.room.look_soon()
        done = [s for s, waiting in enumerate(self.by_slot) if waiting and self.ring.is_done(s, self.seqs[s])]
        if done:
            self._on_bell()  # parts that a worker sent before it was done may not have been heard yet
        each(done, self._finish_if_done)

    def _finish_if_done(self, slot: int) -> None:
        if self.by_slot[slot] and self.ring.is_done(slot, self.seqs[slot]):
            self.finish(slot)

    def failure(self, slot: int) -> ServeError | None:
        """What a whole batch failed of, once it is done and counted."""
        self.meters.batch_done(self.ring, slot)
        failure = self.ring.failure(slot)
        return None if failure is None else ModelError(_kind(failure[0]), failure[1])

    def own_fault(self, place: int, end: int) -> ServeError | None:
        """Of a place that failed by itself, where answers are columns: words in a slab. Elsewhere whoever
        reads the answer finds it. `end` 0: something has written where only the ring may."""
        ring = self.ring
        if not end:
            return ServeError(Kind.INTERNAL, DAMAGED)
        if not ring.outputs:
            return None
        offset, nbytes = ring.answer_slab(place)
        if not offset:
            return ModelError(_kind(ring.place_status(place)), FAILED_ALONE)
        try:
            text = bytes(ring.slab(offset, nbytes)).decode("utf-8", "replace")
        except ValueError:  # the worker has said it is longer than it is
            return ServeError(Kind.INTERNAL, DAMAGED)
        return ModelError(_kind(ring.place_status(place)), text)

    def undelivered(self) -> None:
        """A callee has raised."""
        log.exception("an answer could not be delivered")

    def settle(self) -> None:
        """Somebody has gone: there may be room, or nobody left."""
        self.room.look_soon()
        if self.idle:
            self._wake_idle()

    def _wake_idle(self) -> None:
        if not self.busy:
            for idle in self.idle:
                if not idle.done():
                    idle.set_result(None)
            self.idle.clear()

    # --- deadlines -------------------------------------------------------------------------------

    def watch(self) -> None:
        """One timer for all: when the first of them may be late, and not twice within DEADLINE_TICK_NS."""
        assert self._loop is not None
        if self._alarm is not None:
            self._alarm.cancel()
        now = time.monotonic_ns()
        self.alarm_ns = max(self.due_ns, now + DEADLINE_TICK_NS)
        self._alarm = self._loop.call_later((self.alarm_ns - now) / 1e9, self._expire)

    def _expire(self) -> None:
        now = time.monotonic_ns()
        if self.waiting and now < self.due_ns:  # nobody can be late: do not look at each
            self.watch()
            return
        bound = [p for here in self.by_slot for p in here if p.done is not None and p.deadline_ns]
        late = [pending for pending in bound if pending.deadline_ns <= now]
        self.alarm_ns, self._alarm = 0, None
        self.due_ns = min((p.deadline_ns for p in bound if p.deadline_ns > now), default=0)
        if self.due_ns:  # first: whatever fails below must not end the deadlines of the others
            self.watch()
        each(late, self._expire_one)

    def _expire_one(self, pending: Pending) -> None:
        if pending.done is None:
            return
        queued, done = self._is_queued(pending), pending.done
        self._forget(pending, REJECTED if queued else CANCELED)
        self.meters.rejected("deadline")
        text = QUEUED_TOO_LONG if queued else RAN_TOO_LONG
        self.tell(done, pending, DeadlineError(text, queued=queued))


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        return Kind.INTERNAL
