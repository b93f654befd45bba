"""Tensors in slabs: a whole request or answer written, or read, by one call. Layout: include/slab_tensors.h.

    offset, nbytes = desk.put([(0, 8, (1, 16), data), (1, 8, None, array)], note)      leased and written
    entries, note = desk.read(offset, nbytes)        views of it;  desk.arrays(offset, nbytes)  as arrays

An entry is (number of the tensor, dtype code, shape, data). Data is anything with a C-contiguous buffer, whose
own shape is taken where none is given; or a number of bytes, which are left for somebody else to write. Views and arrays are borrowed: valid until the slab is given back.
"""

cimport cython
from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.memoryview cimport PyMemoryView_FromMemory, PyMemoryView_FromObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from slab_writing cimport *
from slot_verbs cimport Arena, arena_attach, slab_holds, slab_allocate, slab_release, worker_owner

MAX_RANK = TENSOR_AXES

cdef tuple FAULTS = (
    "",
    "this slab holds no tensors",
    "this slab's table of tensors is damaged",
    "a tensor of this slab does not fill its bytes",
    "this slab's note is damaged",
)


# --- in ---------------------------------------------------------------------------------------------

@cython.final
@cython.freelist(8)
cdef class Pieces:
    """Tensors on their way in: their buffers, and the entries that will say where they lie."""

    cdef Piece* at
    cdef Py_ssize_t count, held
    cdef uint64_t nbytes        # of the slab they need, without a note

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.held):
            PyBuffer_Release(&self.at[i].view)
        PyMem_Free(self.at)

    cdef int take(self, object tensors) except -1:
        cdef Py_ssize_t i
        self.count = len(tensors)
        self.at = <Piece*>PyMem_Malloc(max(self.count, 1) * sizeof(Piece))
        if self.at == NULL:
            raise MemoryError
        self.nbytes = tensors_body_at(self.count)
        for i in range(self.count):
            self.take_one(&self.at[i], tensors[i])
            self.held += 1
            self.nbytes = place_piece(&self.at[i], self.nbytes)
        return 0

    cdef int take_one(self, Piece* piece, tuple tensor) except -1:
        number, code, shape, data = tensor
        begin_piece(piece, number, code)
        if type(data) is int:
            return take_memory(piece, NULL, data, shape)
        return take_buffer(piece, data, shape)


def measure(tensors, bytes note not None=b"") -> int:
    """Bytes a slab needs for these entries and the note."""
    cdef Pieces pieces = Pieces()
    pieces.take(tensors)
    return with_note(pieces.nbytes, note)


def lay_out(described, bint noted=False) -> tuple:
    """A slab for tensors that are yet to come, each (number, code, shape, bytes): its bytes before the first, where
    each begins, and its size without a note. Raises ValueError for more than 16 axes."""
    cdef TensorsHead head
    cdef TensorEntry entry
    cdef uint64_t at = tensors_body_at(len(described))
    cdef int axis
    head.magic, head.count = TENSORS_NOTED if noted else TENSORS_MAGIC, len(described)
    text, starts = bytearray((<const char*>&head)[:sizeof(TensorsHead)]), []
    for number, code, shape, nbytes in described:
        if len(shape) > TENSOR_AXES:
            raise ValueError(f"a tensor has at most {TENSOR_AXES} axes, not {len(shape)}")
        memset(&entry, 0, sizeof(TensorEntry))
        entry.number, entry.code, entry.rank, entry.offset, entry.bytes = number, code, len(shape), at, nbytes
        for axis in range(entry.rank):
            entry.shape[axis] = shape[axis]
        text += (<const char*>&entry)[:sizeof(TensorEntry)]
        starts.append(at)
        at += tensors_align(nbytes)
    return bytes(text.ljust(tensors_body_at(len(described)), b"\0")), starts, at


def write(slab, tensors, bytes note not None=b"") -> None:
    """Fill a slab of at least measure() bytes. Raises ValueError for more than 16 axes, and for a smaller slab."""
    cdef Pieces pieces = Pieces()
    cdef Py_buffer room
    pieces.take(tensors)
    PyObject_GetBuffer(slab, &room, PyBUF_WRITABLE)
    try:
        if <uint64_t>room.len < with_note(pieces.nbytes, note):
            raise ValueError(f"{room.len} bytes of room for {with_note(pieces.nbytes, note)}")
        write_pieces(pieces.at, pieces.count, <uint8_t*>room.buf, room.len, note)
    finally:
        PyBuffer_Release(&room)


# --- out --------------------------------------------------------------------------------------------

cdef int check(TensorsFault fault) except -1:
    if fault != TENSORS_FINE:
        raise ValueError(FAULTS[<int>fault])
    return 0


def read(slab not None) -> list:
    """The entries of a slab; data are views of it. Raises ValueError when it holds none."""
    cdef Py_buffer view
    cdef TensorsHead head
    cdef TensorEntry entry
    cdef uint32_t i
    whole = PyMemoryView_FromObject(slab)
    PyObject_GetBuffer(slab, &view, PyBUF_SIMPLE)
    try:
        check(tensors_head(<const uint8_t*>view.buf, view.len, &head))
        found = []
        for i in range(head.count):
            check(tensors_entry(<const uint8_t*>view.buf, view.len, i, &entry))
            data = whole[entry.offset : entry.offset + entry.bytes]
            found.append((entry.number, entry.code, shape_of(&entry), data))
        return found
    finally:
        PyBuffer_Release(&view)


