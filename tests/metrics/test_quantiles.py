"""Buckets of durations against the compiled ones, quantiles against sorting, windows against a clock."""

from __future__ import annotations

import mmap
import time
from array import array
from math import ceil, isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import BatchRing
from fastserve.metrics.registry import (
    BUCKETS,
    SpreadWindow,
    bucket_of,
    middle_ns,
    quantiles_ns,
    read_buckets,
)
from tests.effort import examples

durations = st.integers(0, 1 << 40)


@examples(60)
@given(st.lists(durations, min_size=1, max_size=4))
def test_the_compiled_buckets_are_these(ages: list[int]) -> None:
    """A worker's counts for one request agree with its exact sum."""
    shape = {"slots": 2, "max_rows": 4, "inputs": [8], "outputs": [8]}
    memory = mmap.mmap(-1, batch_ring.measure(**shape))
    batch_ring.format_arena(memory, **shape)
    front, worker = BatchRing(memory, front=0), BatchRing(memory, worker=0)
    wanted = array("Q", bytes(8 * BUCKETS))
    for age in ages:
        before = front.counters()[0][0][1]
        place = front.reserve(1)
        front.commit(place, 1)
        front.backdate(place, max(time.monotonic_ns() - age, 1))
        slot = worker.take()
        worker.start_run(slot)
        worker.publish(slot)
        front.release(place, 1)
        wanted[bucket_of(front.counters()[0][0][1] - before)] += 1
    assert read_buckets([front.spreads()[0]]) == wanted
    assert all(sum(read_buckets([spread])) == len(ages) for spread in front.spreads())
    assert sum(read_buckets([front.spreads()[1]] * 2)) == 2 * len(ages)


@given(durations)
def test_a_bucket_stands_for_its_durations(ns: int) -> None:
    bucket = bucket_of(ns)
    assert 0 <= bucket < BUCKETS
    assert ns < 1024 or middle_ns(bucket) == pytest.approx(ns, rel=0.04)
    assert bucket_of(ns + 1) >= bucket


@given(st.lists(st.integers(1024, 1 << 40), min_size=1), st.floats(0.01, 1))
def test_quantiles_are_those_of_the_sorted(values: list[int], rank: float) -> None:
    counts = [0] * BUCKETS
    for value in values:
        counts[bucket_of(value)] += 1
    exact = sorted(values)[max(ceil(rank * len(values)), 1) - 1]
    assert quantiles_ns(counts, [rank])[0] == pytest.approx(exact, rel=0.04)


def test_nothing_has_no_quantile() -> None:
    assert all(map(isnan, quantiles_ns([0] * BUCKETS, [0.5, 0.9])))


def test_a_window_forgets_what_is_older_than_a_minute() -> None:
    now = [0]
    window = SpreadWindow(lambda: now[0])

    def look(seconds: int, count: int) -> int:
        now[0] = seconds * 1_000_000_000
        return window.since(array("Q", [count]))[0]

    assert look(0, 5) == 5
    assert look(30, 7) == 7, "all of it is younger than a minute"
    assert look(61, 9) == 4
    assert look(95, 10) == 3, "the look at 30 s is the last one a minute old"
    assert look(500, 30) == 20, "a scraper that comes seldom gets what came since"
