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
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastserve._ext.batch_ring import CANCELED, FULL, OVER, PART, REJECTED
from fastserve._ext.slab_tensors import SlabDesk
from fastserve.engine.meters import QueueMeters
from fastserve.engine.room import Room
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError
from fastserve.tensor import TensorSpec
from fastserve.workers.arena import Arena

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

log = logging.getLogger(__name__)

Done = Callable[["Pending", "ServeError | None"], None]
DEADLINE_TICK_S = 0.025
# A turn of the loop that took longer had other calls to serve, and more may be there for this batch.
BUSY_TURN_NS = 10_000
QUEUED_TOO_LONG = "the request's time was up while it waited in the queue"
RAN_TOO_LONG = "the model took longer than the request's time"
DAMAGED = "a worker of this model has damaged the batch of this request"
FAILED_ALONE = "the model failed on this request"
GONE = "the model version was unloaded"


class Pending:
    """One place somebody waits for; `context` is the submitter's own. Calling it cancels it.

    `done` is None once it was called, or cancelled.
    """

    __slots__ = ("context", "deadline_ns", "done", "place", "queue", "rows")

    def __init__(
        self, queue: BatchQueue, place: int, rows: int, done: Done, deadline_ns: int, context: Any
    ) -> None:
        self.queue = queue
        self.place = place
        self.rows = rows
        self.done: Done | None = done
        self.deadline_ns = deadline_ns
        self.context = context

    def __call__(self) -> None:
        self.queue.cancel(self)


