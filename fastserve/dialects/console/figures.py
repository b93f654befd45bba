"""What counters that only grow say of the time between two looks: rates, means, percentiles. No clock here.

A `Totals` is what one model, or the whole server, has counted since it began: by name a tuple of numbers,
of a histogram its counts by bucket. `level` is the exception, a gauge: rows that wait right now.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec

from fastserve.metrics import Metric, names

Totals = dict[str, tuple[float, ...]]

REQUESTS, ERRORS, LATENCY, ROWS, SIZES, LEVEL = "requests", "errors", "latency", "rows", "sizes", "level"
PLOTTED = (REQUESTS, ERRORS, LATENCY, ROWS, SIZES, LEVEL)
STAGES: Mapping[str, Metric] = {
    "decode": names.DECODE_DURATION,
    "queue": names.QUEUE_DURATION,
    "copy-in": names.COPY_IN_DURATION,
    "compute": names.COMPUTE_DURATION,
    "copy-out": names.COPY_OUT_DURATION,
    "encode": names.ENCODE_DURATION,
}


class Figures(msgspec.Struct, kw_only=True):
    """Of one interval. Durations in milliseconds; None where nothing was counted."""

    requests_per_s: float
    errors_per_s: float
    rows_per_s: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    batch_rows: float | None
    queue_rows: float


class Stage(msgspec.Struct):
    """Where the time of requests went."""

    stage: str
    p50_ms: float | None
    p99_ms: float | None


class Bar(msgspec.Struct):
    """Batches of at most so many rows, and of more than the bar before. None: of any size."""

    at_most: float | None
    batches: int


def grown(now: Totals, before: Totals, wanted: Iterable[str], levels: Container[str] = (LEVEL,)) -> Totals:
    """What was counted between, of these names; of `levels` what there is now. What was not there before
    began at nothing."""
    found: Totals = {}
    for name in wanted:
        if name in now:
            old = None if name in levels else before.get(name)
            found[name] = now[name] if old is None else tuple(map(operator.sub, now[name], old))
    return found


def add_up(parts: Iterable[Totals]) -> Totals:
    """The totals of all of them together."""
    found: Totals = {}
    for part in parts:
        for name, values in part.items():
            held = found.get(name)
            found[name] = values if held is None else add(held, values)
    return found


def add(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(operator.add, a, b))


def describe(growth: Totals, seconds: float) -> Figures:
    """The figures of what was counted in so many seconds."""
    p50, p90, p99 = percentiles(growth.get(LATENCY, ()), (0.5, 0.9, 0.99))
    batches = sum(growth.get(SIZES, ()))
    rows = growth.get(ROWS, (0.0,))[0]
    return Figures(
        requests_per_s=growth.get(REQUESTS, (0.0,))[0] / seconds,
        errors_per_s=growth.get(ERRORS, (0.0,))[0] / seconds,
        rows_per_s=rows / seconds,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        batch_rows=rows / batches if batches else None,
        queue_rows=growth.get(LEVEL, (0.0,))[0],
    )


def stages(growth: Totals) -> list[Stage]:
    return [Stage(name, *percentiles(growth.get(name, ()), (0.5, 0.99))) for name in STAGES]


def bars(growth: Totals) -> list[Bar]:
    """How large batches were, up to the largest there was."""
    counts = growth.get(SIZES, ())
    used = max((i + 1 for i, count in enumerate(counts) if count), default=0)
    bounds = (*names.BATCH_ROWS, None)
    return [Bar(bound, int(count)) for bound, count in zip(bounds[:used], counts[:used], strict=True)]


def percentiles(counts: Sequence[float], ranks: Sequence[float]) -> list[float | None]:
    """In milliseconds, of counts by STAGE_SECONDS: within a bucket as if evenly spread (Prometheus does the
    same); above the last bound it is that bound. None when nothing was counted."""
    sums = list(accumulate(counts))
    if not sums or not sums[-1]:
        return [None] * len(ranks)
    return [_percentile(counts, sums, rank * sums[-1]) * 1000 for rank in ranks]


def _percentile(counts: Sequence[float], sums: Sequence[float], wanted: float) -> float:
    bounds = names.STAGE_SECONDS
    bucket = next(i for i, reached in enumerate(sums) if reached >= wanted and counts[i])
    if bucket >= len(bounds):
        return bounds[-1]
    below = bounds[bucket - 1] if bucket else 0.0
    share = (wanted - (sums[bucket] - counts[bucket])) / counts[bucket]
    return below + (bounds[bucket] - below) * share
