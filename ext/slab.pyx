"""Slabs in shared memory, and copies into it that check their bounds and let go of the GIL.

    pool = SlabPool.create(memory, pages=64)
    offset = pool.allocate(10_000, owner=3)         0 when there is no room
    copy_parts(pool.view(offset, 10_000), [chunk1, chunk2])
    pool.release(offset)

No lock: a process that dies holds nothing that reclaim(owner) does not find. Layout: include/slab.h.
"""

from cpython.bytearray cimport PyByteArray_FromStringAndSize, PyByteArray_Resize
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from copying cimport copy_one

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


def copy_rows(object out, object data, *, Py_ssize_t rows, Py_ssize_t row_bytes, Py_ssize_t out_stride,
              Py_ssize_t data_stride, Py_ssize_t out_offset=0, Py_ssize_t data_offset=0) -> None:
    """Copy `rows` rows of row_bytes bytes, each side stepping by its own stride in bytes.

    Raises ValueError when a row would lie outside `out` or `data`, or rows of `out` would overlap.
    """
    cdef Py_buffer target, source
    cdef uint8_t* to
    cdef const uint8_t* at
    cdef Py_ssize_t i
    PyObject_GetBuffer(out, &target, PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        try:
            check_rows("out", rows, row_bytes, out_stride, out_offset, target.len)
            check_rows("data", rows, row_bytes, data_stride, data_offset, source.len)
            if out_stride < row_bytes and rows > 1:
                raise ValueError(f"rows of {row_bytes} bytes overlap at a stride of {out_stride}")
            to, at = <uint8_t*>target.buf + out_offset, <const uint8_t*>source.buf + data_offset
            with nogil:
                for i in range(rows):
                    memcpy(to + i * out_stride, at + i * data_stride, row_bytes)
        finally:
            PyBuffer_Release(&source)
    finally:
        PyBuffer_Release(&target)


cdef int check_rows(str side, Py_ssize_t rows, Py_ssize_t row_bytes, Py_ssize_t stride, Py_ssize_t offset,
                    Py_ssize_t room) except -1:
    if rows < 0 or row_bytes < 0 or stride < 0 or offset < 0 or offset > room:
        raise ValueError(f"{side}: rows, bytes, stride and offset are not negative, and the offset lies inside")
    # In Python integers: the product may not fit in 64 bits.
    last = <object>offset + (<object>rows - 1) * <object>stride + <object>row_bytes
    if rows > 0 and last > room:
        raise ValueError(f"{side}: {rows} rows of {row_bytes} bytes every {stride} from {offset} need {last} bytes, there are {room}")
    return 0


def copy_parts(object out, parts) -> None:
    """Fill `out` with the bytes of `parts`, one behind the other. Raises ValueError unless they fill it exactly."""
    cdef Py_buffer target, source
    cdef Py_ssize_t at = 0
    PyObject_GetBuffer(out, &target, PyBUF_WRITABLE)
    try:
        for part in parts:
            PyObject_GetBuffer(part, &source, PyBUF_SIMPLE)
            try:
                if source.len > target.len - at:
                    raise ValueError(f"more than {target.len} bytes for {target.len} bytes of room")
                copy_one(<uint8_t*>target.buf + at, <const uint8_t*>source.buf, source.len)
                at += source.len
            finally:
                PyBuffer_Release(&source)
        if at != target.len:
            raise ValueError(f"{at} bytes for {target.len} bytes of room")
    finally:
        PyBuffer_Release(&target)


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
