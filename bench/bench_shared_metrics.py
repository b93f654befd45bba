"""Counting against prometheus_client: one request, one duration, one level; and what a scrape costs."""

from __future__ import annotations

import mmap

import prometheus_client
import pytest

from fastserve._ext import shared_metrics
from fastserve.engine.batch_queue import QueueMetrics
from fastserve.metrics import Registry
from fastserve.metrics.names import STAGE_SECONDS, Traffic

SIZES = (1, 16, 4096, 256)
ROUNDS = {"rounds": 20, "iterations": 20_000}


def ours():  # type: ignore[no-untyped-def]
    memory = mmap.mmap(-1, shared_metrics.file_bytes(*SIZES))
    shared_metrics.lay_out(memory, *SIZES)
    section = shared_metrics.Section(memory, 0)
    slots = section.append(shared_metrics.KIND_HISTOGRAM, b"h", len(STAGE_SECONDS) + 2)
    return shared_metrics.Counter(section, -1).add, shared_metrics.Histogram(
        section, slots, STAGE_SECONDS
    ).observe


def theirs():  # type: ignore[no-untyped-def]
    registry = prometheus_client.CollectorRegistry()
    histogram = prometheus_client.Histogram("h", "h", buckets=STAGE_SECONDS, registry=registry)
    return prometheus_client.Counter("c", "c", registry=registry).inc, histogram.observe


@pytest.mark.parametrize("make", [ours, theirs])
def test_counter(benchmark, make) -> None:  # type: ignore[no-untyped-def]
    benchmark.pedantic(make()[0], **ROUNDS)
    assert make is theirs or benchmark.disabled or benchmark.stats["min"] < 100e-9


@pytest.mark.parametrize("make", [ours, theirs])
def test_histogram(benchmark, make) -> None:  # type: ignore[no-untyped-def]
    benchmark.pedantic(make()[1], args=(0.0123,), **ROUNDS)
    assert make is theirs or benchmark.disabled or benchmark.stats["min"] < 100e-9


def test_scrape_of_ten_models(benchmark) -> None:  # type: ignore[no-untyped-def]
    found = Registry()
    for number in range(10):
        QueueMetrics(found, f"model{number}", 1, 0, 64)
        Traffic(found, "kserve_v2", [f"model{number}"]).stages(f"model{number}", 1)
    page = benchmark(found.expose)
    assert page.count(b"\n") > 1000
    assert benchmark.disabled or benchmark.stats["min"] < 5e-3
    found.close()
