"""Counters, gauges and histograms whose numbers live in shared memory (layout: ext/include/shared_metrics.h).

Not the registry: names, labels and the text of /metrics are fastserve/metrics. This module lays out
the file, appends a series, gives out the objects that count, and reads sections back with every
length checked.

    section = Section(memory, 0)
    slot = section.append(KIND_COUNTER, b"requests", 1)
    Counter(section, slot).add()
    section.read(0)                    -> (KIND_COUNTER, b"requests", (1,))
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.math cimport isfinite
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec


cdef extern from "shared_metrics.h" nogil:
    const uint64_t METRIC_MAGIC
    const uint32_t METRIC_SLOTS_EACH_MAX, METRIC_BOUNDS_MAX, METRIC_SIZE_MAX
    uint64_t *METRIC_NOWHERE
    const uint32_t METRIC_COUNTER, METRIC_GAUGE_SUM, METRIC_GAUGE_LAST, METRIC_HISTOGRAM, METRIC_KINDS
    ctypedef struct MetricFile:
        uint64_t magic
        uint32_t sections, series_max, text_max, slots_max
    ctypedef struct MetricSection:
        uint32_t series
        uint64_t overflow
    ctypedef struct MetricSeries:
        uint32_t kind, text_at, text_bytes, slot_at, slot_count
    ctypedef struct MetricView:
        MetricSection *head
        MetricSeries *series
        char *text
        uint64_t *slots
        uint32_t series_max, text_max, slots_max
    uint64_t metric_section_bytes(uint64_t, uint64_t, uint64_t)
    MetricView metric_view(char *, uint64_t, uint32_t, uint32_t, uint32_t)
    uint32_t metric_count(const MetricView *)
    bint metric_series_at(const MetricView *, uint32_t, MetricSeries *)
    uint64_t metric_load(const uint64_t *)
    void metric_store(uint64_t *, uint64_t)
    void metric_add(uint64_t *, uint64_t)
    uint64_t metric_take(uint64_t *)
    double metric_load_double(const uint64_t *)
    void metric_store_double(uint64_t *, double)
    void metric_add_double(uint64_t *, double)
    void metric_observe(uint64_t *, const double *, uint32_t, double)
    const char *METRIC_VALUES
    ctypedef struct MetricValues:
        uint64_t *slots
        const double *bounds
        uint32_t count
    void metric_observe_ns(const MetricValues *, int64_t)
    void metric_publish "__atomic_store_n"(uint32_t *, uint32_t, int)
    const int ATOMIC_RELEASE "__ATOMIC_RELEASE"


cdef extern from "counters.h" nogil:
    uint32_t spread_bucket(uint64_t)


KIND_COUNTER = METRIC_COUNTER
KIND_GAUGE_SUM = METRIC_GAUGE_SUM
KIND_GAUGE_LAST = METRIC_GAUGE_LAST
KIND_HISTOGRAM = METRIC_HISTOGRAM
BOUNDS_MAX = METRIC_BOUNDS_MAX


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


def file_bytes(uint32_t sections, uint32_t series_max, uint32_t text_max, uint32_t slots_max):
    """Bytes of a file with `sections` sections of these sizes. Raises ValueError for absurd ones."""
    if not 0 < sections <= 4096 or max(series_max, text_max, slots_max) > METRIC_SIZE_MAX:
        raise ValueError("not a size a file of meters can have")
    return sizeof(MetricFile) + sections * metric_section_bytes(series_max, text_max, slots_max)


def lay_out(memory, uint32_t sections, uint32_t series_max, uint32_t text_max, uint32_t slots_max):
    """Write the file header into zeroed `memory` of file_bytes(...) bytes. Raises ValueError."""
    cdef Py_buffer view
    PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    cdef MetricFile *head = <MetricFile *>view.buf
    try:
        if view.len != file_bytes(sections, series_max, text_max, slots_max):
            raise ValueError("the memory is not of the size these sections take")
        head.sections = sections
        head.series_max = series_max
        head.text_max = text_max
        head.slots_max = slots_max
        head.magic = METRIC_MAGIC
    finally:
        PyBuffer_Release(&view)


cdef class Section:
    """One section of a file. Keeps the memory exported (an mmap cannot be closed) while it lives.

    Whoever appends must be the only process that does; reading needs nothing.
    """

    cdef Py_buffer buffer
    cdef bint held
    cdef MetricView view
    cdef readonly uint32_t sections
    cdef readonly uint32_t index

    def __cinit__(self, memory, uint32_t index):
        """Raises ValueError when `memory` is not a laid-out file or has no such section."""
        PyObject_GetBuffer(memory, &self.buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.held = True
        cdef MetricFile head
        if self.buffer.len < <Py_ssize_t>sizeof(MetricFile):
            raise ValueError("not a file of meters: too short")
        memcpy(&head, self.buffer.buf, sizeof(MetricFile))
        if head.magic != METRIC_MAGIC:
            raise ValueError("not a file of meters: wrong mark at its start")
        if self.buffer.len != file_bytes(head.sections, head.series_max, head.text_max, head.slots_max):
            raise ValueError("not a file of meters: its size does not match its header")
        if index >= head.sections:
            raise ValueError(f"section {index} of {head.sections}")
        self.sections = head.sections
        self.index = index
        self.view = metric_view(<char *>self.buffer.buf, index, head.series_max, head.text_max, head.slots_max)

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)

    def __len__(self):
        """Series readable now."""
        return metric_count(&self.view)

    @property
    def overflow(self):
        """Series that found no room in this section."""
        return metric_load(&self.view.head.overflow)

    def count_overflow(self):
        metric_add(&self.view.head.overflow, 1)

    def append(self, uint32_t kind, bytes text, uint32_t slot_count):
        """Add a series with zeroed values; returns its first slot, or -1 when the section is full.

        Where the free text and slots begin is worked out from the series present, so a process that
        takes a section over needs nothing else from the one that died.
        """
        cdef MetricSeries entry
        cdef uint64_t text_at = 0, slot_at = 0
        cdef uint32_t count = metric_count(&self.view), i
        if not 0 < kind < METRIC_KINDS or not 0 < slot_count <= METRIC_SLOTS_EACH_MAX:
            raise ValueError("no such kind of series, or too many values")
        for i in range(count):
            if metric_series_at(&self.view, i, &entry):
                text_at = max(text_at, <uint64_t>entry.text_at + entry.text_bytes)
                slot_at = max(slot_at, <uint64_t>entry.slot_at + entry.slot_count)
        if (count == self.view.series_max or text_at + len(text) > self.view.text_max
                or slot_at + slot_count > self.view.slots_max):
            self.count_overflow()
            return -1
        self.write(count, kind, text, <uint32_t>text_at, <uint32_t>slot_at, slot_count)
        return slot_at

    cdef write(self, uint32_t index, uint32_t kind, bytes text, uint32_t text_at, uint32_t slot_at, uint32_t slots):
        cdef MetricSeries *entry = self.view.series + index
        cdef uint32_t i
        memcpy(self.view.text + text_at, <const char *>text, len(text))
        for i in range(slots):
            metric_store(self.view.slots + slot_at + i, 0)
        entry.kind = kind
        entry.text_at = text_at
        entry.text_bytes = <uint32_t>len(text)
        entry.slot_at = slot_at
        entry.slot_count = slots
        metric_publish(&self.view.head.series, index + 1, ATOMIC_RELEASE)

    def text(self, uint32_t index):
        """(kind, text, first slot, slots) of a series, or None when its entry cannot be right."""
        cdef MetricSeries entry
        if not metric_series_at(&self.view, index, &entry):
            return None
        text = PyBytes_FromStringAndSize(self.view.text + entry.text_at, entry.text_bytes)
        return entry.kind, text, entry.slot_at, entry.slot_count

    def values(self, uint32_t slot_at, uint32_t slot_count):
        """The raw 64-bit values; each is whole, together they may straddle an update."""
        if <uint64_t>slot_at + slot_count > self.view.slots_max:
            raise ValueError("slots outside the section")
        cdef uint32_t i
        return tuple([metric_load(self.view.slots + slot_at + i) for i in range(slot_count)])

    def zero(self, uint32_t slot_at, uint32_t slot_count):
        """Set values to 0 (the gauges of a front that is no more)."""
        if <uint64_t>slot_at + slot_count > self.view.slots_max:
            raise ValueError("slots outside the section")
        cdef uint32_t i
        for i in range(slot_count):
            metric_store(self.view.slots + slot_at + i, 0)


cdef class Instrument:
    """One series' values in a section; slot -1 counts into private memory that nobody reads."""

    cdef Section section
    cdef MetricValues values

    def __cinit__(self, *args, **kwargs):
        self.values.slots = METRIC_NOWHERE

    cdef int attach(self, Section section, long long slot, uint32_t count) except -1:
        self.section = section
        if slot < 0:
            self.values.slots = METRIC_NOWHERE
        elif slot + count > section.view.slots_max:
            raise ValueError("slots outside the section")
        else:
            self.values.slots = section.view.slots + slot
        return 0

    def lend(self):
        """A capsule of the numbers, for compiled code that holds this object as long."""
        return PyCapsule_New(&self.values, METRIC_VALUES, NULL)


