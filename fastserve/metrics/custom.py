"""Metrics of models' own: families that a model makes, kept by the process that owns the workers.

All instances of a version, and a worker that is started again, count in the same series; they go with the
last version that asked for them. What comes in was written by a model: names are checked, series bounded.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from fastserve.metrics.exposition import write_head, write_histogram, write_labels, write_number

KINDS = ("counter", "gauge", "histogram")
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}\Z")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}\Z")
MOST_FAMILIES, MOST_SERIES, MOST_LABELS, MOST_BUCKETS, TEXT_MAX = 256, 1024, 16, 256, 1024
# The server's own names: a model's numbers must not stand among them.
_OWN = (
    "fastserve_",
    "nv_inference_",
    "nv_cache_",
    "nv_cpu_",
    "nv_gpu_",
    "nv_model_",
    "nv_pinned_",
    "nv_energy_",
)
Labels = tuple[tuple[str, str], ...]


@dataclass
class Series:
    """One series: a value, or a histogram whose `counts` are one more than its bounds."""

    kind: str
    bounds: tuple[float, ...]
    value: float = 0.0
    counts: list[int] = field(default_factory=list)
    owners: set[Hashable] = field(default_factory=set)

    def change(self, how: str, value: float) -> None:
        """Change the value. Raises ValueError for a change that this kind has not."""
        if not math.isfinite(value) or (how, self.kind) not in _CHANGES:
            raise ValueError(f"a {self.kind} cannot {how} {value}")
        if how == "set":
            self.value = value
        elif how == "observe":
            self.counts[bisect_left(self.bounds, value)] += 1
            self.value += value
        elif self.kind == "counter" and value < 0:
            raise ValueError(f"a counter cannot increment {value}")
        else:
            self.value += value


_CHANGES = {("increment", "counter"), ("increment", "gauge"), ("set", "gauge"), ("observe", "histogram")}


@dataclass
class CustomFamily:
    """All series of a name."""

    kind: str
    help: str
    owners: set[Hashable] = field(default_factory=set)
    series: dict[Labels, tuple[int, Series]] = field(default_factory=dict)


class CustomMetrics:
    """Families of all models. An `owner` is a loaded version."""

    def __init__(self) -> None:
        self._families: dict[str, CustomFamily] = {}
        self._series: dict[int, Series] = {}
        self._numbers = itertools.count(1)

    def add_family(self, owner: Hashable, name: str, help: str, kind: str) -> None:
        """Declare a family. Raises ValueError for an invalid name, or one taken by another kind."""
        if not NAME.match(name) or name.startswith(_OWN) or kind not in KINDS:
            raise ValueError(f"{name[:200]!r} cannot be the name of a model's own {kind[:20]}")
        found = self._families.get(name)
        if found is None:
            if len(self._families) >= MOST_FAMILIES:
                raise ValueError(f"more than {MOST_FAMILIES} families")
            found = self._families[name] = CustomFamily(kind, help[:TEXT_MAX])
        elif found.kind != kind:
            raise ValueError("Family name already exists with different type")
        found.owners.add(owner)

    def add_series(
        self, owner: Hashable, name: str, labels: Mapping[str, str], bounds: Sequence[float]
    ) -> int:
        """Return the number of the series with these labels. Raises ValueError."""
        family = self._families.get(name)
        if family is None or owner not in family.owners:
            raise ValueError(f"there is no family {name[:200]!r}")
        _check_labels(labels)
        key = tuple(sorted(labels.items()))
        number, series = family.series.get(key) or (0, None)
        if series is None:
            _check_bounds(family.kind, bounds)
            if sum(len(one.series) for one in self._families.values()) >= MOST_SERIES:
                raise ValueError(f"more than {MOST_SERIES} metrics")
            number = next(self._numbers)
            counts = [0] * (len(bounds) + 1) if family.kind == "histogram" else []
            series = Series(family.kind, tuple(map(float, bounds)), counts=counts)
            family.series[key] = number, series
            self._series[number] = series
        series.owners.add(owner)
        return number

    def change(self, number: int, how: str, value: float) -> None:
        """Raises ValueError."""
        series = self._series.get(number)
        if series is None:
            raise ValueError("there is no such metric")
        series.change(how, float(value))

    def value(self, number: int) -> float:
        """Raises ValueError."""
        series = self._series.get(number)
        if series is None:
            raise ValueError("there is no such metric")
        return series.value

    def forget(self, owner: Hashable) -> None:
        """Forget a version, and the series that no other version has."""
        for name, family in list(self._families.items()):
            family.owners.discard(owner)
            for labels, (number, series) in list(family.series.items()):
                series.owners.discard(owner)
                if not series.owners:
                    del family.series[labels], self._series[number]
            if not family.owners:
                del self._families[name]

    def write(self) -> list[str]:
        """Return the lines of the metrics page."""
        lines: list[str] = []
        for name, family in sorted(self._families.items()):
            if family.series:
                lines += write_head(name, family.kind, family.help)
            for labels, (_, series) in sorted(family.series.items()):
                if family.kind == "histogram":
                    lines += write_histogram(dict(labels), name, series.bounds, series.counts, series.value)
                else:
                    lines.append(f"{name}{write_labels(dict(labels))} {write_number(series.value)}")
        return lines


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MOST_LABELS:
        raise ValueError(f"at most {MOST_LABELS} labels, not {len(labels)}")
    for name, value in labels.items():
        if not LABEL.match(name) or name.startswith("__") or name in ("le", "quantile"):
            raise ValueError(f"{name[:200]!r} cannot be the name of a label")
        if len(value) > TEXT_MAX:
            raise ValueError(f"label {name}: at most {TEXT_MAX} characters")


def _check_bounds(kind: str, bounds: Sequence[float]) -> None:
    if (kind == "histogram") != bool(bounds):
        raise ValueError("buckets are a histogram's, which has at least one")
    rising = all(a < b for a, b in itertools.pairwise(bounds))
    if len(bounds) > MOST_BUCKETS or not rising or not all(map(math.isfinite, bounds)):
        raise ValueError(f"at most {MOST_BUCKETS} finite buckets in rising order")
