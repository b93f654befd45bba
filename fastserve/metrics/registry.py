"""Registry of meters in memory that all front processes share, and each model's last failed requests.

Failed requests are for the operator's page: error text and request id. The owner keeps those of all front
processes.

Counts in buckets, which only ever grow, give quantiles of durations over about the last minute. Bucket 0 has
less than 1024 ns; then sixteen for every doubling (ext/include/counters.h: spread_bucket), so that a quantile
is within 3 % of the duration it stands for.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from bisect import bisect_left
from collections import Counter as Counted
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, nan
from typing import Generic, NamedTuple, TypeVar, cast

from fastserve._ext.shared_metrics import (
    KIND_GAUGE_SUM,
    Counter,
    Gauge,
    Histogram,
    Instrument,
    Section,
    file_bytes,
    lay_out,
)
from fastserve.errors import Kind
from fastserve.metrics.exposition import Exposition, Metric, clean_value, read_series, write_series
from fastserve.util.memory import make_shared_file, map_shared_file

LAST_FAILURES = 8  # that are kept of a model

LAST_REFUSALS = 4  # requests of a model that their clients got wrong

FAILURE_CHARACTERS = 300  # of the text of one

FAILED_MODELS = 1024  # with failed requests; beyond, the model that failed least recently is forgotten

FAILURES_TAKEN = 64  # models whose failed requests a front process hands over at once

# Faults of the client say nothing of the model.
CLIENT_FAULTS = frozenset(
    kind.name
    for kind in (
        *(Kind.INVALID_ARGUMENT, Kind.NOT_FOUND, Kind.UNIMPLEMENTED, Kind.CANCELLED, Kind.OUT_OF_RANGE),
        *(Kind.PERMISSION_DENIED, Kind.UNAUTHENTICATED, Kind.ALREADY_EXISTS),
    )
)


class FailedRequest(NamedTuple):
    """A request that was answered with an error. `at` is Unix time, `host` its client's address without the
    port, "" where it is not known."""

    at: float
    kind: str
    message: str
    request_id: str
    host: str = ""


class FairList:
    """The last `most` failed requests. One too many takes the place of the oldest one of the client that has
    the most here, so that no client can push out those of all others."""

    __slots__ = ("_kept", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[FailedRequest] = []

    def add(self, failed: FailedRequest) -> None:
        kept = self._kept
        kept.append(failed)
        if len(kept) > self._most:
            ((host, _),) = Counted(one.host for one in kept).most_common(1)
            del kept[next(i for i, one in enumerate(kept) if one.host == host)]

    def newest_first(self) -> list[FailedRequest]:
        # Not as they came: other front processes tell theirs later.
        order = sorted(enumerate(self._kept), key=lambda placed: (placed[1].at, placed[0]), reverse=True)
        return [failed for _, failed in order]


class FailedRequests:
    """The last failed requests of each model served: `of` those that the model or the server failed,
    `refused` those that their clients got wrong. Each has room of its own."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[FairList, FairList]] = {}

    def add(self, model: str, kind: str, message: str, request_id: str, address: str = "") -> None:
        """Keep one. `model` is a name that is served, so that clients cannot add any; `address` is the
        client's HOST:PORT."""
        host = address.rpartition(":")[0]
        self.keep(model, FailedRequest(time.time(), kind, message[:FAILURE_CHARACTERS], request_id, host))

    def keep(self, model: str, failed: FailedRequest) -> None:
        """Keep one, as another front process has written it."""
        lists = self._of.pop(model, None) or (FairList(LAST_FAILURES), FairList(LAST_REFUSALS))
        self._of[model] = lists  # the last one now
        if len(self._of) > FAILED_MODELS:
            del self._of[next(iter(self._of))]
        lists[failed.kind in CLIENT_FAULTS].add(failed)

    def take(self) -> list[tuple[str, FailedRequest]]:
        """Return those of some models, with their models, and keep them no longer."""
        models = list(self._of)[:FAILURES_TAKEN]
        taken = [(model, self._of.pop(model)) for model in models]
        return [(model, one) for model, lists in taken for kept in lists for one in kept.newest_first()[::-1]]

    def of(self, model: str) -> list[FailedRequest]:
        """Return the requests that the model or the server failed, the newest first."""
        return self._of[model][0].newest_first() if model in self._of else []

    def refused(self, model: str) -> list[FailedRequest]:
        """Return the requests that their clients got wrong, the newest first."""
        return self._of[model][1].newest_first() if model in self._of else []


