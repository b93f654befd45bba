"""TensorFlow Serving's own metrics page (spec 6.5): its names, its bounds, its text form.

Counters live in this front process alone; the server's `/metrics` is the page that adds up
several front processes. A call costs two dict lookups and a bisection.

The text differs from Prometheus' usual one: no HELP lines, braces even without labels, `:` in
names, upper bounds that are exclusive, numbers of six significant digits.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fastserve.codec.client_text import to_bytes

REQUEST_COUNT = "/tensorflow/serving/request_count"
REQUEST_LATENCY = "/tensorflow/serving/request_latency"
RUNTIME_LATENCY = "/tensorflow/serving/runtime_latency"
RUNTIME = "TF1"
"""What the original calls the runtime of its sessions; there is no other word that its dashboards know."""
EXAMPLE_COUNTS = "/tensorflow/serving/request_example_counts"
EXAMPLE_TOTAL = "/tensorflow/serving/request_example_count_total"
EXAMPLE_BOUNDS = tuple(2.0**power for power in range(15))
LATENCY_BOUNDS_US: tuple[float, ...] = tuple(10 * 1.8**power for power in range(33))

_NAME_ODD = re.compile(r"[^a-zA-Z0-9_:]")
_LABEL_ODD = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(slots=True)
class Spread:
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


class Monitor:
    """Counts of calls. Names nobody serves share one series, so that clients cannot add series."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._calls: dict[tuple[str, str], int] = {}
        self._latency: dict[tuple[str, str, str], Spread] = {}
        self._runtime: dict[tuple[str, str], Spread] = {}
        self._examples: dict[str, Spread] = {}

    def count(self, model: str, status: str) -> None:
        """One call answered with that code name (`OK`, `NOT_FOUND`, ...)."""
        key = (model, status) if model in self._known else ("", status)
        self._calls[key] = self._calls.get(key, 0) + 1

    def time(self, model: str, api: str, took_us: float, entrypoint: str = "REST") -> None:
        """How long one successful inference took. `model` is one that is served."""
        key = model, api, entrypoint
        spread = self._latency.get(key)
        if spread is None:
            spread = self._latency[key] = Spread()
        spread.add(took_us)

    def run(self, model: str, api: str, ran_us: float) -> None:
        """How long its rows waited for their batch and were run; `api` in the words of gRPC."""
        spread = self._runtime.get((model, api))
        if spread is None:
            spread = self._runtime[model, api] = Spread()
        spread.add(ran_us)

    def examples(self, model: str, count: int) -> None:
        """One MultiInference was answered well, of so many examples."""
        self._examples.setdefault(model, Spread(bounds=EXAMPLE_BOUNDS)).add(count)

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
    return lines + [f"{metric}{{{_labels(labels)}}} {number(value)}" for labels, value in samples]


def write_histogram(
    name: str, bounds: Sequence[float], samples: Sequence[tuple[Mapping[str, str], Spread]]
) -> list[str]:
    """The lines of a histogram: cumulative buckets, sum and count of each sample."""
    metric = clean_name(name)
    lines = [f"# TYPE {metric} histogram"] if samples else []
    limits = [number(bound) for bound in bounds] + ["+Inf"]
    for labels, spread in samples:
        own = _labels(labels)
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


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(
        f'{_before_digit(_LABEL_ODD.sub("_", key))}="{_escaped(value)}"' for key, value in labels.items()
    )


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _before_digit(name: str) -> str:
    return f"_{name}" if name[:1].isdigit() else name
