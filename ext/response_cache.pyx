"""Responses kept by what was asked, least recently used out first; and what is being asked just now.

    found = cache.find(head, inputs, counts)     an Entry: kept. A Miss: it is now under way, and to be run.
                                                 None: its like is under way, see wait()
    miss.keep(form, outputs)                     a copy of what was answered
    miss.close()                                 it is no longer under way; waiting callers are notified

The key is `head`, which tells everything of the inputs but their bytes, and the bytes. Up to WHOLE_BYTES they
are in it as they are, so that nothing can collide; of larger inputs it has a hash. Not thread-safe: one loop.
A miss may cost a tiny request next to nothing, hence all of it in three calls, and nothing kept that the
garbage collector would look at.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from hashlib import blake2b

cdef enum:
    WHOLE = 1024        # below this a copy is cheaper than a hash (blake2b: 1 us and 1 ns a byte), and exact
    ENTRY = 512         # what an entry costs beside its key and its data
    TIMED = 16          # after as many, one in so many is timed and stands for all: a clock costs as much as a lookup

WHOLE_BYTES = WHOLE
ENTRY_BYTES = ENTRY


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Entry:
    """One kept response: `form` as it was given, a copy of every output, parameters as items."""

    cdef readonly object form
    cdef readonly tuple memory, parameters
    cdef bytes key
    cdef uint64_t nbytes
    cdef PyObject* older        # borrowed: the cache's dict has every entry
    cdef PyObject* newer


cdef uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + now.tv_nsec


cdef class Counts:
    """Lookups of one version's requests. For some, `looked(ns, others, hit=...)` receives how long they took, and
    how many others that stands for; `insertion_ns` is of all, estimated in the same way."""

    cdef readonly uint64_t hits, misses, insertion_ns, last_ns
    cdef uint64_t lookups, kept
    cdef object looked

    def __init__(self, looked):
        self.looked = looked


@cython.final
@cython.no_gc               # nothing it holds leads back to it; and a freelist would keep "finalized" of a GC type
@cython.freelist(64)
cdef class Miss:
    """A key under way, until it is closed: answered, failed or given up."""

    cdef readonly bytes key
    cdef ResponseCache cache
    cdef Counts counts

    def keep(self, form, outputs, tuple parameters not None=()) -> None:
        """Copies, unless they alone are larger than everything may be."""
        self.cache.keep(self.key, form, outputs, self.counts, parameters)

    def __del__(self):
        self.close()    # its waiting callers must not wait for ever

    def close(self) -> None:
        """Tells who waits. A second time nothing."""
        if self.cache is None:
            return
        listeners = self.cache.running.pop(self.key)
        self.cache = None
        if listeners is not None:
            for notify in listeners:
                notify()


cdef class ResponseCache:
    """At most `capacity` bytes of responses."""

    cdef readonly uint64_t capacity, used, evictions, hits, misses, lookup_ns, insertion_ns
    cdef dict entries, running
    cdef PyObject* oldest
    cdef PyObject* newest

    def __init__(self, uint64_t capacity):
        self.capacity = capacity
        self.entries, self.running = {}, {}
        self.oldest = NULL
        self.newest = NULL

    def __len__(self):
        return len(self.entries)

    def find(self, bytes head not None, inputs, Counts counts not None):
        """See the module. A hit or a miss is counted; None is neither yet."""
        cdef uint64_t began = 0, weight = weight_of(&counts.lookups)
        if weight:
            began = now_ns()
        cdef bytes key = key_of(head, inputs)
        cdef Entry entry = self.get(key, counts)
        if entry is None:
            if key in self.running:
                return None
            self.running[key] = None
            self.misses += 1
            counts.misses += 1
        if weight:
            self.count_time(counts, weight, began, entry is not None)
        if entry is not None:
            return entry
        cdef Miss miss = Miss.__new__(Miss)
        miss.key, miss.cache, miss.counts = key, self, counts
        return miss

    cpdef Entry get(self, bytes key, Counts counts):
        """Return the response kept under the key, and count a hit."""
        cdef Entry entry = self.entries.get(key)
        if entry is not None:
            self.unlink(entry)
            self.link(entry)
            self.hits += 1
            counts.hits += 1
        return entry

    def key(self, bytes head not None, inputs) -> bytes:
        """Return the key that `find` would look for."""
        return key_of(head, inputs)

    def count_miss(self, Counts counts not None) -> None:
        """For a request that waited for its like in vain, and now runs by itself."""
        self.misses += 1
        counts.misses += 1

    cdef int count_time(self, Counts counts, uint64_t weight, uint64_t began, bint hit) except -1:
        counts.last_ns = now_ns()
        cdef uint64_t took = counts.last_ns - began
        self.lookup_ns += weight * took
        counts.looked(took, weight, hit=hit)
        return 0

    def wait(self, bytes key not None, listener) -> None:
        """Be told when the key is no longer under way. Raises KeyError for one that is not."""
        listeners = self.running[key]
        if listeners is None:
            listeners = self.running[key] = []
        listeners.append(listener)

    def waiting(self) -> dict:
        """Keys under way -> who waits."""
        return {key: list(listeners or ()) for key, listeners in self.running.items()}

    cdef int keep(self, bytes key, form, outputs, Counts counts, tuple parameters) except -1:
        cdef uint64_t began = 0, weight = weight_of(&counts.kept)
        if weight:
            began = now_ns()
        cdef Entry entry = Entry.__new__(Entry)
        entry.key, entry.form, entry.parameters = key, form, parameters
        entry.memory = tuple([copy_of(data) for data in outputs])
        entry.nbytes = ENTRY + PyBytes_GET_SIZE(key)
        for data in entry.memory:
            entry.nbytes += PyBytes_GET_SIZE(data)
        if entry.nbytes <= self.capacity and key not in self.entries:
            self.entries[key] = entry
            self.link(entry)
            self.used += entry.nbytes
            while self.used > self.capacity:
                self.drop(<Entry>self.oldest)
                self.evictions += 1
        if weight:
            began = weight * (now_ns() - began)
            self.insertion_ns += began
            counts.insertion_ns += began
        return 0

    def forget(self, bytes prefix not None) -> None:
        """Let go of every key that begins so."""
        for key in [key for key in self.entries if (<bytes>key).startswith(prefix)]:
            self.drop(self.entries[key])

    cdef int drop(self, Entry entry) except -1:
        self.unlink(entry)
        self.used -= entry.nbytes
        del self.entries[entry.key]
        return 0

    cdef void link(self, Entry entry) noexcept:
        entry.newer = NULL
        entry.older = self.newest
        if self.newest != NULL:
            (<Entry>self.newest).newer = <PyObject*>entry
        self.newest = <PyObject*>entry
        if self.oldest == NULL:
            self.oldest = self.newest

    cdef void unlink(self, Entry entry) noexcept:
        if entry.older != NULL:
            (<Entry>entry.older).newer = entry.newer
        else:
            self.oldest = entry.newer
        if entry.newer != NULL:
            (<Entry>entry.newer).older = entry.older
        else:
            self.newest = entry.older


cdef bytes copy_of(object data):
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return PyBytes_FromStringAndSize(<char*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef inline uint64_t weight_of(uint64_t* number) noexcept:
    """How many the next of its kind stands for when it is timed; 0: it is not."""
    number[0] += 1
    if number[0] <= TIMED:
        return 1
    return 0 if number[0] % TIMED else TIMED


cdef bytes key_of(bytes head, inputs):
    cdef Py_ssize_t size = 0, at = PyBytes_GET_SIZE(head)
    cdef Py_buffer view
    for data in inputs:
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        size += view.len
        PyBuffer_Release(&view)
    if size > WHOLE:
        return head + b"".join([blake2b(data).digest() for data in inputs])
    cdef bytes key = PyBytes_FromStringAndSize(NULL, at + size)
    cdef char* room = PyBytes_AS_STRING(key)
    memcpy(room, PyBytes_AS_STRING(head), at)
    for data in inputs:
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        if view.len <= size:        # what changed its size meanwhile must not lead outside
            memcpy(room + at, view.buf, view.len)
            at, size = at + view.len, size - view.len
        PyBuffer_Release(&view)
    return key
