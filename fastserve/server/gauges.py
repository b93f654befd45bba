"""What a front process measures of itself twice a second, from its heartbeat: nothing a request pays for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastserve import __version__
from fastserve.metrics import Registry, names

if TYPE_CHECKING:
    from fastserve.engine.hosting import Hosted
    from fastserve.wire import HttpListener


class FrontGauges:
    """The gauges of one front process."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._refused: Counter[str] = Counter()
        self._due_ns = 0
        registry.gauges(names.BUILD).of(__version__).set(1)

    def beat(self, listeners: Iterable[HttpListener], interval_s: float) -> None:
        """Connections, refusals and how late this call is; it is due every interval_s seconds."""
        registry, refused = self._registry, Counter[str]()
        for listener in listeners:
            refused.update(listener.refusals)
        registry.gauges(names.CONNECTIONS).of("http").set(sum(len(o.connections) for o in listeners))
        for cause, count in (refused - self._refused).items():
            registry.counters(names.WIRE_REJECTS).of("http", cause).add(count)
        self._refused = refused
        now_ns = time.monotonic_ns()
        if self._due_ns:
            registry.histograms(names.LOOP_DELAY).of().observe_ns(max(now_ns - self._due_ns, 0))
        self._due_ns = now_ns + int(interval_s * 1e9)

    def show_queues(self, hosted: Iterable[Hosted]) -> None:
        """Rows that wait, over all fronts: the owner sees the shared rings."""
        for one in hosted:
            who = (one.version.model, one.version.number)
            self._registry.gauges(names.QUEUE_ROWS).of(*who).set(one.queue.ring.queued())
