"""Requests of one dialect, counted: how many, how they ended, how long they took."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic_ns
from typing import TYPE_CHECKING

from fastserve.metrics import names
from fastserve.metrics.registry import Registry

if TYPE_CHECKING:
    from fastserve._ext.meter import Counter, Histogram


class Traffic:
    """The request meters of a dialect. Names that nobody serves count as the empty model, so that
    clients cannot add series."""

    def __init__(self, registry: Registry, dialect: str, known: Collection[str]) -> None:
        self._registry = registry
        self._dialect = dialect
        self._known = known
        self._kept: dict[tuple[str, object], tuple[Counter, Histogram]] = {}  # as many as versions served

    def succeeded(self, model: str, version: object) -> tuple[Counter, Histogram]:
        """The meters of requests answered well."""
        found = self._kept.get((model, version))
        if found is None:
            who = (model, version, self._dialect)
            requests = self._registry.counters(names.REQUESTS).of(*who, "OK")
            found = requests, self._registry.histograms(names.REQUEST_DURATION).of(*who)
            self._kept[model, version] = found
        return found

    def stages(self, model: str, version: object) -> tuple[Histogram, Histogram]:
        """The meters of reading bodies and of writing them."""
        who = (model, version, self._dialect)
        decode = self._registry.histograms(names.DECODE_DURATION).of(*who)
        return decode, self._registry.histograms(names.ENCODE_DURATION).of(*who)

    def count(self, model: str, version: object, took_ns: int) -> None:
        """One request answered well."""
        requests, duration = self.succeeded(model, version)
        requests.add()
        duration.observe_ns(took_ns)

    def answered(self, model: str, version: object, received_ns: int) -> int:
        """The same of one that came at `received_ns`: how long it took."""
        took_ns = monotonic_ns() - received_ns
        self.count(model, version, took_ns)
        return took_ns

    def refused(self, model: str, kind: str, version: object = "") -> None:
        """One request answered with an error of that kind; `version` where it had reached one."""
        known = model if version or model in self._known else ""
        self._registry.counters(names.REQUESTS).of(known, version, self._dialect, kind).add()
