"""Triton's own nv_* metrics (spec 12), from the counts every version keeps.

The numbers are those of the statistics call, and of GPUs NVML's. There is no pool of pinned memory. Summaries
(--metrics-config summary_latencies=true) have counts and sums since the version was loaded, and quantiles of
the last minute, for which the owner of the models keeps what it has shown: other front processes ask it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from fastserve.devices.inventory import GPUS, Gpu
from fastserve.engine.counters import (
    FIRST_RESPONSE,
    Took,
    VersionCounts,
    counters_of,
    counts_of,
    first_responses,
)
from fastserve.engine.schedulers.cache import ResponseCache
from fastserve.errors import ServeError
from fastserve.metrics.exposition import (
    write_family,
    write_head,
    write_histogram,
    write_labels,
    write_summary,
)
from fastserve.metrics.readiness import MachineUsage
from fastserve.metrics.registry import SpreadWindow, quantiles_ns
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState
from fastserve.settings.kserve_options import MetricsConfig

log = logging.getLogger(__name__)

NAMES = (
    ("nv_inference_request_summary_us", "Summary of inference request duration in microseconds"),
    ("nv_inference_queue_summary_us", "Summary of inference queuing duration in microseconds"),
    ("nv_inference_compute_input_summary_us", "Summary of compute input duration in microseconds"),
    ("nv_inference_compute_infer_summary_us", "Summary of compute inference duration in microseconds"),
    ("nv_inference_compute_output_summary_us", "Summary of compute output duration in microseconds"),
    ("nv_cache_hit_summary_per_model", "Summary of cache hit durations per model, in microseconds"),
    ("nv_cache_miss_summary_per_model", "Summary of cache miss durations per model, in microseconds"),
)


def available(catalog: Catalog) -> list[Version]:
    """Return the available versions, by the names of their models."""
    models = (catalog.models[name] for name in sorted(catalog.models))
    return [version for model in models for version in model.available()]


class ShownVersion(NamedTuple):
    """A version with its labels and counts, as one page shows it."""

    version: Version
    labels: dict[str, str]
    counts: VersionCounts


class NvSummaries(ReplicatedPart):
    """The sliding windows of the versions shown so far, in the owner of the models."""

    PART = "nv summaries"

    def __init__(self, catalog: Catalog, ranks: Sequence[float], *, cached: bool) -> None:
        self._catalog, self._ranks, self._cached = catalog, ranks, cached
        self._lock = threading.Lock()
        self._windows: WeakKeyDictionary[Version, dict[str, SpreadWindow]] = WeakKeyDictionary()

    async def answer(self, question: Content) -> str:
        """Return the lines of every summary of the versions that are available."""
        ready = available(self._catalog)
        return await asyncio.get_running_loop().run_in_executor(None, lambda: self._write(ready))

    def _write(self, versions: Sequence[Version]) -> str:
        seen = [ShownVersion(version, _labels_of(version), counts_of(version)) for version in versions]
        with self._lock:  # scrapes of two listeners may overlap
            return "".join(f"{line}\n" for line in self._lines(seen))

    def _lines(self, seen: Sequence[ShownVersion]) -> list[str]:
        lines: dict[str, list[str]] = {}
        for one in seen:
            windows = self._windows.setdefault(one.version, {})
            for name, took, spread in _spreads(one, cached=self._cached):
                grown = windows.setdefault(name, SpreadWindow()).since(spread)
                values = (ns / 1000 for ns in quantiles_ns(grown, self._ranks))
                quantiles = dict(zip(self._ranks, values, strict=True))
                lines.setdefault(name, []).extend(
                    write_summary(one.labels, name, quantiles, took.count, took.ns // 1000)
                )
        return [
            line
            for name, help in NAMES
            if name in lines
            for line in (*write_head(name, "summary", help), *lines[name])
        ]


def _spreads(one: ShownVersion, *, cached: bool) -> Iterator[tuple[str, Took, array[int]]]:
    counts, counters = one.counts, counters_of(one.version)
    kept = cached and one.version.config.options.cached
    tooks = (counts.success, counts.queue, counts.compute_input, counts.compute_infer, counts.compute_output)
    for (name, _), took, spread in zip(NAMES, tooks, counters.spreads(), strict=False):
        # As there: with a cache in front, durations of requests are of two kinds that one summary would mix.
        if not (kept and took is counts.success):
            yield name, took, spread
    if kept:
        hits, misses = counters.cache_spreads()
        yield NAMES[5][0], counts.cache_hit, array("Q", hits)
        yield NAMES[6][0], counts.cache_miss, array("Q", misses)


Family = tuple[str, str, Callable[[VersionCounts], float]]

_COUNTERS: tuple[Family, ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda counts: counts.success.count,
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda counts: counts.inferences,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda counts: counts.executions,
    ),
)

_LATENCIES: tuple[Family, ...] = (
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda counts: counts.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda counts: counts.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda counts: counts.compute_input.ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda counts: counts.compute_infer.ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda counts: counts.compute_output.ns // 1000,
    ),
)

_CACHED: tuple[Family, ...] = (
    (
        "nv_cache_num_hits_per_model",
        "Number of cache hits per model",
        lambda counts: counts.cache_hit.count,
    ),
    (
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda counts: counts.cache_miss.count,
    ),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda counts: counts.cache_hit.ns // 1000,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda counts: counts.cache_miss.ns // 1000,
    ),
)

_PENDING: Family = (
    "nv_inference_pending_request_count",
    "Instantaneous number of pending requests awaiting execution per-model.",
    lambda counts: counts.pending,
)


class NvMetrics:
    """The page of one front process. `cache` is the server's."""

    def __init__(
        self,
        catalog: Catalog,
        cache: ResponseCache | None,
        options: MetricsConfig,
        state: ReplicatedState,
    ) -> None:
        self._catalog, self._cache, self._options, self._state = catalog, cache, options, state
        self._machine = MachineUsage()
        if options.summary_latencies and state.owned:
            summaries = NvSummaries(catalog, options.summary_quantiles, cached=cache is not None)
            state.add(NvSummaries.PART, summaries)
        self.custom: Callable[[], list[str]] = list  # the lines of models' own metrics

    async def prepare(self) -> Callable[[], bytes]:
        """On the event loop: choose the versions. What it returns writes the page, on any thread."""
        summaries = ""
        if self._options.summary_latencies:
            try:
                summaries = await self._state.show(NvSummaries.PART, {})
            except ServeError as fault:  # the rest of the page may tell why
                log.warning("/metrics has no summaries: %s", fault.message)
        ready = available(self._catalog)
        return lambda: self.write(ready, summaries)

    def write(self, versions: Sequence[Version], summaries: str = "") -> bytes:
        """Prometheus text of these versions and of the server."""
        seen = [ShownVersion(version, _labels_of(version), counts_of(version)) for version in versions]
        lines = [line for family in _COUNTERS for line in _write(family, seen)]
        lines += _write_failures(seen)
        if self._options.counter_latencies:
            lines += [line for family in _LATENCIES for line in _write(family, seen)]
            cached = [one for one in seen if one.version.config.options.cached] if self._cache else []
            lines += [line for family in _CACHED for line in _write(family, cached)]
        if self._options.histogram_latencies:
            lines += _write_first_responses(seen)
        lines += summaries.splitlines()
        lines += _write(_PENDING, seen, "gauge")
        loads = ((write_labels(one.labels), counters_of(one.version).load_s) for one in seen)
        lines += write_family("nv_model_load_duration_secs", "gauge", "Model load time in seconds", loads)
        lines += self._write_server()
        lines += _write_gpus(GPUS.read())
        lines += self.custom()
        return ("\n".join(lines) + "\n").encode("utf-8", "replace")

    def _write_server(self) -> list[str]:
        total, used = self._machine.memory_bytes()
        gauges = [
            ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", 0),
            ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", 0),
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._machine.cpu_utilization()),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used),
            *(self._cache_gauges() if self._cache else ()),
        ]
        lines = []
        for name, help, value in gauges:
            lines += write_family(name, "gauge", help, [("", value)])
        return lines

    def _cache_gauges(self) -> list[tuple[str, str, float]]:
        cache = self._cache
        assert cache is not None
        return [
            ("nv_cache_num_entries", "Number of responses stored in response cache", len(cache)),
            ("nv_cache_num_lookups", "Number of cache lookups in response cache", cache.hits + cache.misses),
            ("nv_cache_num_hits", "Number of cache hits in response cache", cache.hits),
            ("nv_cache_num_misses", "Number of cache misses in response cache", cache.misses),
            ("nv_cache_num_evictions", "Number of cache evictions in response cache", cache.evictions),
            (
                "nv_cache_lookup_duration",
                "Total cache lookup duration (hit and miss), in microseconds",
                cache.lookup_ns // 1000,
            ),
            (
                "nv_cache_insertion_duration",
                "Total cache insertion duration, in microseconds",
                cache.insertion_ns // 1000,
            ),
            ("nv_cache_util", "Cache utilization [0.0 - 1.0]", cache.used / cache.capacity),
        ]


