"""Which sequence lies in which row of the cache. Rows that write are packed in front:

    0 ... writing-1 | writing ...
    write           | read, stand still, or are free

A row changes its place by an exchange with another; a row that is free may still hold what its last sequence
left (`keep`), for prompts that begin alike.
"""

from __future__ import annotations

import numpy as np

from fastserve.backends.text.model import Cache, Plan
from fastserve.backends.text.sequence import Sequence, State


class Rows:
    """`tokens[r]` is the next one to compute of a row, `lengths[r]` how many positions it has in the cache,
    `slots[r]` its slot of the sampler. `ids` are the tokens of those positions, where rows are kept."""

    def __init__(self, count: int, cache: Cache, keep_tokens: int = 0) -> None:
        self.sequences: list[Sequence | None] = [None] * count
        self.writing = 0
        self.free = count
        self.tokens = np.zeros(count, np.int64)
        self.lengths = np.zeros(count, np.int64)
        self.slots = np.zeros(count, np.int32)
        self.ids = np.full((count, keep_tokens), -1, np.int32)
        self.freed = np.zeros(count, np.int64)
        """When a free row was left: the lower, the longer ago."""
        self._cache = cache
        self._keep = keep_tokens > 0
        self._clock = 0

    def take(self, sequence: Sequence, row: int = -1) -> None:
        """A row for a sequence that begins: the one given, or a free one with the least to lose, the nearest
        to those that write. It holds nothing that is the sequence's yet."""
        if row < 0:
            free = [at for at in range(self.writing, len(self.sequences)) if self.sequences[at] is None]
            row = min(free, key=lambda at: (self.lengths[at] > 0, self.freed[at])) if self._keep else free[0]
            self.lengths[row] = 0
        self.sequences[row], self.slots[row] = sequence, sequence.slot
        sequence.row, sequence.state = row, State.READING
        self.free -= 1

    def join(self, sequence: Sequence) -> None:
        """It writes from now on."""
        self._swap(sequence.row, self.writing)
        self.writing += 1
        sequence.state = State.WRITING

    def stand(self, sequence: Sequence) -> None:
        """It writes no longer."""
        self.writing -= 1
        self._swap(sequence.row, self.writing)
        sequence.state = State.STANDING

    def release(self, sequence: Sequence, *, proven: bool) -> None:
        """The row is free. Unless it is `proven` that what it holds has led to numbers, it is wiped."""
        if sequence.row < self.writing:
            self.stand(sequence)
        row = sequence.row
        if not proven:
            self._cache.wipe(row, int(self.lengths[row]))
        if not (proven and self._keep):
            self.lengths[row] = 0
        self._clock += 1
        self.freed[row] = self._clock
        self.sequences[row], sequence.row = None, -1
        self.free += 1

    def advance(self, plan: Plan) -> None:
        """What the plan computed is in the cache now."""
        if self._keep:
            at = np.arange(plan.writing)
            self.ids[at, self.lengths[: plan.writing]] = plan.tokens[: plan.writing]
        self.lengths[: plan.writing] += 1
        for chunk in plan.chunks:
            self.lengths[chunk.row] += chunk.count

    def copy(self, source: int, target: int, count: int) -> None:
        """The first `count` positions of a row begin another, too."""
        self._cache.move(source, target, count)
        self.ids[target, :count] = self.ids[source, :count]
        self.lengths[target] = count

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._swap_cached(a, b)
        for array in (self.tokens, self.lengths, self.slots, self.freed, self.ids):
            array[[a, b]] = array[[b, a]]
        self.sequences[a], self.sequences[b] = self.sequences[b], self.sequences[a]
        for row in (a, b):
            if (sequence := self.sequences[row]) is not None:
                sequence.row = row

    def _swap_cached(self, a: int, b: int) -> None:
        one, other = int(self.lengths[a]), int(self.lengths[b])
        if one and other:
            self._cache.swap(a, b, max(one, other))
        elif one:
            self._cache.move(a, b, one)
        elif other:
            self._cache.move(b, a, other)
