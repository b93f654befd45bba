"""Metrics and their series in shared memory, and Prometheus text (format 0.0.4) of them.

A metric is a name, a help text, a kind and its label names; a series is a metric with label values.
The text of a series carries all of it, so that a process can show unknown series (another
front's, or those of a front that died). Everything read back is checked as untrusted input.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import msgspec

from fastserve._ext.shared_metrics import (
    BOUNDS_MAX,
    KIND_COUNTER,
    KIND_GAUGE_LAST,
    KIND_GAUGE_SUM,
    KIND_HISTOGRAM,
    Section,
)

Kind = Literal["counter", "gauge", "histogram"]

Combine = Literal["sum", "last"]

NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}\Z")

LABEL_VALUE_MAX = 128  # characters; model names are shorter, and nothing a client invents gets here whole

LABELS_MAX = 16


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `labels` are label names, `buckets` the upper bounds of a histogram. Prometheus' text
    leaves out one whose name begins with `_`: it is a dialect's, which shows it in its own form.

    Over several processes counters and histograms add up; a gauge adds up ("sum": connections, rows
    waiting) or shows the value set last ("last": facts only one process knows).
    """

    name: str
    help: str
    kind: Kind
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    combine: Combine = "sum"

    @property
    def code(self) -> int:
        """The number of its kind in shared memory."""
        if self.kind == "gauge":
            return KIND_GAUGE_SUM if self.combine == "sum" else KIND_GAUGE_LAST
        return KIND_COUNTER if self.kind == "counter" else KIND_HISTOGRAM

    @property
    def unit(self) -> float:
        """The value of 1 in shared memory: a counter of seconds counts nanoseconds."""
        return 1e-9 if self.kind == "counter" and self.name.endswith("_seconds_total") else 1.0

    @property
    def slots(self) -> int:
        """64-bit values one series takes."""
        if self.kind == "histogram":
            return len(self.buckets) + 2
        return 2 if self.code == KIND_GAUGE_LAST else 1

    def check(self) -> None:
        """Raise ValueError for names or buckets that Prometheus or a section cannot take."""
        if not NAME.match(self.name):
            raise ValueError(f"metric name {self.name!r}: letters, digits and _ only")
        if len(self.labels) > LABELS_MAX or len(set(self.labels)) != len(self.labels):
            raise ValueError(f"metric {self.name}: at most {LABELS_MAX} labels, each once")
        for label in self.labels:
            if not NAME.match(label) or label.startswith("__") or label == "le":
                raise ValueError(f"metric {self.name}: label name {label!r} cannot be used")
        if (self.kind == "histogram") != bool(self.buckets):
            raise ValueError(f"metric {self.name}: buckets belong to histograms, and a histogram needs some")
        rising = all(a < b for a, b in zip(self.buckets, self.buckets[1:], strict=False))
        if len(self.buckets) > BOUNDS_MAX or not rising or not all(map(math.isfinite, self.buckets)):
            raise ValueError(f"metric {self.name}: at most {BOUNDS_MAX} finite bounds in rising order")


class SeriesText(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Return a series as JSON: [name, help, label names, label values, bounds]."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: tuple[str, ...]
    buckets: tuple[float, ...] = ()


_KINDS: dict[int, tuple[Kind, Combine]] = {
    KIND_COUNTER: ("counter", "sum"),
    KIND_GAUGE_SUM: ("gauge", "sum"),
    KIND_GAUGE_LAST: ("gauge", "last"),
    KIND_HISTOGRAM: ("histogram", "sum"),
}


def clean_value(value: object) -> str:
    """Return a label value cut to LABEL_VALUE_MAX characters, always encodable."""
    text = str(value)[:LABEL_VALUE_MAX]
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_series(metric: Metric, values: tuple[str, ...]) -> bytes:
    return msgspec.json.encode(SeriesText(metric.name, metric.help, metric.labels, values, metric.buckets))


def read_series(kind: int, text: bytes, slots: int) -> tuple[Metric, tuple[str, ...]] | None:
    """Return the metric and label values of a series' text, None when it is invalid."""
    try:
        found = msgspec.json.decode(text, type=SeriesText)
        how, combine = _KINDS[kind]
        metric = Metric(found.name, found.help, how, found.labels, found.buckets, combine)
        metric.check()
    except (ValueError, KeyError, RecursionError):  # msgspec's own errors and bad UTF-8 are ValueErrors
        return None
    if metric.slots != slots or len(found.values) != len(found.labels):
        return None
    return metric, found.values


Labels = Mapping[str, str]

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})

