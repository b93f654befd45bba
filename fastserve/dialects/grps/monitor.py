"""The numbers of the metrics page (spec 12): what grps's own page shows of its server, and their history.

    *qps  *fail_rate(%)  *latency_avg(ms)  *latency_max(ms)  *latency_cdf(ms)  *cpu_usage(%)  *mem_usage(%)

Taken once a second by the owner of the models, from the first look at the page on, out of what every dialect
counts: all front processes are in them, and each shows what the owner has. Latencies are counted in buckets
(SpreadWindow), so that the largest and the spread over the last minute are within 3 %.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import time
from array import array
from collections import deque

from fastserve._ext.shared_metrics import DurationSpread
from fastserve.metrics import Metric, names
from fastserve.metrics.registry import BUCKETS, Registry, SpreadWindow, middle_ns, quantiles_ns
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState

POINTS = (60, 60, 24, 30)  # seconds, minutes, hours, days
MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
CDF = "*latency_cdf(ms)"
NOT_FOUND = "key not found"
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


PART_BUCKETS = 16  # of a spread, which are one series
TOOK = Metric("_grps_took", "Predicts answered well.", "histogram", ("part",), tuple(range(PART_BUCKETS - 1)))


class Latencies:
    """The durations of predicts that were answered well, over all front processes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.add = DurationSpread(registry.histograms(TOOK).of).add

    def read(self) -> array[int]:
        """Return the counts by bucket."""
        (found,) = self._registry.read(TOOK)
        counts = array("Q", bytes(8 * BUCKETS))
        for (part,), (*part_counts, _) in found.items():
            start = PART_BUCKETS * int(part)
            counts[start : start + PART_BUCKETS] = array("Q", map(int, part_counts))
        return counts


class GrpsMonitor(ReplicatedPart):
    """The numbers of one server."""

    PART = "grps monitor"

    def __init__(self, registry: Registry, state: ReplicatedState) -> None:
        self._registry, self._state = registry, state
        self._latencies = Latencies(registry)
        self.took = self._latencies.add
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
        self._window = SpreadWindow()
        self._spread = self._latencies.read()  # as of the last second
        self._cpu = (time.monotonic(), self._read_cpu_s())
        self._timer: asyncio.TimerHandle | None = None
        if state.owned:
            state.add(self.PART, self)

    async def write(self, name: str | None) -> bytes:
        """Return the page, or the history of one number. Raises ServeError."""
        return (await self._state.show(self.PART, {"name": name})).encode()

    async def answer(self, question: Content) -> str:
        self.open()
        name = question["name"]
        return self.write_page() if name is None else self.write_series(name)

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

    def write_page(self) -> str:
        """Every number's name and value."""
        rows = [
            f'<li><a href="/grps/v1/monitor/series?name={html.escape(name)}">{html.escape(name)}</a>: '
            f"<span>{trend.last:g}</span></li>"
            for name, trend in self._trends.items()
        ]
        rows.append(f'<li><a href="/grps/v1/monitor/series?name={CDF}">{CDF}</a></li>')
        return _PAGE.format("\n".join(rows))

    def write_series(self, name: str) -> str:
        """The history of one number as JSON, or the words for none of that name."""
        if name == CDF:
            return json.dumps({"label": "cdf", "data": self._read_spread()})
        trend = self._trends.get(name)
        return NOT_FOUND if trend is None else json.dumps({"label": "trend", "data": trend.points()})

    def _read_spread(self) -> list[tuple[int, float]]:
        """(percent, milliseconds); 100 stands for 99.9 and 101 for 99.99."""
        ranks = [*((p, p / 100) for p in (*range(10, 100, 10), *range(91, 100))), (100, 0.999), (101, 0.9999)]
        grown = self._window.growth(self._latencies.read())
        took = quantiles_ns(grown, [rank for _, rank in ranks]) if any(grown) else [0.0] * len(ranks)
        return [(label, round(ns / 1e6, 3)) for (label, _), ns in zip(ranks, took, strict=True)]

    def _read_max_ms(self) -> float:
        """The longest predict since the last call."""
        before, self._spread = self._spread, self._latencies.read()
        self._window.since(self._spread)
        pairs = zip(self._spread, before, strict=True)
        longest = max((bucket for bucket, (now, then) in enumerate(pairs) if now > then), default=None)
        return 0.0 if longest is None else middle_ns(longest) / 1e6

    def _read_cpu_s(self) -> float:
        (found,) = self._registry.read(names.FRONT_CPU_US)
        return sum(value for (value,) in found.values()) / 1e6

    def _read_memory_share(self) -> float:
        """The part of the machine's memory that the front processes hold."""
        (found,) = self._registry.read(names.FRONT_RESIDENT)
        return sum(value for (value,) in found.values()) / MACHINE_BYTES

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
        wall, cpu = time.monotonic(), self._read_cpu_s()
        used = (cpu - self._cpu[1]) / max(wall - self._cpu[0], 1e-9)
        self._cpu = wall, cpu
        values = (
            new,
            100 * failed / new if new else 0.0,
            1000 * took_s / answered if answered else 0.0,
            self._read_max_ms(),
            100 * used,
            100 * self._read_memory_share(),
        )
        for trend, value in zip(self._trends.values(), values, strict=True):
            trend.add(value)
