"""What the status page says of requests (spec 4): by model version and batch size.

How many there were of each batch size, and how long they took, is counted here, in each front process; what
they were about in the engine is known of all of them together (`engine.counters`), and shared out evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from fastserve.engine import Took, VersionCounts
from fastserve.repository.version import Version

# Parts of a successful request, by InferRequestStats' names.
STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class BatchCounts:
    """Requests of one batch size."""

    success: Took = field(default_factory=Took)
    failed: Took = field(default_factory=Took)


class Counts(dict[int, BatchCounts]):
    """Requests of one loaded version by batch size."""

    def __missing__(self, batch_size: int) -> BatchCounts:
        found = self[batch_size] = BatchCounts()
        return found


class Statistics:
    """The counts of every version asked for; one that is loaded again begins at nothing."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Version, Counts] = WeakKeyDictionary()
        self.control = Took()
        self.health = Took()
        self.status = Took()
        self.repository = Took()

    def of(self, version: Version) -> Counts:
        """The counts of this version, at nothing when it is new."""
        return self._found.setdefault(version, Counts())


def durations(known: VersionCounts, counts: BatchCounts) -> Iterator[tuple[str, Took]]:
    """The fields of InferRequestStats, of requests of one batch size; `known` is of all to their version."""
    means = {stage: getattr(known, stage).ns / max(known.success.count, 1) for stage in STAGES}
    count = counts.success.count
    yield "success", counts.success
    yield "failed", counts.failed
    shares = {stage: Took(count, round(mean * count)) for stage, mean in means.items()}
    yield from shares.items()
    yield "compute", Took(count, sum(shares[stage].ns for stage in STAGES[1:]))