cdef class Counter(Instrument):
    """A number that only grows (whole: counts, bytes)."""

    def __cinit__(self, Section section not None, long long slot):
        self.attach(section, slot, 1)

    def add(self, uint64_t n=1):
        """Raises OverflowError for a negative n."""
        metric_add(self.values.slots, n)

    def take(self) -> int:
        """Add 1, and return what it was before: a number that no other process gets."""
        return metric_take(self.values.slots)

    @property
    def value(self):
        return metric_load(self.values.slots)


cdef class Gauge(Instrument):
    """A number that goes up and down. `last` ones also note when they were set (two slots)."""

    cdef bint last

    def __cinit__(self, Section section not None, long long slot, *, bint last=False):
        self.attach(section, slot, 2 if last else 1)
        self.last = last

    def set(self, double value):
        metric_store_double(self.values.slots, value)
        if self.last:
            metric_store(self.values.slots + 1, now_ns())

    def add(self, double amount=1.0):
        metric_add_double(self.values.slots, amount)
        if self.last:
            metric_store(self.values.slots + 1, now_ns())

    @property
    def value(self):
        return metric_load_double(self.values.slots)


cdef class Histogram(Instrument):
    """Counts per bucket (value <= bound) and their sum. A value that is not finite is not counted."""

    cdef double[34] bounds

    def __cinit__(self, Section section not None, long long slot, bounds):
        """bounds: at most BOUNDS_MAX finite numbers in rising order. Raises ValueError."""
        if not 0 < len(bounds) <= METRIC_BOUNDS_MAX:
            raise ValueError(f"1 to {METRIC_BOUNDS_MAX} bucket bounds")
        for i, bound in enumerate(bounds):
            if not isfinite(bound) or (i and bound <= bounds[i - 1]):
                raise ValueError("bucket bounds are finite and rising")
            self.bounds[i] = bound
        self.values.bounds, self.values.count = self.bounds, <uint32_t>len(bounds)
        self.attach(section, slot, self.values.count + 2)

    def observe(self, double value):
        if isfinite(value):
            metric_observe(self.values.slots, self.bounds, self.values.count, value)

    def observe_ns(self, long long ns):
        """A duration in nanoseconds, counted in seconds."""
        metric_observe_ns(&self.values, ns)

    def observe_all_us(self, list durations not None):
        """Durations in microseconds, counted in seconds."""
        cdef long long us
        for us in durations:
            metric_observe(self.values.slots, self.bounds, self.values.count, us * 1e-6)

    @property
    def buckets(self):
        """Counts per bucket, not cumulative; one more than there are bounds."""
        cdef uint32_t i
        return tuple([metric_load(self.values.slots + i) for i in range(self.values.count + 1)])

    @property
    def sum(self):
        return metric_load_double(self.values.slots + self.values.count + 1)