log = logging.getLogger(__name__)

# One section: room for 250 model versions, 30 series each. The file is sparse: pages cost when written.
SERIES_MAX = 8192

TEXT_BYTES_MAX = 1 << 22

SLOTS_MAX = 1 << 18

FAMILY_SERIES_MAX = 2048  # so that one metric with runaway labels cannot take the room of the others

M = TypeVar("M", bound=Instrument)


class Family(Generic[M]):
    """The series of one metric in this process's section."""

    __slots__ = ("_instruments", "_registry", "metric")

    def __init__(self, registry: Registry, metric: Metric) -> None:
        self.metric = metric
        self._registry = registry
        self._instruments: dict[tuple[object, ...], M] = {}

    def of(self, *values: object) -> M:
        """The meter with these label values, in the order of `metric.labels`. Keep it where speed counts.

        When the section or the family is full it counts nowhere, and the loss shows in
        fastserve_metrics_series_overflow_total.
        """
        found = self._instruments.get(values)
        return found if found is not None else self._add(values)

    def _add(self, values: tuple[object, ...]) -> M:
        metric = self.metric
        if len(values) != len(metric.labels):
            raise ValueError(f"metric {metric.name} has the labels {metric.labels}, not {len(values)} values")
        texts = tuple(map(clean_value, values))
        instrument = self._instruments.get(texts)
        if instrument is None:
            slot = self._registry.find_slot(metric, texts, len(self._instruments))
            instrument = cast(M, self._registry.make_instrument(metric, slot))
            if slot >= 0:  # a series without room is not remembered: the names of an attack are many
                self._instruments[texts] = instrument
        return instrument


class Registry:
    """Meters by name, in section `section` of `sections`; `fd` is the memfd another registry made
    (it stays the caller's, who may close it at once).

    Raises ValueError when `fd` is not such a file. Not thread-safe while series are added; counting is.
    """

    def __init__(self, sections: int = 1, section: int = 0, fd: int | None = None) -> None:
        self.failures = FailedRequests()
        self._made = fd is None
        self.fd = _make_file(sections) if fd is None else fd
        self._memory = map_shared_file(self.fd)
        self._section = Section(self._memory, section)
        self._families: dict[str, Family[Instrument]] = {}
        self._slots: dict[tuple[str, tuple[str, ...]], tuple[Metric, int]] = {}
        self._exposition = Exposition(self._memory)
        self._take_over()

    def counters(self, metric: Metric) -> Family[Counter]:
        return cast("Family[Counter]", self.family(metric))

    def gauges(self, metric: Metric) -> Family[Gauge]:
        return cast("Family[Gauge]", self.family(metric))

    def histograms(self, metric: Metric) -> Family[Histogram]:
        return cast("Family[Histogram]", self.family(metric))

    def family(self, metric: Metric) -> Family[Instrument]:
        """Return all series of one metric. Raises ValueError when a different one has its name."""
        family = self._families.get(metric.name)
        if family is None:
            metric.check()
            family = self._families[metric.name] = Family(self, metric)
        elif family.metric is not metric and family.metric != metric:
            raise ValueError(f"metric {metric.name} exists with another help, kind, labels or buckets")
        return family

    def expose(self) -> bytes:
        """Return Prometheus text of the sum over all sections."""
        return self._exposition.expose()

    def read(self, *metrics: Metric) -> list[dict[tuple[str, ...], tuple[float, ...]]]:
        """Return for each metric its series over all sections, by label values.

        Values are a histogram's counts by bucket and its sum, or one number.
        """
        return self._exposition.read(*metrics)

    def close(self) -> None:
        """Close the registry. Its memory stays as long as one of its meters is in use."""
        self._families.clear()  # they refer back here
        del self._section, self._exposition, self._memory
        if self._made:
            os.close(self.fd)

    def bury(self, section: int) -> None:
        """Zero the summed gauges of a dead process's section. Its counters stay."""
        _zero_gauges(Section(self._memory, section))

    def find_slot(self, metric: Metric, values: tuple[str, ...], present: int) -> int:
        """Return the place of a series, which a former owner of the section may have left; -1 for none."""
        left, slot = self._slots.get((metric.name, values), (None, -1))
        if left == metric:
            return slot
        if present >= FAMILY_SERIES_MAX:
            self._section.count_overflow()
            return -1
        slot = self._section.append(metric.code, write_series(metric, values), metric.slots)
        if slot < 0 and self._section.overflow == 1:
            log.warning("no room for more metric series; the first one left out is of %s", metric.name)
        return slot

    def make_instrument(self, metric: Metric, slot: int) -> Instrument:
        if metric.kind == "counter":
            return Counter(self._section, slot)
        if metric.kind == "gauge":
            return Gauge(self._section, slot, last=metric.combine == "last")
        return Histogram(self._section, slot, metric.buckets)

    def _take_over(self) -> None:
        _zero_gauges(self._section)
        for index in range(len(self._section)):
            entry = self._section.text(index)
            found = entry and read_series(entry[0], entry[1], entry[3])
            if entry and found:
                self._slots.setdefault((found[0].name, found[1]), (found[0], entry[2]))


