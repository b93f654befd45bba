"""What a metric is, and how one series of it is written down in a section. No numbers here.

A metric is a name, a help text, a kind and its label names; a series is a metric with label values.
The text of a series carries all of it, so that a process can show series it has never heard of
(another front's, or those of a front that died). Everything read back is checked as if a stranger
had written it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from fastserve._ext.meter import (
    BOUNDS_MAX,
    KIND_COUNTER,
    KIND_GAUGE_LAST,
    KIND_GAUGE_SUM,
    KIND_HISTOGRAM,
)

Kind = Literal["counter", "gauge", "histogram"]
Combine = Literal["sum", "last"]

NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}\Z")
LABEL_VALUE_MAX = 128  # characters; model names are shorter, and nothing a client invents gets here whole
LABELS_MAX = 16


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `labels` are label names, `buckets` the upper bounds of a histogram.

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
    def slots(self) -> int:
        """64-bit values one series takes."""
        if self.kind == "histogram":
            return len(self.buckets) + 2
        return 2 if self.code == KIND_GAUGE_LAST else 1

    def check(self) -> None:
        """Raises ValueError naming what Prometheus or a section could not take."""
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
    """The text of one series, as JSON: [name, help, label names, label values, bounds]."""

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
    """A label value as it is kept: cut to LABEL_VALUE_MAX characters, always encodable."""
    text = str(value)[:LABEL_VALUE_MAX]
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_series(metric: Metric, values: tuple[str, ...]) -> bytes:
    return msgspec.json.encode(SeriesText(metric.name, metric.help, metric.labels, values, metric.buckets))


def read_series(kind: int, text: bytes, slots: int) -> tuple[Metric, tuple[str, ...]] | None:
    """The metric and label values a text tells of, or None when it cannot be right."""
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
