"""The compiled meters against their oracle, and sections nobody should trust."""

from __future__ import annotations

import math
import mmap
import random
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.shared_metrics import (
    BOUNDS_MAX,
    KIND_COUNTER,
    KIND_GAUGE_LAST,
    KIND_GAUGE_SUM,
    KIND_HISTOGRAM,
    BatchMetrics,
    Counter,
    DurationSpread,
    Gauge,
    Histogram,
    Section,
    SharedTook,
    file_bytes,
    lay_out,
)
from fastserve.metrics.registry import BUCKETS, bucket_of
from tests.effort import examples
from tests.oracles.shared_metrics import PlainHistogram

SIZES = (2, 8, 256, 64)  # sections, series, text bytes, slots
SECTION_AT = 64  # after the file's header


def make(sizes: tuple[int, int, int, int] = SIZES) -> mmap.mmap:
    memory = mmap.mmap(-1, file_bytes(*sizes))
    lay_out(memory, *sizes)
    return memory


def test_counter_counts_in_its_section_only() -> None:
    memory = make()
    one, two = Section(memory, 0), Section(memory, 1)
    counter = Counter(one, one.append(KIND_COUNTER, b"requests", 1))
    counter.add()
    counter.add(41)
    assert counter.value == 42
    assert one.text(0) == (KIND_COUNTER, b"requests", 0, 1)
    assert one.values(0, 1) == (42,)
    assert Section(memory, 0).values(0, 1) == (42,)
    assert len(two) == 0
    assert two.text(0) is None


def test_counter_takes_no_negative_and_no_text() -> None:
    section = Section(make(), 0)
    counter = Counter(section, section.append(KIND_COUNTER, b"c", 1))
    with pytest.raises(OverflowError):
        counter.add(-1)
    with pytest.raises(TypeError):
        counter.add("1")  # type: ignore[arg-type]
    assert counter.value == 0


def test_gauge_sets_adds_and_dates() -> None:
    section = Section(make(), 0)
    level = Gauge(section, section.append(KIND_GAUGE_SUM, b"g", 1))
    level.set(2.5)
    level.add(-4)
    assert level.value == -1.5
    fact = Gauge(section, section.append(KIND_GAUGE_LAST, b"f", 2), last=True)
    fact.set(1)
    first = section.values(1, 2)[1]
    fact.add()
    assert fact.value == 2.0
    assert section.values(1, 2)[1] >= first > 0


bounds = st.lists(
    st.floats(allow_nan=False, allow_infinity=False),
    min_size=1,
    max_size=BOUNDS_MAX,
    unique_by=lambda x: x + 0.0,
).map(lambda found: tuple(sorted(found)))


@given(bounds, st.lists(st.floats()))
def test_histogram_is_its_oracle(limits: tuple[float, ...], values: list[float]) -> None:
    section = Section(make(), 0)
    histogram = Histogram(section, section.append(KIND_HISTOGRAM, b"h", len(limits) + 2), limits)
    plain = PlainHistogram(limits)
    for value in [*values, *limits]:
        histogram.observe(value)
        plain.observe(value)
    assert histogram.buckets == tuple(plain.buckets)
    assert histogram.sum == plain.sum or (math.isnan(histogram.sum) and math.isnan(plain.sum))


def test_histogram_counts_nanoseconds_as_seconds() -> None:
    section = Section(make(), 0)
    histogram = Histogram(section, section.append(KIND_HISTOGRAM, b"h", 4), (0.001, 1.0))
    histogram.observe_ns(1_000_000)
    histogram.observe_ns(2_000_000_000)
    assert histogram.buckets == (1, 0, 1)
    assert histogram.sum == pytest.approx(2.001)
    histogram.observe_all_us([500, 2_000_000, 1000])
    assert histogram.buckets == (3, 0, 2)
    assert histogram.sum == pytest.approx(4.0025)


