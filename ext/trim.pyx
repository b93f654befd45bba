"""Gives back the memory of an arena that a burst has touched and nobody uses since.

    trim = Trim(arena.memory, front=0)
    while trim.look(): ...          every few seconds; True: cut short, to be gone on with soon

What was free at one look and at the next is given back, in every process at once. How that is safe beside live
fronts and workers: include/trim.h.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free
from slot_verbs cimport Arena, arena_attach

cdef extern from "trim.h" nogil:
    ctypedef struct SlotLook:
        pass
    ctypedef struct Looks:
        SlotLook* slots
    bint looks_open(const Arena*, Looks*)
    bint arena_trim(const Arena*, Looks*, uint32_t front)


cdef class Trim:
    """One process's looks at an arena, as front number `front`; the memory is borrowed."""

    cdef Arena arena
    cdef object memory
    cdef Looks looks
    cdef uint32_t front

    def __init__(self, uint8_t[::1] memory not None, *, uint32_t front=0):
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no arena of this version")
        if not looks_open(&self.arena, &self.looks):
            raise MemoryError
        self.memory, self.front = memory, front

    def __dealloc__(self):
        free(self.looks.slots)

    def look(self) -> bool:
        """Give back what nobody has used since the last look, 16 MB at most; True: call again to go on."""
        cdef bint more
        with nogil:
            more = arena_trim(&self.arena, &self.looks, self.front)
        return more