cdef class BatchMetrics:
    """The metrics of a queue's batches in one front process, recorded once a batch."""

    cdef readonly double batch_ns           # how long a batch takes a worker, smoothed
    cdef readonly double rows_per_s         # over the last window; 0 before the first
    cdef Histogram queue, form, copy_in, compute, copy_out, rows
    cdef Counter rows_total, padding, full, partial
    cdef int64_t window_ns, longest_window_ns, window_rows, most_rows

    def __init__(self, tuple histograms not None, tuple counters not None, int64_t most_rows, int64_t longest_window_ns):
        """Histograms: the wait for a worker and the part of it until the batch was sealed, the three stages of the run,
        rows. Counters: rows, rows that were padding, batches of `most_rows` rows, other batches. A rate is
        measured over `longest_window_ns` at least."""
        self.queue, self.form, self.copy_in, self.compute, self.copy_out, self.rows = histograms
        self.rows_total, self.padding, self.full, self.partial = counters
        self.most_rows, self.longest_window_ns, self.window_ns = most_rows, longest_window_ns, <int64_t>now_ns()

    def record(self, tuple ended not None) -> None:
        """Record a published batch, as BatchRing.ended tells of it."""
        cdef int64_t rows, live, done_ns, took_ns, queue_ns, form_ns, copy_in_ns, compute_ns, copy_out_ns
        rows, live, done_ns, took_ns, _, stages = ended
        self.window_rows += rows
        if done_ns - self.window_ns >= self.longest_window_ns:
            self.rows_per_s = self.window_rows * 1e9 / (done_ns - self.window_ns)
            self.window_ns, self.window_rows = done_ns, 0
        self.batch_ns += (took_ns - self.batch_ns) / 8
        if stages is None:
            return
        queue_ns, form_ns, copy_in_ns, compute_ns, copy_out_ns = <tuple?>stages
        if queue_ns >= 0:
            metric_observe_ns(&self.queue.values, queue_ns)
            metric_observe_ns(&self.form.values, form_ns)
        metric_observe_ns(&self.copy_in.values, copy_in_ns)
        metric_observe_ns(&self.compute.values, compute_ns)
        metric_observe_ns(&self.copy_out.values, copy_out_ns)
        self.rows.observe(rows)
        metric_add(self.rows_total.values.slots, rows)
        if live < rows:
            metric_add(self.padding.values.slots, rows - live)
        metric_add((self.full if rows >= self.most_rows else self.partial).values.slots, 1)


