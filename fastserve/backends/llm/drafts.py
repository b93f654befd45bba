"""Speculative decoding by prompt look-up: drafts of next tokens, verified by the step that computes them.

    find_drafts(rows, most, room)    before a step that reads no prompt: a draft for each row that has one
    make_draft_plan(rows, drafts)    its step: a token of each row, then each draft behind its row's token
    draft.next_round(token)          whether the next token may be drawn from what the step computed already

A draft copies what followed the last tokens where they occurred before, in the prompt or the answer. It is a
chunk of its row, right behind the row's own token:

    row 0     ... a b c . . . a b [c] . .        its last token c is computed in any step
    draft                             d e f      followed a b c before: computed beside it

From the logits of c a token is drawn, as without a draft: by the sequence's settings, with the next random
number of its seed. Where it is d, the logits of d are already there, and the next token is drawn from
them; and so on. The first token that differs from the draft is the sequence's token as well, so a step gives
one token at least. Rejected positions of the cache are overwritten by later tokens.

A sequence whose drafts are rejected gets shorter ones, then none for some steps: a token that is computed in
vain costs time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends import model_callbacks
from fastserve.backends.llm.protocols import Chunk, StepPlan
from fastserve.backends.llm.scheduling import Rows, TextSequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_ALIKE, MOST_ALIKE = 3, 4
"""Last tokens that have to occur before, and those that are compared at most: the longest match is used. With
2, twice as many drafts of prose were made, for as many accepted tokens."""
FIRST, LEAST = 4, 2
"""Tokens of a sequence's first draft, and of one after a failure."""
LONGEST_PAUSE = 16
"""Steps without a draft at most, after drafts of which nothing was accepted."""
TELL_NS = 500_000_000
"""Time between two reports of the counts, while sequences run."""


@dataclass(slots=True)
class DraftPace:
    """Length of a sequence's next draft. All accepted: twice as many; some: one more than were; none: half,
    and a pause, twice as long each time."""

    tokens: int = FIRST
    pause: int = 0
    """Steps without a draft after the last failure."""
    left: int = 0
    """Steps of the pause that are left."""

    def judge(self, drafted: int, accepted: int) -> None:
        """Record the fate of a draft."""
        if accepted:
            self.pause = 0
            self.tokens = 2 * drafted if accepted == drafted else max(LEAST, accepted + 1)
        else:
            self.tokens = max(LEAST, drafted // 2)
            self.pause = self.left = min(LONGEST_PAUSE, 2 * self.pause or 1)


@dataclass(slots=True)
class Draft:
    """Tokens of one sequence that are computed in advance. `first` is the place of their logits among those
    of all drafts of the step."""

    sequence: TextSequence
    tokens: list[int]
    first: int
    accepted: int = 0

    def next_round(self, token: int) -> bool:
        """Return whether the token that was drawn is the draft's next, whose logits are there."""
        return self.accepted < len(self.tokens) and token == self.tokens[self.accepted]


def find_drafts(rows: Rows, most: int, room: int) -> list[Draft]:
    """Return drafts for the rows that decode, of at most `most` tokens each and `room` in all."""
    found: list[Draft] = []
    first = 0
    for row, sequence in enumerate(rows.sequences[: rows.writing]):
        assert sequence is not None
        pace = sequence.drafts = sequence.drafts or DraftPace()
        count = min(
            most, pace.tokens, sequence.limit - sequence.drawn - 1, (room - first) // (rows.writing - row)
        )
        if pace.left:
            pace.left -= 1
        elif count > 0 and (tokens := find_draft(rows.said(row), count)):
            found.append(Draft(sequence, tokens, first))
            first += len(tokens)
    return found


def find_draft(said: NDArray[np.int32], count: int) -> list[int]:
    """Return `count` tokens that may follow: those behind the last place where the end of `said` occurred
    before, over again where it ends within them. None where it did not occur."""
    last = len(said) - 1
    places = np.flatnonzero(said[:last] == said[last])
    for back in range(1, MOST_ALIKE):
        longer = places[np.searchsorted(places, back) :]
        longer = longer[said[longer - back] == said[last - back]] if back <= last else longer[:0]
        if not len(longer) and back < LEAST_ALIKE:
            return []
        if not len(longer):
            break
        places = longer
    place = int(places[-1])
    tokens: list[int] = np.resize(said[place + 1 :], count).tolist()
    return tokens


def make_draft_plan(rows: Rows, drafts: list[Draft]) -> StepPlan:
    """Return the arrays of a step that reads no prompt. All logits are wanted: of the rows, then of the
    drafts."""
    writing, offset, chunks = rows.writing, rows.writing, []
    tokens: list[Any] = [rows.tokens[:writing]]
    positions, adapters = [rows.lengths[:writing]], [rows.adapters[:writing]]
    for draft in drafts:
        row, count = draft.sequence.row, len(draft.tokens)
        start = int(rows.lengths[row]) + 1
        chunks.append(Chunk(row, offset, count, start))
        tokens.append(draft.tokens)
        positions.append(np.arange(start, start + count))
        adapters.append(np.full(count, rows.adapters[row]))
        offset += count
    numbers = np.concatenate(adapters)
    return StepPlan(
        np.concatenate(tokens, dtype=np.int64),
        np.concatenate(positions, dtype=np.int64),
        writing,
        chunks,
        np.arange(offset),
        None,
        numbers if numbers.any() else None,
    )


class DraftCounts:
    """Tokens drafted and accepted since they were last reported to the server."""

    def __init__(self) -> None:
        self._drafted = self._accepted = self._told_ns = 0

    def add(self, drafts: list[Draft]) -> None:
        """Count the drafts of a step, once they are verified."""
        self._drafted += sum(len(draft.tokens) for draft in drafts)
        self._accepted += sum(draft.accepted for draft in drafts)

    def tell(self, now_ns: int, *, idle: bool) -> None:
        """Report the counts: now and then, and when no sequence is left."""
        if self._drafted and (idle or now_ns - self._told_ns >= TELL_NS):
            model_callbacks.notify("drafts", drafted=self._drafted, accepted=self._accepted)
            self._drafted = self._accepted = 0
            self._told_ns = now_ns
