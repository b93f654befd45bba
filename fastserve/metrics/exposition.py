"""Every section's series, added up and written as Prometheus text. Nothing here counts.

prometheus_client is imported at the first scrape: it costs 4 MB resident (measured), and a front
process that nobody scrapes should not pay.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastserve._ext.meter import Section
from fastserve.metrics.series import Metric, read_series

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Shown

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Values = tuple[int, ...]  # the raw 64-bit words of one series
Labels = tuple[str, ...]
Merged = dict[str, tuple[Metric, dict[Labels, Values]]]


class Exposition:
    """Reads the sections of one file. What a series is called is parsed once: it never changes."""

    def __init__(self, memory: mmap.mmap) -> None:
        first = Section(memory, 0)
        self._sections = [first, *(Section(memory, i) for i in range(1, first.sections))]
        self._known: list[list[tuple[Metric, Labels, int, int] | None]] = [[] for _ in self._sections]
        self._lock = threading.Lock()  # a scrape may run beside the event loop

    def expose(self) -> bytes:
        from prometheus_client.exposition import generate_latest

        with self._lock:
            return generate_latest(self)  # type: ignore[arg-type,unused-ignore]

    def collect(self) -> Iterator[Shown]:
        """The custom collector's face: prometheus_client families."""
        merged, unreadable = self.merge()
        for metric, series in merged.values():
            yield _show(metric, series)
        yield from self._show_itself(unreadable)

    def merge(self) -> tuple[Merged, int]:
        """Series of the same name and labels added up, and how many could not be understood."""
        merged: Merged = {}
        unreadable = 0
        for section, known in zip(self._sections, self._known, strict=True):
            self._learn(section, known)
            for entry in known:
                if entry is None or not _merge_one(merged, section, *entry):
                    unreadable += 1
        return merged, unreadable

    def totals(self, *metrics: Metric) -> list[dict[Labels, tuple[int, float]]]:
        """Per metric, its series over all sections: a histogram's (count, sum), a counter's (value, 0.0)."""
        with self._lock:
            merged, _ = self.merge()
        found = [merged.get(metric.name, (metric, {}))[1] for metric in metrics]
        return [
            {labels: _total(metric, values) for labels, values in series.items()}
            for metric, series in zip(metrics, found, strict=True)
        ]

    def _learn(self, section: Section, known: list[Any]) -> None:
        for index in range(len(known), len(section)):
            entry = section.text(index)
            found = entry and read_series(entry[0], entry[1], entry[3])
            known.append((found[0], found[1], entry[2], entry[3]) if entry and found else None)

    def _show_itself(self, unreadable: int) -> Iterator[Shown]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        lost = sum(section.overflow for section in self._sections)
        series = sum(map(len, self._sections))
        yield GaugeMetricFamily("fastserve_metrics_series", "Metric series in all processes.", series)
        yield CounterMetricFamily(
            "fastserve_metrics_series_overflow_total", "Uses of metric series that found no room.", lost
        )
        yield GaugeMetricFamily(
            "fastserve_metrics_series_unreadable", "Metric series that could not be understood.", unreadable
        )


def _merge_one(
    merged: Merged, section: Section, metric: Metric, labels: Labels, slot_at: int, slots: int
) -> bool:
    known, series = merged.setdefault(metric.name, (metric, {}))
    if known != metric:  # two processes that disagree about a metric: the first one found is shown
        return False
    values = section.values(slot_at, slots)
    before = series.get(labels)
    series[labels] = values if before is None else _add(metric, before, values)
    return True


def _add(metric: Metric, a: Values, b: Values) -> Values:
    if metric.kind == "counter":
        return (a[0] + b[0],)
    if metric.kind == "histogram":
        counts = tuple(x + y for x, y in zip(a[:-1], b[:-1], strict=True))
        return (*counts, _bits(_double(a[-1]) + _double(b[-1])))
    if metric.combine == "last":
        return a if a[1] >= b[1] else b  # the second word is when it was set
    return (_bits(_double(a[0]) + _double(b[0])),)


def _show(metric: Metric, series: dict[Labels, Values]) -> Shown:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if metric.kind == "histogram":
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, values in series.items():
            family.add_metric(labels, _cumulate(metric.buckets, values), _double(values[-1]))
        return family
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    shown = kind(metric.name, metric.help, labels=metric.labels)
    for labels, values in series.items():
        shown.add_metric(labels, values[0] if metric.kind == "counter" else _double(values[0]))
    return shown


def _total(metric: Metric, values: Values) -> tuple[int, float]:
    return (sum(values[:-1]), _double(values[-1])) if metric.kind == "histogram" else (values[0], 0.0)


def _cumulate(bounds: tuple[float, ...], values: Values) -> list[tuple[str, float]]:
    pairs = []
    total = 0
    for bound, count in zip([*map(str, bounds), "+Inf"], values[:-1], strict=True):
        total += count
        pairs.append((bound, float(total)))
    return pairs


def _double(bits: int) -> float:
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")
