"""The numbers of the metrics page (spec 12): what grps's own page shows of its server, and their history.

    *qps  *fail_rate(%)  *latency_avg(ms)  *latency_max(ms)  *latency_cdf(ms)  *cpu_usage(%)  *mem_usage(%)

Taken once a second, from the first look at the page on, out of what every dialect counts: all front processes
are in them. How latencies are spread is of this process alone.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import time
from collections import deque

from fastserve.metrics import names
from fastserve.metrics.registry import Registry

POINTS = (60, 60, 24, 30)  # seconds, minutes, hours, days
CDF = "*latency_cdf(ms)"
NOT_FOUND = b"key not found"
# The names that clients of the original look for, beneath the page that every HTTP listener has at /console.
_PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>grps metrics</title></head>
<body style="margin:0;height:100vh;display:flex;flex-direction:column">
<iframe src="/console" title="the operator's page" style="flex:1;border:0"></iframe>
<details style="font:15px system-ui,sans-serif;padding:.6rem 1rem"><summary>Metrics by their names</summary>
<ul>
{}
</ul></details></body></html>
"""


class Trend:
    """The last seconds, minutes, hours and days of one number; each is the average of the finer ones."""

    def __init__(self) -> None:
        self._rings = [deque([0.0] * size, maxlen=size) for size in POINTS]
        self._seen = 0

    @property
    def last(self) -> float:
        return self._rings[0][-1]

    def add(self, value: float) -> None:
        """The value of a second."""
        self._rings[0].append(value)
        self._seen += 1
        every = 1
        for finer, ring, size in zip(self._rings, self._rings[1:], POINTS, strict=False):
            every *= size
            if self._seen % every:
                return
            ring.append(sum(finer) / size)

    def points(self) -> list[tuple[int, float]]:
        """Oldest first."""
        values = [value for ring in reversed(self._rings) for value in ring]
        return [(at, round(value, 3)) for at, value in enumerate(values)]


class GrpsMonitor:
    """The numbers of one server."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._trends = {
            name: Trend()
            for name in (
                "*qps",
                "*fail_rate(%)",
                "*latency_avg(ms)",
                "*latency_max(ms)",
                "*cpu_usage(%)",
                "*mem_usage(%)",
            )
        }
        self._last = (0, 0, 0.0)  # calls, failures, seconds
        self._took: deque[float] = deque(maxlen=10_000)  # milliseconds of the last predicts of this process
        self._max = 0.0
        self._cpu = (time.monotonic(), time.process_time())
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Somebody looks: from now on every second is kept."""
        if self._timer is None:
            self._turn()

    def _turn(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(1.0, self._turn)
        self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def took(self, took_ns: int) -> None:
        """A predict was answered well."""
        took_ms = took_ns / 1e6
        self._took.append(took_ms)
        self._max = max(self._max, took_ms)

    def write_page(self) -> bytes:
        """Every number's name and value."""
        rows = [
            f'<li><a href="/grps/v1/monitor/series?name={html.escape(name)}">{html.escape(name)}</a>: '
            f"<span>{trend.last:g}</span></li>"
            for name, trend in self._trends.items()
        ]
        rows.append(f'<li><a href="/grps/v1/monitor/series?name={CDF}">{CDF}</a></li>')
        return _PAGE.format("\n".join(rows)).encode()

    def write_series(self, name: str) -> bytes:
        """The history of one number as JSON, or the words for none of that name."""
        if name == CDF:
            return json.dumps({"label": "cdf", "data": self._spread()}).encode()
        trend = self._trends.get(name)
        return NOT_FOUND if trend is None else json.dumps({"label": "trend", "data": trend.points()}).encode()

    def _spread(self) -> list[tuple[int, float]]:
        """(percent, milliseconds); 100 stands for 99.9 and 101 for 99.99."""
        ranks = [*((p, p / 100) for p in (*range(10, 100, 10), *range(91, 100))), (100, 0.999), (101, 0.9999)]
        took = sorted(self._took) or [0.0]
        return [(label, round(took[min(int(rank * len(took)), len(took) - 1)], 3)) for label, rank in ranks]

    def _look(self) -> None:
        requests, durations = self._registry.read(names.REQUESTS, names.REQUEST_DURATION)
        calls = sum(int(count) for (_, _, dialect, _), (count,) in requests.items() if dialect == "grps")
        good = sum(
            int(count)
            for (_, _, dialect, code), (count,) in requests.items()
            if (dialect, code) == ("grps", "OK")
        )
        seconds = sum(took[-1] for labels, took in durations.items() if "grps" in labels)
        before = self._last
        self._last = calls, calls - good, seconds
        new, failed, took_s = (now - then for now, then in zip(self._last, before, strict=True))
        answered = new - failed
        wall, cpu = time.monotonic(), time.process_time()
        used = (cpu - self._cpu[1]) / max(wall - self._cpu[0], 1e-9)
        self._cpu = wall, cpu
        values = (
            new,
            100 * failed / new if new else 0.0,
            1000 * took_s / answered if answered else 0.0,
            self._max,
            100 * used,
            100 * resident_share(),
        )
        self._max = 0.0
        for trend, value in zip(self._trends.values(), values, strict=True):
            trend.add(value)


def resident_share() -> float:
    """The part of the machine's memory that this process holds."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages / os.sysconf("SC_PHYS_PAGES")
