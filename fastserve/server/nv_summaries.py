"""Triton's summaries of latencies (--metrics-config summary_latencies=true): quantiles over the last minute.

Counts and sums are since the version was loaded. What the versions keep anyway is read at a scrape; nothing
is kept for the quantiles in between.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from fastserve.engine.counters import Took, VersionCounts, counters_of
from fastserve.metrics.spread import Window, quantiles_ns
from fastserve.metrics.text import write_head, write_summary
from fastserve.repository.version import Version

NAMES = (
    ("nv_inference_request_summary_us", "Summary of inference request duration in microseconds"),
    ("nv_inference_queue_summary_us", "Summary of inference queuing duration in microseconds"),
    ("nv_inference_compute_input_summary_us", "Summary of compute input duration in microseconds"),
    ("nv_inference_compute_infer_summary_us", "Summary of compute inference duration in microseconds"),
    ("nv_inference_compute_output_summary_us", "Summary of compute output duration in microseconds"),
    ("nv_cache_hit_summary_per_model", "Summary of cache hit durations per model, in microseconds"),
    ("nv_cache_miss_summary_per_model", "Summary of cache miss durations per model, in microseconds"),
)


class Seen(NamedTuple):
    """A version as one page shows it."""

    version: Version
    labels: dict[str, str]
    counts: VersionCounts


class Summaries:
    """The windows of the versions that have been shown."""

    def __init__(self, ranks: Sequence[float]) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._windows: WeakKeyDictionary[Version, dict[str, Window]] = WeakKeyDictionary()

    def write(self, seen: Sequence[Seen], *, cached: bool) -> list[str]:
        """The lines of every summary of these versions."""
        with self._lock:  # scrapes of two listeners may overlap
            return self._write(seen, cached=cached)

    def _write(self, seen: Sequence[Seen], *, cached: bool) -> list[str]:
        lines: dict[str, list[str]] = {}
        for one in seen:
            windows = self._windows.setdefault(one.version, {})
            for name, took, spread in _spreads(one, cached=cached):
                grown = windows.setdefault(name, Window()).since(spread)
                values = (ns / 1000 for ns in quantiles_ns(grown, self._ranks))
                quantiles = dict(zip(self._ranks, values, strict=True))
                lines.setdefault(name, []).extend(
                    write_summary(one.labels, name, quantiles, took.count, took.ns // 1000)
                )
        return [
            line
            for name, help in NAMES
            if name in lines
            for line in (*write_head(name, "summary", help), *lines[name])
        ]


def _spreads(one: Seen, *, cached: bool) -> Iterator[tuple[str, Took, array[int]]]:
    counts, counters = one.counts, counters_of(one.version)
    kept = cached and one.version.config.options.cached
    tooks = (counts.success, counts.queue, counts.compute_input, counts.compute_infer, counts.compute_output)
    for (name, _), took, spread in zip(NAMES, tooks, counters.spreads(), strict=False):
        # As there: with a cache in front, durations of requests are of two kinds that one summary would mix.
        if not (kept and took is counts.success):
            yield name, took, spread
    if kept:
        yield NAMES[5][0], counts.cache_hit, array("Q", counters.hit_spread)
        yield NAMES[6][0], counts.cache_miss, array("Q", counters.miss_spread)
