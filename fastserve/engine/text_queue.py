"""Text versions: a prompt goes into the queue, its tokens come back one by one; no task or future in between.

    run = scheduler.generate(version, ids, note, heard)   heard(records) once a wake-up, the last in any case
    run.taken(n)                                   n more tokens were read; a reader that is behind is stalled
    run.cancel()                                   reaches the worker within a step

A sequence holds a slot from its start to its end, waiting or running: there are as many as may be
(max_sequences of every instance, and max_waiting). A request that finds none is refused with Retry-After.
Sequences of API keys wait in the order of their turns (share_board.py), each of which costs its tokens by the
key's weight: those of its prompt, and as many as the key's answers had lately, which is settled at its end.
While several keys send requests, the last eighth of the slots is for those that have not their share.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastserve._ext.batch_ring import FULL as FULL_RING
from fastserve._ext.batch_ring import RECORDS
from fastserve._ext.fast_path import ACCOUNT, Account, Ticket
from fastserve._ext.text_tokens import Flowing, pass_on
from fastserve._ext.token_records import TokenReader, prompt_bytes, write_prompt
from fastserve.codec.generation import Extra, Finish, Heard, Record, TextNote, write_text
from fastserve.engine.batch_queue import BatchQueue, QueueMetrics, Specs
from fastserve.engine.engine import Engine, Scheduler, TensorFace
from fastserve.engine.input_checks import check_inputs
from fastserve.engine.share_board import ACTIVE_S, ModelTurns
from fastserve.errors import (
    DeadlineError,
    Kind,
    Reason,
    ServeError,
    internal,
    invalid,
    pack_status,
    unsupported,
)
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.util.rate_limited_log import run_all
from fastserve.workers.arena import SLAB_PAGE, Arena

log = logging.getLogger(__name__)

FULL = "the queue of this model is full: {} sequences run or wait (text.max_sequences, text.max_waiting)"
NO_ROOM = "the prompts that wait for this model take all of their memory (max_queue_bytes)"
TOO_LARGE = "a prompt of {} bytes is larger than all that may wait (max_queue_bytes)"
LOST = "tokens of this request were lost on their way from the worker"
# The worker ends what is past its time; here that is found when the worker does not come to it.
SLACK_NS = 100_000_000
# How often the tokens of sequences under way are charged to their API keys.
CHARGE_NS = 100_000_000
FIRST_ANSWER = 64
"""Tokens that an answer is expected to have while none of its key has ended."""
NEWEST = 1 / 8  # weight of one answer in the mean of a key's


class TextRun(Flowing):
    """One sequence of this front process; see codec.text.Run."""

    __slots__ = (
        "_charged",
        "_expected",
        "_heard",
        "_pages",
        "_prompt",
        "_queue",
        "_ticket",
        "account",
        "turn",
    )

    def __init__(
        self,
        queue: TextQueue,
        slot: int,
        prompt: int,
        pages: int,
        heard: Heard,
        account: Account | None = None,
        turn: float = 0.0,
        expected: float = 0.0,
    ) -> None:
        """`expected`: tokens that its turn was charged with."""
        self._queue, self._heard = queue, heard
        self.slot, self.held = slot, prompt
        self.account, self.turn = account, turn
        self._prompt, self._expected = prompt, expected
        self._charged = 0  # tokens
        self._pages = pages  # of its prompt, until its worker has let go of it
        self._ticket: Ticket | None = None

    def submit(self, lease: int, deadline_ns: int) -> None:
        """Submit the sequence's lease."""
        self._ticket = self._queue.submit(lease, 1, self._done, deadline_ns, None, self.account)
        self._queue.counts.came()
        if self.account is not None:
            self._queue.hold_account(self, 1)

    def charge(self) -> None:
        """Charge its account for the tokens that have come since the last time, first for its prompt."""
        assert self.account is not None
        tokens, self._charged = self.held - self._charged, self.held
        if tokens:
            self.account.charge_tokens(tokens)  # type: ignore[attr-defined]  # as TicketTable does

    def taken(self, records: int) -> None:
        if not self.ended:
            self._queue.tokens.taken(self.slot, records)

    def cancel(self, why: Finish = Finish.CANCELLED) -> None:
        if self.ended:
            return
        self._close(why)
        assert self._ticket is not None
        self._queue.cancel(self._ticket)
        self._queue.tokens.leave(self.slot)
        self._queue.later(self._heard, [(-1, why, 0, b"")])

    def hear(self, records: list[Record] | None) -> None:
        """Take records from the queue; None when some were lost."""
        if self.ended:  # by another run that handled the same step
            return
        if records is None:
            assert self._ticket is not None
            self._queue.cancel(self._ticket)
            self._fail(internal(LOST))
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
            if self.account is not None:
                self._turns(self.account).reach(self.turn)
            counts.began(self.held, records[0][2])
        if self.begun:
            self.held += counts.went_on(records, begun)
        elif records[0][1] == Finish.STOP:
            counts.read(self.held)

    def _done(self, ticket: Ticket, error: ServeError | None) -> None:
        """Handle the end of the slot, for the queue."""
        if error is None:
            self._queue.release(ticket)
        if not self.ended:  # its last record would have come before
            self._queue.tokens.leave(self.slot)
            self._fail(error or internal(LOST))

    def _fail(self, error: ServeError) -> None:
        finish = Finish.TIMEOUT if isinstance(error, DeadlineError) else Finish.FAILED
        self._close(finish)
        self._tell([(-1, finish, 0, write_text(Extra(message=error.message, kind=pack_status(error))))])

    def _close(self, finish: int) -> None:
        self.ended = True
        self._free()
        if self.account is not None:
            self._queue.hold_account(self, -1)
            took = 0
            if self.begun or finish == Finish.STOP:  # else its worker has not come to its prompt
                self.charge()
                took = self.held
            if self.begun:
                self._queue.learn(self.account.name, took - self._prompt)
            self._turns(self.account).give_back(
                self.account.name, (self._expected - took) / self.account.weight
            )
        self._queue.counts.ended(finish, self.begun, self.held if self.begun else 0)

    def _turns(self, account: Account) -> ModelTurns:
        turns: ModelTurns = account.board.of(self._queue.metrics.model)
        return turns

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
    """The queue of a text version in this front process."""

    def __init__(
        self, arena: Arena, front: int, inputs: Specs, outputs: Specs, metrics: QueueMetrics
    ) -> None:
        super().__init__(arena, front, inputs, outputs, metrics)
        self.counts = metrics.of_text()
        geometry = arena.geometry
        self.tokens = TokenReader(
            arena.memory, front=front, worker_doorbells=arena.worker_doorbells, window=geometry.window
        )
        # Prompts share their half of the memory evenly; the other half is for tokens.
        self._most_pages = max(geometry.slab_pages // 2 // geometry.fronts, 1)
        self.prompt_pages = 0  # of this front's that their worker still needs
        self.accounted: set[TextRun] = set()  # sequences whose tokens are charged to somebody
        self._held: Counter[str] = Counter()  # of these, by their keys
        self._active: dict[str, tuple[float, float]] = {}  # keys, when they came last, and their weights
        self._answers: dict[str, float] = {}  # mean tokens of these keys' answers
        self._charge_ns = 0

    def _forsake(self, found: list[Any]) -> None:
        self.tokens.read([entry for kind, entry in found if kind == RECORDS])  # gives their slabs back

    def start(self, ids: Sequence[int], note: TextNote, heard: Heard) -> TextRun:
        """Start one sequence. Raises ServeError when it cannot wait."""
        account = ACCOUNT.get()
        if account is None:
            return self._start(ids, note, heard, None)
        turns, expected = account.board.of(self.metrics.model), self._expect(ids, note, account.name)
        note.turn = turns.claim(account.name, expected / account.weight)
        try:
            return self._start(ids, note, heard, account, expected)
        except BaseException:
            turns.give_back(account.name, expected / account.weight)
            raise

    def _expect(self, ids: Sequence[int], note: TextNote, key: str) -> float:
        """Return how many tokens a sequence will likely have, its prompt's among them."""
        if note.embeds:
            return len(ids)
        return len(ids) + min(note.sampling.max_new_tokens, self._answers.get(key, FIRST_ANSWER))

    def learn(self, key: str, tokens: int) -> None:
        """Note how many tokens an answer to a key has had."""
        mean = self._answers.get(key, tokens)
        self._answers[key] = mean + (tokens - mean) * NEWEST

    def _start(
        self,
        ids: Sequence[int],
        note: TextNote,
        heard: Heard,
        account: Account | None,
        expected: float = 0.0,
    ) -> TextRun:
        said = write_text(note)
        nbytes = prompt_bytes(ids, said)
        pages = self._find_pages(nbytes)
        lease = FULL_RING if account is not None and self._holds_enough(account) else self.ring.reserve(1)
        if lease < 0:
            self.rejected("queue_rows")
            retry_s = self.metrics.seconds_for(1)
            text = FULL.format(self.ring.slots)
            raise ServeError(Kind.UNAVAILABLE, text, retry_after_s=retry_s, reason=Reason.QUEUE_FULL)
        run = TextRun(self, lease >> 16, len(ids), pages, heard, account, note.turn, expected)
        try:
            self.tokens.listen(lease >> 16, self._write(lease, nbytes, ids, said, note.priority), run)
            run.submit(lease, note.deadline_ns + SLACK_NS if note.deadline_ns else 0)
        except BaseException:
            self.tokens.leave(lease >> 16)
            self.abandon(lease, 1)
            raise
        self.prompt_pages += pages
        return run

    def _holds_enough(self, account: Account) -> bool:
        """Return whether a key has its share of the slots, while others send requests and few are free."""
        now = time.monotonic()
        self._active[account.name] = now, account.weight
        if len(self._active) == 1:
            return False
        gone = [key for key, (at, _) in self._active.items() if at < now - ACTIVE_S]
        for key in gone:
            del self._active[key]
            self._answers.pop(key, None)
        slots = self.ring.slots
        if slots - self.ring.outstanding() > max(1, slots // 8):
            return False
        share = account.weight / sum(weight for _, weight in self._active.values())
        return self._held[account.name] >= max(1, slots * share)

    def hold_account(self, run: TextRun, count: int) -> None:
        """Take a sequence into its key's account, or with -1 out of it."""
        assert run.account is not None
        (self.accounted.add if count > 0 else self.accounted.discard)(run)
        self._held[run.account.name] += count
        if not self._held[run.account.name]:
            del self._held[run.account.name]

    def later(self, heard: Heard, records: list[Record]) -> None:
        """Call `heard` in the next turn of the loop, never inside the caller."""
        assert self._loop is not None
        self._loop.call_soon(heard, records)

    def _find_pages(self, nbytes: int) -> int:
        pages = -(-nbytes // SLAB_PAGE)
        if pages > self._most_pages:
            raise invalid(TOO_LARGE.format(nbytes))
        if self.prompt_pages + pages > self._most_pages:
            raise self._no_room()
        return pages

    def _no_room(self) -> ServeError:
        self.rejected("queue_bytes")
        retry_s = self.metrics.seconds_for(1)
        return ServeError(Kind.UNAVAILABLE, NO_ROOM, retry_after_s=retry_s, reason=Reason.QUEUE_FULL)

    def _write(self, lease: int, nbytes: int, ids: Sequence[int], said: bytes, priority: int) -> int:
        """Write the prompt into a slab and attach it to the lease; return the lease's tag. Engines take the
        most urgent `priority` first."""
        offset = self.ring.allocate_slab(nbytes)
        if not offset:
            raise self._no_room()
        try:
            write_prompt(self.ring.slab(offset, nbytes, writable=True), ids, said)
        except BaseException:
            self.ring.free_slab(offset)
            raise
        return self.ring.attach_slab(lease, offset, nbytes, priority)

    def _on_doorbell(self) -> None:
        found = self.ring.drain()
        if len(found) == 1 and found[0][0] == RECORDS:  # one step and nothing else: nearly every wake-up
            self._pass_on([found[0][1]])
        else:
            self._hear(found)

    def _hear(self, found: list[tuple[int, Any]]) -> None:
        messages = [entry for kind, entry in found if kind == RECORDS]
        if messages:
            self._pass_on(messages)
        run_all((entry for entry in found if entry[0] != RECORDS), self.hear_one)

    def _pass_on(self, messages: list[tuple[int, int]]) -> None:
        """Deliver the tokens of one step; most are passed on in compiled code and counted at once."""
        gaps: list[int] = []
        now_ns = time.monotonic_ns()
        left = pass_on(self.tokens.read(messages), self.tokens, gaps, now_ns)
        if gaps:
            self.counts.flowed(gaps)
        if left:
            run_all(left, _tell_run)
        if self.accounted and now_ns >= self._charge_ns:
            self._charge_ns = now_ns + CHARGE_NS
            for run in self.accounted:
                if run.begun:
                    run.charge()


def _tell_run(told: tuple[TextRun, list[Record] | None]) -> None:
    run, records = told
    run.hear(records)


class TextScheduler(Scheduler):
    """Generates tokens for prompts; passes tensor requests on to the engine's `tensors`."""

    def __init__(self, queue: TextQueue) -> None:
        self.queue = queue

    def generate(self, version: Version, ids: Sequence[int], note: TextNote, heard: Heard) -> TextRun:
        """See Engine.generate."""
        return self.queue.start(ids, note, heard)

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        check_inputs(version, request.inputs)
        return await _tensors(engine).infer(version, request)

    async def stream(
        self, engine: Engine, version: Version, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        check_inputs(version, request.inputs)
        async with contextlib.aclosing(_tensors(engine).stream(version, request)) as responses:
            async for response in responses:
                yield response


def _tensors(engine: Engine) -> TensorFace:
    if engine.tensors is None:
        raise unsupported("text models take no tensors here")
    return engine.tensors