cdef class DurationSpread:
    """Counts of durations in the 512 buckets of a spread, sixteen of which are a Histogram of the bounds 0 to 14. `make`
    gives one by its number, once there is something to count in it."""

    cdef object make
    cdef list histograms

    def __init__(self, make) -> None:
        self.make, self.histograms = make, [None] * 32

    def add(self, int64_t ns) -> None:
        cdef uint32_t bucket = spread_bucket(<uint64_t>max(ns, 0))
        cdef Histogram histogram = self.histograms[bucket >> 4]
        if histogram is None:
            histogram = self.histograms[bucket >> 4] = self.make(bucket >> 4)
        histogram.observe(bucket & 15)


cdef class SharedTook:
    """Number of events and their total time: two words of `words`, at `at`, which no other process writes."""

    cdef Py_buffer buffer
    cdef bint held
    cdef uint64_t *pair

    def __cinit__(self, words, Py_ssize_t at):
        """Raises ValueError for a place outside, or words not on a boundary of 8 bytes."""
        PyObject_GetBuffer(words, &self.buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.held = True
        if at < 0 or at > self.buffer.len // 8 - 2 or <uint64_t>self.buffer.buf % 8:
            raise ValueError("not two words of this memory")
        self.pair = <uint64_t *>self.buffer.buf + at

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)

    def add(self, int64_t ns, int64_t count=1) -> None:
        metric_store(self.pair, metric_load(self.pair) + <uint64_t>count)
        metric_store(self.pair + 1, metric_load(self.pair + 1) + <uint64_t>ns)
