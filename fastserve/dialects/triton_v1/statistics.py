"""What the status page counts of requests: by model version and batch size (spec 4). Per front process."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastserve.repository.version import Version


@dataclass(slots=True)
class Durations:
    """How many, and how long they took together."""

    count: int = 0
    total_ns: int = 0

    def add(self, took_ns: int) -> None:
        self.count += 1
        self.total_ns += took_ns


@dataclass(slots=True)
class BatchCounts:
    """Requests of one batch size."""

    success: Durations = field(default_factory=Durations)
    failed: Durations = field(default_factory=Durations)


@dataclass(slots=True)
class VersionCounts:
    """Requests of one loaded version; a version loaded again begins at nothing."""

    version: Version
    by_batch: dict[int, BatchCounts] = field(default_factory=dict)
    rows: int = 0
    last_ns: int = 0  # on the clock of time.monotonic_ns()

    def succeeded(self, batch_size: int, took_ns: int, now_ns: int) -> None:
        """One request was answered well."""
        (self.by_batch.get(batch_size) or self._add(batch_size)).success.add(took_ns)
        self.rows += batch_size
        self.last_ns = now_ns

    def failed(self, batch_size: int, took_ns: int) -> None:
        """One request that passed its checks was answered with an error."""
        (self.by_batch.get(batch_size) or self._add(batch_size)).failed.add(took_ns)

    def _add(self, batch_size: int) -> BatchCounts:
        found = self.by_batch[batch_size] = BatchCounts()
        return found


class Statistics:
    """The counts of every version asked for."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], VersionCounts] = {}
        self.control = Durations()
        self.health = Durations()
        self.status = Durations()
        self.repository = Durations()

    def of(self, version: Version) -> VersionCounts:
        """The counts of this version, at nothing when it is new."""
        key = (version.model, version.number)
        found = self._found.get(key)
        if found is None or found.version is not version:
            found = self._found[key] = VersionCounts(version)
        return found
