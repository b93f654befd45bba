"""`app_monitor` of a grps project: metrics of its own, shown by the server among those of models.

    app_monitor.inc("seen", 1)          a counter       avg, max, min     a gauge
    app_monitor.cdf("took", 12.5)       a histogram

Names may be anything there, so each is a label of one family for its kind.
"""

from __future__ import annotations

import threading
from typing import Any

from fastserve.backends.triton_metrics import MetricFamily

BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0]
_KINDS = {
    "inc": (MetricFamily.COUNTER, "What grps models count"),
    "avg": (MetricFamily.GAUGE, "Averages of what grps models measure"),
    "max": (MetricFamily.GAUGE, "Largest of what grps models measure"),
    "min": (MetricFamily.GAUGE, "Smallest of what grps models measure"),
    "cdf": (MetricFamily.HISTOGRAM, "What grps models measure"),
}


class Monitor:
    """Those of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[tuple[str, str], Any] = {}
        self._values: dict[tuple[str, str], tuple[float, int]] = {}  # what a gauge shows, of so many

    def inc(self, name: str, value: float = 1) -> None:
        """Count."""
        self._find("inc", name).increment(value)

    def avg(self, name: str, value: float) -> None:
        """The average of all values since the start."""
        before, count = self._values.get(("avg", name), (0.0, 0))
        self._show("avg", name, before + (value - before) / (count + 1), count + 1)

    def max(self, name: str, value: float) -> None:
        """The largest value since the start."""
        self._show("max", name, max(value, self._values.get(("max", name), (value, 0))[0]), 1)

    def min(self, name: str, value: float) -> None:
        """The smallest value since the start."""
        self._show("min", name, min(value, self._values.get(("min", name), (value, 0))[0]), 1)

    def cdf(self, name: str, value: float) -> None:
        """How values are spread."""
        self._find("cdf", name).observe(value)

    def _show(self, kind: str, name: str, value: float, count: int) -> None:
        self._values[kind, name] = value, count
        self._find(kind, name).set(value)

    def _find(self, kind: str, name: str) -> Any:
        with self._lock:
            if (kind, name) not in self._metrics:
                number, words = _KINDS[kind]
                family = MetricFamily(f"grps_app_{kind}", words, number)
                buckets = BUCKETS if kind == "cdf" else None
                self._metrics[kind, name] = family.Metric({"name": str(name)}, buckets)
            return self._metrics[kind, name]


app_monitor = Monitor()
