"""The loop of a worker with a text engine: prompts in, tokens out, many sequences in one step.

    take what is there -> submit        who has left, whose time is up -> cancel
    engine.step(out)                    publish: one message and one doorbell for each front concerned

A slot stays RUNNING from the moment its prompt is taken until its last record is sent, so that the death of
this worker ends what has begun, and what has not goes to the next one. Nothing here waits for a reader: a
sequence whose reader is behind stands still (`TokenSender.room`), the others go on. It does so only while
nobody waits for its row of the engine; else it writes on, and its front keeps what is not read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastserve._ext.token_records import TokenSender, read_prompt
from fastserve.backends.llm.protocols import TextEngine, TextRequest
from fastserve.backends.model_errors import explain, kind_of
from fastserve.codec.generation import Extra, Finish, read_text, write_text
from fastserve.errors import Kind, ServeError, invalid
from fastserve.workers.arena import Arena

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

log = logging.getLogger(__name__)

CONTROL_SPOKE = 2
# Sequences that all stand still give a sign of life this often, and so many times before they count as stuck;
# what found no room in a ring is tried again.
BEAT_NS, BEATS, AGAIN_NS = 1_000_000_000, 8, 1_000_000
# The status that a slot ends with, by its finish: for the counters; its client has its last record.
STATUSES = [0] * len(Finish)
STATUSES[Finish.TIMEOUT] = Kind.DEADLINE_EXCEEDED.value
STATUSES[Finish.FAILED] = Kind.INTERNAL.value
UNREADABLE = "the prompt cannot be read"


class TextLoop:
    """One engine, and the slots it has taken."""

    def __init__(
        self,
        arena: Arena,
        ring: BatchRing,
        worker: int,
        engine: TextEngine,
        control: int = -1,
        *,
        limit_ms: int = 0,
    ) -> None:
        """`limit_ms`: what is silent for longer is taken to hang; 0: never."""
        self._ring, self._engine = ring, engine
        self._beat_ns = min(BEAT_NS, limit_ms * 1_000_000 // BEATS or BEAT_NS)
        self._workers = arena.geometry.workers
        # One engine takes all there is, so that its priorities order what waits; of several each what fits.
        self._rows = max(engine.info.slots, 1)
        self._most = arena.geometry.slots if self._workers == 1 else self._rows
        self.out = TokenSender(
            arena.memory,
            worker=worker,
            own_doorbell=arena.worker_doorbells[worker],
            front_doorbells=arena.front_doorbells,
            control=control,
            window=arena.geometry.window,
            statuses=STATUSES,
        )

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run until `stopped`, which is called when a message arrives, returns True."""
        while True:
            ran = self.turn()
            if self.out.sleep(self.patience_ns(ran), self._is_full) & CONTROL_SPOKE and stopped():
                return

    def turn(self) -> bool:
        """Admit, cancel, step and publish once. Returns False when the engine could do nothing."""
        self._admit()
        self.out.awaited = self._is_awaited()
        for rid, finish in self.out.gone():
            self._engine.cancel(rid, Finish(finish))
        ran = self._engine.pending() > 0 and self._engine.step(self.out)
        for slot in self.out.publish():
            self._ring.end_run(slot)
            self._ring.publish(slot)
        return ran

    @property
    def _is_full(self) -> bool:
        return self._engine.pending() >= self._most

    def _is_awaited(self) -> bool:
        """Whether a sequence waits for a row of the engine: in its queue, or for one of several engines."""
        ticket = self._engine.pending()
        return ticket > self._rows or (ticket >= self._most and self.out.behind and self.out.untaken)

    def patience_ns(self, ran: bool) -> int:
        """How long the loop may sleep; negative: for ever."""
        if ran:
            return 0
        if self.out.unsent:
            return AGAIN_NS
        if not self.out.active:
            return -1
        due_ns = self.out.next_deadline_ns()
        left_ns = due_ns - time.monotonic_ns() if due_ns else self._beat_ns
        return min(max(left_ns, 1), self._beat_ns)

    def _admit(self) -> None:
        left = self._most - self._engine.pending()
        if self._workers > 1:
            left = -(-left // self._workers)  # others may be free as well
        while left > 0 and (slot := self._ring.take()) >= 0:
            left -= 1
            self._submit(slot)

    def _submit(self, slot: int) -> None:
        leases = self._ring.leases(slot)
        if not leases:  # its caller has left
            self._ring.publish(slot)
            return
        self._ring.start_run(slot)
        try:
            ids, said = read_prompt(self._ring.slab(*leases[0][2:]))
            note = read_text(said)
        except (ValueError, RecursionError):
            rid = self.out.admit(slot)
            self._fail(rid, invalid(UNREADABLE))
            return
        rid = self.out.admit(slot, note.deadline_ns)
        try:
            self._engine.submit(TextRequest(rid, ids, note, self._ring.times_ns(slot)[0]))
        except Exception as error:
            if not isinstance(error, ServeError):
                log.exception("the engine failed to take a request")
            self._fail(rid, error)

    def _fail(self, rid: int, error: Exception) -> None:
        extra = write_text(Extra(message=explain(error), kind=kind_of(error).value))
        self.out.end(rid, Finish.FAILED, extra)