def read_note(slab not None):
    """The note of a slab that holds tensors, as a view of it; empty when it has none. Raises ValueError for a
    damaged slab."""
    cdef Py_buffer view
    cdef TensorsHead head
    cdef uint64_t at
    cdef uint32_t nbytes
    PyObject_GetBuffer(slab, &view, PyBUF_SIMPLE)
    try:
        check(tensors_head(<const uint8_t*>view.buf, view.len, &head))
        check(tensors_note(<const uint8_t*>view.buf, view.len, &head, &at, &nbytes))
    finally:
        PyBuffer_Release(&view)
    return PyMemoryView_FromObject(slab)[at : at + nbytes] if nbytes else b""


cdef class SlabCodec:
    """One process's way into the slabs of an arena, as front number `front` or worker number `worker`.

    `make_array(shape, dtype, memory, offset)` and a dtype for each code (None: no array, bytes stay a view)
    are for arrays().
    """

    cdef Arena arena
    cdef object memory, readable, make_array
    cdef tuple types
    cdef uint32_t owner

    def __init__(self, const uint8_t[::1] memory not None, *, int front=-1, int worker=-1, make_array=None, tuple types=()):
        if not arena_attach(&self.arena, <uint8_t*>&memory[0], memory.shape[0]) or not self.arena.slabs.pages:
            raise ValueError("this memory holds no arena with slabs of this version")
        self.memory = memory.base
        self.readable = PyMemoryView_FromObject(self.memory).toreadonly()
        self.owner = worker_owner(&self.arena, worker) if worker >= 0 else 1 + front
        if make_array is not None and len(types) < DT_COUNT:
            raise ValueError(f"{DT_COUNT} types, one for each dtype code, not {len(types)}")
        self.make_array, self.types = make_array, types

    def put(self, tensors, bytes note not None=b"") -> tuple:
        """A slab of ours that holds them: (offset, bytes); offset 0 when there is no room for so many bytes.
        Raises ValueError for more than 16 axes."""
        cdef Pieces pieces = Pieces()
        pieces.take(tensors)
        cdef uint64_t nbytes = with_note(pieces.nbytes, note)
        cdef uint64_t offset = slab_allocate(&self.arena.slabs, nbytes, self.owner)
        if offset:
            write_pieces(pieces.at, pieces.count, self.arena.slabs.base + offset, nbytes, note)
        return offset, nbytes

    def lay(self, bytes head not None, list spans not None, uint64_t nbytes, bytes note not None=b"") -> tuple:
        """A slab of ours for tensors that are yet to come, as lay_out() says: (offset, bytes, memory of each span);
        offset 0 when there is no room. `spans`: (where it begins, bytes) of each tensor."""
        cdef uint64_t size = with_note(nbytes, note), at, count
        cdef uint64_t offset = slab_allocate(&self.arena.slabs, size, self.owner)
        cdef uint8_t* slab = self.arena.slabs.base + offset
        cdef list memory = []
        if offset == 0:
            return 0, size, memory
        try:
            for at, count in spans:
                if at > nbytes or count > nbytes - at:
                    raise ValueError("a tensor does not lie in its slab")
                memory.append(PyMemoryView_FromMemory(<char*>slab + at, count, PyBUF_WRITE))
            if <uint64_t>len(head) > nbytes:
                raise ValueError("a head does not lie in its slab")
            memcpy(slab, <const char*>head, len(head))
            write_note(slab, size, note)
        except BaseException:
            slab_release(&self.arena.slabs, offset)
            raise
        return offset, size, memory

    def look(self, uint64_t offset, uint64_t nbytes):
        """What a leased slab without a note holds: ((number, code, shape) of each tensor, their memory); None for one
        with a note, or that holds none."""
        cdef TensorsHead head
        cdef TensorEntry entry
        cdef uint32_t i
        if not slab_holds(&self.arena.slabs, offset, nbytes):
            return None
        cdef const uint8_t* slab = self.arena.slabs.base + offset
        if tensors_head(slab, nbytes, &head) or head.magic != TENSORS_MAGIC:
            return None
        form, memory = [], []
        for i in range(head.count):
            if tensors_entry(slab, nbytes, i, &entry):
                return None
            form.append((entry.number, entry.code, shape_of(&entry)))
            memory.append(PyMemoryView_FromMemory(<char*>slab + entry.offset, entry.bytes, PyBUF_READ))
        return tuple(form), memory

    def read(self, uint64_t offset, uint64_t nbytes) -> tuple:
        """(entries, note) of a leased slab, data as views. Raises ValueError when it is none or holds none."""
        return self.read_slab(offset, nbytes, False)

    def arrays(self, uint64_t offset, uint64_t nbytes) -> tuple:
        """The same with data as read-only arrays."""
        return self.read_slab(offset, nbytes, True)

    cdef tuple read_slab(self, uint64_t offset, uint64_t nbytes, bint as_arrays):
        cdef TensorsHead head
        cdef TensorEntry entry
        cdef uint64_t note_at
        cdef uint32_t i, note_bytes
        if not slab_holds(&self.arena.slabs, offset, nbytes):
            raise ValueError("not the bytes of a leased slab")
        cdef const uint8_t* slab = self.arena.slabs.base + offset
        check(tensors_head(slab, nbytes, &head))
        check(tensors_note(slab, nbytes, &head, &note_at, &note_bytes))
        found = []
        for i in range(head.count):
            check(tensors_entry(slab, nbytes, i, &entry))
            shape = shape_of(&entry)
            if as_arrays and self.types[entry.code] is not None:
                data = self.make_array(shape, self.types[entry.code], self.readable, <uint64_t>(slab - self.arena.base) + entry.offset)
            else:
                data = PyMemoryView_FromMemory(<char*>slab + entry.offset, entry.bytes, PyBUF_READ)
            found.append((entry.number, entry.code, shape, data))
        note = (<const char*>slab)[note_at : note_at + note_bytes] if note_bytes else b""
        return found, note
