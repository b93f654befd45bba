"""History of the last minutes: a sample of the counters every two seconds, and the figures of each interval.

The owner of the models keeps it for all front processes. A sample is taken in steps, a metric or
some models at a time, so that the event loop does other work between two of them (`work_on`): with 200 models
all of it is 6 ms of CPU. A model has 300 points of seven numbers, 17 KB; one that generates text of four
more.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from math import nan
from typing import TypeVar

from fastserve.dialects.admin import figures
from fastserve.dialects.admin.figures import STAGES, ModelFigures, TextFigures, Totals
from fastserve.metrics import Registry, names
from fastserve.metrics.registry import CLIENT_FAULTS

INTERVAL_S = 2.0
POINTS = 300  # ten minutes
WINDOW = 5  # intervals that make up "now": single ones jump
MODELS_MAX = 256  # with a history; beyond, in the order of their names, only "now" is known
SLICE_NS = 400_000  # of work for this page at a time: half of what a turn of the loop may cost
MODELS_A_STEP = 8
SERIES = ("requests_per_s", "errors_per_s", "faults_per_s", "p50_ms", "p99_ms", "batch_rows", "queue_rows")
SHOWN = (*figures.POINTED, *STAGES)
LEVELS = frozenset((figures.LEVEL, *figures.TEXT_LEVELS))
ALL = ""  # the model whose figures are the server's
Causes = dict[tuple[str, str, str], float]
Points = dict[str, list[float | None]]
T = TypeVar("T")


def work_on(steps: Iterator[T], done: list[T] | None = None) -> bool:
    """Take steps for SLICE_NS and return whether there are more; results are appended to `done`."""
    until_ns = time.monotonic_ns() + SLICE_NS
    for step in steps:
        if done is not None:
            done.append(step)
        if time.monotonic_ns() >= until_ns:
            return True
    return False


class Look:
    """A sample of the counters, by model and by failure: (kind, model, cause)."""

    __slots__ = ("all", "at_ns", "causes", "models")

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns
        self.models: dict[str, Totals] = defaultdict(dict)
        self.causes: Causes = defaultdict(float)
        self.all: Totals = {}

    def read(self, registry: Registry) -> Iterator[None]:
        """Read the counters, a metric in each step."""
        for labels, (count,) in registry.read(names.REQUESTS)[0].items():
            self._count_request(labels[0], labels[-1], count)
        yield
        for name, metric in _HISTOGRAMS.items():
            for labels, values in registry.read(metric)[0].items():
                self._add(labels[0], name, values[:-1])  # without the sum
            yield
        found = registry.read(*_NUMBERS.values())
        for name, series in zip(_NUMBERS, found, strict=True):
            for labels, values in series.items():
                self._add(labels[0], name, values)
        yield
        rejects, cancels, wire = registry.read(names.REJECTS, names.CANCELS, names.WIRE_REJECTS)
        for kind, series in (("reject", rejects), ("cancel", cancels)):
            for labels, (count,) in series.items():
                self.causes[kind, labels[0], labels[-1]] += count
        for labels, (count,) in wire.items():
            self.causes["wire", "", labels[-1]] += count
        yield
        for number, totals in enumerate(self.models.values(), 1):
            figures.add_to(self.all, totals)
            if not number % MODELS_A_STEP:
                yield

    def of(self, model: str) -> Totals:
        return self.all if model == ALL else self.models.get(model, {})

    def _count_request(self, model: str, status: str, count: float) -> None:
        self._add(model, figures.REQUESTS, (count,))
        if status != "OK":
            self._add(model, figures.ERRORS, (count,))
            if status not in CLIENT_FAULTS:
                self._add(model, figures.FAULTS, (count,))
            self.causes["status", model, status] += count

    def _add(self, model: str, name: str, values: tuple[float, ...]) -> None:
        totals = self.models[model]
        totals[name] = figures.add(totals[name], values) if name in totals else values


_HISTOGRAMS = {
    figures.LATENCY: names.REQUEST_DURATION,
    figures.SIZES: names.BATCH_SIZE,
    **STAGES,
    **figures.TEXT_HISTOGRAMS,
}
_NUMBERS = {figures.ROWS: names.ROWS, figures.LEVEL: names.QUEUE_ROWS, **figures.TEXT_NUMBERS}


class Track:
    """Points of one model: `end` is the number after the last one."""

    __slots__ = ("end", "series")

    def __init__(self) -> None:
        self.end = 0
        self.series: dict[str, array[float]] = defaultdict(_no_points)

    def add(self, number: int, values: dict[str, float | None]) -> None:
        self.end = number + 1
        for name, value in values.items():
            kept = self.series[name]
            kept.append(nan if value is None else round(value, 4))
            del kept[:-POINTS]

    def read(self, wanted: Iterable[str], after: int, until: int) -> Points:
        """Return the points of numbers `after` to `until`, oldest first; None without counts."""
        first, last = max(self.end - after, 0), max(self.end - until, 0)  # counted from the end
        return {
            name: [
                value if value == value else None
                for value in kept[max(len(kept) - first, 0) : max(len(kept) - last, 0)]
            ]
            for name in wanted
            if (kept := self.series.get(name)) is not None
        }


class History:
    """Samples and points. `seen` counts all points there ever were: the number of the next one; `samples`
    is one more once there is any."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looks: deque[Look] = deque(maxlen=WINDOW + 1)
        self._tracks: dict[str, Track] = {}
        self.seen = self.samples = 0

    def look(self, now_ns: int) -> None:
        """Take a sample; called once an interval."""
        for _ in self.steps(now_ns):
            pass

    def steps(self, now_ns: int) -> Iterator[None]:
        """Take a sample in steps. What is read meanwhile is of the sample before."""
        look = Look(now_ns)
        yield from look.read(self._registry)
        if self._looks:
            yield from self._keep(self._looks[-1], look)
            self.seen += 1
        self._looks.append(look)
        self.samples += 1

    def models(self) -> list[str]:
        """Return the models with any count, without the server's own."""
        return sorted(name for name in self._looks[-1].models if name != ALL) if self._looks else []

    def growth(self, model: str, wanted: Iterable[str] = SHOWN) -> tuple[Totals, float]:
        """Return the figures of the window that is "now", and its seconds."""
        if not self._looks:
            return {}, INTERVAL_S
        first, last = self._looks[0], self._looks[-1]
        growth = figures.grown(last.of(model), first.of(model), wanted, LEVELS)
        return growth, max((last.at_ns - first.at_ns) / 1e9, INTERVAL_S)

    def causes(self) -> list[tuple[tuple[str, str, str], float, float]]:
        """Return for each failure (kind, model, cause) its total, and its present rate a second."""
        if not self._looks:
            return []
        first, last = self._looks[0], self._looks[-1]
        seconds = max((last.at_ns - first.at_ns) / 1e9, INTERVAL_S)
        return [
            (key, count, (count - first.causes.get(key, 0.0)) / seconds)
            for key, count in sorted(last.causes.items(), key=lambda item: -item[1])
        ]

    def points(
        self, model: str, after: int, until: int | None = None, wanted: Iterable[str] | None = None
    ) -> Points:
        """Return the points of a model from number `after` on, oldest first; None without counts."""
        track = self._tracks.get(model)
        if track is None:
            return {}
        return track.read(wanted or track.series, after, self.seen if until is None else until)

    def _keep(self, before: Look, now: Look) -> Iterator[None]:
        seconds = max((now.at_ns - before.at_ns) / 1e9, 1e-3)
        known = {ALL, *sorted(now.models)[:MODELS_MAX]}
        for gone in set(self._tracks) - known:
            del self._tracks[gone]
        for number, model in enumerate(known, 1):
            growth = figures.grown(now.of(model), before.of(model), figures.POINTED, LEVELS)
            self._add_point(model, figures.describe(growth, seconds), figures.describe_text(growth, seconds))
            if not number % MODELS_A_STEP:
                yield

    def _add_point(self, model: str, point: ModelFigures, text: TextFigures | None) -> None:
        track = self._tracks.setdefault(model, Track())
        found = {name: getattr(point, name) for name in SERIES}
        if text is not None or figures.SERIES[0] in track.series:
            found |= {name: getattr(text, name, None) for name in figures.SERIES}
        track.add(self.seen, found)


def _no_points() -> array[float]:
    return array("d")
