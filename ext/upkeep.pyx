"""What the owner of an arena looks after while others work in it: memory that nobody uses, batches that hang.

    looks = Looks(arena.memory, front=0)
    while looks.give_back(): ...        every few seconds; True: cut short, to be gone on with soon
    looks.running()                     who runs what, and since when nothing was heard of it

    pins = Pins(arena.memory, front=0)
    while not pins.take(): ...          from then on nothing is given back, until pins.drop()

What was free at one look and at the next is given back, in every process at once. How that is safe beside live
fronts and workers: include/trim.h.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from slot_verbs cimport Arena, SLOT_RUNNING, Slot, arena_attach, load64, slot_at, word_state, word_worker

cdef extern from "trim.h" nogil:
    ctypedef struct SlotLook:
        pass
    ctypedef struct TrimLooks:
        SlotLook* slots
    bint looks_open(const Arena*, TrimLooks*)
    bint arena_trim(const Arena*, TrimLooks*, uint32_t front)
    bint pins_take(const Arena*, uint32_t front)
    void pins_drop(const Arena*, uint32_t front)


cdef class Looks:
    """One process's looks at an arena, as front number `front`; the memory is borrowed."""

    cdef Arena arena
    cdef object memory
    cdef TrimLooks looks
    cdef uint32_t front

    def __init__(self, uint8_t[::1] memory not None, *, uint32_t front=0):
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no arena of this version")
        if not looks_open(&self.arena, &self.looks):
            raise MemoryError
        self.memory, self.front = memory, front

    def __dealloc__(self):
        free(self.looks.slots)

    def running(self) -> list:
        """(worker, since, ran) of each batch a worker runs: when it was taken or last gave a sign of life,
        CLOCK_MONOTONIC ns, and whether the backend is through with it."""
        cdef uint32_t i
        cdef uint64_t w
        cdef Slot* s
        found = []
        for i in range(self.arena.slots):
            s = slot_at(&self.arena, i)
            w = load64(&s.word)
            if word_state(w) == SLOT_RUNNING and s.taken_ns:     # else it is just being taken
                found.append((word_worker(w), max(s.taken_ns, s.moved_ns), s.ran_ns != 0))
        return found

    def give_back(self) -> bool:
        """Give back what nobody has used since the last look, 16 MB at most; True: call again to go on."""
        cdef bint more
        with nogil:
            more = arena_trim(&self.arena, &self.looks, self.front)
        return more


cdef class Pins:
    """One front's word that a device reads and writes the arena where it lies; the memory is borrowed."""

    cdef Arena arena
    cdef object memory
    cdef uint32_t front
    cdef int64_t size

    def __init__(self, uint8_t[::1] memory not None, *, uint32_t front=0):
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no arena of this version")
        if front >= self.arena.fronts:
            raise ValueError(f"front {front} of {self.arena.fronts}")
        self.memory, self.front, self.size = memory, front, memory.shape[0]

    def take(self) -> bool:
        """No page of it is exchanged from now on; False: some are this moment, and it is to be asked again."""
        return pins_take(&self.arena, self.front)

    def drop(self) -> None:
        """Nothing of it is registered for this front any more."""
        pins_drop(&self.arena, self.front)

    def offset_of(self, view not None) -> int:
        """Where in the arena a view of it begins; -1 for other memory."""
        cdef Py_buffer told
        cdef int64_t at
        PyObject_GetBuffer(view, &told, PyBUF_SIMPLE)
        try:
            at = <uint8_t*>told.buf - self.arena.base
            return at if 0 <= at <= self.size - told.len else -1
        finally:
            PyBuffer_Release(&told)
