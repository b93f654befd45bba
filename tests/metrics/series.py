"""A registry whose series are named where they are counted."""

from __future__ import annotations

from typing import cast

from fastserve._ext.shared_metrics import Counter, Gauge, Histogram
from fastserve.metrics import Metric, Registry
from fastserve.metrics.exposition import Combine


class NamedRegistry(Registry):
    """Makes a series by its name, help and labels."""

    def counter(self, name: str, help: str, /, **labels: object) -> Counter:
        metric = Metric(name, help, "counter", tuple(labels))
        return cast(Counter, self.family(metric).of(*labels.values()))

    def gauge(self, name: str, help: str, /, *, combine: Combine = "sum", **labels: object) -> Gauge:
        metric = Metric(name, help, "gauge", tuple(labels), combine=combine)
        return cast(Gauge, self.family(metric).of(*labels.values()))

    def histogram(self, name: str, help: str, /, buckets: tuple[float, ...], **labels: object) -> Histogram:
        metric = Metric(name, help, "histogram", tuple(labels), buckets)
        return cast(Histogram, self.family(metric).of(*labels.values()))
