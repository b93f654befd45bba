"""Text versions: a prompt goes into the queue, its tokens come back one by one; no task or future in between.

    run = scheduler.generate(ids, note, heard)     heard(records) once a doorbell, the last record in any case
    run.taken(n)                                   the reader is so much nearer; one that is not stands still
    run.cancel()                                   its worker hears of it within a step

A sequence holds a slot from its first moment to its last, waiting or running: there are as many as may be
(max_sequences of every instance, and max_waiting). Who finds none is refused, and told when to come again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastserve._ext.batch_ring import RECORDS
from fastserve._ext.fast_path import Pending
from fastserve._ext.text_tokens import Flowing, pass_on
from fastserve._ext.token_records import TokenReader, prompt_bytes, write_prompt
from fastserve.codec.text import Extra, Finish, Heard, Record, TextNote, write_text
from fastserve.each import each
from fastserve.engine.batch_queue import BatchQueue, Specs
from fastserve.engine.meters import QueueMeters
from fastserve.engine.rows import check_inputs
from fastserve.engine.scheduler import Runs, Scheduler, TensorFace
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.workers.arena import SLAB_PAGE, Arena

log = logging.getLogger(__name__)

FULL = "the queue of this model is full: {} sequences run or wait (text.max_sequences, text.max_waiting)"
NO_ROOM = "the prompts that wait for this model take all of their memory (max_queue_bytes)"
TOO_LARGE = "a prompt of {} bytes is larger than all that may wait (max_queue_bytes)"
LOST = "tokens of this request were lost on their way from the worker"
# The worker ends what is past its time; here that is found when the worker does not come to it.
SLACK_NS = 100_000_000


class TextRun(Flowing):
    """One sequence of this front; see codec.text.Run."""

    __slots__ = ("_heard", "_pages", "_pending", "_queue")

    def __init__(self, queue: TextQueue, slot: int, prompt: int, pages: int, heard: Heard) -> None:
        self._queue, self._heard = queue, heard
        self.slot, self.held = slot, prompt
        self._pages = pages  # of its prompt, until its worker has let go of it
        self._pending: Pending | None = None

    def submit(self, place: int, deadline_ns: int) -> None:
        """Let it run."""
        self._pending = self._queue.submit(place, 1, self._done, deadline_ns)
        self._queue.counts.came()

    def taken(self, records: int) -> None:
        if not self.ended:
            self._queue.tokens.taken(self.slot, records)

    def cancel(self, why: Finish = Finish.CANCELLED) -> None:
        if self.ended:
            return
        self._close(why)
        assert self._pending is not None
        self._queue.cancel(self._pending)
        self._queue.tokens.leave(self.slot)
        self._queue.later(self._heard, [(-1, why, 0, b"")])

    def hear(self, records: list[Record] | None) -> None:
        """For the queue: what came; None when some of it was lost."""
        if self.ended:  # by another, who heard of the same step
            return
        if records is None:
            assert self._pending is not None
            self._queue.cancel(self._pending)
            self._fail(ServeError(Kind.INTERNAL, LOST))
            return
        self._count(records)
        if records[-1][1]:
            self._close(records[-1][1])
        self._tell(records)

    def _count(self, records: list[Record]) -> None:
        counts, begun = self._queue.counts, self.begun
        self._free()
        if not begun and records[0][0] >= 0:
            self.begun = True
            counts.began(self.held, records[0][2])
        if self.begun:
            self.held += counts.went_on(records, begun)
        elif records[0][1] == Finish.STOP:
            counts.read(self.held)

    def _done(self, pending: Pending, error: ServeError | None) -> None:
        """For the queue: the slot is through."""
        if error is None:
            self._queue.release(pending)
        if not self.ended:  # its last record would have come before
            self._queue.tokens.leave(self.slot)
            self._fail(error or ServeError(Kind.INTERNAL, LOST))

    def _fail(self, error: ServeError) -> None:
        finish = Finish.TIMEOUT if isinstance(error, DeadlineError) else Finish.FAILED
        self._close(finish)
        self._tell([(-1, finish, 0, write_text(Extra(message=error.message, kind=error.kind.value)))])

    def _close(self, finish: int) -> None:
        self.ended = True
        self._free()
        self._queue.counts.ended(finish, self.begun, self.held if self.begun else 0)

    def _free(self) -> None:
        if self._pages:
            self._queue.prompt_pages -= self._pages
            self._pages = 0

    def _tell(self, records: list[Record]) -> None:
        try:
            self._heard(records)
        except Exception:
            log.exception("tokens could not be delivered")


class TextQueue(BatchQueue):
    """The queue of a text version as this front sees it."""

    def __init__(self, arena: Arena, front: int, inputs: Specs, outputs: Specs, meters: QueueMeters) -> None:
        super().__init__(arena, front, inputs, outputs, meters)
        self.counts = meters.of_text()
        geometry = arena.geometry
        self.tokens = TokenReader(
            arena.memory, front=front, worker_bells=arena.worker_bells, window=geometry.window
        )
        # Prompts share their half of the memory evenly; the other half is for tokens.
        self._most_pages = max(geometry.slab_pages // 2 // geometry.fronts, 1)
        self.prompt_pages = 0  # of this front's that their worker still needs

    def _forsake(self, found: list[Any]) -> None:
        self.tokens.read([entry for kind, entry in found if kind == RECORDS])  # gives their slabs back

    def start(self, ids: Sequence[int], note: TextNote, heard: Heard) -> TextRun:
        """One sequence. Raises ServeError when it cannot wait."""
        said = write_text(note)
        nbytes = prompt_bytes(ids, said)
        pages = self._find_pages(nbytes)
        place = self.ring.reserve(1)
        if place < 0:
            self.rejected("queue_rows")
            retry_s = self.meters.seconds_for(1)
            raise ServeError(Kind.UNAVAILABLE, FULL.format(self.ring.slots), retry_after_s=retry_s)
        run = TextRun(self, place >> 16, len(ids), pages, heard)
        try:
            self.tokens.listen(place >> 16, self._write(place, nbytes, ids, said, note.priority), run)
            run.submit(place, note.deadline_ns + SLACK_NS if note.deadline_ns else 0)
        except BaseException:
            self.tokens.leave(place >> 16)
            self.abandon(place, 1)
            raise
        self.prompt_pages += pages
        return run

    def later(self, heard: Heard, records: list[Record]) -> None:
        """Call it in a turn of its own: never from inside what its caller calls."""
        assert self._loop is not None
        self._loop.call_soon(heard, records)

    def _find_pages(self, nbytes: int) -> int:
        pages = -(-nbytes // SLAB_PAGE)
        if pages > self._most_pages:
            raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE.format(nbytes))
        if self.prompt_pages + pages > self._most_pages:
            raise self._no_room()
        return pages

    def _no_room(self) -> ServeError:
        self.rejected("queue_bytes")
        return ServeError(Kind.UNAVAILABLE, NO_ROOM, retry_after_s=self.meters.seconds_for(1))

    def _write(self, place: int, nbytes: int, ids: Sequence[int], said: bytes, priority: int) -> int:
        """The prompt into the place's slab; the place's tag. Engines take the most urgent first."""
        offset = self.ring.lease(nbytes)
        if not offset:
            raise self._no_room()
        try:
            write_prompt(self.ring.slab(offset, nbytes, writable=True), ids, said)
        except BaseException:
            self.ring.return_lease(offset)
            raise
        return self.ring.attach_slab(place, offset, nbytes, priority)

    def _on_bell(self) -> None:
        found = self.ring.drain()
        if len(found) == 1 and found[0][0] == RECORDS:  # a step and no more: what nearly every bell is for
            self._pass_on([found[0][1]])
        else:
            self._hear(found)

    def _hear(self, found: list[tuple[int, Any]]) -> None:
        messages = [entry for kind, entry in found if kind == RECORDS]
        if messages:
            self._pass_on(messages)
        each((entry for entry in found if entry[0] != RECORDS), self.hear_one)

    def _pass_on(self, messages: list[tuple[int, int]]) -> None:
        """What a step made of everybody: the most of it flows, and is counted at once."""
        gaps: list[int] = []
        left = pass_on(self.tokens.read(messages), self.tokens, gaps, time.monotonic_ns())
        if gaps:
            self.counts.flowed(gaps)
        if left:
            each(left, _tell_run)


def _tell_run(told: tuple[TextRun, list[Record] | None]) -> None:
    run, records = told
    run.hear(records)


class TextScheduler(Scheduler):
    """Prompts and their tokens; and requests of tensors, which whoever knows tokenizers reads (`tensors`)."""

    def __init__(self, queue: TextQueue) -> None:
        self.queue = queue

    def generate(self, ids: Sequence[int], note: TextNote, heard: Heard) -> TextRun:
        """See Engine.generate."""
        return self.queue.start(ids, note, heard)

    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        check_inputs(version, request.inputs)
        return await _tensors(engine).infer(version, request)

    async def stream(
        self, engine: Runs, version: Version, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        check_inputs(version, request.inputs)
        async with contextlib.aclosing(_tensors(engine).stream(version, request)) as responses:
            async for response in responses:
                yield response


def _tensors(engine: Runs) -> TensorFace:
    if engine.tensors is None:
        raise ServeError(Kind.UNIMPLEMENTED, "text models take no tensors here")
    return engine.tensors
