"""TensorFlow Serving's own metrics page (spec 6.5): its names, its bounds, its text form.

All numbers are sums over the front processes: calls are counted in the registry's memory, for two dict
lookups each, and `/metrics` does not show them. Batches and warm-ups are read at a scrape from what every
version counts anyway, by the owner of the models, and are of all APIs.

The text differs from Prometheus' usual one: no HELP lines, braces even without labels, `:` in
names, upper bounds that are exclusive, numbers of six significant digits.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nextafter

from fastserve.codec.json_text import to_bytes
from fastserve.engine import counters_of
from fastserve.errors import ServeError
from fastserve.metrics import Metric, Registry
from fastserve.metrics.registry import middle_ns
from fastserve.repository.model_config import round_up
from fastserve.repository.version import Version, VersionState
from fastserve.serving.dialect import ServingContext
from fastserve.serving.replication import Content, ReplicatedPart

log = logging.getLogger(__name__)

REQUEST_COUNT = "/tensorflow/serving/request_count"
REQUEST_LATENCY = "/tensorflow/serving/request_latency"
RUNTIME_LATENCY = "/tensorflow/serving/runtime_latency"
RUNTIME = "TF1"
"""The runtime of sessions as the original names it; there is no other word that its dashboards know."""

EXAMPLE_COUNTS = "/tensorflow/serving/request_example_counts"
EXAMPLE_TOTAL = "/tensorflow/serving/request_example_count_total"
EXAMPLE_BOUNDS = tuple(2.0**power for power in range(15))
LATENCY_BOUNDS_US: tuple[float, ...] = tuple(10 * 1.8**step for step in range(33))
_NAME_ODD = re.compile(r"[^a-zA-Z0-9_:]")
_LABEL_ODD = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(slots=True)
class PageHistogram:
    """A histogram, of latencies in microseconds unless told otherwise; each bucket ends before its bound."""

    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    bounds: Sequence[float] = LATENCY_BOUNDS_US

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_right(self.bounds, value)] += times
        self.total += value * times


def _histogram(name: str, bounds: Sequence[float], *labels: str) -> Metric:
    ends = tuple(nextafter(bound, 0) for bound in bounds)  # in the registry a bound belongs to its bucket
    return Metric(f"_tfserving_{name}", "See the dialect's own page.", "histogram", labels, ends)


CALLS = Metric("_tfserving_calls", "See the dialect's own page.", "counter", ("model", "status"))
LATENCIES = _histogram("latency_us", LATENCY_BOUNDS_US, "model", "api", "entrypoint")
RUNTIMES = _histogram("runtime_us", LATENCY_BOUNDS_US, "model", "api")
EXAMPLES = _histogram("examples", EXAMPLE_BOUNDS, "model")


class TFServingMonitor:
    """Counts of calls. Names nobody serves share one series, so that clients cannot add series."""

    def __init__(self, known: Collection[str], registry: Registry) -> None:
        self._known, self._registry = known, registry
        self._calls = registry.counters(CALLS)
        self._latency = registry.histograms(LATENCIES)
        self._runtime = registry.histograms(RUNTIMES)
        self._examples = registry.histograms(EXAMPLES)

    def count(self, model: str, status: str) -> None:
        """One call answered with that code name (`OK`, `NOT_FOUND`, ...)."""
        self._calls.of(model if model in self._known else "", status).add()

    def time(self, model: str, api: str, took_us: float, entrypoint: str = "REST") -> None:
        """How long one successful inference took. `model` is one that is served."""
        self._latency.of(model, api, entrypoint).observe(took_us)

    def run(self, model: str, api: str, ran_us: float) -> None:
        """How long its rows waited for their batch and were run; `api` in the words of gRPC."""
        self._runtime.of(model, api).observe(ran_us)

    def examples(self, model: str, count: int) -> None:
        """One MultiInference was answered well, of so many examples."""
        self._examples.of(model).observe(count)

    def write(self, more: Sequence[str] = ()) -> bytes:
        """The page: the calls, then the lines of others."""
        (found,) = self._registry.read(CALLS)
        calls = [
            ({"model_name": model, "status": status}, int(value))
            for (model, status), (value,) in sorted(found.items())
        ]
        spreads = [
            ({"model_name": model, "API": api, "entrypoint": entrypoint}, spread)
            for (model, api, entrypoint), spread in self._read(LATENCIES, LATENCY_BOUNDS_US)
        ]
        lines = write_series(REQUEST_COUNT, "counter", calls)
        lines += write_histogram(REQUEST_LATENCY, LATENCY_BOUNDS_US, spreads)
        lines += self._write_runs()
        return to_bytes("\n".join([*lines, *more]) + "\n")

    def _write_runs(self) -> list[str]:
        runs = [
            ({"model_name": model, "API": api, "runtime": RUNTIME}, spread)
            for (model, api), spread in self._read(RUNTIMES, LATENCY_BOUNDS_US)
        ]
        counts = [({"model": model}, spread) for (model,), spread in self._read(EXAMPLES, EXAMPLE_BOUNDS)]
        totals = [(labels, int(spread.total)) for labels, spread in counts]
        return [
            *write_histogram(RUNTIME_LATENCY, LATENCY_BOUNDS_US, runs),
            *write_histogram(EXAMPLE_COUNTS, EXAMPLE_BOUNDS, counts),
            *write_series(EXAMPLE_TOTAL, "counter", totals),
        ]

    def _read(self, metric: Metric, bounds: Sequence[float]) -> list[tuple[tuple[str, ...], PageHistogram]]:
        (found,) = self._registry.read(metric)
        return [
            (labels, PageHistogram([*map(int, counts)], total, bounds))
            for labels, (*counts, total) in sorted(found.items())
        ]


def write_series(name: str, kind: str, samples: Sequence[tuple[Mapping[str, str], int | float]]) -> list[str]:
    """The lines of a counter or gauge; none without samples."""
    metric = clean_name(name)
    lines = [f"# TYPE {metric} {kind}"] if samples else []
    return lines + [f"{metric}{{{_write_labels(labels)}}} {number(value)}" for labels, value in samples]


def write_histogram(
    name: str, bounds: Sequence[float], samples: Sequence[tuple[Mapping[str, str], PageHistogram]]
) -> list[str]:
    """The lines of a histogram: cumulative buckets, sum and count of each sample."""
    metric = clean_name(name)
    lines = [f"# TYPE {metric} histogram"] if samples else []
    limits = [number(bound) for bound in bounds] + ["+Inf"]
    for labels, spread in samples:
        own = _write_labels(labels)
        prefix = f"{own}," if own else ""
        so_far = 0
        for limit, count in zip(limits, spread.counts, strict=True):
            so_far += count
            lines.append(f'{metric}_bucket{{{prefix}le="{limit}"}} {so_far}')
        lines.append(f"{metric}_sum{{{own}}} {number(spread.total)}")
        lines.append(f"{metric}_count{{{own}}} {so_far}")
    return lines


def clean_name(name: str) -> str:
    """A metric's name as the page prints it: `/a/b` becomes `:a:b`, a leading digit gets `_`."""
    return _before_digit(_NAME_ODD.sub(":", name))