_GPU: tuple[tuple[str, str, Callable[[Gpu], float | None]], ...] = (
    ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", lambda gpu: gpu.utilization),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", lambda gpu: gpu.memory_total_bytes),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", lambda gpu: gpu.memory_used_bytes),
    ("nv_gpu_power_usage", "GPU power usage in watts", lambda gpu: gpu.power_w),
    ("nv_gpu_power_limit", "GPU power management limit in watts", lambda gpu: gpu.power_limit_w),
    ("nv_energy_consumption", "GPU energy in joules since the driver was loaded", lambda gpu: gpu.energy_j),
)


def _write_gpus(gpus: Sequence[Gpu]) -> list[str]:
    """Nothing of a machine without one, and nothing of what a GPU does not tell."""
    lines: list[str] = []
    for name, help, value in _GPU:
        told = [(write_labels({"gpu_uuid": gpu.uuid}), value(gpu)) for gpu in gpus]
        known = [(labels, number) for labels, number in told if number is not None]
        if known:
            kind = "counter" if name == "nv_energy_consumption" else "gauge"
            lines += write_family(name, kind, help, known)
    return lines


def _labels_of(version: Version) -> dict[str, str]:
    return {
        **{f"_{name}": value for name, value in version.config.options.metric_tags.items()},
        "model": version.model,
        "version": str(version.number),
    }


def _write(family: Family, seen: Sequence[ShownVersion], kind: str = "counter") -> list[str]:
    name, help, value = family
    return write_family(name, kind, help, ((write_labels(one.labels), value(one.counts)) for one in seen))


def _write_first_responses(seen: Sequence[ShownVersion]) -> list[str]:
    lines: list[str] = []
    for one in seen:
        if one.version.config.options.decoupled:
            found = first_responses(one.version)
            lines += write_histogram(one.labels, FIRST_RESPONSE, found.bounds, found.counts, found.sum_ms)
    if lines:
        help = "Duration from request to first response in milliseconds"
        lines = [*write_head(FIRST_RESPONSE, "histogram", help), *lines]
    return lines


def _write_failures(seen: Sequence[ShownVersion]) -> list[str]:
    return write_family(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        (
            (write_labels({**one.labels, "reason": reason}), took.count)
            for one in seen
            for reason, took in sorted(one.counts.failures.items())
        ),
    )
