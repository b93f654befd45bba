"""What a front process measures of itself twice a second, from its heartbeat: nothing a request pays for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fastserve import __version__
from fastserve.engine.counters import counters_of
from fastserve.metrics import Registry, names

_DEVICE = (names.DEVICE_BATCHES, names.DEVICE_OUT_OF_MEMORY)

if TYPE_CHECKING:
    from fastserve.engine.hosting import Hosted
    from fastserve.repository.version import Version
    from fastserve.wire import HttpListener
    from fastserve.wire.tls import Credentials


class FrontGauges:
    """The gauges of one front process."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._refused: Counter[str] = Counter()
        self._due_ns = 0
        self._devices: WeakKeyDictionary[Version, tuple[int, int]] = WeakKeyDictionary()
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

    def show_certificate(self, credentials: Credentials | None) -> None:
        """Until when the certificate of now holds. Fronts read the same files: the owner tells it."""
        if credentials is not None:
            self._registry.gauges(names.TLS_EXPIRES).of().set(credentials.expires_at)

    def show_queues(self, hosted: Iterable[Hosted]) -> None:
        """Rows that wait, over all fronts: the owner sees the shared rings."""
        for one in hosted:
            who = (one.version.model, one.version.number)
            self._registry.gauges(names.QUEUE_ROWS).of(*who).set(one.queue.ring.queued())
            if one.part == 0:
                self._show_devices(one.version)

    def _show_devices(self, version: Version) -> None:
        """What workers have told since the last look of their GPUs, and of memory that ran out."""
        counters, who = counters_of(version), (version.model, version.number)
        told = counters.devices.values()
        if not told and not counters.out_of_memory:
            return
        sums = sum(one.batches for one in told), counters.out_of_memory
        before = self._devices.get(version, (0, 0))
        for metric, now, then in zip(_DEVICE, sums, before, strict=True):
            self._registry.counters(metric).of(*who).add(now - then)
        self._devices[version] = sums
        if told:
            staged = sum(not one.pinned for one in told)
            self._registry.gauges(names.DEVICE_STAGED).of(*who).set(staged)
