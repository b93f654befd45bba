"""What a load gave, as text for a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any

from fastserve.cli.load.histogram import Histogram, floor_of
from fastserve.cli.load.run import Outcome

PERCENTILES = (50, 90, 99, 99.9)
SHORT = (50, 90, 99, 100)
BAR_CHARS = 50
STEPS_PER_DOUBLING = 2


def duration(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns:.0f} ns"


def text(outcome: Outcome) -> Iterator[str]:
    histogram = outcome.histogram
    yield f"requests   {histogram.total:,} in {outcome.seconds:.1f} s: {outcome.rate:,.1f}/s"
    yield f"replies    {outcome.body_bytes / 1e6 / max(outcome.seconds, 1e-9):,.2f} MB/s of bodies"
    yield f"latency    mean {duration(histogram.mean())}"
    for percent in PERCENTILES:
        yield f"  p{percent:<7g} {duration(histogram.percentile(percent))}"
    yield f"  p{100:<7g} {duration(histogram.percentile(100))}"
    if outcome.texts.pieces:
        yield from text_lines(outcome)
    for status, count in sorted(outcome.statuses.items()):
        yield f"status {status}  {count:,}"
    for fault, count in sorted(outcome.faults.items()):
        yield f"FAILED  {fault}: {count:,}"
    yield from bars(outcome.texts.gaps if outcome.texts.gaps.total else histogram)


def text_lines(outcome: Outcome) -> Iterator[str]:
    """What streams of text are judged by. The bars below are of the gaps."""
    texts = outcome.texts
    each = texts.tokens / max(texts.answers, 1)
    yield f"tokens     {texts.rate(outcome.seconds):,.1f}/s, {each:,.1f} an answer"
    for name, histogram in (("first", texts.first), ("gaps", texts.gaps)):
        told = "  ".join(f"p{percent:g} {duration(histogram.percentile(percent))}" for percent in SHORT)
        yield f"{name:<9}  {told}"


def bars(histogram: Histogram) -> Iterator[str]:
    """One line per half doubling of latency; the longest bar is the most common latency."""
    steps: dict[int, int] = {}
    for bucket, count in histogram.counts.items():
        step = int(log2(max(1, floor_of(bucket))) * STEPS_PER_DOUBLING)
        steps[step] = steps.get(step, 0) + count
    if not steps:
        return
    most = max(steps.values())
    yield ""
    for step in range(min(steps), max(steps) + 1):
        count = steps.get(step, 0)
        upper = duration(2 ** ((step + 1) / STEPS_PER_DOUBLING))
        bar = "#" * round(count / most * BAR_CHARS) or ("." if count else "")
        yield f"  < {upper:>8}  {count:>10,}  {bar}".rstrip()


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Latencies in microseconds."""
    histogram = outcome.histogram
    return {
        "requests": histogram.total,
        "seconds": outcome.seconds,
        "requests_per_s": outcome.rate,
        "mean_us": histogram.mean() / 1000,
        **{f"p{percent:g}_us": histogram.percentile(percent) / 1000 for percent in PERCENTILES},
        "body_bytes": outcome.body_bytes,
        "statuses": outcome.statuses,
        "faults": outcome.faults,
        **(texts_json(outcome) if outcome.texts.pieces else {}),
    }


def texts_json(outcome: Outcome) -> dict[str, Any]:
    """Of streams of text; times in microseconds."""
    texts = outcome.texts
    found = {"tokens_per_s": texts.rate(outcome.seconds), "answers": texts.answers, "tokens": texts.tokens}
    for name, histogram in (("first", texts.first), ("gap", texts.gaps)):
        found |= {f"{name}_p{percent:g}_us": histogram.percentile(percent) / 1000 for percent in SHORT}
    return found
