"""Slabs in shared memory by themselves, for tests and benchmarks of include/slab.h, and memory that is not zeroed.

    pool = SlabPool.create(memory, pages=64)
    offset = pool.allocate(10_000, owner=3)         0 when there is no room
    pool.view(offset, 10_000)[:] = data
    pool.release(offset)

No lock: a process that dies holds nothing that reclaim(owner) does not find. Layout: include/slab.h.
"""

from cpython.bytearray cimport PyByteArray_FromStringAndSize, PyByteArray_Resize
from cpython.buffer cimport PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "slab.h" nogil:
    enum: SLAB_PAGE
    ctypedef struct Slabs:
        uint8_t* base
        uint32_t pages
    uint64_t slab_header_bytes(uint32_t)
    void slab_format(uint8_t*, uint32_t)
    bint slab_attach(Slabs*, uint8_t*, uint64_t)
    uint64_t slab_allocate(const Slabs*, uint64_t, uint32_t)
    bint slab_holds(const Slabs*, uint64_t, uint64_t)
    bint slab_release(const Slabs*, uint64_t)
    bint slab_give(const Slabs*, uint64_t, uint32_t giver, uint32_t taker)
    uint32_t slab_reclaim(const Slabs*, uint32_t)
    uint32_t slab_used(const Slabs*)
    uint32_t slab_trim(const Slabs*, uint32_t owner, uint32_t most, uint32_t* at)

PAGE_BYTES = SLAB_PAGE


def pool_bytes(uint32_t pages) -> int:
    """Bytes of zeroed memory a pool of `pages` pages needs."""
    return slab_header_bytes(pages) + <uint64_t>pages * SLAB_PAGE


cdef class SlabPool:
    """One process's view of a pool; the memory is borrowed."""

    cdef Slabs slabs
    cdef object memory

    def __init__(self, uint8_t[::1] memory not None):
        if not slab_attach(&self.slabs, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no slab pool")
        self.memory = memory

    @classmethod
    def create(cls, uint8_t[::1] memory not None, uint32_t pages):
        """Format zeroed memory of at least pool_bytes(pages) bytes."""
        if <uint64_t>memory.shape[0] < pool_bytes(pages):
            raise ValueError(f"a pool of {pages} pages needs {pool_bytes(pages)} bytes, got {memory.shape[0]}")
        slab_format(&memory[0], pages)
        return cls(memory)

    def allocate(self, uint64_t nbytes, uint32_t owner) -> int:
        """Offset of at least nbytes contiguous bytes, 0 when there is no room."""
        cdef uint64_t offset
        with nogil:
            offset = slab_allocate(&self.slabs, nbytes, owner)
        return offset

    def release(self, uint64_t offset) -> None:
        """Give a lease back. Raises ValueError when offset starts none."""
        if not slab_release(&self.slabs, offset):
            raise ValueError("not the start of a lease")

    def give(self, uint64_t offset, uint32_t giver, uint32_t taker) -> None:
        """The lease changes hands. Raises ValueError when offset starts none of the giver's."""
        if not slab_give(&self.slabs, offset, giver, taker):
            raise ValueError("not the start of a lease")

    def reclaim(self, uint32_t owner) -> int:
        """Free everything `owner` held; the number of pages."""
        return slab_reclaim(&self.slabs, owner)

    def used(self) -> int:
        """Pages under lease."""
        return slab_used(&self.slabs)

    def trim(self, uint32_t owner) -> int:
        """Give the memory of pages back that were free at the last call already; how many. They read as zeros
        then, in every process. Pages on their way are `owner`'s: reclaim(owner) finds them, should it die."""
        cdef uint32_t at = 0, given
        with nogil:
            given = slab_trim(&self.slabs, owner, self.slabs.pages, &at)
        return given

    def view(self, uint64_t offset, uint64_t nbytes):
        """The bytes of a lease, writable, valid until it is released."""
        if not slab_holds(&self.slabs, offset, nbytes):
            raise ValueError("not the bytes of a leased slab")
        return PyMemoryView_FromMemory(<char*>self.slabs.base + offset, nbytes, PyBUF_WRITE)


def blank_bytes(Py_ssize_t nbytes):
    """A bytearray of nbytes whose content is whatever was there: for a reader that fills every byte."""
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes")
    return PyByteArray_FromStringAndSize(NULL, nbytes)


def grow_bytes(bytearray memory not None, Py_ssize_t nbytes):
    """Make a bytearray longer; what is new is whatever was there. No copy where it is large: pages are moved.
    Raises BufferError while a view of it is held."""
    if nbytes < len(memory):
        raise ValueError(f"{nbytes} bytes, fewer than {len(memory)}")
    PyByteArray_Resize(memory, nbytes)
