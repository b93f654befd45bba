"""History of the last minutes: a sample of the counters every two seconds, and the figures of each interval.

Every front process keeps its own, of the sums over all of them. A look reads only what is shown: 0.5 ms with
ten models. A model has 300 points of six numbers, 7 KB; one that generates text of four more.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from math import nan

from fastserve.dialects.admin import figures
from fastserve.dialects.admin.figures import STAGES, ModelFigures, TextFigures, Totals
from fastserve.metrics import Registry, names

INTERVAL_S = 2.0
POINTS = 300  # ten minutes
WINDOW = 5  # intervals that make up "now": single ones jump
MODELS_MAX = 100  # with a history; beyond, in the order of their names, only "now" is known
SERIES = ("requests_per_s", "errors_per_s", "p50_ms", "p99_ms", "batch_rows", "queue_rows")
SHOWN = (*figures.PLOTTED, *STAGES, *figures.TEXT_PLOTTED)
LEVELS = frozenset((figures.LEVEL, *figures.TEXT_LEVELS))
ALL = ""  # the model whose figures are the server's
Causes = dict[tuple[str, str, str], float]


class Look:
    """A sample of the counters, by model and by failure: (kind, model, cause)."""

    __slots__ = ("all", "at_ns", "causes", "models")

    def __init__(self, registry: Registry, at_ns: int) -> None:
        self.at_ns = at_ns
        self.models: dict[str, Totals] = defaultdict(dict)
        self.causes: Causes = defaultdict(float)
        found = registry.read(*_READ)
        requests, duration, sizes, rows, waiting, rejects, cancels, wire = found[:_FIRST]
        timed, plain = found[_FIRST:_PLAIN], found[_PLAIN:]
        for labels, (count,) in requests.items():
            self._count_request(labels[0], labels[-1], count)
        columns = (
            (figures.LATENCY, duration),
            (figures.SIZES, sizes),
            *zip((*STAGES, *figures.TEXT_HISTOGRAMS), timed, strict=True),
        )
        for name, series in columns:
            for labels, values in series.items():
                self._add(labels[0], name, values[:-1])  # without the sum
        levels = zip(figures.TEXT_NUMBERS, plain, strict=True)
        for name, series in ((figures.ROWS, rows), (figures.LEVEL, waiting), *levels):
            for labels, values in series.items():
                self._add(labels[0], name, values)
        for kind, series in (("reject", rejects), ("cancel", cancels)):
            for labels, (count,) in series.items():
                self.causes[kind, labels[0], labels[-1]] += count
        for labels, (count,) in wire.items():
            self.causes["wire", "", labels[-1]] += count
        self.all = figures.add_up(self.models.values())

    def of(self, model: str) -> Totals:
        return self.all if model == ALL else self.models.get(model, {})

    def _count_request(self, model: str, status: str, count: float) -> None:
        self._add(model, figures.REQUESTS, (count,))
        if status != "OK":
            self._add(model, figures.ERRORS, (count,))
            self.causes["status", model, status] += count

    def _add(self, model: str, name: str, values: tuple[float, ...]) -> None:
        totals = self.models[model]
        totals[name] = figures.add(totals[name], values) if name in totals else values


_READ = (
    names.REQUESTS,
    names.REQUEST_DURATION,
    names.BATCH_SIZE,
    names.ROWS,
    names.QUEUE_ROWS,
    names.REJECTS,
    names.CANCELS,
    names.WIRE_REJECTS,
    *STAGES.values(),
    *figures.TEXT_HISTOGRAMS.values(),
    *figures.TEXT_NUMBERS.values(),
)

_PLAIN = len(_READ) - len(figures.TEXT_NUMBERS)
_FIRST = _PLAIN - len(STAGES) - len(figures.TEXT_HISTOGRAMS)


class History:
    """Samples and points. `seen` counts all points there ever were: the number of the next one."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looks: deque[Look] = deque(maxlen=WINDOW + 1)
        self._points: dict[str, tuple[deque[int], dict[str, array[float]]]] = {}
        self.seen = 0

    def look(self, now_ns: int) -> None:
        """Take a sample; called once an interval."""
        look = Look(self._registry, now_ns)
        if self._looks:
            self._keep(self._looks[-1], look)
            self.seen += 1
        self._looks.append(look)

    def models(self) -> list[str]:
        """Return the models with any count, without the server's own."""
        return sorted(name for name in self._looks[-1].models if name != ALL) if self._looks else []

    def growth(self, model: str) -> tuple[Totals, float]:
        """Return the figures of the window that is "now", and its seconds."""
        if not self._looks:
            return {}, INTERVAL_S
        first, last = self._looks[0], self._looks[-1]
        growth = figures.grown(last.of(model), first.of(model), SHOWN, LEVELS)
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

    def points(self, model: str, after: int) -> dict[str, list[float | None]]:
        """Return the points of a model from number `after` on, oldest first; None without counts."""
        numbers, series = self._points.get(model, ((), {}))
        newer = sum(number >= after for number in numbers)
        return {
            name: [_or_none(value) for value in kept[max(len(kept) - newer, 0) :]]
            for name, kept in series.items()
        }

    def _keep(self, before: Look, now: Look) -> None:
        seconds = max((now.at_ns - before.at_ns) / 1e9, 1e-3)
        known = {ALL, *sorted(now.models)[:MODELS_MAX]}
        for gone in set(self._points) - known:
            del self._points[gone]
        for model in known:
            growth = figures.grown(now.of(model), before.of(model), SHOWN, LEVELS)
            self._add_point(model, figures.describe(growth, seconds), figures.describe_text(growth, seconds))

    def _add_point(self, model: str, point: ModelFigures, text: TextFigures | None) -> None:
        numbers, series = self._points.setdefault(model, (deque(maxlen=POINTS), defaultdict(_no_points)))
        numbers.append(self.seen)
        found = {name: getattr(point, name) for name in SERIES}
        if text is not None or figures.SERIES[0] in series:
            found |= {name: getattr(text, name, None) for name in figures.SERIES}
        for name, value in found.items():
            kept = series[name]
            kept.append(nan if value is None else value)
            del kept[:-POINTS]


def _no_points() -> array[float]:
    return array("f")


def _or_none(value: float) -> float | None:
    return None if value != value else round(value, 4)