def number(value: int | float) -> str:
    """Whole counts in full, everything else in six significant digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _write_labels(labels: Mapping[str, str]) -> str:
    return ",".join(
        f'{_before_digit(_LABEL_ODD.sub("_", key))}="{_escaped(value)}"' for key, value in labels.items()
    )


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _before_digit(name: str) -> str:
    return f"_{name}" if name[:1].isdigit() else name


SESSION = "/tensorflow/serving/batching_session/"
WAIT_BOUNDS_US = tuple(100 * 1.2**bucket for bucket in range(52))
SIZE_BOUNDS = tuple(2.0**exponent for exponent in range(14))
POOL = "batch_threads"
"""The original's name of threads that nobody has named."""


@dataclass(slots=True)
class SessionCounts:
    """Runs by rows and by rows after filling up; requests by how long they waited (SpreadWindow)."""

    runs: Counter[tuple[int, int]] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)
    waited_ns: int = 0

    def add(self, other: SessionCounts) -> None:
        self.runs.update(other.runs)
        self.waits.update(other.waits)
        self.waited_ns += other.waited_ns


class BatchesPart(ReplicatedPart):
    """Counts of the batches and warm-ups of a server's versions, which the owner of the models shows: it
    knows those that failed to load, and keeps the batches of those that are gone."""

    PART = "tfserving batches"

    def __init__(self, context: ServingContext) -> None:
        self._catalog, self._state = context.engine.catalog, context.state
        self._gone = SessionCounts()
        self._ending: set[Version] = set()  # another one of their number may be listed by now
        if self._state.owned:
            self._state.add(self.PART, self)
            self._catalog.on_change.append(self._keep)

    async def lines(self) -> list[str]:
        """Return the lines; none of batches before the first, and none at all while the owner is silent."""
        try:
            return (await self._state.show(self.PART, {})).splitlines()
        except ServeError as fault:  # the rest of the page may tell why
            log.warning("the metrics page has no batches: %s", fault.message)
            return []

    async def answer(self, question: Content) -> str:
        models = self._catalog.models.values()
        versions = [version for model in models for version in model.versions.values()]
        total = SessionCounts()
        total.add(self._gone)
        for version in {*versions, *self._ending}:
            if version.batching and version.state is not VersionState.END:
                total.add(_count_batches(version))
        batches = _write_batches(total) if total.runs else []
        return "\n".join([*batches, *write_warm_ups(versions)])

    def _keep(self, version: Version) -> None:
        if version.state is VersionState.UNLOADING:
            self._ending.add(version)
        elif version.state is VersionState.END:
            self._ending.discard(version)
            if version.batching:
                self._gone.add(_count_batches(version))


