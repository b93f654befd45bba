"""The batching engine: one thread, one batch, one step at a time; a protocols.TextEngine.

A step ends cancelled and late sequences, applies back-pressure (sequences whose readers are behind are
stalled, and resumed when they catch up), plans its tokens, computes, samples and sends records. The tokens
of a sequence depend on its request and its seed alone. There is no pre-emption: a sequence begins when a
row is free for all of it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fastserve._ext.sampler import Sampler
from fastserve.backends.llm.drafts import Draft, DraftCounts, find_drafts, make_draft_plan
from fastserve.backends.llm.grammars import Grammars
from fastserve.backends.llm.pooling import make_pool, tell_vector
from fastserve.backends.llm.protocols import Chunk, ModelRunner, Out, StepPlan, TextRequest
from fastserve.backends.llm.sampling import BatchSampler
from fastserve.backends.llm.scheduling import (
    DecodeState,
    Prefill,
    PrefillBudget,
    QueuedEngine,
    Rows,
    TextSequence,
    begin_row,
    make_plan,
    make_sequence,
    share_out,
)
from fastserve.backends.model_errors import count_out_of_memory, end_if_lost, explain, is_out_of_memory
from fastserve.codec.generation import Extra, Finish, Grammar, Info, write_text
from fastserve.errors import ConfigError, Kind, ServeError, invalid
from fastserve.settings.model_options import TextOptions

if TYPE_CHECKING:
    from fastserve.backends.llm.kv_cache import CacheSize

log = logging.getLogger(__name__)
FAULTS_MAX = 3
"""Consecutive steps that may fail before the engine counts as broken."""
COMPILE_NAP_S = 0.001
"""Wait for a grammar when nothing else can run."""
STEPS_BETWEEN_TRIES = 64
"""After an out-of-memory step, the prompt budget grows by one token every so many steps."""


class BatchEngine(QueuedEngine):
    """The engine of one model. Settings of the sampler are checked in a slot of its own."""

    def __init__(
        self,
        model: ModelRunner,
        info: Info,
        options: TextOptions,
        grammars: Grammars | None = None,
        *,
        drafts_alone: bool = False,
    ) -> None:
        """`grammars` have a slot more than the engine, as the sampler. `drafts_alone`: drafts are made only
        while one sequence decodes, for models that compute each draft in a call of its own."""
        super().__init__(options)
        self.info = msgspec.structs.replace(info, grammars=grammars is not None)
        self._grammars = grammars
        self._compiling: list[TextSequence] = []
        self._model, self._options = model, options
        self._drafted, self._drafts = options.prompt_lookup_num_tokens, DraftCounts()
        self._most_drafting = 1 if drafts_alone else info.slots
        keeps = options.prefix_cache or self._drafted
        self._rows = Rows(
            info.slots, model.cache, info.max_tokens if keeps else 0, keep_rows=options.prefix_cache
        )
        self._drawing = BatchSampler(Sampler(info.vocab_size, info.slots + 1), info.slots, grammars)
        self._eos = dict.fromkeys(info.eos_ids, Finish.EOS)
        self._standing: list[TextSequence] = []
        self._numbers = self._steps = self._faults = 0
        self._pooled = 0  # sequences that want an embedding
        self._step_tokens, self._pace = options.step_tokens, PrefillBudget(options.step_ms)

    def submit(self, request: TextRequest) -> None:
        """Queue a request. Raises ServeError for one that can never run, or when the queue is full."""
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
        if request.note.sampling.grammar is not None:
            self._compile(sequence, request.note.sampling.grammar)
        self._pooled += sequence.pool is not None
        self._numbers += 1
        sequence.number = self._numbers
        sequence.arrived_ns = sequence.last_ns = request.arrived_ns or time.monotonic_ns()
        self._add(sequence)

    def step(self, out: Out) -> bool:
        """Run one iteration; see TextEngine.step."""
        now_ns = time.monotonic_ns()
        self._end_due(out, now_ns)
        if self._compiling:
            self._look_at_grammars(out)
        self._apply_back_pressure(out)
        shares = share_out(self._rows, self._waiting, self._begin, self._room(), now_ns)
        if not shares and not self._rows.writing:
            return self._await_grammar()
        drafts = [] if shares or not self._drafted else self._find_drafts()
        plan = make_draft_plan(self._rows, drafts) if drafts else make_plan(self._rows, shares)
        logits = self._compute(plan, shares, out)
        if logits is not None:
            self._advance(plan, shares, drafts, logits, out)
            if not drafts:  # the estimates are of a token that is written by each sequence
                self._pace.took(plan.writing, len(plan.tokens) - plan.writing, time.monotonic_ns() - now_ns)
        if self._drafted:
            self._drafts.tell(now_ns, idle=not self._sequences)
        return True

    def close(self) -> None:
        """Free memory; sequences that have not ended get no record."""
        self._sequences.clear()
        if self._grammars is not None:
            self._grammars.close()
        self._model.close()

    def _compile(self, sequence: TextSequence, grammar: Grammar) -> None:
        """Begin to compile the grammar of a new sequence. Raises ServeError."""
        if self._grammars is None:
            raise ServeError(Kind.UNIMPLEMENTED, "this model has no grammars")
        sequence.grammar = self._grammars.compile(grammar)
        self._compiling.append(sequence)

    def _look_at_grammars(self, out: Out) -> None:
        """Fail the sequences whose grammars cannot be used."""
        here = [one for one in self._compiling if one.state != DecodeState.ENDED]
        compiled = [one for one in here if one.is_ready]
        self._compiling = [one for one in here if not one.is_ready]
        for sequence in compiled:
            fault = sequence.grammar.fault() if sequence.grammar is not None else None
            if fault is not None:
                self._fail(sequence, out, fault.kind, fault.message)

    def _await_grammar(self) -> bool:
        """Wait a little for the first grammar. Returns whether there is one."""
        first = self._compiling[0].grammar if self._compiling else None
        if first is not None:
            first.wait(COMPILE_NAP_S)
        return first is not None

    def _room(self) -> int:
        """Return the tokens of prompts for this step."""
        begun = self._rows.writing + len(self._standing)
        to_come = len(self._sequences) - begun - self._pooled
        return self._pace.room(self._step_tokens, self._rows.writing, min(to_come, self.info.slots - begun))

    def _apply_back_pressure(self, out: Out) -> None:
        rows, room = self._rows, out.room
        for sequence in rows.sequences[rows.writing - 1 :: -1] if rows.writing else ():
            if sequence is not None and not room(sequence.rid):
                rows.stand(sequence)
                self._standing.append(sequence)
        if self._standing:
            came = [one for one in self._standing if one.state == DecodeState.STALLED and room(one.rid)]
            for sequence in came:
                rows.join(sequence)
            self._standing = [one for one in self._standing if one.state == DecodeState.STALLED]

    def _begin(self, sequence: TextSequence) -> None:
        self._drawing.begin(sequence)
        if self._options.prefix_cache:
            begin_row(self._rows, sequence)
        else:
            self._rows.take(sequence)

    def _compute(self, plan: StepPlan, shares: list[Prefill], out: Out) -> np.ndarray | None:
        """Return the logits; None when the step failed, with its sequences. The next step overwrites all
        that a failed one wrote into the cache."""
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

    def _shed(self, plan: StepPlan, shares: list[Prefill], out: Out) -> None:
        """Reduce the work after an out-of-memory step: prefill fewer tokens at a time; without prefill, fail
        the newest sequence of the lowest priority."""
        count_out_of_memory()
        read = len(plan.tokens) - plan.writing
        if read > 1 or (read and not shares):  # without prompts these are drafts
            self._step_tokens = max(1, read // 2)
            log.warning("no memory for a step of %d tokens: prompts are read more slowly", len(plan.tokens))
            return
        last = max(self._of_step(plan, shares), key=lambda one: (one.priority, one.number))
        log.error("no memory for a step of %d sequences: one of them fails", len(plan.tokens))
        self._fail(last, out, Kind.RESOURCE_EXHAUSTED, "the model has no memory left to compute this in")

    def _find_drafts(self) -> list[Draft]:
        if self._rows.writing > self._most_drafting:
            return []
        return find_drafts(self._rows, self._drafted, self._step_tokens - self._rows.writing)

    def _of_step(self, plan: StepPlan, shares: list[Prefill]) -> list[TextSequence]:
        writing = [one for one in self._rows.sequences[: plan.writing] if one is not None]
        return writing + [share.sequence for share in shares]

    def _advance(
        self, plan: StepPlan, shares: list[Prefill], drafts: list[Draft], logits: np.ndarray, out: Out
    ) -> None:
        rows, read = self._rows, [share.sequence for share in shares if share.draws]
        slots = np.concatenate((rows.slots[: plan.writing], np.array([one.slot for one in read], np.int32)))
        tokens = self._drawing.draw(logits, slots)
        rows.advance(plan)
        self._drawing.score(shares, logits[len(slots) :])
        writers = [one for one in rows.sequences[: plan.writing] if one is not None]
        ended = self._drawing.tell(writers + read, tokens, logits, out)
        rows.tokens[[one.row for one in writers + read]] = tokens
        if drafts:
            ended += self._verify(drafts, logits[plan.writing :], {one.rid for one, _ in ended}, out)
        for sequence, finish in reversed(ended):
            self._end(sequence, proven=finish != Finish.FAILED)
        for sequence in read:
            if sequence.state == DecodeState.PREFILL:
                rows.join(sequence)
        if plan.pooled is not None:
            self._pool(shares, out)

    def _verify(
        self, drafts: list[Draft], logits: np.ndarray, ended: set[int], out: Out
    ) -> list[tuple[TextSequence, Finish]]:
        """Draw tokens from the logits of drafts, a round for each place of them, while what was drawn is the
        draft's; return the sequences that have ended, and why. Each round is drawn as a step of its own."""
        rows, found = self._rows, []
        going = drafts
        while going := [
            one
            for one in going
            if one.sequence.rid not in ended and one.next_round(int(rows.tokens[one.sequence.row]))
        ]:
            part = logits[[one.first + one.accepted for one in going]]
            sequences = [one.sequence for one in going]
            at = [one.row for one in sequences]
            tokens = self._drawing.draw(part, rows.slots[at])
            rows.tokens[at] = tokens
            for one in going:
                one.accepted += 1
            new = self._drawing.tell(sequences, tokens, part, out)
            ended |= {one.rid for one, _ in new}
            found += new
        for one in drafts:
            self._settle(one, logits)
        self._drafts.add(drafts)
        return found

    def _settle(self, draft: Draft, logits: np.ndarray) -> None:
        """Account for the accepted tokens of a draft. A rejected one leaves no NaN in the cache."""
        row, count, accepted = draft.sequence.row, len(draft.tokens), draft.accepted
        self._rows.accept(row, draft.tokens[:accepted])
        if np.isnan(logits[draft.first + accepted : draft.first + count, 0]).any():
            begin = int(self._rows.lengths[row])
            self._model.cache.wipe(row, begin + count - accepted, begin)
        if draft.sequence.drafts is not None:
            draft.sequence.drafts.judge(count, accepted)

    def _pool(self, shares: list[Prefill], out: Out) -> None:
        """Pool hidden states; a prompt that is read to its end gets its embedding and ends."""
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

    def _fail(self, sequence: TextSequence, out: Out, kind: Kind, words: str) -> None:
        self._end(sequence)
        out.end(sequence.rid, Finish.FAILED, write_text(Extra(message=words, kind=kind.value)))

    def _end(self, sequence: TextSequence, *, proven: bool | None = None) -> None:
        if sequence.state != DecodeState.WAITING:
            self._rows.release(sequence, proven=sequence.drawn > 0 if proven is None else proven)
            self._drawing.end(sequence)
        self._pooled -= sequence.pool is not None
        if sequence.grammar is not None and self._grammars is not None:
            self._grammars.release(sequence.grammar)
        super()._end(sequence)


