"""The batch queue: one available version as this front process sees it. Rows are reserved, filled and
submitted; answers come back by the queue's eventfd.

    lease = await queue.reserve(rows)
    ticket = queue.submit(lease, rows, done, deadline_ns)     after the inputs were written
    done(ticket, None)            the outputs are readable; the callee calls queue.release(ticket)
    done(ticket, ServeError)      the request failed; nothing is left to release

A lease is a slice of a batch: its slot in the arena and its first row there, in one number. Everything runs
on the event loop's thread. `done` is called exactly once for every ticket that was not cancelled, never from
inside `submit`. Requests that find no free slot wait in the SlotWaitQueue, first in, first out,
those of several API keys in turns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

from fastserve._ext.batch_ring import CANCELED, FULL, OVER, PART, REJECTED
from fastserve._ext.fast_path import ACCOUNTS_MIXED_NS, DEADLINE_TICK_NS, Ticket, TicketTable
from fastserve._ext.shared_metrics import BatchMetrics
from fastserve._ext.slab_tensors import SlabCodec
from fastserve.codec.generation import Record
from fastserve.engine.slot_wait_queue import SlotWaitQueue
from fastserve.errors import (
    DeadlineError,
    Kind,
    ModelError,
    Reason,
    ServeError,
    internal,
    unpack_status,
    worker_lost,
)
from fastserve.metrics import names
from fastserve.metrics.registry import Registry
from fastserve.tensor import TensorSpec
from fastserve.util.offload import Offload
from fastserve.util.rate_limited_log import run_all
from fastserve.util.spans import BatchTimes, RunTrace
from fastserve.workers.arena import Arena

if TYPE_CHECKING:
    from fastserve._ext.fast_path import Account
    from fastserve.engine.share_board import ModelTurns, ShareBoard

# A rate measured over this long decides Retry-After.
RATE_WINDOW_NS = 1_000_000_000

LONGEST_RETRY_S = 30.0


class TextMetrics:
    """Metrics of one version's sequences in one front process: where each is, and how it ended."""

    def __init__(self, registry: Registry, model: str, version: int) -> None:
        who = (model, version)
        self._first = registry.histograms(names.TEXT_FIRST_TOKEN).of(*who)
        self._gap = registry.histograms(names.TEXT_TOKEN_GAP).of(*who)
        self._prompt = registry.counters(names.TEXT_PROMPT_TOKENS).of(*who)
        self._tokens = registry.counters(names.TEXT_TOKENS).of(*who)
        self._ends = [registry.counters(names.TEXT_SEQUENCES).of(*who, how) for how in names.FINISHES[1:]]
        self._waiting = registry.gauges(names.TEXT_WAITING).of(*who)
        self._running = registry.gauges(names.TEXT_RUNNING).of(*who)
        self._kv = registry.gauges(names.TEXT_KV_USED).of(*who)

    def came(self) -> None:
        """Count a sequence that waits for its first token."""
        self._waiting.add()

    def began(self, prompt: int, took_us: int) -> None:
        """Count the first token of a sequence, made `took_us` microseconds after its start."""
        self._waiting.add(-1)
        self._running.add()
        self._prompt.add(prompt)
        self._kv.add(prompt)
        self._first.observe_ns(took_us * 1000)

    def read(self, prompt: int) -> None:
        """Count the prompt of a sequence that generates no tokens, such as an embedding."""
        self._prompt.add(prompt)

    def went_on(self, records: Sequence[Record], begun: bool) -> int:
        """Count the tokens among `records` and return their number; `begun`: it had tokens before."""
        made = len(records) - (records[-1][0] < 0)
        for record in records[not begun : made]:
            self._gap.observe_ns(record[2] * 1000)
        self._tokens.add(made)
        self._kv.add(made)
        return made

    def flowed(self, gaps_us: list[int]) -> None:
        """Count one token for each gap, in microseconds, of sequences that had begun."""
        self._gap.observe_all_us(gaps_us)
        self._tokens.add(len(gaps_us))
        self._kv.add(len(gaps_us))

    def ended(self, finish: int, begun: bool, held: int) -> None:
        """Count the end of a sequence that held `held` tokens in the KV cache."""
        self._ends[finish - 1].add()
        (self._running if begun else self._waiting).add(-1)
        self._kv.add(-held)