def _count_batches(version: Version) -> SessionCounts:
    counters, sizes = counters_of(version), version.config.allowed_batch_sizes
    counts = counters.read()
    runs = {(batch.rows, round_up(batch.rows, sizes)): batch.runs for batch in counts.batches}
    waits = {bucket: count for bucket, count in enumerate(counters.spreads()[1]) if count}
    return SessionCounts(Counter(runs), Counter(waits), counts.queue.ns)


def _write_batches(total: SessionCounts) -> list[str]:
    processed, padding = PageHistogram(bounds=SIZE_BOUNDS), dict[int, PageHistogram]()
    for (rows, filled), runs in sorted(total.runs.items(), key=lambda item: item[0][1]):
        processed.add(filled, runs)
        padding.setdefault(filled, PageHistogram(bounds=SIZE_BOUNDS)).add(filled - rows, runs)
    waits = PageHistogram(bounds=WAIT_BOUNDS_US)
    for bucket, count in total.waits.items():
        waits.add(middle_ns(bucket) / 1000, count)
    waits.total = total.waited_ns / 1000  # exact, where the buckets are within 3 %
    padded = [({"execution_batch_size": str(size)}, spread) for size, spread in padding.items()]
    return [
        *write_series(SESSION + "wrapped_run_count", "counter", [({}, total.runs.total())]),
        *write_histogram(SESSION + "queuing_latency", WAIT_BOUNDS_US, [({"thread_pool_name": POOL}, waits)]),
        *write_histogram(SESSION + "processed_batch_size", SIZE_BOUNDS, [({}, processed)]),
        *write_histogram(SESSION + "padding_size", SIZE_BOUNDS, padded),
    ]


LATENCY = "/tensorflow/serving/model_warmup_latency"
RECORDS = "/tensorflow/serving/model_warmup_records_read"


def write_warm_ups(versions: Iterable[Version]) -> list[str]:
    """The lines; none before the first record."""
    spreads: dict[tuple[str, str], PageHistogram] = {}
    records: dict[tuple[str, str], int] = {}
    for version in versions:
        for warm_up in counters_of(version).warm_ups:
            key = str(version.folder), warm_up.status
            spreads.setdefault(key, PageHistogram()).add(warm_up.ns / 1000)
            records[key] = records.get(key, 0) + warm_up.records
    return [
        *write_histogram(LATENCY, LATENCY_BOUNDS_US, [(_labels(*key), one) for key, one in spreads.items()]),
        *write_series(RECORDS, "counter", [(_labels(*key), count) for key, count in records.items()]),
    ]


def _labels(path: str, status: str) -> dict[str, str]:
    return {"model_path": path, "status": status}
