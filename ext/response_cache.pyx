"""Responses kept by what was asked, least recently used out first; and what is being asked just now.

    found = cache.find(head, inputs, counts)     an Entry: kept. A Miss: it is now under way, and to be run.
                                                 None: its like is under way, see wait()
    miss.keep(form, outputs)                     a copy of what was answered
    miss.close()                                 it is no longer under way; waiting callers are notified

The key is `head`, which tells everything of the inputs but their bytes, and the bytes. Up to WHOLE_BYTES they
are in it as they are, so that nothing can collide; of larger inputs it has a hash. Not thread-safe: one loop.
A miss may cost a tiny request next to nothing, hence all of it in three calls, and nothing kept that the
garbage collector would look at.

SharedResponseCache keeps responses in memory that several processes share (include/shared_cache.h), each of which has
such an object: an Entry is a copy then, and only requests of one process wait for their like.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libc.stdint cimport uint32_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from cpython.buffer cimport PyBUF_WRITABLE

import marshal
from hashlib import blake2b


cdef extern from "shared_cache.h" nogil:
    const uint64_t CACHE_MAGIC
    const uint32_t CACHE_NONE
    ctypedef struct CacheHead:
        uint64_t magic, capacity, seed, used
        uint32_t entries
        uint64_t hits, misses, evictions, lookup_ns, insertion_ns, resets
    ctypedef struct CacheRecord:
        uint64_t seq, data_bytes
        uint32_t key_bytes, note_bytes, first
    ctypedef struct CacheView:
        CacheHead *head
        CacheRecord *records
    ctypedef struct CacheCursor:
        const CacheView *view
        uint32_t block, at
    uint64_t cache_bytes(uint64_t)
    CacheView cache_view(char *, uint64_t)
    bint cache_lay_out(CacheView *, uint64_t, uint64_t)
    bint cache_lock(CacheView *)
    void cache_unlock(CacheView *)
    uint64_t cache_hash(uint64_t, const char *, uint64_t)
    uint32_t cache_find(CacheView *, uint64_t, const char *, uint32_t)
    void cache_unlink(CacheView *, uint32_t)
    void cache_link(CacheView *, uint32_t)
    uint32_t cache_make(CacheView *, uint64_t, const char *, uint32_t, uint32_t, uint64_t, uint64_t)
    void cache_show(CacheView *, uint32_t)
    uint32_t cache_forget(CacheView *, uint32_t, uint32_t, const char *, uint32_t)
    bint cache_read(CacheCursor *, char *, uint64_t)
    bint cache_write(CacheCursor *, const char *, uint64_t)
    int cache_audit(CacheView *)
    uint64_t cache_load "__atomic_load_n"(uint64_t *, int)
    uint64_t cache_add "__atomic_fetch_add"(uint64_t *, uint64_t, int)
    void cache_fence "__atomic_thread_fence"(int)
    const int RELAXED "__ATOMIC_RELAXED"
    const int ACQUIRE "__ATOMIC_ACQUIRE"


cdef enum:
    WHOLE = 1024        # below this a copy is cheaper than a hash (blake2b: 1 us and 1 ns a byte), and exact
    ENTRY = 512         # what an entry costs beside its key and its data
    MOST_NOTES = 1024   # what bytes of entries mean, kept as read
    SLICE = 4096        # records that are looked at while others wait
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


cdef enum:
    HITS = 0
    MISSES = 1
    INSERTION_NS = 2
    LAST_NS = 3
    COUNTS = 4

COUNTS_BYTES = COUNTS * 8


cdef class Counts:
    """Lookups of one version's requests, in `memory` of COUNTS_BYTES that other processes may read. For some,
    `looked(ns, others, hit=...)` receives how long they took, and how many others that stands for; `insertion_ns` is of
    all, estimated in the same way."""

    cdef Py_buffer buffer
    cdef bint held
    cdef uint64_t* at
    cdef uint64_t lookups, kept
    cdef object looked

    def __cinit__(self, looked, memory):
        """Raises ValueError for memory of another size, or not on a boundary of 8 bytes."""
        PyObject_GetBuffer(memory, &self.buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.held = True
        if self.buffer.len != COUNTS * 8 or <uint64_t>self.buffer.buf % 8:
            raise ValueError("not the memory of the counts of a cache")
        self.at = <uint64_t*>self.buffer.buf
        self.looked = looked

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)

    @property
    def hits(self):
        return self.at[HITS]

    @property
    def misses(self):
        return self.at[MISSES]

    @property
    def insertion_ns(self):
        return self.at[INSERTION_NS]

    @property
    def last_ns(self):
        return self.at[LAST_NS]


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

    cdef readonly uint64_t capacity
    cdef uint64_t used_bytes, evicted, hit, missed, looked_ns, inserted_ns
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

    @property
    def used(self):
        return self.used_bytes

    @property
    def evictions(self):
        return self.evicted

    @property
    def hits(self):
        return self.hit

    @property
    def misses(self):
        return self.missed

    @property
    def lookup_ns(self):
        return self.looked_ns

    @property
    def insertion_ns(self):
        return self.inserted_ns

    cdef void add_miss(self) noexcept:
        self.missed += 1

    cdef void add_times(self, uint64_t lookup, uint64_t insertion) noexcept:
        self.looked_ns += lookup
        self.inserted_ns += insertion

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
            self.add_miss()
            counts.at[MISSES] += 1
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
            self.hit += 1
            counts.at[HITS] += 1
        return entry

    def key(self, bytes head not None, inputs) -> bytes:
        """Return the key that `find` would look for."""
        return key_of(head, inputs)

    def count_miss(self, Counts counts not None) -> None:
        """For a request that waited for its like in vain, and now runs by itself."""
        self.add_miss()
        counts.at[MISSES] += 1

    cdef int count_time(self, Counts counts, uint64_t weight, uint64_t began, bint hit) except -1:
        counts.at[LAST_NS] = now_ns()
        cdef uint64_t took = counts.at[LAST_NS] - began
        self.add_times(weight * took, 0)
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
        self.store(key, form, outputs, parameters)
        if weight:
            began = weight * (now_ns() - began)
            self.add_times(0, began)
            counts.at[INSERTION_NS] += began
        return 0

    cdef int store(self, bytes key, form, outputs, tuple parameters) except -1:
        cdef Entry entry = Entry.__new__(Entry)
        entry.key, entry.form, entry.parameters = key, form, parameters
        entry.memory = tuple([copy_of(data) for data in outputs])
        entry.nbytes = ENTRY + PyBytes_GET_SIZE(key)
        for data in entry.memory:
            entry.nbytes += PyBytes_GET_SIZE(data)
        if entry.nbytes <= self.capacity and key not in self.entries:
            self.entries[key] = entry
            self.link(entry)
            self.used_bytes += entry.nbytes
            while self.used_bytes > self.capacity:
                self.drop(<Entry>self.oldest)
                self.evicted += 1
        return 0

    def forget(self, bytes prefix not None) -> None:
        """Let go of every key that begins so."""
        for key in [key for key in self.entries if (<bytes>key).startswith(prefix)]:
            self.drop(self.entries[key])

    cdef int drop(self, Entry entry) except -1:
        self.unlink(entry)
        self.used_bytes -= entry.nbytes
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


def shared_bytes(uint64_t capacity) -> int:
    """Return how large the memory of a SharedResponseCache is. Raises ValueError."""
    if not 0 < capacity <= <uint64_t>1 << 40:
        raise ValueError("a response cache has 1 byte to 1 TB")
    return cache_bytes(capacity)


def lay_out_shared(memory, uint64_t capacity, uint64_t seed) -> None:
    """Make a table in zeroed memory of shared_bytes(capacity) bytes. Raises ValueError, OSError."""
    cdef Py_buffer buffer
    cdef CacheView view
    cdef uint64_t wanted = shared_bytes(capacity)
    PyObject_GetBuffer(memory, &buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        if <uint64_t>buffer.len != wanted:
            raise ValueError("the memory is not of the size that this capacity takes")
        view = cache_view(<char*>buffer.buf, capacity)
        if not cache_lay_out(&view, capacity, seed):
            raise OSError("this system has no robust mutexes for several processes")
    finally:
        PyBuffer_Release(&buffer)


cdef class SharedResponseCache(ResponseCache):
    """Response cache in memory that several processes share, at most `capacity` bytes over all of them."""

    cdef Py_buffer buffer
    cdef bint held
    cdef CacheView view
    cdef dict notes             # as bytes -> (form, parameters, sizes)

    def __init__(self, memory, uint64_t capacity):
        """Raises ValueError for memory that is no such table."""
        super().__init__(capacity)
        self.notes = {}
        cdef uint64_t wanted = shared_bytes(capacity)
        PyObject_GetBuffer(memory, &self.buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.held = True
        if <uint64_t>self.buffer.len != wanted:
            raise ValueError("the memory is not of the size that this capacity takes")
        self.view = cache_view(<char*>self.buffer.buf, capacity)
        if self.view.head.magic != CACHE_MAGIC or self.view.head.capacity != capacity:
            raise ValueError("not a table of responses")

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)

    def __len__(self):
        return self.view.head.entries

    @property
    def used(self):
        return cache_load(&self.view.head.used, RELAXED)

    @property
    def evictions(self):
        return cache_load(&self.view.head.evictions, RELAXED)

    @property
    def hits(self):
        return cache_load(&self.view.head.hits, RELAXED)

    @property
    def misses(self):
        return cache_load(&self.view.head.misses, RELAXED)

    @property
    def lookup_ns(self):
        return cache_load(&self.view.head.lookup_ns, RELAXED)

    @property
    def insertion_ns(self):
        return cache_load(&self.view.head.insertion_ns, RELAXED)

    @property
    def resets(self):
        """How often all was dropped, because a process died while it changed the table."""
        return cache_load(&self.view.head.resets, RELAXED)

    def audit(self) -> int:
        """For tests: 0 when everything in the table fits together. Raises TimeoutError when it is taken."""
        if not cache_lock(&self.view):
            raise TimeoutError
        cdef int found = cache_audit(&self.view)
        cache_unlock(&self.view)
        return found

    cdef void add_miss(self) noexcept:
        cache_add(&self.view.head.misses, 1, RELAXED)

    cdef void add_times(self, uint64_t lookup, uint64_t insertion) noexcept:
        if lookup:
            cache_add(&self.view.head.lookup_ns, lookup, RELAXED)
        if insertion:
            cache_add(&self.view.head.insertion_ns, insertion, RELAXED)

    cpdef Entry get(self, bytes key, Counts counts):
        """Return a copy of the response kept under the key, and count a hit."""
        cdef Entry entry = self.copy(key)
        if entry is not None:
            cache_add(&self.view.head.hits, 1, RELAXED)
            counts.at[HITS] += 1
        return entry

    cdef Entry copy(self, bytes key):
        cdef const char* text = PyBytes_AS_STRING(key)
        cdef uint32_t size = <uint32_t>PyBytes_GET_SIZE(key), number
        cdef uint64_t digest = cache_hash(self.view.head.seed, text, size)
        cdef CacheRecord found
        if not cache_lock(&self.view):
            return None
        number = cache_find(&self.view, digest, text, size)
        if number != CACHE_NONE:
            found = self.view.records[number]
            cache_unlink(&self.view, number)
            cache_link(&self.view, number)
        cache_unlock(&self.view)
        return None if number == CACHE_NONE else self.read(number, &found)

    cdef Entry read(self, uint32_t number, CacheRecord* found):
        """Copy a record's bytes, and look whether they were still its own then; else it is gone."""
        cdef CacheCursor cursor
        cdef bytes note = PyBytes_FromStringAndSize(NULL, found.note_bytes)
        cdef bytes data
        cdef bint read
        cursor.view, cursor.block, cursor.at = &self.view, found.first, 0
        read = cache_skip(&cursor, found.key_bytes) and cache_read(&cursor, PyBytes_AS_STRING(note), found.note_bytes)
        cdef list memory = []
        if not read or not self.holds(number, found):
            return None
        form, parameters, sizes = self.understand(note)
        for size in sizes:
            data = PyBytes_FromStringAndSize(NULL, size)
            read = read and cache_read(&cursor, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
            memory.append(data)
        if not read or not self.holds(number, found):
            return None
        cdef Entry entry = Entry.__new__(Entry)
        entry.form, entry.memory, entry.parameters = form, tuple(memory), parameters
        return entry

    cdef bint holds(self, uint32_t number, CacheRecord* found) noexcept:
        cache_fence(ACQUIRE)
        return cache_load(&self.view.records[number].seq, RELAXED) == found.seq

    cdef tuple understand(self, bytes note):
        known = self.notes.get(note)
        if known is None:
            if len(self.notes) >= MOST_NOTES:
                self.notes.clear()
            known = self.notes[note] = marshal.loads(note)
        return <tuple>known

    cdef int store(self, bytes key, form, outputs, tuple parameters) except -1:
        cdef list views = [memoryview(data).cast("B") for data in outputs]
        cdef tuple sizes = tuple([len(view) for view in views])
        cdef bytes note = marshal.dumps((form, parameters, sizes))
        cdef const char* text = PyBytes_AS_STRING(key)
        cdef uint32_t size = <uint32_t>PyBytes_GET_SIZE(key), number, noted = <uint32_t>PyBytes_GET_SIZE(note)
        cdef uint64_t digest = cache_hash(self.view.head.seed, text, size), data_bytes = sum(sizes)
        cdef CacheCursor cursor
        cdef list held = []
        for view in views:      # what can fail is done before the table is taken
            held.append(Held(view))
        if not cache_lock(&self.view):
            return 0
        number = cache_make(&self.view, digest, text, size, noted, data_bytes, ENTRY + size + data_bytes)
        if number != CACHE_NONE:
            cursor.view, cursor.block, cursor.at = &self.view, self.view.records[number].first, 0
            cache_write(&cursor, text, size)
            cache_write(&cursor, PyBytes_AS_STRING(note), noted)
            for one in held:
                cache_write(&cursor, <const char*>(<Held>one).buffer.buf, (<Held>one).buffer.len)
            cache_show(&self.view, number)
        cache_unlock(&self.view)
        return 0

    def forget(self, bytes prefix not None) -> None:
        """Let go of every key that begins so."""
        cdef uint32_t at = 0
        while at != CACHE_NONE:
            if not cache_lock(&self.view):
                return
            at = cache_forget(&self.view, at, SLICE, PyBytes_AS_STRING(prefix), <uint32_t>PyBytes_GET_SIZE(prefix))
            cache_unlock(&self.view)


@cython.final
cdef class Held:
    """Memory that is read while this is there."""

    cdef Py_buffer buffer

    def __cinit__(self, data):
        PyObject_GetBuffer(data, &self.buffer, PyBUF_SIMPLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)


cdef bint cache_skip(CacheCursor* cursor, uint64_t size) noexcept:
    """Go over a record's key."""
    cdef char spare[512]
    cdef uint64_t piece
    while size:
        piece = min(size, <uint64_t>512)
        if not cache_read(cursor, spare, piece):
            return False
        size -= piece
    return True


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
