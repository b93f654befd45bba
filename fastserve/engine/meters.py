"""What a queue counts: one batch at a time, so that a request pays next to nothing for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastserve.codec.text import Record
from fastserve.metrics import names
from fastserve.metrics.registry import Registry

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

# A rate measured over this long decides Retry-After.
RATE_WINDOW_NS = 1_000_000_000
LONGEST_RETRY_S = 30.0


class TextMeters:
    """What one front process counts of one version's sequences: where each is, and what became of it."""

    def __init__(self, registry: Registry, model: str, version: int) -> None:
        who = (model, version)
        self._first = registry.histograms(names.TEXT_FIRST_TOKEN).of(*who)
        self._gap = registry.histograms(names.TEXT_TOKEN_GAP).of(*who)
        self._prompt = registry.counters(names.TEXT_PROMPT_TOKENS).of(*who)
        self._tokens = registry.counters(names.TEXT_TOKENS).of(*who)
        self._ends = [registry.counters(names.TEXT_SEQUENCES).of(*who, how) for how in names.FINISHES[1:]]
        self._waiting = registry.gauges(names.TEXT_WAITING).of(*who)
        self._running = registry.gauges(names.TEXT_RUNNING).of(*who)
        self._kv = registry.gauges(names.TEXT_KV_USED).of(*who)

    def came(self) -> None:
        """A sequence waits for its first token."""
        self._waiting.add()

    def began(self, prompt: int, took_us: int) -> None:
        """It has its first token."""
        self._waiting.add(-1)
        self._running.add()
        self._prompt.add(prompt)
        self._kv.add(prompt)
        self._first.observe_ns(took_us * 1000)

    def read(self, prompt: int) -> None:
        """Its prompt is all that it was: a vector was made of it."""
        self._prompt.add(prompt)

    def went_on(self, records: Sequence[Record], begun: bool) -> int:
        """How many of these records are tokens; `begun`: the first of them is not its first."""
        made = len(records) - (records[-1][0] < 0)
        for record in records[not begun : made]:
            self._gap.observe_ns(record[2] * 1000)
        self._tokens.add(made)
        self._kv.add(made)
        return made

    def flowed(self, gaps_us: list[int]) -> None:
        """Tokens of sequences that had begun, one for each gap before it."""
        self._gap.observe_all_us(gaps_us)
        self._tokens.add(len(gaps_us))
        self._kv.add(len(gaps_us))

    def ended(self, finish: int, begun: bool, held: int) -> None:
        """It is over, and had so many tokens in the cache."""
        self._ends[finish - 1].add()
        (self._running if begun else self._waiting).add(-1)
        self._kv.add(-held)


class QueueMeters:
    """The meters of one version in one front process."""

    def __init__(
        self, registry: Registry, model: str, version: int, max_delay_ns: int, max_rows: int
    ) -> None:
        who = self._who = (model, version)
        self._registry = registry
        self._queue = registry.histograms(names.QUEUE_DURATION).of(*who)
        self._form = registry.histograms(names.BATCH_FORM_DURATION).of(*who)
        self._copy_in = registry.histograms(names.COPY_IN_DURATION).of(*who)
        self._compute = registry.histograms(names.COMPUTE_DURATION).of(*who)
        self._copy_out = registry.histograms(names.COPY_OUT_DURATION).of(*who)
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

    def of_text(self) -> TextMeters:
        """Those of its sequences, where it generates text."""
        return TextMeters(self._registry, *self._who)

    def batch_done(self, ring: BatchRing, slot: int) -> None:
        """Record a published batch, unless another front has; called while its slot is still held."""
        first, taken, run, ran, done = ring.times_ns(slot)
        _, rows, live, _ = ring.describe(slot)
        self._count_rate(done, rows)
        if not ring.count_once(slot):
            return
        if first:
            self._queue.observe_ns(max(taken - first, 0))
            self._form.observe_ns(ring.formed_ns(slot))
        run = run or taken
        ran = max(ran or done, run)
        self._copy_in.observe_ns(max(run - taken, 0))
        self._compute.observe_ns(max(ran - run, 0))
        self._copy_out.observe_ns(max(done - ran, 0))
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
