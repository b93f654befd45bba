"""The meters, plainly: dictionaries of Python numbers, one per section, added up when asked."""

from __future__ import annotations

import math
from bisect import bisect_left


class PlainHistogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        if math.isfinite(value):
            self.buckets[bisect_left(self.bounds, value)] += 1
            self.sum += value


class PlainRegistry:
    """values[(kind, name, label)] per section; `total` is what a scrape shows."""

    def __init__(self, sections: int) -> None:
        self.counters: list[dict[tuple[str, str], int]] = [{} for _ in range(sections)]
        self.gauges: list[dict[tuple[str, str], float]] = [{} for _ in range(sections)]

    def add(self, section: int, name: str, label: str, n: int) -> None:
        held = self.counters[section]
        held[name, label] = held.get((name, label), 0) + n

    def set(self, section: int, name: str, label: str, value: float) -> None:
        self.gauges[section][name, label] = value

    def bury(self, section: int) -> None:
        self.gauges[section] = dict.fromkeys(self.gauges[section], 0.0)

    def total(self, kind: str) -> dict[tuple[str, str], float]:
        totals: dict[tuple[str, str], float] = {}
        for held in self.counters if kind == "counter" else self.gauges:
            for key, value in held.items():
                totals[key] = totals.get(key, 0) + value
        return totals