@pytest.mark.parametrize(
    "limits", [(), (1.0, 1.0), (2.0, 1.0), (math.inf,), (math.nan,), tuple(range(BOUNDS_MAX + 1))]
)
def test_histogram_refuses_bounds(limits: tuple[float, ...]) -> None:
    section = Section(make(), 0)
    with pytest.raises(ValueError, match="bounds"):
        Histogram(section, 0, limits)


def test_threads_lose_nothing() -> None:
    section = Section(make(), 0)
    counter = Counter(section, section.append(KIND_COUNTER, b"c", 1))
    gauge = Gauge(section, section.append(KIND_GAUGE_SUM, b"g", 1))

    def count() -> None:
        for _ in range(10_000):
            counter.add()
            gauge.add()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counter.value, gauge.value) == (40_000, 40_000.0)


@pytest.mark.parametrize(
    ("series", "text", "slots"),
    [(9, 1, 1), (3, 100, 1), (5, 1, 14)],
    ids=["series", "text", "slots"],
)
def test_full_section_says_so_and_counts_nowhere(series: int, text: int, slots: int) -> None:
    section = Section(make(), 0)
    found = [section.append(KIND_HISTOGRAM, b"x" * text, slots) for _ in range(series)]
    assert found[-1] == -1
    assert min(found[:-1]) >= 0
    assert section.overflow == 1
    lost = Counter(section, -1)
    lost.add()
    assert sum(section.values(0, 64)) == 0


def test_append_goes_on_where_the_dead_left_off() -> None:
    memory = make()
    Section(memory, 0).append(KIND_HISTOGRAM, b"left", 5)
    assert Section(memory, 0).append(KIND_COUNTER, b"new", 1) == 5
    assert Section(memory, 0).text(1) == (KIND_COUNTER, b"new", 5, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: bytearray(10),
        lambda m: bytearray(len(m)),
        lambda m: bytearray(m[:]) + b"x",
        lambda m: bytearray(m[:8] + struct.pack("<4I", 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1) + m[24:]),
    ],
    ids=["short", "blank", "long", "absurd"],
)
def test_section_refuses_other_memory(spoil) -> None:  # type: ignore[no-untyped-def]
    memory = make()
    with pytest.raises(ValueError):
        Section(spoil(memory), 0)
    with pytest.raises(ValueError, match="section 2 of 2"):
        Section(memory, 2)


def test_attach_outside_is_refused() -> None:
    section = Section(make(), 0)
    for wrong in (64, 2**31, 2**62):
        with pytest.raises(ValueError, match="outside"):
            Counter(section, wrong)
    with pytest.raises(ValueError, match="outside"):
        Gauge(section, 63, last=True)
    with pytest.raises(ValueError, match="outside"):
        section.values(60, 5)
    with pytest.raises(TypeError):
        Counter(None, 0)  # type: ignore[arg-type]


def test_memory_outlives_nobody() -> None:
    memory = make()
    counter = Counter(Section(memory, 0), 0)
    with pytest.raises(BufferError):
        memory.close()
    counter.add()


@examples(200)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_hostile_section_is_read_without_harm(rng: random.Random, spoils: int) -> None:
    memory = make()
    writer = Section(memory, 1)
    for i in range(4):
        writer.append(KIND_COUNTER, b"series%d" % i, 1 + i)
    start = SECTION_AT + (len(memory) - SECTION_AT) // 2
    for _ in range(spoils):
        word = rng.choice([0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 63, 64, 255, 256, rng.getrandbits(32)])
        struct.pack_into("<I", memory, start + 4 * rng.randrange(0, 90), word)
    assert len(writer) <= 8
    for index in range(len(writer)):
        entry = writer.text(index)
        if entry is not None:
            assert len(entry[1]) <= 256
            assert len(writer.values(entry[2], entry[3])) == entry[3]
    writer.append(KIND_COUNTER, b"more", 1)


