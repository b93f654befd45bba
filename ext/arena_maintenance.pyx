"""Maintenance by the owner of an arena while others work in it: memory that nobody uses, batches that hang.

    scanner = ArenaScanner(arena.memory, front=0)
    while scanner.trim(): ...        every few seconds; True: cut short, to be gone on with soon
    scanner.running()                     each running batch: worker, last sign of life, executed

    pulse = WorkerHeartbeat(arena.memory, arena.worker_doorbells)
    pulse.ping(0)                       whether worker 0 has answered the ping before; its loop does, also while it idles

What was free at one look and at the next is given back, in every process at once. How that is safe beside live
fronts and workers: include/trim.h.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from slot_verbs cimport Arena, SLOT_RUNNING, Slot, arena_attach, load64, slot_at, word_state, word_worker, worker_busy, worker_ping

cdef extern from "trim.h" nogil:
    ctypedef struct SlotScan:
        pass
    ctypedef struct ArenaScan:
        SlotScan* slots
    bint scan_open(const Arena*, ArenaScan*)
    bint arena_trim(const Arena*, ArenaScan*, uint32_t front)


cdef class ArenaScanner:
    """One process's looks at an arena, as front number `front`; the memory is borrowed."""

    cdef Arena arena
    cdef object memory
    cdef ArenaScan scan
    cdef uint32_t front

    def __init__(self, uint8_t[::1] memory not None, *, uint32_t front=0):
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no arena of this version")
        if not scan_open(&self.arena, &self.scan):
            raise MemoryError
        self.memory, self.front = memory, front

    def __dealloc__(self):
        free(self.scan.slots)

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

    def trim(self) -> bool:
        """Give back what nobody has used since the last look, 16 MB at most; True: call again to go on."""
        cdef bint more
        with nogil:
            more = arena_trim(&self.arena, &self.scan, self.front)
        return more


cdef class WorkerHeartbeat:
    """The owner's questions to the workers of an arena whether they live; the memory is borrowed. `parted`: their
    answers may come in parts, also when execute() is over."""

    cdef Arena arena
    cdef object memory
    cdef list doorbells
    cdef bint parted

    def __init__(self, uint8_t[::1] memory not None, worker_doorbells, *, bint parted=False):
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no arena of this version")
        self.memory, self.doorbells, self.parted = memory, list(worker_doorbells), parted

    def ping(self, uint32_t worker) -> bool:
        """Ask a worker's loop for a sign of life; whether it has answered the question before this one."""
        if worker >= self.arena.workers:
            raise ValueError(f"worker {worker} of {self.arena.workers}")
        return worker_ping(&self.arena, worker, self.doorbells[worker])

    def busy(self, uint32_t worker) -> bool:
        """Whether a worker is in a batch; where answers come in parts, until its execute() is over."""
        return worker_busy(&self.arena, worker, self.parted)
