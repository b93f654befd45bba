"""What a queue counts: one batch at a time, so that a request pays next to nothing for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastserve.metrics import names
from fastserve.metrics.registry import Registry

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

# A rate measured over this long decides Retry-After.
RATE_WINDOW_NS = 1_000_000_000
LONGEST_RETRY_S = 30.0


class QueueMeters:
    """The meters of one version in one front process."""

    def __init__(
        self, registry: Registry, model: str, version: int, max_delay_ns: int, max_rows: int
    ) -> None:
        who = (model, version)
        self._queue = registry.histograms(names.QUEUE_DURATION).of(*who)
        self._form = registry.histograms(names.BATCH_FORM_DURATION).of(*who)
        self._compute = registry.histograms(names.COMPUTE_DURATION).of(*who)
        self._rows = registry.histograms(names.BATCH_SIZE).of(*who)
        self._rows_total = registry.counters(names.ROWS).of(*who)
        self._padding = registry.counters(names.PADDING_ROWS).of(*who)
        self._batches = {c: registry.counters(names.BATCHES).of(*who, c) for c in names.SEAL_CAUSES}
        self._rejects = {c: registry.counters(names.REJECTS).of(*who, c) for c in names.REJECT_CAUSES}
        self._cancels = {s: registry.counters(names.CANCELS).of(*who, s) for s in names.CANCEL_STAGES}
        self._max_rows = max_rows
        self._waits = "due" if max_delay_ns else "idle"
        self._window_ns = time.monotonic_ns()
        self._window_rows = 0
        self._rows_per_s = 0.0

    def batch_done(self, ring: BatchRing, slot: int) -> None:
        """Record a published batch, unless another front has; called while its slot is still held."""
        first, taken, run, _, done = ring.times_ns(slot)
        _, rows, live, _ = ring.describe(slot)
        self._count_rate(done, rows)
        if not ring.count_once(slot):
            return
        if first:
            self._queue.observe_ns(max(taken - first, 0))
            self._form.observe_ns(max(taken - first, 0))
        self._compute.observe_ns(max(done - (run or taken), 0))
        self._rows.observe(rows)
        self._rows_total.add(rows)
        if live < rows:
            self._padding.add(rows - live)
        self._batches["full" if rows >= self._max_rows else self._waits].add()

    def rejected(self, cause: str) -> None:
        """A request was turned away before it ran."""
        self._rejects[cause].add()

    def cancelled(self, stage: str) -> None:
        """A client left while its request was queued or running."""
        self._cancels[stage].add()

    def seconds_for(self, rows: int) -> float:
        """How long `rows` queued rows will take at the measured rate: what Retry-After says."""
        return min(max(rows / self._rows_per_s, 1.0), LONGEST_RETRY_S) if self._rows_per_s else 1.0

    def _count_rate(self, now_ns: int, rows: int) -> None:
        self._window_rows += rows
        elapsed = now_ns - self._window_ns
        if elapsed >= RATE_WINDOW_NS:
            self._rows_per_s = self._window_rows * 1e9 / elapsed
            self._window_ns, self._window_rows = now_ns, 0
