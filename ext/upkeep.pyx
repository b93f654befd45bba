"""Maintenance by the owner of an arena while others work in it: memory that nobody uses, batches that hang.

    looks = Looks(arena.memory, front=0)
    while looks.give_back(): ...        every few seconds; True: cut short, to be gone on with soon
    looks.running()                     who runs what, and since when nothing was heard of it

    pulse = Pulse(arena.memory, arena.worker_bells)
    pulse.ping(0)                       whether worker 0 has answered the ping before; its loop does, also while it idles

What was free at one look and at the next is given back, in every process at once. How that is safe beside live
fronts and workers: include/trim.h.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from slot_verbs cimport Arena, SLOT_RUNNING, Slot, arena_attach, load64, slot_at, word_state, word_worker, worker_busy, worker_ping

cdef extern from "trim.h" nogil:
    ctypedef struct SlotLook:
        pass
    ctypedef struct TrimLooks:
        SlotLook* slots
    bint looks_open(const Arena*, TrimLooks*)
    bint arena_trim(const Arena*, TrimLooks*, uint32_t front)


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


cdef class Pulse:
    """The owner's questions to the workers of an arena whether they live; the memory is borrowed. `parted`: their
    answers may come in parts, also when execute() is over."""

    cdef Arena arena
    cdef object memory
    cdef list bells
    cdef bint parted

    def __init__(self, uint8_t[::1] memory not None, worker_bells, *, bint parted=False):
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no arena of this version")
        self.memory, self.bells, self.parted = memory, list(worker_bells), parted

    def ping(self, uint32_t worker) -> bool:
        """Ask a worker's loop for a sign of life; whether it has answered the question before this one."""
        if worker >= self.arena.workers:
            raise ValueError(f"worker {worker} of {self.arena.workers}")
        return worker_ping(&self.arena, worker, self.bells[worker])

    def busy(self, uint32_t worker) -> bool:
        """Whether a worker is in a batch; where answers come in parts, until its execute() is over."""
        return worker_busy(&self.arena, worker, self.parted)
