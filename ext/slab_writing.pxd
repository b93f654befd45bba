# Tensors into a slab: their buffers taken, measured and copied. Layout: include/slab_tensors.h.

from cpython.buffer cimport PyBUF_ND, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from copying cimport copy_one

cdef extern from "slab_tensors.h" nogil:
    enum: TENSORS_MAGIC, TENSORS_NOTED, TENSOR_AXES, NOTE_TAIL, DT_NONE, DT_COUNT, DT_BYTES
    ctypedef enum TensorsFault:
        TENSORS_FINE, TENSORS_NONE, TENSORS_TABLE, TENSORS_SIZE, TENSORS_NOTE
    ctypedef struct TensorsHead:
        uint32_t magic, count
    ctypedef struct TensorEntry:
        uint16_t number
        uint8_t code, rank
        uint32_t unused
        uint64_t offset, bytes
        int64_t* shape
    uint64_t tensors_align(uint64_t)
    uint64_t tensors_body_at(uint64_t)
    TensorsFault tensors_head(const uint8_t*, uint64_t, TensorsHead*)
    TensorsFault tensors_entry(const uint8_t*, uint64_t, uint32_t, TensorEntry*)
    TensorsFault tensors_note(const uint8_t*, uint64_t, const TensorsHead*, uint64_t*, uint32_t*)


# A view without an object, which PyBuffer_Release() leaves alone: memory of nobody's, or, NULL, bytes somebody else
# will write.
ctypedef struct Piece:
    Py_buffer view
    TensorEntry entry


cdef inline tuple shape_of(const TensorEntry* entry):
    cdef int axis
    if entry.rank == 1:
        return (entry.shape[0],)
    if entry.rank == 2:
        return (entry.shape[0], entry.shape[1])
    return tuple([entry.shape[axis] for axis in range(entry.rank)])


cdef inline int set_rank(Piece* piece, Py_ssize_t rank) except -1:
    if rank > TENSOR_AXES:
        raise ValueError(f"a tensor has at most {TENSOR_AXES} axes, not {rank}")
    piece.entry.rank = rank
    return 0


cdef inline int set_shape(Piece* piece, tuple shape) except -1:
    cdef int axis
    set_rank(piece, len(shape))
    for axis in range(piece.entry.rank):
        piece.entry.shape[axis] = shape[axis]
    return 0


cdef inline int take_memory(Piece* piece, const uint8_t* at, uint64_t nbytes, tuple shape) except -1:
    """Memory that stays until the piece is written; NULL: so many bytes are left for somebody else to write."""
    memset(&piece.view, 0, sizeof(Py_buffer))
    piece.view.buf, piece.view.len = <void*>at, nbytes
    return set_shape(piece, shape)


cdef inline int take_buffer(Piece* piece, object data, tuple shape) except -1:
    """A C-contiguous buffer, whose own shape counts where none is given. Released with PyBuffer_Release()."""
    cdef int axis
    PyObject_GetBuffer(data, &piece.view, PyBUF_ND)
    try:
        if shape is not None:
            return set_shape(piece, shape)
        set_rank(piece, piece.view.ndim)
        for axis in range(piece.view.ndim):
            piece.entry.shape[axis] = piece.view.shape[axis]
    except BaseException:
        PyBuffer_Release(&piece.view)
        raise
    return 0


cdef inline void begin_piece(Piece* piece, uint16_t number, uint8_t code) noexcept:
    memset(&piece.entry, 0, sizeof(TensorEntry))
    piece.entry.number, piece.entry.code = number, code


cdef inline uint64_t place_piece(Piece* piece, uint64_t at) noexcept:
    """The piece lies there; where the next one does."""
    piece.entry.offset, piece.entry.bytes = at, piece.view.len
    return at + tensors_align(piece.entry.bytes)


cdef inline uint64_t with_note(uint64_t nbytes, bytes note):
    return nbytes + len(note) + NOTE_TAIL if note else nbytes


cdef inline int write_note(uint8_t* slab, uint64_t size, bytes note) except -1:
    cdef uint32_t note_bytes = len(note)
    if note_bytes:
        memcpy(slab + size - NOTE_TAIL, &note_bytes, NOTE_TAIL)
        memcpy(slab + size - NOTE_TAIL - note_bytes, <const char*>note, note_bytes)
    return 0


cdef inline int write_pieces(Piece* pieces, Py_ssize_t count, uint8_t* slab, uint64_t size, bytes note) except -1:
    """The note ends where the slab does."""
    cdef TensorsHead head
    cdef Py_ssize_t i
    head.magic, head.count = TENSORS_NOTED if note else TENSORS_MAGIC, count
    memcpy(slab, &head, sizeof(TensorsHead))
    for i in range(count):
        memcpy(slab + sizeof(TensorsHead) + i * sizeof(TensorEntry), &pieces[i].entry, sizeof(TensorEntry))
        if pieces[i].view.buf != NULL:
            copy_one(slab + pieces[i].entry.offset, <const uint8_t*>pieces[i].view.buf, pieces[i].view.len)
    return write_note(slab, size, note)
