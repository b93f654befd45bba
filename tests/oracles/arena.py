"""A whole arena, slow and plain: batches of places, who holds which page, who died. No memory, no atomics.

Verbs are BatchRing's, for any front and worker. Places and batches are objects; a batch is one opening
of a slot. What the words, row tables and page words of a real arena say must follow from this.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class PlainPlace:
    """The rows of one request. `state`: reserved, committed, answered, or gone."""

    batch: PlainBatch
    front: int
    start: int
    rows: int
    state: str = "reserved"
    in_pages: int = 0
    out_pages: int = 0


@dataclass(eq=False)
class PlainBatch:
    """`state`: open, sealed, running, done or free. A sealed batch without unsettled rows is ready."""

    leases: list[PlainPlace] = field(default_factory=list)
    state: str = "open"
    reserved: int = 0
    settled: int = 0
    worker: int = -1
    attempts: int = 0
    failed: bool = False


class PlainArena:
    """The arena's verbs in plain Python."""

    def __init__(self, slots: int, max_rows: int, max_attempts: int) -> None:
        self.slots, self.max_rows, self.max_attempts = slots, max_rows, max_attempts
        self.batches: list[PlainBatch] = []
        self.loose = 0  # pages under lease that belong to a process, not to a place

    # --- fronts

    def reserve(self, front: int, rows: int) -> PlainPlace | None:
        batch = next((b for b in self.batches if b.state == "open"), None)
        if batch is not None and batch.reserved + rows > self.max_rows:
            batch.state, batch = "sealed", None
        if batch is None:
            if len(self.batches) == self.slots:
                return None
            batch = PlainBatch()
            self.batches.append(batch)
        lease = PlainPlace(batch, front, batch.reserved, rows)
        batch.leases.append(lease)
        batch.reserved += rows
        if batch.reserved == self.max_rows:
            batch.state = "sealed"
        return lease

    def commit(self, lease: PlainPlace) -> None:
        lease.state = "committed"
        lease.batch.settled += lease.rows

    def abandon(self, lease: PlainPlace) -> None:
        batch = lease.batch
        if batch.state == "open" and batch.reserved == lease.start + lease.rows:
            batch.leases.remove(lease)
            batch.reserved -= lease.rows
        else:
            batch.settled += lease.rows
        lease.state = "gone"
        self._leave(batch)

    def drop(self, lease: PlainPlace) -> bool:
        if lease.state != "committed":
            return False
        lease.state = "gone"
        self._leave(lease.batch)
        return True

    def release(self, lease: PlainPlace) -> None:
        if lease.state == "answered":
            lease.state, lease.in_pages, lease.out_pages = "gone", 0, 0
            self._free(lease.batch)

    # --- workers

    def take(self, worker: int) -> PlainBatch | None:
        ready = [b for b in self.batches if b.state == "sealed" and b.settled == b.reserved]
        opened = [b for b in self.batches if b.state == "open" and 0 < b.settled == b.reserved]
        for batch in (ready or opened)[:1]:
            batch.state, batch.worker, batch.attempts = "running", worker, batch.attempts + 1
            return batch
        return None

    def publish(self, batch: PlainBatch) -> bool:
        for lease in batch.leases:
            if lease.state == "committed":
                lease.state = "answered"
            elif lease.state == "gone":
                lease.in_pages = lease.out_pages = 0
        batch.state = "done"
        self._free(batch)
        return batch.state == "done"

    # --- the owner

    def worker_died(self, worker: int) -> tuple[int, int]:
        retried = failed = 0
        for batch in [b for b in self.batches if b.state == "running" and b.worker == worker]:
            if batch.attempts < self.max_attempts:
                batch.state = "sealed"
                self._leave(batch)
                retried += batch.state == "sealed"
            else:
                batch.failed, failed = True, failed + 1
                self.publish(batch)
        return retried, failed

    def reclaim_front(self, front: int) -> None:
        for batch in list(self.batches):
            for lease in [p for p in batch.leases if p.front == front]:
                if lease.state == "reserved":
                    batch.settled += lease.rows
                    lease.state = "gone"
                elif lease.state == "committed":
                    lease.state = "gone"
                else:
                    self.release(lease)
            self._leave(batch)

    # --- looking at it

    @property
    def outstanding(self) -> int:
        return sum(batch.reserved for batch in self.batches)

    @property
    def queued(self) -> int:
        return sum(p.rows for p in self._waiting() if p.state == "committed")

    @property
    def waiting(self) -> int:
        return sum(p.rows for p in self._waiting())

    @property
    def pending(self) -> int:
        return sum(p.state == "committed" for p in self._waiting())

    @property
    def pages(self) -> int:
        held = sum(p.in_pages + p.out_pages for b in self.batches for p in b.leases)
        return held + self.loose

    def _waiting(self) -> list[PlainPlace]:
        """Places that are written, or wait for a worker, and that somebody wants."""
        waiting = [b for b in self.batches if b.state in ("open", "sealed")]
        return [p for b in waiting for p in b.leases if p.state != "gone"]

    def _leave(self, batch: PlainBatch) -> None:
        """A batch that nobody is in any more is no batch."""
        settled = 0 < batch.reserved == batch.settled
        if settled and batch.state in ("open", "sealed") and all(p.state == "gone" for p in batch.leases):
            batch.state = "free"
            self.batches.remove(batch)

    def _free(self, batch: PlainBatch) -> None:
        if batch.state == "done" and all(lease.state == "gone" for lease in batch.leases):
            batch.state = "free"
            self.batches.remove(batch)
