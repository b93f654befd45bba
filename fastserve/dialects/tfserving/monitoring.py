"""TensorFlow Serving's own metrics page (spec 6.5): its names, its bounds, its text form.

Counters of calls are of this front process alone; the server's `/metrics` adds up several. A call costs two
dict lookups and a bisection. Batches and warm-ups are read at a scrape from what every version counts anyway,
and are of all APIs and front processes.

The text differs from Prometheus' usual one: no HELP lines, braces even without labels, `:` in
names, upper bounds that are exclusive, numbers of six significant digits.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from fastserve.codec.json_text import to_bytes
from fastserve.engine import RequestCounters, counters_of
from fastserve.metrics.quantiles import middle_ns
from fastserve.repository.model_config import round_up
from fastserve.repository.version import Version

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


class TFServingMonitor:
    """Counts of calls. Names nobody serves share one series, so that clients cannot add series."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._calls: Counter[tuple[str, str]] = Counter()
        self._latency: dict[tuple[str, str, str], PageHistogram] = defaultdict(PageHistogram)
        self._runtime: dict[tuple[str, str], PageHistogram] = defaultdict(PageHistogram)
        self._examples: dict[str, PageHistogram] = {}

    def count(self, model: str, status: str) -> None:
        """One call answered with that code name (`OK`, `NOT_FOUND`, ...)."""
        self._calls[model if model in self._known else "", status] += 1

    def time(self, model: str, api: str, took_us: float, entrypoint: str = "REST") -> None:
        """How long one successful inference took. `model` is one that is served."""
        self._latency[model, api, entrypoint].add(took_us)

    def run(self, model: str, api: str, ran_us: float) -> None:
        """How long its rows waited for their batch and were run; `api` in the words of gRPC."""
        self._runtime[model, api].add(ran_us)

    def examples(self, model: str, count: int) -> None:
        """One MultiInference was answered well, of so many examples."""
        self._examples.setdefault(model, PageHistogram(bounds=EXAMPLE_BOUNDS)).add(count)

    def write(self, more: Sequence[str] = ()) -> bytes:
        """The page: the calls, then the lines of others."""
        calls = [
            ({"model_name": model, "status": status}, value)
            for (model, status), value in sorted(self._calls.items())
        ]
        spreads = [
            ({"model_name": model, "API": api, "entrypoint": entrypoint}, spread)
            for (model, api, entrypoint), spread in sorted(self._latency.items())
        ]
        lines = write_series(REQUEST_COUNT, "counter", calls)
        lines += write_histogram(REQUEST_LATENCY, LATENCY_BOUNDS_US, spreads)
        lines += self._write_runs()
        return to_bytes("\n".join([*lines, *more]) + "\n")

    def _write_runs(self) -> list[str]:
        runs = [
            ({"model_name": model, "API": api, "runtime": RUNTIME}, spread)
            for (model, api), spread in sorted(self._runtime.items())
        ]
        counts = [({"model": model}, spread) for model, spread in sorted(self._examples.items())]
        totals = [(labels, int(spread.total)) for labels, spread in counts]
        return [
            *write_histogram(RUNTIME_LATENCY, LATENCY_BOUNDS_US, runs),
            *write_histogram(EXAMPLE_COUNTS, EXAMPLE_BOUNDS, counts),
            *write_series(EXAMPLE_TOTAL, "counter", totals),
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
    """Runs by rows and by rows after filling up; requests by how long they waited (metrics.quantiles)."""

    runs: Counter[tuple[int, int]] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)
    waited_ns: int = 0

    def add(self, other: SessionCounts) -> None:
        self.runs.update(other.runs)
        self.waits.update(other.waits)
        self.waited_ns += other.waited_ns


class BatchSessions:
    """Counts of the batches that a server's versions have run; those of versions that are gone are kept."""

    def __init__(self) -> None:
        self._now: dict[RequestCounters, SessionCounts] = {}
        self._gone = SessionCounts()

    def write(self, versions: Iterable[Version]) -> list[str]:
        """The lines, with these versions as those that are there; none before the first batch."""
        batching = [version for version in versions if version.batching and counters_of(version).queues]
        now = {counters_of(version): _count_batches(version) for version in batching}
        for counters in self._now.keys() - now.keys():
            self._gone.add(self._now[counters])
        self._now = now
        total = SessionCounts()
        for seen in chain([self._gone], now.values()):
            total.add(seen)
        return _write_batches(total) if total.runs else []


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
