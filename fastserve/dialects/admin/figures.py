"""Rates, means and percentiles of an interval, from the growth of counters. No clock here.

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
REQUESTS, ERRORS, FAULTS, LATENCY = "requests", "errors", "faults", "latency"
ROWS, SIZES, LEVEL = "rows", "sizes", "level"
PLOTTED = (REQUESTS, ERRORS, FAULTS, LATENCY, ROWS, SIZES, LEVEL)

STAGES: Mapping[str, Metric] = {
    "decode": names.DECODE_DURATION,
    "queue": names.QUEUE_DURATION,
    "copy-in": names.COPY_IN_DURATION,
    "compute": names.COMPUTE_DURATION,
    "copy-out": names.COPY_OUT_DURATION,
    "encode": names.ENCODE_DURATION,
}


class ModelFigures(msgspec.Struct, kw_only=True):
    """Figures of one interval. Durations are in milliseconds, None where nothing was counted. Faults are the
    errors that are not the client's: of the model, or of the server."""

    requests_per_s: float
    errors_per_s: float
    faults_per_s: float
    rows_per_s: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    batch_rows: float | None
    queue_rows: float


class StageFigures(msgspec.Struct):
    """Time of requests in one stage."""

    stage: str
    p50_ms: float | None
    p99_ms: float | None


class Bar(msgspec.Struct):
    """Number of batches of at most `rows` rows and more than the bar before; None: of any size."""

    at_most: float | None
    batches: int


def grown(now: Totals, before: Totals, wanted: Iterable[str], levels: Container[str] = (LEVEL,)) -> Totals:
    """Return the growth of these names; of `levels` the present value. A series that was not there before
    began at nothing."""
    found: Totals = {}
    for name in wanted:
        if name in now:
            old = None if name in levels else before.get(name)
            found[name] = now[name] if old is None else tuple(map(operator.sub, now[name], old))
    return found


def add_to(total: Totals, part: Totals) -> None:
    """Add a part to a total."""
    for name, values in part.items():
        held = total.get(name)
        total[name] = values if held is None else add(held, values)


def add(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(operator.add, a, b))


def describe(growth: Totals, seconds: float) -> ModelFigures:
    """Return the figures of an interval."""
    p50, p90, p99 = percentiles(growth.get(LATENCY, ()), (0.5, 0.9, 0.99))
    batches = sum(growth.get(SIZES, ()))
    rows = growth.get(ROWS, (0.0,))[0]
    return ModelFigures(
        requests_per_s=growth.get(REQUESTS, (0.0,))[0] / seconds,
        errors_per_s=growth.get(ERRORS, (0.0,))[0] / seconds,
        faults_per_s=growth.get(FAULTS, (0.0,))[0] / seconds,
        rows_per_s=rows / seconds,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        batch_rows=rows / batches if batches else None,
        queue_rows=growth.get(LEVEL, (0.0,))[0],
    )


def stages(growth: Totals) -> list[StageFigures]:
    return [StageFigures(name, *percentiles(growth.get(name, ()), (0.5, 0.99))) for name in STAGES]


def bars(growth: Totals) -> list[Bar]:
    """Return the distribution of batch sizes, up to the largest."""
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


TOKENS, PROMPTS, FIRST, GAPS = "tokens", "prompts", "first", "gaps"
RUNNING, WAITING, KV_USED, KV = "running", "waiting", "kv_used", "kv"
TEXT_HISTOGRAMS: Mapping[str, Metric] = {FIRST: names.TEXT_FIRST_TOKEN, GAPS: names.TEXT_TOKEN_GAP}

TEXT_NUMBERS: Mapping[str, Metric] = {
    TOKENS: names.TEXT_TOKENS,
    PROMPTS: names.TEXT_PROMPT_TOKENS,
    RUNNING: names.TEXT_RUNNING,
    WAITING: names.TEXT_WAITING,
    KV_USED: names.TEXT_KV_USED,
    KV: names.TEXT_KV,
}

TEXT_LEVELS = frozenset((RUNNING, WAITING, KV_USED, KV))
TEXT_PLOTTED = (*TEXT_HISTOGRAMS, *TEXT_NUMBERS)
POINTED = (*PLOTTED, *TEXT_PLOTTED)
SERIES = ("tokens_per_s", "first_p50_ms", "first_p99_ms", "running")


class TextFigures(msgspec.Struct, kw_only=True):
    """Of one interval; `running`, `waiting` and what the KV cache holds are of its end. `kv_tokens` 0: not
    told. Durations in milliseconds; None where nothing was counted."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    first_p50_ms: float | None
    first_p99_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    running: int
    waiting: int
    kv_used_tokens: int
    kv_tokens: int


def describe_text(growth: Totals, seconds: float) -> TextFigures | None:
    """Return the text figures of an interval, None for a model that generates no text."""
    if TOKENS not in growth:
        return None
    first = percentiles(growth.get(FIRST, ()), (0.5, 0.99))
    gaps = percentiles(growth.get(GAPS, ()), (0.5, 0.99))
    running, waiting, used, held = (
        int(growth.get(name, (0.0,))[0]) for name in (RUNNING, WAITING, KV_USED, KV)
    )
    return TextFigures(
        tokens_per_s=growth[TOKENS][0] / seconds,
        prompt_tokens_per_s=growth.get(PROMPTS, (0.0,))[0] / seconds,
        first_p50_ms=first[0],
        first_p99_ms=first[1],
        gap_p50_ms=gaps[0],
        gap_p99_ms=gaps[1],
        running=running,
        waiting=waiting,
        kv_used_tokens=used,
        kv_tokens=held,
    )
