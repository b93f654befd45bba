"""From logits to records: one call of the sampler for the whole batch, then a record for each sequence.

Log probabilities are of the model's own distribution, before any setting, as transformers' output_logits.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fastserve._ext.sampler import Sampler
from fastserve.backends.llm.protocols import Out
from fastserve.backends.llm.scheduling import Prefill, TextSequence
from fastserve.codec.generation import Extra, Finish, Logprobs, Sampling, write_text
from fastserve.errors import Kind, invalid

NO_NUMBER = write_text(
    Extra(message="the model computed NaN, or nothing that can be drawn", kind=Kind.INTERNAL.value)
)


class BatchSampler:
    """Slots of the sampler, one for each sequence; the last one is for checking settings."""

    def __init__(self, sampler: Sampler, slots: int) -> None:
        self._sampler: Any = sampler  # numpy's stubs know no Buffer before Python 3.12
        self._free = list(range(slots))
        self._spare = slots
        self._tokens = np.zeros(slots, np.int32)

    def check(self, sequence: TextSequence) -> None:
        """Check the settings of a sequence. Raises ServeError for invalid ones."""
        try:
            self._begin(self._spare, sequence.sampling)
        except (ValueError, OverflowError) as error:
            raise invalid(str(error)) from None

    def begin(self, sequence: TextSequence) -> None:
        """Take a slot for a sequence."""
        sequence.slot = self._free.pop()
        self._begin(sequence.slot, sequence.sampling)
        self._sampler.see(sequence.slot, sequence.prompt)

    def end(self, sequence: TextSequence) -> None:
        """Free the slot of a sequence."""
        self._free.append(sequence.slot)
        sequence.slot = -1

    def draw(self, logits: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Sample a token for each slot, from the row of logits at its place; -1 where there is none. The
        array is valid until the next call."""
        tokens = self._tokens[: len(slots)]
        if len(slots):
            self._sampler.draw(logits, slots, tokens)
        return tokens

    def tell(
        self, sequences: list[TextSequence], tokens: np.ndarray, logits: np.ndarray, out: Out
    ) -> list[tuple[TextSequence, Finish]]:
        """Send a record for each sequence; return those that have ended, and why."""
        now_ns, ended, going = time.monotonic_ns(), [], Finish.NONE
        for place, (sequence, token) in enumerate(zip(sequences, tokens.tolist(), strict=True)):
            if token < 0:
                out.end(sequence.rid, Finish.FAILED, NO_NUMBER)
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
            for at in range(one.start + 1, min(one.start + one.count + 1, len(prompt))):
                scores.append(self._score(logits[place + at - one.start - 1], int(prompt[at])))
            place += one.count

    def _score(self, row: np.ndarray, token: int) -> tuple[int, float | None]:
        try:
            return token, self._logprobs(row, token, 0).own
        except ValueError:  # a NaN: the sequence fails when its first token is drawn
            return token, None

    def _extra(self, sequence: TextSequence, token: int, row: np.ndarray) -> bytes:
        best, scores = sequence.sampling.logprobs, sequence.scores
        sequence.scores = None
        return write_text(
            Extra(logprobs=self._logprobs(row, token, best) if best >= 0 else None, prompt=scores)
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
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
        )