class QueueMetrics(BatchMetrics):
    """Metrics of one version in one front process. Batches are recorded by compiled code."""

    def __init__(
        self, registry: Registry, model: str, version: int, max_delay_ns: int, max_rows: int
    ) -> None:
        who = self._who = (model, version)
        self.model = model
        self._registry = registry
        durations = (
            *(names.QUEUE_DURATION, names.BATCH_FORM_DURATION, names.COPY_IN_DURATION),
            *(names.COMPUTE_DURATION, names.COPY_OUT_DURATION, names.BATCH_SIZE),
        )
        queue, form, copy_in, compute, copy_out, rows = (registry.histograms(m).of(*who) for m in durations)
        batches = {c: registry.counters(names.BATCHES).of(*who, c) for c in names.SEAL_CAUSES}
        super().__init__(
            (queue, form, copy_in, compute, copy_out, rows),
            (
                registry.counters(names.ROWS).of(*who),
                registry.counters(names.PADDING_ROWS).of(*who),
                batches["full"],
                batches["due" if max_delay_ns else "idle"],
            ),
            max_rows,
            RATE_WINDOW_NS,
        )
        self._rejects = {c: registry.counters(names.REJECTS).of(*who, c) for c in names.REJECT_CAUSES}
        self._cancels = {s: registry.counters(names.CANCELS).of(*who, s) for s in names.CANCEL_STAGES}

    def of_text(self) -> TextMetrics:
        """Return the metrics of its sequences, for a version that generates text."""
        return TextMetrics(self._registry, *self._who)

    def rejected(self, cause: str) -> None:
        """A request was turned away before it ran."""
        self._rejects[cause].add()

    def cancelled(self, stage: str) -> None:
        """A client left while its request was queued or running."""
        self._cancels[stage].add()

    def seconds_for(self, rows: int) -> float:
        """How long `rows` queued rows will take at the measured rate: what Retry-After says."""
        return min(max(rows / self.rows_per_s, 1.0), LONGEST_RETRY_S) if self.rows_per_s else 1.0

    def drain_s(self, rows: int) -> float:
        """Return the seconds that so many queued rows take at the measured rate; 0 before there is one."""
        return min(rows / self.rows_per_s, LONGEST_RETRY_S) if self.rows_per_s else 0.0


log = logging.getLogger(__name__)

Specs = Mapping[str, TensorSpec]

# Front and worker on one core: a worker that is woken while there is more to read takes the core from the
# front that would read it, and a batch of few rows costs nearly as much as one of many. How long it may sleep
# on while every turn brings more; decision 0006 has what that gains.
ONE_CORE_PATIENCE_NS = 500_000

LOOK_NS = 100_000_000

# Of batches that take longer a part stays free for keys that seldom come (SlotWaitQueue.share).
LONG_BATCH_NS = 5_000_000
LEAST_LIGHT_RATE = 0.05
LIGHT_S = 10.0  # over which the rate is smoothed

QUEUED_TOO_LONG = "the request's time was up while it waited in the queue"

RAN_TOO_LONG = "the model took longer than the request's time"

DAMAGED = "a worker of this model has damaged the batch of this request"

FAILED_ALONE = "the model failed on this request"

GONE = "the model version was unloaded"


