"""The batch ring, slow and plain: lists of requests, no memory, no atomics.

What a ring must do, whatever the order of events: rows of one batch are consecutive and never more
than max_rows, batches run oldest first, and every committed place is answered exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Batch:
    """One opening of a slot."""

    leases: list[int] = field(default_factory=list)
    rows: int = 0
    sealed: bool = False


@dataclass
class PlainRing:
    """Places are numbered from 0 in the order of reservation."""

    max_rows: int
    slots: int
    batches: list[Batch] = field(default_factory=list)
    rows_of: list[int] = field(default_factory=list)
    state: list[str] = field(default_factory=list)

    def reserve(self, rows: int) -> int | None:
        batch = self.batches[-1] if self.batches and not self.batches[-1].sealed else None
        if batch is not None and batch.rows + rows > self.max_rows:
            batch.sealed = True
            batch = None
        if batch is None:
            if len(self._in_use()) >= self.slots:
                return None
            batch = Batch()
            self.batches.append(batch)
        lease = len(self.rows_of)
        self.rows_of.append(rows)
        self.state.append("reserved")
        batch.leases.append(lease)
        batch.rows += rows
        batch.sealed = batch.rows == self.max_rows
        return lease

    def take(self) -> list[int] | None:
        """The places of the oldest batch that is settled; None when there is none."""
        for batch in self.batches:
            states = {self.state[p] for p in batch.leases}
            if batch.leases and states == {"committed"}:
                batch.sealed = True
                for lease in batch.leases:
                    self.state[lease] = "running"
                return list(batch.leases)
        return None

    def pending(self) -> int:
        """Requests that wait for a worker."""
        return self.state.count("committed")

    def runs(self, failed: set[int]) -> tuple[dict[int, int], int, int, int]:
        """Runs by the rows of their batch; requests answered well, their rows, and those that failed: a batch
        whose first place is in `failed` did as a whole."""
        by_rows: dict[int, int] = {}
        well = rows = badly = 0
        for batch in self.batches:
            if batch.leases and all(self.state[p] in ("answered", "released") for p in batch.leases):
                by_rows[batch.rows] = by_rows.get(batch.rows, 0) + 1
                if batch.leases[0] in failed:
                    badly += len(batch.leases)
                else:
                    well += len(batch.leases)
                    rows += batch.rows
        return by_rows, well, rows, badly

    def _in_use(self) -> list[Batch]:
        return [b for b in self.batches if any(self.state[p] != "released" for p in b.leases)]
