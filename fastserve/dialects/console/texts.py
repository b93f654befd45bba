"""Figures of models that generate text, of what was counted between two looks: see figures."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fastserve.dialects.console.figures import Totals, percentiles
from fastserve.metrics import Metric, names

TOKENS, PROMPTS, FIRST, GAPS = "tokens", "prompts", "first", "gaps"
RUNNING, WAITING, KV_USED, KV = "running", "waiting", "kv_used", "kv"
HISTOGRAMS: Mapping[str, Metric] = {FIRST: names.TEXT_FIRST_TOKEN, GAPS: names.TEXT_TOKEN_GAP}
NUMBERS: Mapping[str, Metric] = {
    TOKENS: names.TEXT_TOKENS,
    PROMPTS: names.TEXT_PROMPT_TOKENS,
    RUNNING: names.TEXT_RUNNING,
    WAITING: names.TEXT_WAITING,
    KV_USED: names.TEXT_KV_USED,
    KV: names.TEXT_KV,
}
LEVELS = frozenset((RUNNING, WAITING, KV_USED, KV))
PLOTTED = (*HISTOGRAMS, *NUMBERS)
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


def describe(growth: Totals, seconds: float) -> TextFigures | None:
    """The figures of what was counted in so many seconds; None of what generates no text."""
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
