"""What the status page says of requests (spec 4): by model version and batch size.

How many there were of each batch size, and how long they took, is counted here, in each front process; what
they were about in the engine is known of all of them together (`engine.counters`), and shared out evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fastserve.engine import Took, counts_of
from fastserve.repository.version import Version

# Parts of a successful request, by InferRequestStats' names.
STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class BatchCounts:
    """Requests of one batch size."""

    success: Took = field(default_factory=Took)
    failed: Took = field(default_factory=Took)


@dataclass(slots=True)
class VersionCounts:
    """Requests of one loaded version; a version loaded again begins at nothing."""

    version: Version
    by_batch: dict[int, BatchCounts] = field(default_factory=dict)

    def of(self, batch_size: int) -> BatchCounts:
        """The counts of one batch size."""
        found = self.by_batch.get(batch_size)
        if found is None:
            found = self.by_batch[batch_size] = BatchCounts()
        return found


@dataclass(frozen=True, slots=True)
class Shown:
    """What a version's status says. `stats` are the durations of InferRequestStats by batch size."""

    executions: int
    inferences: int
    last_ms: int
    stats: dict[int, dict[str, Took]]


class Statistics:
    """The counts of every version asked for."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], VersionCounts] = {}
        self.control = Took()
        self.health = Took()
        self.status = Took()
        self.repository = Took()

    def of(self, version: Version) -> VersionCounts:
        """The counts of this version, at nothing when it is new."""
        key = (version.model, version.number)
        found = self._found.get(key)
        if found is None or found.version is not version:
            found = self._found[key] = VersionCounts(version)
        return found

    def show(self, version: Version) -> Shown:
        """All there is to say of a version."""
        known, sizes = counts_of(version), self.of(version).by_batch
        means = {stage: getattr(known, stage).ns / max(known.success.count, 1) for stage in STAGES}
        stats = {size: dict(_durations(counts, means)) for size, counts in sizes.items()}
        return Shown(known.executions, known.inferences, known.last_ms, stats)


def _durations(counts: BatchCounts, means: dict[str, float]) -> Iterator[tuple[str, Took]]:
    count = counts.success.count
    yield "success", counts.success
    yield "failed", counts.failed
    shares = {stage: Took(count, round(mean * count)) for stage, mean in means.items()}
    yield from shares.items()
    yield "compute", Took(count, sum(shares[stage].ns for stage in STAGES[1:]))