def batch_metrics(most_rows: int, window_ns: int) -> tuple[BatchMetrics, list[Histogram], list[Counter]]:
    section = Section(make((1, 16, 256, 256)), 0)
    histograms = [
        Histogram(section, section.append(KIND_HISTOGRAM, b"h", 4), (0.5e-6, 4.0)) for _ in range(6)
    ]
    counters = [Counter(section, section.append(KIND_COUNTER, b"c", 1)) for _ in range(4)]
    return BatchMetrics(tuple(histograms), tuple(counters), most_rows, window_ns), histograms, counters  # type: ignore[arg-type]


def test_batch_metrics_record_a_batch_once() -> None:
    """A batch that another front has recorded moves the rate and the duration alone."""
    metrics, histograms, counters = batch_metrics(4, 1 << 62)
    metrics.record((3, 2, 10**9, 800, 1.5, (100, 50, 200, 600, 300)))
    metrics.record((4, 4, 10**9, 800, 1.5, (-1, 0, 1, 2, 3)))
    metrics.record((4, 4, 10**9, 1600, 1.5, None))
    queue, form, copy_in, compute, copy_out, rows = histograms
    assert [sum(one.buckets) for one in histograms] == [1, 1, 2, 2, 2, 2]
    assert [round(one.sum * 1e9) for one in (queue, form, copy_in, compute, copy_out)] == [
        100,
        50,
        201,
        602,
        303,
    ]
    assert (rows.buckets, rows.sum) == ((0, 2, 0), 7.0)
    assert [one.value for one in counters] == [7, 1, 1, 1]
    assert metrics.batch_ns == pytest.approx(100 + (800 - 100) / 8 + (1600 - 187.5) / 8)
    assert metrics.rows_per_s == 0.0


def test_batch_metrics_measure_a_rate_by_windows() -> None:
    metrics, *_ = batch_metrics(4, 1_000_000)
    begun_ns = time.monotonic_ns()
    metrics.record((30, 30, begun_ns + 500_000, 1, 1.5, None))
    assert metrics.rows_per_s == 0.0
    metrics.record((70, 70, begun_ns + 2_000_000_000, 1, 1.5, None))
    assert metrics.rows_per_s == pytest.approx(50.0, rel=0.05)
    metrics.record((9, 9, begun_ns + 2_000_000_100, 1, 1.5, None))
    assert metrics.rows_per_s == pytest.approx(50.0, rel=0.05)


@given(st.lists(st.integers(-5, 1 << 45)))
def test_duration_spread_has_the_buckets_of_spreads(durations: list[int]) -> None:
    section, made = Section(make((1, 64, 64, 1024)), 0), dict[int, Histogram]()

    def make_part(number: int) -> Histogram:
        assert number not in made
        slot = section.append(KIND_HISTOGRAM, b"", 17)
        made[number] = Histogram(section, slot, tuple(range(15)))
        return made[number]

    spread, wanted = DurationSpread(make_part), [0] * BUCKETS
    for ns in durations:
        spread.add(ns)
        wanted[bucket_of(max(ns, 0))] += 1
    found = [0] * BUCKETS
    for number, histogram in made.items():
        found[16 * number : 16 * number + 16] = histogram.buckets
    assert found == wanted


def test_shared_took_adds_in_its_two_words() -> None:
    words = memoryview(bytearray(4 * 8)).cast("Q")
    SharedTook(words, 1).add(50)
    SharedTook(words, 1).add(7, 3)
    SharedTook(words, 2).add(1, 100)
    assert words.tolist() == [0, 4, 157, 1]
    for at in (-1, 3, 1 << 60):
        with pytest.raises(ValueError, match="two words"):
            SharedTook(words, at)
    with pytest.raises(ValueError, match="two words"):
        SharedTook(memoryview(bytearray(33))[1:], 0)
    with pytest.raises(BufferError):
        SharedTook(b"12345678" * 2, 0)
