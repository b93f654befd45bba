"""Sampling, slow and plain: numpy in float64, everything sorted.

`margin` says how near a decision was: the least distance of a cumulated probability from a deciding bound,
or ten times that of two surprises between which a set ends: they are rounded a tenth as much as sums are.
A float32 implementation may decide otherwise within its rounding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
MASK = (1 << 64) - 1


def uniform(seed: int, step: int) -> float:
    """splitmix64 of a counter."""
    z = (seed + (step + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


@dataclass
class PlainSequence:
    """One sequence: its settings, what was seen of its prompt and what it has drawn."""

    seed: int = 0
    step: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: set[int] = field(default_factory=set)
    drawn: Counter[int] = field(default_factory=Counter)
    margin: float = 1.0

    def draw(self, row: NDArray[np.float32]) -> int:
        self.margin = 1.0
        logits = self.penalise(row.astype(np.float64))
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            return -1
        token = self._choose(logits) if self.do_sample else int(logits.argmax())
        self.step += 1
        self.drawn[token] += 1
        return token

    def penalise(self, logits: Row) -> Row:
        for token in self.prompt | set(self.drawn):
            value = logits[token]
            value = value / self.repetition_penalty if value > 0 else value * self.repetition_penalty
            count = self.drawn[token]
            logits[token] = value - self.frequency_penalty * count - (self.presence_penalty if count else 0)
        return logits

    def _choose(self, logits: Row) -> int:
        weights = np.exp((logits - logits.max()) / self.temperature)
        order = np.lexsort((np.arange(len(weights)), -weights))
        order = order[weights[order] > 0]
        if 0 < self.top_k < len(logits):
            order = order[: self.top_k]
        if self.top_p < 1:
            order = self._least(order, weights[order], self.top_p)
        if self.min_p > 0:
            near = np.abs(weights[order] - self.min_p)
            self.margin = min(self.margin, float(near[near > 0].min(initial=1.0)))
            order = order[weights[order] >= self.min_p]
        if self.typical_p < 1:
            share = weights[order] / weights[order].sum()
            surprise = np.abs(-np.log(share) - -(share * np.log(share)).sum())
            nearest = np.lexsort((order, surprise))
            kept = self._least(order[nearest], weights[order[nearest]], self.typical_p)
            self._look_around(len(kept), surprise[nearest], weights[order[nearest]])
            order = kept
        left = np.sort(order)
        return int(left[self._reached(weights[left], uniform(self.seed, self.step))])

    def _least(self, order: NDArray[np.intp], weights: Row, share: float) -> NDArray[np.intp]:
        """The fewest of the first whose mass is at least that share."""
        sums = np.cumsum(weights) / weights.sum()
        self.margin = min(self.margin, float(np.abs(sums - share).min()))
        return order[: int((sums < share).sum()) + 1]

    def _look_around(self, kept: int, surprise: Row, weights: Row) -> None:
        """The last that stays, against its neighbours in the order: one of the same weight may be as near."""
        for left in range(max(kept - 2, 0), min(kept, len(surprise) - 1)):
            if weights[left] != weights[left + 1]:
                self.margin = min(self.margin, 10 * float(surprise[left + 1] - surprise[left]))

    def _reached(self, weights: Row, share: float) -> int:
        sums = np.cumsum(weights) / weights.sum()
        self.margin = min(self.margin, float(np.abs(sums[:-1] - share).min(initial=1.0)))
        return min(int((sums <= share).sum()), len(weights) - 1)