def describe_engine(
    options: TextOptions, config: Any, room: CacheSize, ends: list[int], dtype: str, device: str
) -> Info:
    """Return the Info of a decoder with this config of transformers, or one with the same fields. Raises
    ConfigError."""
    prompt = min(options.max_prompt_tokens or room.tokens - 1, room.tokens - 1)
    if options.max_prompt_tokens > prompt:
        text = f"given {options.max_prompt_tokens}, allowed: at most {prompt}, one less than max_tokens"
        raise ConfigError(f"text.max_prompt_tokens: {text}")
    return Info(
        vocab_size=config.vocab_size,
        max_tokens=room.tokens,
        max_prompt_tokens=prompt,
        max_new_tokens=min(options.max_new_tokens, room.tokens - 1),
        slots=room.slots,
        kv_tokens=room.slots * room.tokens,
        eos_ids=ends,
        dtype=dtype,
        device=device,
        tokenizer=options.tokenizer,
        embeds=config.hidden_size if options.pooling else 0,
    )


def open_grammars(folder: Path, options: TextOptions, info: Info) -> Grammars | None:
    """Return the grammars of a decoder's engine; None where fronts have no tokenizer for it, and as
    Grammars.open."""
    if options.tokenizer != "folder":
        return None
    return Grammars.open(folder, info.vocab_size, info.eos_ids, info.slots + 1)


def try_model(model: ModelRunner, adapters: int = 0) -> None:
    """Run one step of each kind, and one of each adapter, so that a model that cannot run fails at load, and
    the first request does not wait for lazy set-up."""
    for number in range(adapters + 1):
        given = np.full(2, number) if number else None
        chunk = Chunk(0, 0, 2, 0)
        model.forward(
            StepPlan(np.zeros(2, np.int64), np.arange(2), 0, [chunk], np.array([1]), adapters=given)
        )
    model.forward(StepPlan(np.zeros(1, np.int64), np.array([2]), 1, [], np.zeros(1, np.int64)))
    model.cache.wipe(0, 3)


def _read_prompt(request: TextRequest) -> np.ndarray:
    try:
        return np.array(request.ids, np.int32)
    except (OverflowError, ValueError, TypeError):
        raise invalid("prompt: allowed: token ids, integers of 32 bits") from None
