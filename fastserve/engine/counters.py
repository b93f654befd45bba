"""Statistics of a version since it was loaded: the numbers behind the dialects' statistics and `nv_*`.

    counts = counts_of(version)             any thread, any front process
    counts.success.count, counts.queue.ns   of requests answered well
    counts.fail, counts.failures["BACKEND"] of the others, by what ended them
    counts.batches                          runs and their times by the size of the batch

Nearly all of it is counted in the arena (ext/include/counters.h): by the worker as it publishes a batch, so a
request pays nothing, and it is the sum over all front processes. A Counters holds what no batch tells, of one
front process: ends in a scheduler's own queue, cache lookups, ensembles, responses of decoupled models.

Where durations begin and end (Triton's InferStatistics):

    success, fail    from the request's rows being written to the batch published
    queue            from there to a worker taking the batch; a scheduler's queue before that counts too
    compute_input    taken to the backend's start: gathering, padding
    compute_infer    the backend
    compute_output   the backend's end to published
    cache_hit        the lookup; cache_miss the lookup and the insertion

As in Triton, each request of a batch has waited for the whole batch: compute times are summed over requests
in `compute_*`, over batches in `batches`. What never got that far (unknown names,
wrong shapes) is no request.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import BACKEND, CANCELED, OTHER, REJECTED
from fastserve.metrics.quantiles import BUCKETS, bucket_of, read_buckets
from fastserve.repository.version import Attachment, Version

if TYPE_CHECKING:
    from fastserve._ext.response_cache import Counts
    from fastserve.engine.batch_queue import BatchQueue

__all__ = [
    "BACKEND",
    "CANCELED",
    "OTHER",
    "REASONS",
    "REJECTED",
    "DeviceCounts",
    "RequestCounters",
    "Took",
    "counters_of",
    "counts_of",
]

REASONS = batch_ring.TALLIES[REJECTED:]
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0)
MOST_RESPONSES = 256  # responses of one request that are counted separately; later ones count with the last


@dataclass(slots=True)
class Took:
    """Number of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class DeviceCounts:
    """Device statistics reported by one worker: batches, their times by stage, and whether the arena is
    registered with the device (if not, batches were staged). The workers it replaced are included."""

    device: str = ""
    pinned: bool = True
    batches: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Result of running the recorded requests of a version: OK, or the name of a Kind when that failed."""

    status: str
    ns: int
    records: int


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Runs and times of batches of `rows` rows (1 for a model without a batch axis)."""

    rows: int
    runs: int
    input_ns: int
    infer_ns: int
    output_ns: int


