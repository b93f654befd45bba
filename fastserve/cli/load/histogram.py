"""A latency histogram of fixed size and fixed precision: nothing is sampled, nothing is averaged away.

A value of N bits keeps its leading 7: buckets are at most 1/64 wide relative to their value, so a
percentile is right within 1.6 %, from 1 ns to hours, in a few thousand counters.
"""

from __future__ import annotations

from collections.abc import Mapping

KEPT_BITS = 7
HALF = 1 << (KEPT_BITS - 1)  # of a doubling's values have their leading bit set


def bucket_of(value_ns: int) -> int:
    """Values below 2 * HALF have a bucket each; from there on HALF buckets for every doubling."""
    spare = max(0, value_ns.bit_length() - KEPT_BITS)
    return spare * HALF + (value_ns >> spare)


def floor_of(bucket: int) -> int:
    """The least value of a bucket, in ns."""
    spare = max(0, bucket // HALF - 1)
    return (bucket - spare * HALF) << spare


class Histogram:
    """Counts of latencies in ns."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    def add(self, value_ns: int) -> None:
        bucket = bucket_of(value_ns)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def merge(self, other: Mapping[int, int]) -> None:
        for bucket, count in other.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def percentile(self, percent: float) -> float:
        """The latency in ns that `percent` of the requests stayed under; 0 when there were none."""
        wanted = self.total * percent / 100
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return (floor_of(bucket) + floor_of(bucket + 1)) / 2
        return 0.0

    def mean(self) -> float:
        """Mean latency in ns, from the middles of the buckets."""
        weighted = sum((floor_of(b) + floor_of(b + 1)) / 2 * n for b, n in self.counts.items())
        return weighted / max(1, self.total)