_HELP_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n"})


def write_labels(labels: Labels, **last: str) -> str:
    """Return `{a="1",b="2"}` in the order of names, with `last` (`le`, `quantile`) behind."""
    named = [*sorted(labels.items()), *last.items()]
    inner = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in named)
    return f"{{{inner}}}" if inner else ""


def write_number(value: float) -> str:
    """Return a number as text, whole ones without a point."""
    if value != value:
        return "Nan"  # as prometheus-cpp writes it; parsers do not mind the case
    return str(int(value)) if value == int(value) else repr(value)


def write_head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {name} {help.translate(_HELP_ESCAPES)}", f"# TYPE {name} {kind}"]


def write_histogram(
    labels: Labels, name: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> list[str]:
    """Return the lines of one histogram; `counts` has one more than there are bounds."""
    sums = accumulate(counts)
    lines = [f"{name}_count{write_labels(labels)} {sum(counts)}"]
    lines.append(f"{name}_sum{write_labels(labels)} {write_number(total)}")
    for bound, count in zip([*map(write_number, bounds), "+Inf"], sums, strict=True):
        lines.append(f"{name}_bucket{write_labels(labels, le=bound)} {count}")
    return lines


def write_summary(
    labels: Labels, name: str, quantiles: Mapping[float, float], count: int, total: float
) -> list[str]:
    """Return the lines of one summary."""
    lines = [f"{name}_count{write_labels(labels)} {count}"]
    lines.append(f"{name}_sum{write_labels(labels)} {write_number(total)}")
    for rank, value in quantiles.items():
        lines.append(f"{name}{write_labels(labels, quantile=write_number(rank))} {write_number(value)}")
    return lines


def write_family(name: str, kind: str, help: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    """Return the head and a line for each (written labels, value), nothing without samples."""
    lines = [f"{name}{labels} {write_number(value)}" for labels, value in samples]
    return [*write_head(name, kind, help), *lines] if lines else []


CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Values = tuple[int, ...]  # the raw 64-bit words of one series

LabelValues = tuple[str, ...]

Entry = tuple[Metric, LabelValues, int, int]  # of a series: its place in the section, and words there

Merged = dict[str, tuple[Metric, dict[LabelValues, Values]]]


class Exposition:
    """Reads the sections of one file. The text of a series is parsed once, since it never changes."""

    def __init__(self, memory: mmap.mmap) -> None:
        first = Section(memory, 0)
        self._sections = [first, *(Section(memory, i) for i in range(1, first.sections))]
        self._known: list[list[Entry | None]] = [[] for _ in self._sections]
        self._by_name: list[dict[str, list[Entry]]] = [{} for _ in self._sections]
        self._heads: dict[tuple[str, LabelValues], tuple[str, ...]] = {}
        self._lock = threading.Lock()  # a scrape may run beside the event loop

    def expose(self) -> bytes:
        with self._lock:
            merged, unreadable = self.merge()
            shown = [found for name, found in merged.items() if not name.startswith("_")]
            lines = [line for metric, series in shown for line in self._write(metric, series)]
        return ("\n".join([*lines, *self._write_itself(unreadable)]) + "\n").encode()

    def merge(self, wanted: Iterable[str] | None = None) -> tuple[Merged, int]:
        """Return the series by name and labels, added up, and the number of unreadable ones; `wanted` are
        names of metrics, None for all."""
        merged: Merged = {}
        unreadable = 0
        for section, known, by_name in zip(self._sections, self._known, self._by_name, strict=True):
            self._learn(section, known, by_name)
            entries = known if wanted is None else [one for name in wanted for one in by_name.get(name, ())]
            for entry in entries:
                if entry is None or not _merge_one(merged, section, *entry):
                    unreadable += 1
        return merged, unreadable

    def read(self, *metrics: Metric) -> list[dict[LabelValues, tuple[float, ...]]]:
        """Return for each metric its series over all sections.

        Values are a histogram's counts by bucket and its sum, or one number.
        """
        wanted = dict.fromkeys(metric.name for metric in metrics)
        with self._lock:
            merged, _ = self.merge(wanted)
        return [
            {labels: _numbers(metric, values) for labels, values in series.items()}
            for metric, series in (merged.get(metric.name, (metric, {})) for metric in metrics)
        ]

    def _learn(self, section: Section, known: list[Entry | None], by_name: dict[str, list[Entry]]) -> None:
        for index in range(len(known), len(section)):
            entry = section.text(index)
            found = entry and read_series(entry[0], entry[1], entry[3])
            learned = (found[0], found[1], entry[2], entry[3]) if entry and found else None
            known.append(learned)
            if learned is not None:
                by_name.setdefault(learned[0].name, []).append(learned)

    def _write(self, metric: Metric, series: dict[LabelValues, Values]) -> list[str]:
        lines = write_head(metric.name, metric.kind, metric.help)
        for labels, values in series.items():
            heads = self._heads.get((metric.name, labels))
            if heads is None:
                heads = self._heads[metric.name, labels] = _write_heads(metric, labels)
            if metric.kind == "histogram":
                counts = [*accumulate(values[:-1])]
                lines += [f"{head}{count}.0" for head, count in zip(heads, counts, strict=False)]
                lines += [f"{heads[-2]}{counts[-1]}.0", f"{heads[-1]}{_double(values[-1])!r}"]
            else:
                (value,) = _numbers(metric, values)
                lines.append(f"{heads[0]}{value!r}")
        return lines

    def _write_itself(self, unreadable: int) -> list[str]:
        lines = []
        for name, kind, help, value in (
            (
                "fastserve_metrics_series",
                "gauge",
                "Metric series in all processes.",
                sum(map(len, self._sections)),
            ),
            (
                "fastserve_metrics_series_overflow_total",
                "counter",
                "Uses of metric series that found no room.",
                sum(section.overflow for section in self._sections),
            ),
            (
                "fastserve_metrics_series_unreadable",
                "gauge",
                "Metric series that could not be understood.",
                unreadable,
            ),
        ):
            lines += [*write_head(name, kind, help), f"{name} {value}.0"]
        return lines


def _merge_one(
    merged: Merged, section: Section, metric: Metric, labels: LabelValues, slot_at: int, slots: int
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


def _write_heads(metric: Metric, values: LabelValues) -> tuple[str, ...]:
    """Return the lines of one series up to their values."""
    labels = dict(zip(metric.labels, values, strict=True))
    if metric.kind != "histogram":
        return (f"{metric.name}{write_labels(labels)} ",)
    bounds = [*map(str, metric.buckets), "+Inf"]
    buckets = [f"{metric.name}_bucket{write_labels(labels, le=bound)} " for bound in bounds]
    return (*buckets, *(f"{metric.name}_{part}{write_labels(labels)} " for part in ("count", "sum")))


def _numbers(metric: Metric, values: Values) -> tuple[float, ...]:
    if metric.kind == "histogram":
        return (*values[:-1], _double(values[-1]))
    return (values[0] * metric.unit if metric.kind == "counter" else _double(values[0]),)


def _double(bits: int) -> float:
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")
