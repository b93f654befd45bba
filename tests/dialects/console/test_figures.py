"""Figures of what was counted between two looks, against the requests themselves."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.dialects.admin import figures
from fastserve.dialects.admin.figures import ERRORS, LATENCY, LEVEL, REQUESTS, ROWS, SIZES
from fastserve.metrics import names
from tests.effort import examples

BOUNDS = names.STAGE_SECONDS
DURATIONS = st.lists(st.floats(0, 120), min_size=1, max_size=200)


def counted(durations: list[float]) -> list[float]:
    """By bucket, as a histogram counts them."""
    counts = [0.0] * (len(BOUNDS) + 1)
    for seconds in durations:
        counts[bisect_left(BOUNDS, seconds)] += 1
    return counts


@given(DURATIONS, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
@examples(300)
def test_a_percentile_is_in_the_bucket_of_the_true_one(durations: list[float], rank: float) -> None:
    (found,) = figures.percentiles(counted(durations), [rank])
    true = sorted(durations)[max(math.ceil(rank * len(durations) - 1e-9), 1) - 1]
    bucket = bisect_left(BOUNDS, true)
    low, high = (BOUNDS[bucket - 1] if bucket else 0.0), BOUNDS[min(bucket, len(BOUNDS) - 1)]
    assert found is not None
    assert min(low, high) * 1000 <= found <= high * 1000 * (1 + 1e-12)


def test_a_percentile_lies_in_its_bucket_as_far_as_its_rank() -> None:
    low, high = BOUNDS[3], BOUNDS[4]
    counts = [0.0] * (len(BOUNDS) + 1)
    counts[2], counts[4] = 2, 8
    found = figures.percentiles(counts, [0.4, 0.6, 1.0])
    wanted = [low + (high - low) * share for share in (0.25, 0.5, 1.0)]
    assert found == pytest.approx([1000 * seconds for seconds in wanted])


@given(DURATIONS)
def test_percentiles_rise(durations: list[float]) -> None:
    found = figures.percentiles(counted(durations), [0.1, 0.5, 0.9, 0.99])
    assert found == sorted(value for value in found if value is not None)


@pytest.mark.parametrize("counts", [(), (0.0,) * (len(BOUNDS) + 1)])
def test_nothing_counted_has_no_percentile(counts: tuple[float, ...]) -> None:
    assert figures.percentiles(counts, [0.5, 0.99]) == [None, None]


def test_figures_are_of_what_came_between() -> None:
    before = {REQUESTS: (10.0,), ERRORS: (1.0,), ROWS: (40.0,), SIZES: (10.0, 0.0), LEVEL: (9.0,)}
    now = {REQUESTS: (30.0,), ERRORS: (6.0,), ROWS: (90.0,), SIZES: (12.0, 18.0), LEVEL: (3.0,)}
    now[LATENCY] = tuple(counted([0.00005] * 20))
    found = figures.describe(figures.grown(now, before, figures.PLOTTED), 4.0)
    assert (found.requests_per_s, found.errors_per_s, found.rows_per_s) == (5.0, 1.25, 12.5)
    assert found.batch_rows == 50 / 20
    assert found.queue_rows == 3
    assert found.p50_ms is not None
    assert 0.025 < found.p50_ms <= 0.05


def test_what_is_new_began_at_nothing_and_only_what_is_wanted_is_compared() -> None:
    now, before = {ROWS: (2.0,), SIZES: (5.0, 6.0), ERRORS: (1.0,)}, {SIZES: (5.0, 4.0)}
    assert figures.grown(now, before, (ROWS, SIZES, LEVEL)) == {ROWS: (2.0,), SIZES: (0.0, 2.0)}


def test_totals_add_up_by_name_and_bucket() -> None:
    parts = [{ROWS: (1.0,), SIZES: (1.0, 2.0)}, {SIZES: (10.0, 20.0)}, {}]
    total: figures.Totals = {}
    for part in parts:
        figures.add_to(total, part)
    assert total == {ROWS: (1.0,), SIZES: (11.0, 22.0)}


def test_bars_end_with_the_largest_batches() -> None:
    counts = [0.0] * (len(names.BATCH_ROWS) + 1)
    counts[0], counts[2] = 5.0, 7.0
    found = figures.bars({SIZES: tuple(counts)})
    assert [(bar.at_most, bar.batches) for bar in found] == [(1.0, 5), (2.0, 0), (4.0, 7)]
    counts[-1] = 1.0
    assert figures.bars({SIZES: tuple(counts)})[-1].at_most is None
    assert figures.bars({}) == []