def _zero_gauges(section: Section) -> None:
    for index in range(len(section)):
        entry = section.text(index)
        if entry and entry[0] == KIND_GAUGE_SUM:
            section.zero(entry[2], entry[3])


def _make_file(sections: int) -> int:
    size = file_bytes(sections, SERIES_MAX, TEXT_BYTES_MAX, SLOTS_MAX)
    fd = make_shared_file("fastserve-metrics", size)
    with map_shared_file(fd) as memory:
        lay_out(memory, sections, SERIES_MAX, TEXT_BYTES_MAX, SLOTS_MAX)
    return fd


BUCKETS = 512
FIRST_POWER, PER_DOUBLING = 10, 16
WINDOW_NS = 60_000_000_000


def bucket_of(ns: int) -> int:
    """Return the bucket of a duration."""
    if ns < 1 << FIRST_POWER:
        return 0
    power = ns.bit_length() - 1
    bucket = (power - FIRST_POWER) * PER_DOUBLING + (ns >> (power - 4) & (PER_DOUBLING - 1)) + 1
    return min(bucket, BUCKETS - 1)


def middle_ns(bucket: int) -> float:
    """Return the middle of a bucket."""
    if bucket == 0:
        return (1 << FIRST_POWER) / 2
    doubling, part = divmod(bucket - 1, PER_DOUBLING)
    return (PER_DOUBLING + part + 0.5) * 2.0 ** (FIRST_POWER + doubling - 4)


def read_buckets(spreads: Sequence[bytes]) -> array[int]:
    """Return the sum of spreads in an arena's form."""
    total = array("Q", bytes(8 * BUCKETS))
    for spread in spreads:
        total = array("Q", map(int.__add__, total, array("Q", spread)))
    return total


def quantiles_ns(counts: Sequence[int], ranks: Sequence[float]) -> list[float]:
    """Return the durations at these ranks from 0 to 1, nan when nothing was counted."""
    sums = list(accumulate(counts))
    total = sums[-1] if sums else 0
    if not total:
        return [nan] * len(ranks)
    return [middle_ns(bisect_left(sums, max(ceil(rank * total), 1))) for rank in ranks]


@dataclass(slots=True)
class SpreadWindow:
    """Growth of counts over about the last minute.

    Each call keeps its counts; of calls more than a minute before, the last is the reference.
    """

    clock: Callable[[], int] = time.monotonic_ns
    _seen: deque[tuple[int, array[int]]] = field(default_factory=deque)

    def growth(self, counts: array[int]) -> list[int]:
        """Return the growth of each count, and keep nothing."""
        old = self._seen[0][1] if self._seen else array("Q", bytes(8 * len(counts)))
        return [max(new - before, 0) for new, before in zip(counts, old, strict=True)]

    def since(self, counts: array[int]) -> list[int]:
        """Return the growth of each count, and keep the counts."""
        now = self.clock()
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_NS:
            self._seen.popleft()
        if not self._seen:  # in the first minute, everything there was
            self._seen.append((now, array("Q", bytes(8 * len(counts)))))
        self._seen.append((now, counts))
        return self.growth(counts)