@dataclass(slots=True)
class ResponseCounts:
    """Counts of the nth responses of requests to a decoupled model. `compute_infer` is the time since the
    previous response, the writing of this one included."""

    compute_infer: Took = field(default_factory=Took)
    compute_output: Took = field(default_factory=Took)
    success: Took = field(default_factory=Took)
    fail: Took = field(default_factory=Took)
    empty_response: Took = field(default_factory=Took)
    cancel: Took = field(default_factory=Took)


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Statistics of one version, as defined in the module.

    `inferences` are rows of successful requests, `executions` batches run, `pending` requests that wait for a
    worker now. `last_ms` is Unix time, 0 for never. `responses` is of this front process.
    """

    success: Took
    failures: Mapping[str, Took]
    queue: Took
    compute_input: Took
    compute_infer: Took
    compute_output: Took
    cache_hit: Took
    cache_miss: Took
    inferences: int
    executions: int
    pending: int
    last_ms: int
    batches: Sequence[BatchCounts]
    responses: Mapping[int, ResponseCounts]

    @property
    def fail(self) -> Took:
        """Sum of all failures."""
        ends = self.failures.values()
        return Took(sum(end.count for end in ends), sum(end.ns for end in ends))


class Buckets:
    """A histogram of milliseconds: one count for each upper bound, and one beyond the last."""

    __slots__ = ("bounds", "counts", "sum_ms")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum_ms = 0.0

    def observe(self, ms: float) -> None:
        self.counts[bisect_left(self.bounds, ms)] += 1
        self.sum_ms += ms


@dataclass(slots=True)
class RemoteCounts:
    """The remote workers of one machine, and their batches since they were last shown."""

    workers: int = 0
    batches: int = 0


class RequestCounters:
    """Counts of one version in this front process that its batches do not record; `queues` have the rest."""

    def __init__(self) -> None:
        self.queues: list[BatchQueue] = []
        self.hit, self.miss = Took(), Took()  # their times; `cached` counts them
        self.cached: Counts | None = None
        self.hit_spread, self.miss_spread = (array("Q", bytes(8 * BUCKETS)) for _ in range(2))
        self.responses: dict[int, ResponseCounts] = {}
        self.first_response: Buckets | None = None  # of a decoupled model
        self.waiting: Callable[[], int] = _nobody  # requests in a scheduler's own queue
        self.devices: dict[tuple[int, int], DeviceCounts] = {}  # by part and worker
        self.remotes: dict[str, RemoteCounts] = {}  # by machine
        self.remotes_wanted = 0
        self.out_of_memory = 0  # batches that its workers had no memory for, a device's or the host's
        self.warm_ups: list[WarmUp] = []  # one for each of its queues, if it brings requests
        self.last_ns = 0  # CLOCK_MONOTONIC
        self.load_s = 0.0  # how long it took to load
        self._ends = [Took() for _ in REASONS]
        self._served = [Took(), Took()]  # whole requests, and the time their models took
        self._batches: dict[int, list[int]] = {}

    def close(self, queue: BatchQueue) -> None:
        """Drop a queue that closes: a reference would keep its arena's memory."""
        self.queues.remove(queue)
        self.waiting = _nobody

    def looked(self, ns: int, weight: int, *, hit: bool) -> None:
        """Add the time of a cache lookup, measured for one in `weight`; `cached` has their number."""
        took, spread = (self.hit, self.hit_spread) if hit else (self.miss, self.miss_spread)
        took.ns += weight * ns
        spread[bucket_of(ns)] += weight

    def spreads(self) -> list[array[int]]:
        """Return a histogram of request times (metrics.quantiles) each for success, queue, compute_input,
        compute_infer and compute_output. Cache hits and ensembles are not included."""
        told = [queue.ring.spreads() for queue in self.queues]
        return [read_buckets([spreads[kind] for spreads in told]) for kind in range(REJECTED)]

    def end(self, reason: int, ns: int = 0) -> None:
        """Count a request that ended without an answer before any queue had it: REJECTED, CANCELED, BACKEND
        or OTHER."""
        self._ends[reason - REJECTED].add(ns)

    def serve(self, rows: int, ns: int, infer_ns: int) -> None:
        """Count a successful request that ran outside this version's queues: one of an ensemble."""
        self._served[0].add(ns)
        self._served[1].add(infer_ns)
        one = self._batches.setdefault(rows, [0, 0])
        one[0] += 1
        one[1] += infer_ns
        self.last_ns = time.monotonic_ns()

    def response(self, index: int) -> ResponseCounts:
        """Return the counts of response number `index`, from 0."""
        index = min(index, MOST_RESPONSES - 1)
        found = self.responses.get(index)
        if found is None:
            found = self.responses[index] = ResponseCounts()
        return found

    def read(self) -> VersionCounts:
        """Return these counts and those of the queues, added up."""
        sums, rows, last_ns = self._read_queues()
        success, queue, inputs, infer, output = sums[:REJECTED]
        hit, miss, cached_ns = self._read_cached()
        success.add(self._served[0].ns + hit.ns, self._served[0].count + hit.count)
        infer.add(self._served[1].ns, self._served[1].count)
        for there, here in zip(sums[REJECTED:], self._ends, strict=True):
            there.add(here.ns, here.count)
        batches = self._read_batches()
        return VersionCounts(
            success=success,
            failures=dict(zip(REASONS, sums[REJECTED:], strict=True)),
            queue=queue,
            compute_input=inputs,
            compute_infer=infer,
            compute_output=output,
            cache_hit=hit,
            cache_miss=miss,
            inferences=rows + sum(size * runs for size, (runs, _) in self._batches.items()),
            executions=sum(batch.runs for batch in batches),
            pending=self.waiting() + sum(queue.ring.pending() for queue in self.queues),
            last_ms=_unix_ms(max(last_ns, self.last_ns, cached_ns)),
            batches=batches,
            responses=self.responses,
        )

    def _read_cached(self) -> tuple[Took, Took, int]:
        """Return hits, misses (their time includes the insertion), and the time of the last lookup."""
        cached = self.cached
        if cached is None:
            return Took(), Took(), 0
        hit, miss = Took(cached.hits, self.hit.ns), Took(cached.misses, self.miss.ns + cached.insertion_ns)
        return hit, miss, cached.last_ns

    def _read_queues(self) -> tuple[list[Took], int, int]:
        """Return the sums over all queues: counters, rows served; and the time of the last request."""
        sums, rows, last_ns = [Took() for _ in batch_ring.TALLIES], 0, 0
        for queue in self.queues:
            counters, served_rows, served_ns = queue.ring.counters()
            for took, (count, ns) in zip(sums, counters, strict=True):
                took.add(ns, count)
            rows, last_ns = rows + served_rows, max(last_ns, served_ns)
        return sums, rows, last_ns

    def _read_batches(self) -> list[BatchCounts]:
        found = {rows: [runs, 0, infer_ns, 0] for rows, (runs, infer_ns) in self._batches.items()}
        for queue in self.queues:
            for rows, *run in queue.ring.runs():
                found[rows] = [a + b for a, b in zip(found.get(rows, (0, 0, 0, 0)), run, strict=True)]
        return [BatchCounts(rows, *run) for rows, run in sorted(found.items())]


def _nobody() -> int:
    return 0


def _unix_ms(at_ns: int) -> int:
    return (time.time_ns() - time.monotonic_ns() + at_ns) // 1_000_000 if at_ns else 0


COUNTERS: Attachment[RequestCounters] = Attachment(outlives=True)


def counters_of(version: Version) -> RequestCounters:
    """Return the version's counters in this front process."""
    return COUNTERS.get(version) or COUNTERS.put(version, RequestCounters())


def first_responses(version: Version) -> Buckets:
    """Return the histogram of milliseconds from a request to its first response, for a decoupled model, in
    this front process. Its bounds are those of `model_metrics`, or Triton's."""
    counters = counters_of(version)
    if counters.first_response is None:
        bounds = version.config.options.first_response_ms
        counters.first_response = Buckets(FIRST_RESPONSE_MS if bounds is None else tuple(bounds))
    return counters.first_response


def counts_of(version: Version) -> VersionCounts:
    """Return the statistics of a version since it was loaded; zeros for one that cannot serve here."""
    return counters_of(version).read()
