"""Batches on TensorFlow Serving's metrics page, under the names of its batching session (spec 6.5).

What every version counts anyway is read at a scrape, so that requests pay nothing; it is of all APIs and of
all front processes. Not here: `input_batch_size`, since rows of single requests are not counted.

The names have no model in them, and a counter must not fall when a version goes: what was last seen of it
is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from fastserve.dialects.tfserving.monitoring import Spread, write_histogram, write_series
from fastserve.engine import Counters, counters_of
from fastserve.metrics.spread import middle_ns
from fastserve.repository.model_config import round_up
from fastserve.repository.version import Version

SESSION = "/tensorflow/serving/batching_session/"
WAIT_BOUNDS_US = tuple(100 * 1.2**power for power in range(52))
SIZE_BOUNDS = tuple(2.0**power for power in range(14))
POOL = "batch_threads"
"""The original's name of threads that nobody has named."""


@dataclass(slots=True)
class Seen:
    """Runs by rows and by rows after filling up; requests by how long they waited (metrics.spread)."""

    runs: Counter[tuple[int, int]] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)
    waited_ns: int = 0

    def add(self, other: Seen) -> None:
        self.runs.update(other.runs)
        self.waits.update(other.waits)
        self.waited_ns += other.waited_ns


class Sessions:
    """What the versions of a server have run in batches."""

    def __init__(self) -> None:
        self._now: dict[Counters, Seen] = {}
        self._gone = Seen()

    def write(self, versions: Iterable[Version]) -> list[str]:
        """The lines, with these versions as those that are there; none before the first batch."""
        batching = [version for version in versions if version.batching and counters_of(version).queues]
        now = {counters_of(version): _look(version) for version in batching}
        for counters in self._now.keys() - now.keys():
            self._gone.add(self._now[counters])
        self._now = now
        total = Seen()
        for seen in chain([self._gone], now.values()):
            total.add(seen)
        return _write(total) if total.runs else []


def _look(version: Version) -> Seen:
    counters, sizes = counters_of(version), version.config.allowed_batch_sizes
    counts = counters.read()
    runs = {(batch.rows, round_up(batch.rows, sizes)): batch.runs for batch in counts.batches}
    waits = {bucket: count for bucket, count in enumerate(counters.spreads()[1]) if count}
    return Seen(Counter(runs), Counter(waits), counts.queue.ns)


def _write(total: Seen) -> list[str]:
    processed, padding = Spread(bounds=SIZE_BOUNDS), dict[int, Spread]()
    for (rows, filled), runs in sorted(total.runs.items(), key=lambda item: item[0][1]):
        processed.add(filled, runs)
        padding.setdefault(filled, Spread(bounds=SIZE_BOUNDS)).add(filled - rows, runs)
    waits = Spread(bounds=WAIT_BOUNDS_US)
    for bucket, count in total.waits.items():
        waits.add(middle_ns(bucket) / 1000, count)
    waits.total = total.waited_ns / 1000  # exact, where the buckets are within 3 %
    padded = [({"execution_batch_size": str(size)}, spread) for size, spread in padding.items()]
    return [
        *write_series(SESSION + "wrapped_run_count", "counter", [({}, total.runs.total())]),
        *write_histogram(SESSION + "queuing_latency", WAIT_BOUNDS_US, [({"thread_pool_name": POOL}, waits)]),
        *write_histogram(SESSION + "processed_batch_size", SIZE_BOUNDS, [({}, processed)]),
        *write_histogram(SESSION + "padding_size", SIZE_BOUNDS, padded),
    ]
