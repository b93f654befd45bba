"""Quantiles of durations, over about the last minute, of counts in buckets that only ever grow.

bucket 0: less than 1024 ns; then sixteen for every doubling (ext/include/counters.h: spread_bucket), so that
a quantile is within 3 % of the duration it stands for
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, nan

BUCKETS = 512
FIRST_POWER, PER_DOUBLING = 10, 16
WINDOW_NS = 60_000_000_000


def bucket_of(ns: int) -> int:
    """Return the bucket of a duration."""
    if ns < 1 << FIRST_POWER:
        return 0
    power = ns.bit_length() - 1
    bucket = (power - FIRST_POWER) * PER_DOUBLING + (ns >> (power - 4) & (PER_DOUBLING - 1)) + 1
    return min(bucket, BUCKETS - 1)


def middle_ns(bucket: int) -> float:
    """Return the middle of a bucket."""
    if bucket == 0:
        return (1 << FIRST_POWER) / 2
    doubling, part = divmod(bucket - 1, PER_DOUBLING)
    return (PER_DOUBLING + part + 0.5) * 2.0 ** (FIRST_POWER + doubling - 4)


def read_buckets(spreads: Sequence[bytes]) -> array[int]:
    """Return the sum of spreads in an arena's form."""
    total = array("Q", bytes(8 * BUCKETS))
    for spread in spreads:
        total = array("Q", map(int.__add__, total, array("Q", spread)))
    return total


def quantiles_ns(counts: Sequence[int], ranks: Sequence[float]) -> list[float]:
    """Return the durations at these ranks from 0 to 1, nan when nothing was counted."""
    sums = list(accumulate(counts))
    total = sums[-1] if sums else 0
    if not total:
        return [nan] * len(ranks)
    return [middle_ns(bisect_left(sums, max(ceil(rank * total), 1))) for rank in ranks]


@dataclass(slots=True)
class SpreadWindow:
    """Growth of counts over about the last minute.

    Each call keeps its counts; of calls more than a minute before, the last is the reference.
    """

    clock: Callable[[], int] = time.monotonic_ns
    _seen: deque[tuple[int, array[int]]] = field(default_factory=deque)

    def growth(self, counts: array[int]) -> list[int]:
        """Return the growth of each count, and keep nothing."""
        old = self._seen[0][1] if self._seen else array("Q", bytes(8 * len(counts)))
        return [max(new - before, 0) for new, before in zip(counts, old, strict=True)]

    def since(self, counts: array[int]) -> list[int]:
        """Return the growth of each count, and keep the counts."""
        now = self.clock()
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_NS:
            self._seen.popleft()
        if not self._seen:  # in the first minute, everything there was
            self._seen.append((now, array("Q", bytes(8 * len(counts)))))
        self._seen.append((now, counts))
        return self.growth(counts)