class BatchQueue(TicketTable):
    """Reserves and submits leases, reads answers on the queue's eventfd, cancels and releases."""

    metrics: QueueMetrics

    def __init__(
        self, arena: Arena, front: int, inputs: Specs, outputs: Specs, metrics: QueueMetrics
    ) -> None:
        super().__init__(arena.ring(front=front), arena.geometry.slots, metrics)
        self.arena, self.front = arena, front
        self.codec = None if arena.geometry.dense else SlabCodec(arena.memory, front=front)
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.dense = arena.geometry.dense
        self.on_device = False  # whether its workers read clients' memory on their device by themselves
        self.requests, self.decoupled = arena.geometry.requests, arena.geometry.decoupled
        self.max_rows, self.workers = arena.geometry.max_rows, arena.geometry.workers
        self.turned_away = 0  # requests that found no room, or waited too long for it
        self.room = SlotWaitQueue(self.ring, arena.geometry.max_queued, self._wake_idle)
        self.in_turns = False  # whether keys have turns under overload; not where a scheduler decides before
        self._light_rate = 0.0  # rows a second of keys that had none waiting, while others had
        self._light_s = 1.0  # for how long that was seen
        self._looked_ns = 0
        self.offload = Offload()
        self._doorbell = arena.front_doorbells[front]
        self._one_core = arena.geometry.max_delay_ns == 0 and len(os.sched_getaffinity(0)) == 1
        self._seen = 0  # of `submitted`, when this turn began
        self._more_by_ns = 0  # how long waking workers may be delayed while turns bring more; 0: not at all
        self._alarm: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Listen for answers on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._forsake(self.ring.drain())
        self._loop.add_reader(self._doorbell, self._on_doorbell)

    def _forsake(self, found: list[Any]) -> None:
        """Drop messages to the dead front process that this one replaces; their memory is reclaimed."""

    async def drain(self) -> None:
        """Return when no ticket waits, nobody waits for a lease, and no answer is being read."""
        if self.busy:
            assert self._loop is not None
            idle = self._loop.create_future()
            self.idle.append(idle)
            await idle

    def close(self) -> None:
        """Stop listening. Requests that still wait fail with UNAVAILABLE: the version is gone."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._doorbell)
        if self.wake_handle is not None:
            self.wake_handle.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        self.room.close(version_gone)
        gone = version_gone()
        for waiting_here in self.by_slot:
            for ticket in waiting_here:
                done, ticket.done = ticket.done, None
                if done is not None:
                    self.deliver(done, ticket, gone)
            waiting_here.clear()
        if self.idle:
            self._wake_idle()

    @property
    def busy(self) -> bool:
        """Whether a request waits for a lease or an answer, or an answer is being read."""
        return bool(self.waiting or self.unreleased or self.room.anyone)

    # --- leases ----------------------------------------------------------------------------------

    async def reserve(
        self, rows: int, deadline_ns: int = 0, account: Account | None = None, *, patient: bool = False
    ) -> int:
        """Reserve a lease for rows, as soon as a slot is free and it is the turn of its account. Raises
        ServeError UNAVAILABLE, with the time to wait, when the queue is full, and DeadlineError. A `patient`
        request is not refused: it waits until the others have leases and half of the queue stays free; after
        PATIENCE_NS it waits as one of them."""
        waits = patient and (self.room.anyone or not self.room.spares(rows))
        lease = FULL if waits else self.ring.reserve(rows)
        if lease >= 0:
            return lease
        over = not patient and (lease == OVER or not self.room.fits(rows))
        if over and (account is None or not self.room.make_room(rows, account, self._reject)):
            raise self._reject()
        return await self._stand(rows, deadline_ns, account, patient=patient)

    def _reject(self) -> ServeError:
        self.rejected("queue_rows")
        return self.too_many()

    def too_many(self) -> ServeError:
        """Return the error of a request that exceeds the queue's bounds."""
        return ServeError(
            Kind.UNAVAILABLE,
            "the queue of this model is full (max_queue_rows, max_queue_bytes)",
            retry_after_s=self.metrics.seconds_for(self.ring.queued()),
            reason=Reason.QUEUE_FULL,
        )

    async def _stand(self, rows: int, deadline_ns: int, account: Account | None, *, patient: bool) -> int:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[int | ServeError] = loop.create_future()
        if account is not None and account.board is not None:
            self.room.turns = account.board.of(self.metrics.model)
        standing = self.room.stand(rows, came.set_result, account, patient=patient)
        if account is not None and self.ring.ahead < 0 and (self.room.keys > 1 or account is not self.newest):
            self.look_around(account, time.monotonic_ns())
        left_s = max(deadline_ns - time.monotonic_ns(), 0) / 1e9 if deadline_ns else None
        try:
            await asyncio.wait([came], timeout=left_s)
        except asyncio.CancelledError:
            self.room.leave(standing)
            if came.done() and not isinstance(lease := came.result(), ServeError):
                self.abandon(lease, rows)
            raise
        if not came.done():
            self.room.leave(standing)
            self.rejected("deadline")
            raise queued_too_long()
        lease = came.result()
        if isinstance(lease, ServeError):
            raise lease
        return lease

    def look_around(self, account: Account, now_ns: int) -> None:
        """Give keys turns while several send requests. Called ten times a second while one does."""
        board: ShareBoard | None = account.board
        if board is None or not self.in_turns:
            self.look_ns = 1 << 62
            return
        self.look_ns = now_ns + LOOK_NS
        turns, room = board.of(self.metrics.model), self.room
        passed_s, self._looked_ns = min((now_ns - self._looked_ns) / 1e9, 1.0), now_ns
        if room.anyone or room.light_rows:  # else nobody stands in line, however many come
            self._light_s = min(self._light_s + passed_s, LIGHT_S)  # at first the mean of the seconds so far
            self._light_rate += (room.light_rows - self._light_rate * passed_s) / self._light_s
            room.light_rows = 0
        several = self.mixed_ns > now_ns - ACCOUNTS_MIXED_NS or room.keys > 1
        turns.note_active(account.name, several=several, light_rate=self._light_rate)
        if several or turns.others_active(account.name) or account is not self.newest:
            room.share(turns, self._light_rows(turns), int(2 * self.metrics.batch_ns))
        else:
            room.stop_sharing()

    def _light_rows(self, turns: ModelTurns) -> int:
        """Return how many rows of keys that seldom come to expect while a batch runs: the mean, and twice the
        deviation of independent ones."""
        rate, batch_ns = self._light_rate + turns.light_rate, self.metrics.batch_ns
        if batch_ns < LONG_BATCH_NS or rate < LEAST_LIGHT_RATE:
            return 0
        mean = rate * batch_ns / 1e9
        return ceil(mean + 2 * sqrt(mean))

    def rejected(self, cause: str) -> None:
        """A request was turned away before it ran."""
        self.turned_away += 1
        self.metrics.rejected(cause)
        self.ring.count(REJECTED)

    async def fill(self, lease: int, rows: int, nbytes: int, write: Callable[[], None]) -> None:
        """Call `write`, which writes `nbytes` bytes into a reserved lease. Large writes run in a thread:
        touching fresh pages costs as much again as the copy. A failure gives the lease back."""
        self.unreleased += 1  # `drain` waits for this, too
        try:
            await self.offload(nbytes, write)
        except BaseException:
            self.unreleased -= 1
            self.abandon(lease, rows)
            raise
        self.unreleased -= 1

    def abandon(self, lease: int, rows: int) -> None:
        """Give back a reserved lease whose inputs could not be written."""
        self.ring.abandon(lease, rows)
        if self.wake_handle is None:
            self.wake_soon()
        if self.idle or self.room.anyone:
            self.settle()

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a ticket; `done` will not be called. No effect once it is answered."""
        if ticket.done is None:
            return
        self.metrics.cancelled("queued" if self._is_queued(ticket) else "running")
        self._forget(ticket, CANCELED)
        self.waiting -= 1
        if self.idle or self.room.anyone:
            self.settle()

    def _is_queued(self, ticket: Ticket) -> bool:
        return self.ring.describe(ticket.lease >> 16)[0] in ("open", "sealed", "ready")

    def _forget(self, ticket: Ticket, end: int) -> None:
        ticket.done = None
        if self.ring.drop(ticket.lease, ticket.rows, end):
            self.by_slot[ticket.lease >> 16].remove(ticket)
        # else a worker has answered and counted it: _finish releases it when the message comes

    def trace_lease(self, run: RunTrace, lease: int, rows: int) -> Callable[[], None]:
        """Leave a traced request's context beside a written lease, for its worker. Returns what adds the
        batch to the run, to be called once when the lease has ended. Of a slot that is used again by then
        nothing is known but the batch's ids."""
        slot, written_ns = lease >> 16, time.monotonic_ns()
        seq, notes = self.ring.seq(slot), self.arena.traces
        notes.write(self.front, slot, seq, lease & 0xFFFF, rows, run.context)

        def ended() -> None:
            times_ns: tuple[int, ...] = self.ring.times_ns(slot)
            if self.ring.seq(slot) != seq:
                times_ns = (0,) * len(times_ns)
            run.batches.append(BatchTimes(notes.arena, slot, seq, written_ns, rows, times_ns))

        return ended

    # --- answers ---------------------------------------------------------------------------------

    def wake_soon(self) -> None:
        assert self._loop is not None
        if self._one_core:
            self._seen = self.submitted
            self._more_by_ns = time.monotonic_ns() + ONE_CORE_PATIENCE_NS
        self.wake_handle = self._loop.call_soon(self._wake_workers)

    def _wake_workers(self) -> None:
        if self._more_by_ns and self._may_wait():
            assert self._loop is not None
            self.wake_handle = self._loop.call_soon(self._wake_workers)
            return
        self.wake_handle = None
        self.ring.wake_workers()

    def _may_wait(self) -> bool:
        """Whether the next turn may bring rows for this batch too, as this one did."""
        more, self._seen = self.submitted > self._seen, self.submitted
        return more and time.monotonic_ns() < self._more_by_ns

    def _on_doorbell(self) -> None:
        run_all(self.ring.drain(), self.hear_one)
        if self.room.anyone:  # another front may have rung for it
            self.room.look_soon()

    def hear_one(self, entry: tuple[int, Any]) -> None:
        """Handle one message of the ring: a batch is done, a part of an answer came, or a rescan is due."""
        slot, seq = entry
        if slot < 0:
            self._part(*seq) if slot == PART else self._rescan()
        elif self.ring.is_done(slot, seq):
            self.finish(slot)

    def _part(self, slot: int, seq: int, row: int, offset: int, nbytes: int, final: bool) -> None:
        """Pass one part of an answer, whose slab this front now owns, to a context that takes parts."""
        if self.seqs[slot] == seq:
            for ticket in self.by_slot[slot]:
                take = getattr(ticket.context, "part", None)
                if ticket.lease & 0xFFFF == row and ticket.done is not None and take is not None:
                    take(offset, nbytes, final)
                    return
        if offset:  # its caller has left
            self.ring.free_slab(offset)

    def _rescan(self) -> None:
        """Look at every batch waited for: a worker may have died between answering and its message, or a
        batch ended that all callers had left."""
        self.room.look_soon()
        done = [s for s, waiting in enumerate(self.by_slot) if waiting and self.ring.is_done(s, self.seqs[s])]
        if done:
            self._on_doorbell()  # parts that a worker sent before it was done may still be unread
        run_all(done, self._finish_if_done)

    def _finish_if_done(self, slot: int) -> None:
        if self.by_slot[slot] and self.ring.is_done(slot, self.seqs[slot]):
            self.finish(slot)

    def failure(self, failed: tuple[int, str]) -> ServeError:
        """Return the error of a whole batch that failed so."""
        return _model_error(*failed)

    def own_fault(self, lease: int, end: int) -> ServeError | None:
        """Return the error of a lease that failed by itself in an arena of columns, whose text is in a slab.
        None in other arenas: there the reader of the answer finds the error. `end` 0: something has written
        where only the ring may."""
        ring = self.ring
        if not end:
            return internal(DAMAGED)
        if not ring.outputs:
            return None
        offset, nbytes = ring.answer_slab(lease)
        if not offset:
            return _model_error(ring.lease_status(lease), FAILED_ALONE)
        try:
            text = bytes(ring.slab(offset, nbytes)).decode("utf-8", "replace")
        except ValueError:  # the worker has said it is longer than it is
            return internal(DAMAGED)
        return _model_error(ring.lease_status(lease), text)

    def undelivered(self) -> None:
        """Log the exception of a `done` callback."""
        log.exception("an answer could not be delivered")

    def settle(self) -> None:
        """Look for free slots, and wake `drain` if nothing is left, after a request has ended."""
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
        """Set the one timer to the earliest deadline, but at least DEADLINE_TICK_NS from now."""
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
        late = [ticket for ticket in bound if ticket.deadline_ns <= now]
        self.alarm_ns, self._alarm = 0, None
        self.due_ns = min((p.deadline_ns for p in bound if p.deadline_ns > now), default=0)
        if self.due_ns:  # first: whatever fails below must not end the deadlines of the others
            self.watch()
        run_all(late, self._expire_one)

    def _expire_one(self, ticket: Ticket) -> None:
        if ticket.done is None:
            return
        queued, done = self._is_queued(ticket), ticket.done
        self._forget(ticket, REJECTED if queued else CANCELED)
        self.metrics.rejected("deadline")
        late = queued_too_long() if queued else DeadlineError(RAN_TOO_LONG, queued=False)
        self.deliver(done, ticket, late)


def queued_too_long() -> DeadlineError:
    """Return the error of a request whose time was up before a worker took it."""
    return DeadlineError(QUEUED_TOO_LONG, queued=True, reason=Reason.QUEUE_DEADLINE)


def version_gone() -> ServeError:
    """Return the error of a request that waited for a version that was unloaded."""
    return ServeError(Kind.UNAVAILABLE, GONE)


def _model_error(status: int, text: str) -> ServeError:
    """Return the error of a lease or a batch: a ModelError, unless its worker was lost."""
    kind, reason = unpack_status(status)
    if reason is Reason.WORKER_LOST:
        return worker_lost(text)
    return ModelError(kind, text, reason=reason)