class BatchQueue:
    """Reserve, submit, cancel, release; and the doorbell that brings answers."""

    def __init__(
        self,
        arena: Arena,
        front: int,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        meters: QueueMeters,
    ) -> None:
        self.arena = arena
        self.ring: BatchRing = arena.ring(front=front)
        self.desk = None if arena.geometry.dense else SlabDesk(arena.memory, front=front)
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.dense = arena.geometry.dense
        self.requests, self.decoupled = arena.geometry.requests, arena.geometry.decoupled
        self.max_rows, self.workers = arena.geometry.max_rows, arena.geometry.workers
        self.meters = meters
        self.waiting = 0  # requests submitted and not yet answered or cancelled
        self.unreleased = 0  # answers handed out whose memory is still read
        self.room = Room(self.ring, arena.geometry.max_queued, self._wake_idle)
        self._bell = arena.front_bells[front]
        self._pending: list[list[Pending]] = [[] for _ in range(arena.geometry.slots)]
        self._seqs = [0] * arena.geometry.slots  # which opening of the slot the pending ones are in
        self._kicking: asyncio.Handle | None = None
        self._turn_ns = self._kick_by_ns = 0  # when this turn began, and how long the kick may wait
        self._watching = False
        self._idle: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Listen for answers on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.ring.drain()  # parts sent to a front that died in this one's place: reclaimed with it
        self._loop.add_reader(self._bell, self._on_bell)

    async def drain(self) -> None:
        """Return when no pending waits, nobody waits for a place, and no answer is being read."""
        if self.busy:
            assert self._loop is not None
            idle = self._loop.create_future()
            self._idle.append(idle)
            await idle

    def close(self) -> None:
        """Stop listening. Whoever still waits is told that the version is gone."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._bell)
        if self._kicking is not None:
            self._kicking.cancel()
        self.room.close()
        gone = ServeError(Kind.UNAVAILABLE, GONE)
        for waiting_here in self._pending:
            for pending in waiting_here:
                done, pending.done = pending.done, None
                if done is not None:
                    self._tell(done, pending, gone)
            waiting_here.clear()
        if self._idle:
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

    def submit(
        self,
        place: int,
        rows: int,
        done: Done,
        deadline_ns: int = 0,
        context: Any = None,
        patience_ns: int = 0,
    ) -> Pending:
        """The place's inputs are written: let it run. Workers are woken at the end of this loop turn,
        so that what arrives together runs together; with patience, after further turns while those are
        busy, so long at most."""
        pending = Pending(self, place, rows, done, deadline_ns, context)
        waiting_here = self._pending[place >> 16]
        if not waiting_here:
            self._seqs[place >> 16] = self.ring.seq(place >> 16)
        waiting_here.append(pending)
        self.ring.commit(place, rows)
        self.waiting += 1
        if self._kicking is None:
            self._kick_soon(patience_ns)
        elif not patience_ns:
            self._kick_by_ns = 0
        if deadline_ns and not self._watching:
            self._watch()
        return pending

    def abandon(self, place: int, rows: int) -> None:
        """The inputs could not be written."""
        self.ring.abandon(place, rows)
        if self._kicking is None:
            self._kick_soon()

    def cancel(self, pending: Pending) -> None:
        """Nobody waits any more; `done` will not be called. No effect on a pending already answered."""
        if pending.done is None:
            return
        self.meters.cancelled("queued" if self._is_queued(pending) else "running")
        self._forget(pending, CANCELED)
        self.waiting -= 1
        if self._idle or self.room.anyone:
            self._settle()

    def _is_queued(self, pending: Pending) -> bool:
        return self.ring.describe(pending.place >> 16)[0] in ("open", "sealed", "ready")

    def _forget(self, pending: Pending, end: int) -> None:
        pending.done = None
        if self.ring.drop(pending.place):
            self.ring.count(end, 0, pending.place)
            self._pending[pending.place >> 16].remove(pending)
        # else a worker has answered and counted it: _finish releases it when the message comes

    def release(self, pending: Pending) -> None:
        """The outputs of an answered pending have been read."""
        self.ring.release(pending.place, pending.rows)
        self.unreleased -= 1
        if self._idle or self.room.anyone:
            self._settle()

    # --- answers ---------------------------------------------------------------------------------

    def _kick_soon(self, patience_ns: int = 0) -> None:
        assert self._loop is not None
        if patience_ns:
            self._turn_ns = time.monotonic_ns()
            self._kick_by_ns = self._turn_ns + patience_ns
        self._kicking = self._loop.call_soon(self._kick)

    def _kick(self) -> None:
        if self._kick_by_ns:
            now, turn_ns = time.monotonic_ns(), self._turn_ns
            if now - turn_ns > BUSY_TURN_NS and now < self._kick_by_ns:
                self._turn_ns = now
                assert self._loop is not None
                self._kicking = self._loop.call_soon(self._kick)
                return
            self._kick_by_ns = 0
        self._kicking = None
        self.ring.kick()

    def _on_bell(self) -> None:
        for slot, seq in self.ring.drain():
            if slot < 0:
                self._part(*seq) if slot == PART else self._rescan()
            elif self.ring.is_done(slot, seq):
                self._finish(slot)

    def _part(self, slot: int, seq: int, row: int, offset: int, nbytes: int, final: bool) -> None:
        """One part of an answer, whose slab is this front's now: for a context that takes parts."""
        if self._seqs[slot] == seq:
            for pending in self._pending[slot]:
                take = getattr(pending.context, "part", None)
                if pending.place & 0xFFFF == row and pending.done is not None and take is not None:
                    take(offset, nbytes, final)
                    return
        if offset:  # its caller has left
            self.ring.return_lease(offset)

    def _rescan(self) -> None:
        """A worker died, perhaps between answering and telling so, or a batch ended that everybody had left:
        look at every place waited for."""
        self.room.look_soon()
        for slot, waiting_here in enumerate(self._pending):
            if waiting_here and self.ring.is_done(slot, self._seqs[slot]):
                self._finish(slot)

    def _finish(self, slot: int) -> None:
        waiting_here, self._pending[slot] = self._pending[slot], []
        self.meters.batch_done(self.ring, slot)
        failure = self.ring.failure(slot)
        error = None if failure is None else ModelError(_kind(failure[0]), failure[1])
        self.unreleased += len(waiting_here)
        for pending in waiting_here:
            done, pending.done = pending.done, None
            fault: ServeError | None = error
            if fault is None and (end := self.ring.answered(pending.place, pending.rows)) != 1:
                fault = self._own_fault(pending.place) if end else ServeError(Kind.INTERNAL, DAMAGED)
            if fault is not None or done is None:
                self.release(pending)
            if done is not None:
                self._tell(done, pending, fault)
        if self._idle or self.room.anyone:
            self._settle()

    def _own_fault(self, place: int) -> ServeError | None:
        """Of a place that failed by itself, where answers are columns: words in a slab. Elsewhere whoever
        reads the answer finds it."""
        ring = self.ring
        if not ring.outputs:
            return None
        offset, nbytes = ring.answer_slab(place)
        text = bytes(ring.slab(offset, nbytes)).decode("utf-8", "replace") if offset else FAILED_ALONE
        return ModelError(_kind(ring.place_status(place)), text)

    def _tell(self, done: Done, pending: Pending, error: ServeError | None) -> None:
        self.waiting -= 1
        try:
            done(pending, error)
        except Exception:  # one caller's fault must not cost the others of the batch their answers
            log.exception("an answer could not be delivered")

    def _settle(self) -> None:
        """Somebody has gone: there may be room, or nobody left."""
        self.room.look_soon()
        if self._idle:
            self._wake_idle()

    def _wake_idle(self) -> None:
        if not self.busy:
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)
            self._idle.clear()

    # --- deadlines -------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._loop is not None
        self._watching = True
        self._loop.call_later(DEADLINE_TICK_S, self._expire)

    def _expire(self) -> None:
        """Runs every DEADLINE_TICK_S while somebody with a deadline waits: far cheaper than a timer each."""
        now, left = time.monotonic_ns(), False
        for waiting_here in self._pending:
            for pending in list(waiting_here):
                if pending.done is None or not pending.deadline_ns:
                    continue
                if pending.deadline_ns <= now:
                    self._expire_one(pending)
                else:
                    left = True
        self._watching = False
        if left:
            self._watch()

    def _expire_one(self, pending: Pending) -> None:
        queued, done = self._is_queued(pending), pending.done
        self._forget(pending, REJECTED if queued else CANCELED)
        self.meters.rejected("deadline")
        text = QUEUED_TOO_LONG if queued else RAN_TOO_LONG
        if done is not None:
            self._tell(done, pending, DeadlineError(text, queued=queued))


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        return Kind.INTERNAL
