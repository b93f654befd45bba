"""The engine: one thread, one batch, one step at a time; the face of text_engine.TextEngine.

A step: end what was cancelled or is late; let those stand still whose readers are behind, and those go on
whose readers came; share out the step's tokens; compute; draw; tell. What a sequence draws depends on its
request and its seed. Nobody is pushed out of the cache: a sequence begins when a row for all of it is free.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from fastserve._ext.sampler import Sampler
from fastserve.backends.base import explain
from fastserve.backends.device_faults import end_if_lost, is_out_of_memory
from fastserve.backends.shortage import count_shortage
from fastserve.backends.text.drawing import Drawing
from fastserve.backends.text.model import Model, Plan
from fastserve.backends.text.pace import Pace
from fastserve.backends.text.planning import Reading, make_plan, share_out
from fastserve.backends.text.pooling import make_pool, tell_vector
from fastserve.backends.text.prefixes import begin_row
from fastserve.backends.text.rows import Rows
from fastserve.backends.text.sequence import Sequence, State, make_sequence
from fastserve.backends.text.waiting import Deadlines, Waiting
from fastserve.backends.text_engine import Out, TextRequest
from fastserve.codec.text import Extra, Finish, Info, write_text
from fastserve.config.text import TextOptions
from fastserve.errors import Kind, ServeError, invalid

log = logging.getLogger(__name__)

FAULTS_MAX = 3
"""Steps in a row that may fail before the engine is taken for broken."""
STEPS_BETWEEN_TRIES = 64
"""After memory ran out a token more is read every so many steps: it is asked for what it had not, seldom."""


class Engine:
    """Sequences of one model. `settings` of the sampler are checked in a slot of its own."""

    def __init__(self, model: Model, info: Info, options: TextOptions) -> None:
        self.info = info
        self._model, self._options = model, options
        self._rows = Rows(info.slots, model.cache, info.max_tokens if options.prefix_cache else 0)
        self._waiting, self._deadlines = Waiting(int(options.ageing_s * 1e9)), Deadlines()
        self._drawing = Drawing(Sampler(info.vocab_size, info.slots + 1), info.slots)
        self._eos = dict.fromkeys(info.eos_ids, Finish.EOS)
        self._sequences: dict[int, Sequence] = {}
        self._asked: dict[int, Finish] = {}
        self._standing: list[Sequence] = []
        self._numbers = self._steps = self._faults = 0
        self._pooled = 0  # sequences that want a vector
        self._step_tokens, self._pace = options.step_tokens, Pace(options.step_ms)

    def submit(self, request: TextRequest) -> None:
        """Into the line. Raises ServeError for a request that can never run, or when the line is full."""
        if request.rid in self._sequences:
            raise ValueError(f"rid {request.rid} is here already")
        if len(self._sequences) >= self.info.slots + self._options.max_waiting:
            text = f"{self._options.max_waiting} requests wait already"
            raise ServeError(Kind.RESOURCE_EXHAUSTED, text, retry_after_s=1)
        prompt = _read_prompt(request)
        sequence = make_sequence(request, prompt, self.info, self._eos)
        if request.note.embeds:
            sequence.pool = make_pool(self.info, self._options)
        self._drawing.check(sequence)
        self._pooled += sequence.pool is not None
        self._numbers += 1
        sequence.number = self._numbers
        sequence.arrived_ns = sequence.last_ns = request.arrived_ns or time.monotonic_ns()
        self._sequences[sequence.rid] = sequence
        self._waiting.add(sequence)
        if sequence.deadline_ns:
            self._deadlines.add(sequence)

    def cancel(self, rid: int, why: Finish) -> None:
        """Ends it at the next step; the first reason stays."""
        if rid in self._sequences:
            self._asked.setdefault(rid, why)

    def pending(self) -> int:
        """Sequences submitted and not ended."""
        return len(self._sequences)

    def step(self, out: Out) -> bool:
        """One iteration; see TextEngine.step."""
        now_ns = time.monotonic_ns()
        self._end_asked(out, now_ns)
        self._heed_readers(out)
        shares = share_out(self._rows, self._waiting, self._begin, self._room(), now_ns)
        if not shares and not self._rows.writing:
            return False
        plan = make_plan(self._rows, shares)
        logits = self._compute(plan, shares, out)
        if logits is not None:
            self._advance(plan, shares, logits, out)
            self._pace.took(plan.writing, len(plan.tokens) - plan.writing, time.monotonic_ns() - now_ns)
        return True

    def close(self) -> None:
        """Gives memory back; sequences that have not ended get no record."""
        self._sequences.clear()
        self._model.close()

    def _room(self) -> int:
        """Tokens of prompts in this step."""
        begun = self._rows.writing + len(self._standing)
        to_come = len(self._sequences) - begun - self._pooled
        return self._pace.room(self._step_tokens, self._rows.writing, min(to_come, self.info.slots - begun))

    def _end_asked(self, out: Out, now_ns: int) -> None:
        for sequence in self._deadlines.late(now_ns):
            self._asked.setdefault(sequence.rid, Finish.TIMEOUT)
        for rid, why in self._asked.items():
            if rid in self._sequences:
                self._end(self._sequences[rid])
                out.end(rid, why)
        self._asked.clear()

    def _heed_readers(self, out: Out) -> None:
        rows, room = self._rows, out.room
        for sequence in rows.sequences[rows.writing - 1 :: -1] if rows.writing else ():
            if sequence is not None and not room(sequence.rid):
                rows.stand(sequence)
                self._standing.append(sequence)
        if self._standing:
            came = [one for one in self._standing if one.state == State.STANDING and room(one.rid)]
            for sequence in came:
                rows.join(sequence)
            self._standing = [one for one in self._standing if one.state == State.STANDING]

    def _begin(self, sequence: Sequence) -> None:
        self._drawing.begin(sequence)
        if self._options.prefix_cache:
            begin_row(self._rows, sequence)
        else:
            self._rows.take(sequence)

    def _compute(self, plan: Plan, shares: list[Reading], out: Out) -> np.ndarray | None:
        """None when the step failed, and whoever must has been failed. The cache has nothing of such a step
        that the next does not write again."""
        try:
            logits = self._model.forward(plan)
        except Exception as error:
            end_if_lost(error)
            if is_out_of_memory(error):
                self._shed(plan, shares, out)
                return None
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                raise
            log.exception("a step of %d tokens failed", len(plan.tokens))
            for sequence in self._of_step(plan, shares):
                self._fail(sequence, out, Kind.INTERNAL, explain(error))
            return None
        self._faults = 0
        self._steps += 1
        if self._step_tokens < self._options.step_tokens and self._steps % STEPS_BETWEEN_TRIES == 0:
            self._step_tokens += 1
        return logits

    def _shed(self, plan: Plan, shares: list[Reading], out: Out) -> None:
        """Memory to compute in is short: read less at a time; where that is all there is to save, the last
        to come of the lowest priority goes."""
        count_shortage()
        read = len(plan.tokens) - plan.writing
        if read > 1:
            self._step_tokens = max(1, read // 2)
            log.warning("no memory for a step of %d tokens: prompts are read more slowly", len(plan.tokens))
            return
        last = max(self._of_step(plan, shares), key=lambda one: (one.priority, one.number))
        log.error("no memory for a step of %d sequences: one of them fails", len(plan.tokens))
        self._fail(last, out, Kind.RESOURCE_EXHAUSTED, "the model has no memory left to compute this in")

    def _of_step(self, plan: Plan, shares: list[Reading]) -> list[Sequence]:
        writing = [one for one in self._rows.sequences[: plan.writing] if one is not None]
        return writing + [share.sequence for share in shares]

    def _advance(self, plan: Plan, shares: list[Reading], logits: np.ndarray, out: Out) -> None:
        rows, read = self._rows, [share.sequence for share in shares if share.draws]
        slots = np.concatenate((rows.slots[: plan.writing], np.array([one.slot for one in read], np.int32)))
        tokens = self._drawing.draw(logits, slots)
        rows.advance(plan)
        self._drawing.score(shares, logits[len(slots) :])
        writers = [one for one in rows.sequences[: plan.writing] if one is not None]
        ended = self._drawing.tell(writers + read, tokens, logits, out)
        rows.tokens[[one.row for one in writers + read]] = tokens
        for sequence, finish in reversed(ended):
            self._end(sequence, proven=finish != Finish.FAILED)
        for sequence in read:
            if sequence.state == State.READING:
                rows.join(sequence)
        if plan.pooled is not None:
            self._pool(shares, out)

    def _pool(self, shares: list[Reading], out: Out) -> None:
        """Hidden states to whose they are; a prompt that is read to its end ends with its vector."""
        states, at = self._model.states(), 0
        for share in shares:
            sequence, pool = share.sequence, share.sequence.pool
            if pool is None:
                continue
            count = len(pool.places(share.chunk, last=share.last))
            pool.add(states[at : at + count])
            at += count
            if share.last:
                finish, extra = tell_vector(pool.vector())
                self._end(sequence, proven=finish != Finish.FAILED)
                out.end(sequence.rid, finish, extra)

    def _fail(self, sequence: Sequence, out: Out, kind: Kind, words: str) -> None:
        self._end(sequence)
        out.end(sequence.rid, Finish.FAILED, write_text(Extra(message=words, kind=kind.value)))

    def _end(self, sequence: Sequence, *, proven: bool | None = None) -> None:
        if sequence.state == State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._rows.release(sequence, proven=sequence.drawn > 0 if proven is None else proven)
            self._drawing.end(sequence)
        sequence.state = State.ENDED
        self._pooled -= sequence.pool is not None
        del self._sequences[sequence.rid]


def _read_prompt(request: TextRequest) -> np.ndarray:
    try:
        return np.array(request.ids, np.int32)
    except (OverflowError, ValueError, TypeError):
        raise invalid("prompt: allowed: token ids, integers of 32 bits") from None
