"""A model without weights: the next token is a hash of all that its row of the cache holds. A row that was
mixed up, moved too short or left with NaN shows in the tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from fastserve.backends.llm.protocols import StepPlan

VOCAB = 50
POISON = VOCAB - 1
"""A token whose keys and values are NaN."""


def next_token(said: list[int]) -> int:
    """Return the token that the scripted model says after these; never POISON."""
    return zlib.crc32(np.array(said, np.int64).tobytes()) % (VOCAB - 1)


def next_repeated(said: list[int]) -> int:
    """Return a token that mostly depends on the last two alone, of a small alphabet: texts repeat themselves,
    and now and then go another way."""
    turns = zlib.crc32(np.array(said, np.int64).tobytes()) % 20 == 0
    return next_token(said if turns else said[-2:]) % 12


def continue_plainly(
    prompt: list[int], count: int, tell: Callable[[list[int]], int] = next_token
) -> list[int]:
    """The oracle: one sequence, alone."""
    said = list(prompt)
    for _ in range(count):
        said.append(tell(said))
    return said[len(prompt) :]


class ScriptedModel:
    """`room` is the most tokens of a step it has memory for; `fault` is raised by the next step; `soft` gives
    other tokens logits of their own, too."""

    def __init__(
        self,
        rows: int,
        positions: int,
        tell: Callable[[list[int]], int] = next_token,
        *,
        soft: bool = False,
    ) -> None:
        self.tell, self.soft = tell, soft
        self.data = np.zeros((rows, positions))
        self.cache = self
        self.room = 1 << 30
        self.fault: Exception | None = None
        self.plans: list[StepPlan] = []

    def move(self, source: int, target: int, count: int) -> None:
        self.data[target, :count] = self.data[source, :count]

    def swap(self, one: int, other: int, count: int) -> None:
        self.data[[one, other], :count] = self.data[[other, one], :count]

    def wipe(self, row: int, count: int, begin: int = 0) -> None:
        self.data[row, begin:count] = 0

    def forward(self, plan: StepPlan) -> np.ndarray:
        self.plans.append(plan)
        owners = list(range(plan.writing))
        for chunk in plan.chunks:
            owners += [chunk.row] * chunk.count
        assert len(plan.tokens) == len(plan.positions) == len(owners)
        self.data[owners, plan.positions] = np.where(plan.tokens == POISON, np.nan, plan.tokens)
        if self.fault is not None or len(owners) > self.room:
            raise self.fault or MemoryError
        logits = np.zeros((len(plan.wanted), VOCAB), np.float32)
        for row, at in zip(logits, plan.wanted.tolist(), strict=True):
            held = self.data[owners[at]]
            if np.isnan(held).any():  # what is masked is multiplied, too
                row[:] = np.nan
            else:
                said = held[: plan.positions[at] + 1].astype(int).tolist()
                if self.soft:
                    row[:] = np.random.default_rng([7, *said[-4:]]).normal(size=VOCAB)
                row[self.tell(said)] = 3 if self.soft else 9
        return logits

    def states(self) -> np.ndarray:
        """Return the contents of each of these places, and where it is."""
        plan = self.plans[-1]
        assert plan.pooled is not None
        return np.stack((plan.tokens, plan.positions), 1)[plan.pooled].astype(np.float32)

    def close(self) -> None:
        self.data = np.zeros((0, 0))
