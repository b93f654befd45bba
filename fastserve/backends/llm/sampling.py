"""From logits to records: one call of the sampler for the whole batch, then a record for each sequence.

Biases of logits, and ends that may not come yet, are written into the rows before the sampler reads them and
taken back afterwards. Log probabilities are of the model's own distribution, before any setting, as
transformers' output_logits.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fastserve._ext.sampler import Sampler
from fastserve.backends.llm.grammars import Grammars
from fastserve.backends.llm.protocols import Out
from fastserve.backends.llm.scheduling import Prefill, TextSequence
from fastserve.codec.generation import Extra, Finish, Logprobs, Sampling, write_ranks, write_text
from fastserve.errors import Kind, invalid

NO_NUMBER = write_text(
    Extra(message="the model computed NaN, or nothing that can be drawn", kind=Kind.INTERNAL.value)
)


class BiasedRow:
    """Changes of one sequence to its row of logits, from before a token is drawn until afterwards."""

    def __init__(self, sequence: TextSequence, vocab: int) -> None:
        bias = sequence.sampling.logit_bias
        self._sequence = sequence
        self._tokens = np.fromiter(bias, np.int64, len(bias))
        self._values = np.fromiter(bias.values(), np.float32, len(bias))
        ends = [token for token in sequence.ends if token < vocab]
        self._ends = np.array(ends if sequence.sampling.min_new_tokens else [], np.int64)
        self._touched = np.union1d(self._tokens, self._ends)

    @staticmethod
    def is_needed(sampling: Sampling) -> bool:
        """Return whether settings change the row at all."""
        return bool(sampling.logit_bias) or sampling.min_new_tokens > 0

    def add(self, row: np.ndarray) -> np.ndarray:
        """Change the row; return what `take_back` needs."""
        before = row[self._touched]
        row[self._tokens] += self._values
        if self._sequence.drawn < self._sequence.sampling.min_new_tokens:
            row[self._ends] = -np.inf
        return before

    def take_back(self, row: np.ndarray, before: np.ndarray) -> None:
        """Give the row its own logits again."""
        row[self._touched] = before


class BatchSampler:
    """Slots of the sampler, one for each sequence; the last one is for checking settings."""

    def __init__(self, sampler: Sampler, slots: int, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._sampler: Any = sampler  # numpy's stubs know no Buffer before Python 3.12
        self._free = list(range(slots))
        self._spare = slots
        self._tokens = np.zeros(slots, np.int32)
        self._biased: dict[int, BiasedRow] = {}

    def check(self, sequence: TextSequence) -> None:
        """Check the settings of a sequence. Raises ServeError for invalid ones."""
        bias = sequence.sampling.logit_bias
        if bias and not (min(bias) >= 0 and max(bias) < self._sampler.vocab):
            raise invalid(f"logit_bias: allowed: tokens from 0 to {self._sampler.vocab - 1}")
        try:
            self._begin(self._spare, sequence.sampling)
        except (ValueError, OverflowError) as error:
            raise invalid(str(error)) from None

    def begin(self, sequence: TextSequence) -> None:
        """Take a slot for a sequence."""
        sequence.slot = self._free.pop()
        self._begin(sequence.slot, sequence.sampling)
        self._sampler.see(sequence.slot, sequence.prompt)
        if BiasedRow.is_needed(sequence.sampling):
            self._biased[sequence.slot] = BiasedRow(sequence, self._sampler.vocab)
        if sequence.grammar is not None and self._grammars is not None:
            self._grammars.begin(sequence.slot, sequence.grammar)

    def end(self, sequence: TextSequence) -> None:
        """Free the slot of a sequence."""
        if sequence.grammar is not None and self._grammars is not None:
            self._grammars.end(sequence.slot)
        self._biased.pop(sequence.slot, None)
        self._free.append(sequence.slot)
        sequence.slot = -1

    def draw(self, logits: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Sample a token for each slot, from the row of logits at its place; -1 where there is none. The
        array is valid until the next call."""
        tokens = self._tokens[: len(slots)]
        if not len(slots):
            return tokens
        masks = self._grammars.masks(slots.tolist()) if self._grammars is not None else None
        if self._biased:
            self._draw_biased(logits, slots, tokens, masks)
        else:
            self._sampler.draw(logits, slots, tokens, masks)
        if masks is not None and self._grammars is not None:
            self._grammars.consume(slots.tolist(), tokens.tolist())
        return tokens

    def _draw_biased(
        self, logits: np.ndarray, slots: np.ndarray, tokens: np.ndarray, masks: np.ndarray | None
    ) -> None:
        found = [
            (row, biased)
            for row, slot in zip(logits, slots.tolist(), strict=False)
            if (biased := self._biased.get(slot)) is not None
        ]
        before = [biased.add(row) for row, biased in found]
        self._sampler.draw(logits, slots, tokens, masks)
        for (row, biased), values in zip(found, before, strict=True):
            biased.take_back(row, values)

    def tell(
        self, sequences: list[TextSequence], tokens: np.ndarray, logits: np.ndarray, out: Out
    ) -> list[tuple[TextSequence, Finish]]:
        """Send a record for each sequence; return those that have ended, and why."""
        now_ns, ended, going = time.monotonic_ns(), [], Finish.NONE
        for place, (sequence, token) in enumerate(zip(sequences, tokens.tolist(), strict=True)):
            if token < 0:
                out.end(sequence.rid, Finish.FAILED, self._no_token(sequence))
                ended.append((sequence, Finish.FAILED))
                continue
            took_us = (now_ns - sequence.last_ns) // 1000
            sequence.last_ns = now_ns
            sequence.drawn += 1
            finish = sequence.ends.get(token, going)
            if not finish and sequence.drawn >= sequence.limit:
                finish = Finish.LENGTH
            extra = b""
            if sequence.sampling.logprobs >= 0 or sequence.scores is not None:
                extra = self._extra(sequence, token, logits[place])
            out.token(sequence.rid, token, finish, took_us, extra)
            if finish:
                ended.append((sequence, finish))
        return ended

    def score(self, shares: list[Prefill], logits: np.ndarray) -> None:
        """Score the prompt's own tokens, where that was requested. `logits`: a row for each token of such
        chunks."""
        place = 0
        for share in shares:
            scores, prompt, one = share.sequence.scores, share.sequence.prompt, share.chunk
            if scores is None:
                continue
            best = share.sequence.sampling.prompt_best
            for at in range(one.start + 1, min(one.start + one.count + 1, len(prompt))):
                row, token = logits[place + at - one.start - 1], int(prompt[at])
                scored = self._score(row, token, max(best, 0))
                scores.append((token, None if scored is None else scored.own))
                if best >= 0:
                    rank = int(np.count_nonzero(row >= row[token]))
                    share.sequence.ranks.append((rank, [] if scored is None else scored.best))
            place += one.count

    def _no_token(self, sequence: TextSequence) -> bytes:
        said = self._grammars.fault_of(sequence.slot) if self._grammars is not None else ""
        if not said:
            return NO_NUMBER
        text = f"the grammar allows no token after {sequence.drawn}: {said}"
        return write_text(Extra(message=text, kind=Kind.RESOURCE_EXHAUSTED.value))

    def _score(self, row: np.ndarray, token: int, best: int) -> Logprobs | None:
        try:
            return self._logprobs(row, token, best)
        except ValueError:  # a NaN: the sequence fails when its first token is drawn
            return None

    def _extra(self, sequence: TextSequence, token: int, row: np.ndarray) -> bytes:
        best, scores, ranks = sequence.sampling.logprobs, sequence.scores, sequence.ranks
        sequence.scores, sequence.ranks = None, []
        own = self._logprobs(row, token, best) if best >= 0 else None
        return write_text(
            Extra(logprobs=own, prompt=scores, prompt_ranks=write_ranks(ranks) if ranks else b"")
        )

    def _logprobs(self, row: np.ndarray, token: int, best: int) -> Logprobs:
        return Logprobs(*self._sampler.logprobs(row, token, min(best, self._sampler.vocab)))

    def _begin(self, slot: int, sampling: Sampling) -> None:
        self._sampler.begin(
            slot,
            seed=sampling.seed & (2**64 - 1),
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            masked=sampling.grammar is not None,
        )
