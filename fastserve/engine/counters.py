"""Statistics of a version since it was loaded: the numbers behind the dialects' statistics and `nv_*`.

    counts = counts_of(version)             any thread, any front process
    counts.success.count, counts.queue.ns   of requests answered well
    counts.fail, counts.failures["BACKEND"] of the others, by what ended them
    counts.batches                          runs and their times by the size of the batch

Nearly all of it is counted in the arena (ext/include/counters.h): by the worker as it publishes a batch, so a
request pays nothing. RequestCounters count what no batch tells, in memory that the front processes share too
(shared_counts.py): ends in a scheduler's own queue, cache lookups, ensembles, responses of decoupled models.
So every front process reads the same sums.

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
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import BACKEND, CANCELED, OTHER, REJECTED
from fastserve._ext.response_cache import Counts
from fastserve._ext.shared_metrics import SharedTook
from fastserve.engine.shared_counts import MOST_BOUNDS, MOST_RESPONSES, MOST_SIZES, CountsMemory
from fastserve.metrics.registry import BUCKETS, bucket_of, read_buckets
from fastserve.repository.version import Attachment, Version

if TYPE_CHECKING:
    from array import array

    from fastserve._ext.batch_ring import BatchRing
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


RESPONSE_KINDS = tuple(one.name for one in fields(ResponseCounts))


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Statistics of one version, as defined in the module.

    `inferences` are rows of successful requests, `executions` batches run, `pending` requests that wait for a
    worker now (in a scheduler of another process: half a second ago). `last_ms` is Unix time, 0 for
    never.
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


class FirstResponses:
    """Histogram of milliseconds to the first response, in shared memory: a count for each upper bound, and
    one beyond the last."""

    __slots__ = ("_memory", "_start", "bounds")

    def __init__(self, memory: CountsMemory, bounds: Sequence[float]) -> None:
        self._memory = memory
        self.bounds = tuple(bounds)[:MOST_BOUNDS]
        self._start = memory.place("first")

    def observe(self, ns: int) -> None:
        self._memory.own[self._start + bisect_left(self.bounds, ns / 1e6)] += 1
        self._memory.add("first_sum_ns", ns)

    @property
    def counts(self) -> list[int]:
        """Counts over all front processes."""
        return self._memory.read("first", len(self.bounds) + 1)

    @property
    def sum_ms(self) -> float:
        return self._memory.read("first_sum_ns", 1)[0] / 1e6


class ResponseTooks:
    """Where responses of one number are counted, by the names of ResponseCounts."""

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self, memory: CountsMemory, index: int) -> None:
        for kind, name in enumerate(RESPONSE_KINDS):
            setattr(self, name, memory.took("responses", index * len(RESPONSE_KINDS) + kind))

    compute_infer: SharedTook
    compute_output: SharedTook
    success: SharedTook
    fail: SharedTook
    empty_response: SharedTook
    cancel: SharedTook


@dataclass(slots=True)
class SizeCounts:
    """Requests of one batch size, of an API that shows them by size."""

    success: Took = field(default_factory=Took)
    failed: Took = field(default_factory=Took)


@dataclass(slots=True)
class RemoteCounts:
    """The remote workers of one machine, and their batches since they were last shown."""

    workers: int = 0
    batches: int = 0


class ClosedRing:
    """The counts of a queue that is closed, read as from its ring."""

    def __init__(self, ring: BatchRing) -> None:
        self._counters, self._runs, self._spreads = ring.counters(), ring.runs(), ring.spreads()

    def counters(self) -> tuple[tuple[tuple[int, int], ...], int, int]:
        return self._counters

    def runs(self) -> list[tuple[int, int, int, int, int]]:
        return self._runs

    def spreads(self) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        return self._spreads


class RequestCounters:
    """Counts of one version that its batches do not record; `queues` have the rest."""

    def __init__(self, memory: CountsMemory | None = None) -> None:
        """`memory`: that of several front processes, of which this is one."""
        self.queues: list[BatchQueue] = []
        self.memory = memory or CountsMemory()
        self.first_response: FirstResponses | None = None  # of a decoupled model
        self.waiting: Callable[[], int] = _nobody  # requests in a scheduler's own queue
        self.devices: dict[tuple[int, int], DeviceCounts] = {}  # by part and worker
        self.remotes: dict[str, RemoteCounts] = {}  # by machine
        self.remotes_wanted = 0
        self.out_of_memory = 0  # batches that its workers had no memory for, a device's or the host's
        self.drafted = self.accepted = 0  # tokens of text models that speculate, since they were last shown
        self.warm_ups: list[WarmUp] = []  # one for each of its queues, if it brings requests
        self.load_s = 0.0  # how long it took to load
        self._closed: list[ClosedRing] = []
        self._responses: dict[int, ResponseTooks] = {}
        self._sizes: dict[int, tuple[SharedTook, SharedTook]] = {}  # answered well and not, by batch size

    def close(self, queue: BatchQueue) -> None:
        """Drop a queue that closes: a reference would keep its arena's memory. Its counts stay."""
        self.queues.remove(queue)
        self._closed.append(ClosedRing(queue.ring))
        self.waiting = _nobody
        if not self.queues:
            self.seal()

    def seal(self) -> None:
        """The version has ended, or could not be loaded: let go of the shared memory."""
        self._responses.clear()
        self._sizes.clear()
        self.memory.seal()

    def show_waiting(self) -> None:
        """Tell the other front processes how many requests wait here."""
        self.memory.set("waiting", self.waiting())

    def cached(self) -> Counts:
        """Return the counts of a cache before the version's scheduler."""
        return Counts(self._looked, self.memory.slice("cached"))

    def _looked(self, ns: int, weight: int, *, hit: bool) -> None:
        """Add the time of a cache lookup, measured for one in `weight`; `cached` has their number."""
        self.memory.add("hit" if hit else "miss", weight * ns)
        self.memory.add("hit_spread" if hit else "miss_spread", weight, bucket_of(ns))

    def spreads(self) -> list[array[int]]:
        """Return a histogram of request times (SpreadWindow) each for success, queue, compute_input,
        compute_infer and compute_output. Cache hits and ensembles are not included."""
        told = [ring.spreads() for ring in self._rings()]
        return [read_buckets([spreads[kind] for spreads in told]) for kind in range(REJECTED)]

    def cache_spreads(self) -> tuple[list[int], list[int]]:
        """Return such histograms of cache hits and misses."""
        return self.memory.read("hit_spread", BUCKETS), self.memory.read("miss_spread", BUCKETS)

    def end(self, reason: int, ns: int = 0) -> None:
        """Count a request that ended without an answer before any queue had it: REJECTED, CANCELED, BACKEND
        or OTHER."""
        self.memory.took("ends", reason - REJECTED).add(ns)

    def serve(self, rows: int, ns: int, infer_ns: int) -> None:
        """Count a successful request that ran outside this version's queues: one of an ensemble."""
        memory = self.memory
        memory.took("served").add(ns)
        memory.took("served", 1).add(infer_ns)
        SharedTook(memory.own, memory.of_size("runs", rows)).add(infer_ns)
        memory.set("last_ns", time.monotonic_ns())

    def answered(self, size: int, ns: int, well: bool = True) -> None:
        """Count a request of a batch size, for an API that shows them by size."""
        tooks = self._sizes.get(size) or self._begin_size(size)
        tooks[not well].add(ns)

    def _begin_size(self, size: int) -> tuple[SharedTook, SharedTook]:
        memory = self.memory
        at = memory.of_size("requests", size)
        tooks = SharedTook(memory.own, at), SharedTook(memory.own, at + 2)
        if len(self._sizes) < MOST_SIZES:
            self._sizes[size] = tooks
        return tooks

    def by_size(self) -> dict[int, SizeCounts]:
        """Return what `answered` has counted, by batch size."""
        found = self.memory.read_sizes("requests").items()
        return {size: SizeCounts(Took(*counts[:2]), Took(*counts[2:])) for size, counts in found}

    def response(self, index: int) -> ResponseTooks:
        """Return where response number `index`, from 0, is counted."""
        index = min(index, MOST_RESPONSES - 1)
        found = self._responses.get(index)
        if found is None:
            found = self._responses[index] = ResponseTooks(self.memory, index)
            self.memory.use("responses", index + 1)
        return found

    def read(self) -> VersionCounts:
        """Return these counts and those of the queues, added up."""
        sums, rows, last_ns = self._read_queues()
        success, queue, inputs, infer, output = sums[:REJECTED]
        hits, misses, insertion_ns, _ = self.memory.read("cached", 4)
        hit_ns, miss_ns = self.memory.read("hit", 2)
        served, served_ns, _, infer_ns = self.memory.read("served", 4)
        success.add(served_ns + hit_ns, served + hits)
        infer.add(infer_ns, served)
        ends = self.memory.read("ends", 2 * len(REASONS))
        for there, count, ns in zip(sums[REJECTED:], ends[::2], ends[1::2], strict=True):
            there.add(ns, count)
        ran = self.memory.read_sizes("runs")
        batches = self._read_batches(ran)
        return VersionCounts(
            success=success,
            failures=dict(zip(REASONS, sums[REJECTED:], strict=True)),
            queue=queue,
            compute_input=inputs,
            compute_infer=infer,
            compute_output=output,
            cache_hit=Took(hits, hit_ns),
            cache_miss=Took(misses, miss_ns + insertion_ns),
            inferences=rows + sum(size * runs for size, (runs, *_) in ran.items()),
            executions=sum(batch.runs for batch in batches),
            pending=self.pending,
            last_ms=_unix_ms(self._latest(last_ns)),
            batches=batches,
            responses=self._read_responses(),
        )

    def _rings(self) -> list[BatchRing | ClosedRing]:
        return [*(queue.ring for queue in self.queues), *self._closed]

    @property
    def last_ns(self) -> int:
        """Return when the last request ended, as time.monotonic_ns counts; 0 for never."""
        return self._latest(max((ring.counters()[2] for ring in self._rings()), default=0))

    def _latest(self, last_ns: int) -> int:
        return max(last_ns, self.memory.latest("last_ns"), self.memory.latest("cached", 3))

    @property
    def pending(self) -> int:
        """Return how many requests wait for a worker, in all front processes."""
        elsewhere = self.memory.read_others("waiting")
        return self.waiting() + elsewhere + sum(queue.ring.pending() for queue in self.queues)

    def _read_responses(self) -> dict[int, ResponseCounts]:
        words = 2 * len(RESPONSE_KINDS)
        found: dict[int, ResponseCounts] = {}
        for index in range(self.memory.used("responses")):
            read = self.memory.read("responses", words, index * words)
            if any(read[::2]):
                found[index] = ResponseCounts(*map(Took, read[::2], read[1::2]))
        return found

    def _read_queues(self) -> tuple[list[Took], int, int]:
        """Return the sums over all queues: counters, rows served; and the time of the last request."""
        sums, rows, last_ns = [Took() for _ in batch_ring.TALLIES], 0, 0
        for ring in self._rings():
            counters, served_rows, served_ns = ring.counters()
            for took, (count, ns) in zip(sums, counters, strict=True):
                took.add(ns, count)
            rows, last_ns = rows + served_rows, max(last_ns, served_ns)
        return sums, rows, last_ns

    def _read_batches(self, ran: Mapping[int, Sequence[int]]) -> list[BatchCounts]:
        found = {rows: [runs, 0, infer_ns, 0] for rows, (runs, infer_ns, *_) in ran.items()}
        for ring in self._rings():
            for rows, *run in ring.runs():
                found[rows] = [a + b for a, b in zip(found.get(rows, (0, 0, 0, 0)), run, strict=True)]
        return [BatchCounts(rows, *run) for rows, run in sorted(found.items())]


def _nobody() -> int:
    return 0


def _unix_ms(at_ns: int) -> int:
    return (time.time_ns() - time.monotonic_ns() + at_ns) // 1_000_000 if at_ns else 0


COUNTERS: Attachment[RequestCounters] = Attachment(outlives=True)


def counters_of(version: Version) -> RequestCounters:
    """Return the version's counters."""
    return COUNTERS.get(version) or COUNTERS.put(version, RequestCounters())


def first_responses(version: Version) -> FirstResponses:
    """Return the histogram of milliseconds from a request to its first response, for a decoupled model. Its
    bounds are those of `model_metrics`, or Triton's."""
    counters = counters_of(version)
    if counters.first_response is None:
        bounds = version.config.options.first_response_ms
        counters.first_response = FirstResponses(
            counters.memory, FIRST_RESPONSE_MS if bounds is None else bounds
        )
    return counters.first_response


def counts_of(version: Version) -> VersionCounts:
    """Return the statistics of a version since it was loaded; zeros for one that cannot serve here."""
    return counters_of(version).read()
