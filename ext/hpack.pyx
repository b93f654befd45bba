"""HPACK (RFC 7541): header blocks of HTTP/2 into lists of (name, value), and replies' into blocks.

    decoder = HpackDecoder()
    decoder.decode(block)               # [(b":method", b"POST"), ...]
    decoder.generation                  # moves with every change of the table: while it stands, equal
                                        # blocks are equal lists, and need no decoding
    static_block([(b":status", b"200"), (b"grpc-status", b"0")])    # for any connection, built once

What the dynamic table holds are the tuples handed out, so that an indexed field costs a reference. It never
holds more than RFC 7541 counts: names, values and 32 bytes an entry. Nothing here looks at what a header
means, or whether its name may be sent.
"""

from enum import IntEnum

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_DECREF
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libcpp.string cimport string

cdef extern from "hpack_static_table.h":
    enum:
        HPACK_STATICS
    struct HpackStatic:
        const char* name
        const char* value
    const HpackStatic* HPACK_STATIC

cdef extern from "scratch.h" nogil:
    char* take_scratch(size_t bytes)

cdef extern from "hpack_wire.h" nogil:
    enum:
        HPACK_INTEGER_BYTES
    struct HpackCursor:
        const uint8_t* at
        const uint8_t* end
    struct HpackText:
        const uint8_t* at
        size_t bytes
        bint huffman
    size_t huffman_most_decoded(size_t bytes)
    Py_ssize_t huffman_decode(const uint8_t* start, size_t bytes, uint8_t* out)
    bint hpack_read_integer(HpackCursor* cursor, int prefix_bits, uint64_t* value)
    bint hpack_read_text(HpackCursor* cursor, HpackText* text)
    uint8_t* hpack_write_integer(uint8_t* out, uint8_t pattern, int prefix_bits, uint64_t value)
    uint8_t* hpack_write_text(uint8_t* out, const uint8_t* start, size_t bytes)

cdef enum:
    TABLE_BYTES = 4096      # of both sides until they say something else (RFC 9113 6.5.2)
    LIST_BYTES = 65536
    ENTRY = 32              # what an entry counts beside its name and value (RFC 7541 4.1)
    # The first octet of a representation (RFC 7541 6), and the bits of its integer.
    INDEXED = 0x80
    INSERTED = 0x40
    RESIZED = 0x20
    NEVER_INDEXED = 0x10
    SHORTEST_RING = 8

ENTRY_BYTES = ENTRY


class Fault(IntEnum):
    """The values of `HpackFault.code`."""

    MALFORMED = 1
    TABLE_SIZE = 2
    LIST_TOO_LARGE = 3


class HpackFault(ValueError):
    """A block that cannot be had: `code` (a Fault), and `offset`, the byte that showed it.

    MALFORMED is no HPACK. TABLE_SIZE: a size of the table that is not allowed, or stands in the wrong place.
    After both the decoder is of no more use, and neither is the connection (RFC 9113 4.3: COMPRESSION_ERROR).
    LIST_TOO_LARGE: the list would have more than `list_bytes`; the block was read to its end, and the next one
    can be decoded. `fields` are the first ones of that list.
    """

    def __init__(self, code: int, offset: int, fields=()) -> None:
        super().__init__(f"{Fault(code).name} at byte {offset}")
        self.code = Fault(code)
        self.offset = offset
        self.fields = list(fields)


cdef tuple STATIC = tuple([
    (HPACK_STATIC[i].name, HPACK_STATIC[i].value) for i in range(HPACK_STATICS)
])
cdef dict STATIC_FIELDS = {field: i + 1 for i, field in enumerate(STATIC)}
cdef dict STATIC_NAMES = {field[0]: len(STATIC) - i for i, field in enumerate(reversed(STATIC))}
# A header with a secret is never put into a table, here or on the way (RFC 7541 7.1).
cdef frozenset SECRET = frozenset((b"authorization", b"cookie", b"proxy-authorization", b"set-cookie"))


cdef struct Ring:
    # The dynamic table: owned (name, value) tuples, the newest before `next`.
    PyObject** slots
    uint32_t room           # a power of two, or 0
    uint32_t next
    uint32_t count
    uint64_t bytes          # as RFC 7541 4.1 counts them


cdef inline uint64_t size_of(tuple field) noexcept:
    return ENTRY + PyBytes_GET_SIZE(<bytes>field[0]) + PyBytes_GET_SIZE(<bytes>field[1])


cdef inline tuple ring_get(Ring* ring, uint64_t back):
    # The entry `back` before the newest.
    return <tuple>ring.slots[(ring.next - 1 - <uint32_t>back) & (ring.room - 1)]


cdef int ring_grow(Ring* ring) except -1:
    cdef uint32_t i, number, room = ring.room * 2 if ring.room else SHORTEST_RING
    cdef PyObject** slots = <PyObject**>malloc(room * sizeof(PyObject*))
    if slots is NULL:
        raise MemoryError
    for i in range(ring.count):
        number = ring.next - ring.count + i
        slots[number & (room - 1)] = ring.slots[number & (ring.room - 1)]
    free(ring.slots)
    ring.slots, ring.room = slots, room
    return 0


cdef int ring_push(Ring* ring, tuple field) except -1:
    if ring.count == ring.room:
        ring_grow(ring)
    Py_INCREF(field)
    ring.slots[ring.next & (ring.room - 1)] = <PyObject*>field
    ring.next += 1
    ring.count += 1
    ring.bytes += size_of(field)
    return 0


cdef tuple ring_pop(Ring* ring):
    # The oldest.
    cdef PyObject* slot = ring.slots[(ring.next - ring.count) & (ring.room - 1)]
    cdef tuple field = <tuple>slot
    ring.count -= 1
    ring.bytes -= size_of(field)
    Py_DECREF(field)
    return field


cdef void ring_shrink(Ring* ring, uint64_t most) noexcept:
    while ring.bytes > most:
        ring_pop(ring)


cdef bytes take_text(HpackText* text):
    # None for what is no text in Huffman's code.
    cdef bytes large
    cdef Py_ssize_t size
    if not text.huffman:
        return PyBytes_FromStringAndSize(<const char*>text.at, text.bytes)
    cdef size_t most = huffman_most_decoded(text.bytes)
    cdef char* room = take_scratch(most)
    if room is NULL:        # larger than any block a connection takes
        large = PyBytes_FromStringAndSize(NULL, most)
        size = huffman_decode(text.at, text.bytes, <uint8_t*>PyBytes_AS_STRING(large))
        return large[:size] if size >= 0 else None
    size = huffman_decode(text.at, text.bytes, <uint8_t*>room)
    return PyBytes_FromStringAndSize(room, size) if size >= 0 else None


cdef struct Block:
    HpackCursor cursor
    const uint8_t* start
    uint64_t list_bytes     # so far
    bint begun              # a field was seen: no more sizes of the table


@cython.final
@cython.no_gc               # tuples of bytes: no cycle can be made of them
cdef class HpackDecoder:
    """One direction of a connection: the table of at most `table_bytes` that the peer's blocks build, and
    at most `list_bytes` a list, counted like the table (SETTINGS_MAX_HEADER_LIST_SIZE).

    A peer begins with a table of 4096 bytes; up to `table_bytes` it may say so. Less than 4096 is for a peer
    that knows. SETTINGS_HEADER_TABLE_SIZE is not changed while a connection is open.
    """

    cdef Ring ring
    cdef uint64_t limit, most, list_most
    cdef readonly uint64_t generation

    def __init__(self, table_bytes: int = TABLE_BYTES, list_bytes: int = LIST_BYTES):
        self.limit, self.list_most = table_bytes, list_bytes
        self.most = min(self.limit, <uint64_t>TABLE_BYTES)

    def __dealloc__(self):
        ring_shrink(&self.ring, 0)
        free(self.ring.slots)

    def __len__(self) -> int:
        return self.ring.count

    @property
    def table_bytes(self) -> int:
        """Bytes that the table holds, as RFC 7541 4.1 counts them."""
        return self.ring.bytes

    def decode(self, block) -> list:
        """The fields of one whole block. Raises HpackFault."""
        cdef Py_buffer view
        if PyBytes_CheckExact(block):
            return self.read(<const uint8_t*>PyBytes_AS_STRING(block), PyBytes_GET_SIZE(block))
        PyObject_GetBuffer(block, &view, PyBUF_SIMPLE)
        try:
            return self.read(<const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef list read(self, const uint8_t* start, size_t size):
        cdef Block block
        cdef tuple field
        cdef list fields = []
        block.start = block.cursor.at = start
        block.cursor.end = start + size
        block.list_bytes, block.begun = 0, False
        while block.cursor.at != block.cursor.end:
            field = self.read_field(&block)
            if field is None:
                continue
            block.list_bytes += size_of(field)
            if block.list_bytes <= self.list_most:
                fields.append(field)
        if block.list_bytes > self.list_most:
            raise HpackFault(Fault.LIST_TOO_LARGE, size, fields)
        return fields

    cdef tuple read_field(self, Block* block):
        # The next field; None for a size of the table.
        cdef uint8_t first = block.cursor.at[0]
        cdef bint inserted = (first & (INDEXED | INSERTED)) == INSERTED
        if not first & INDEXED and not inserted and first & RESIZED:
            self.resize(block)
            return None
        block.begun = True
        if first & INDEXED:
            return self.find(block, 7)
        cdef tuple field = self.read_literal(block, 6 if inserted else 4)
        if inserted:
            self.insert(field)
        return field

    cdef int resize(self, Block* block) except -1:
        cdef uint64_t most
        cdef Py_ssize_t offset = block.cursor.at - block.start
        if block.begun:
            raise HpackFault(Fault.TABLE_SIZE, offset)
        if not hpack_read_integer(&block.cursor, 5, &most):
            raise HpackFault(Fault.MALFORMED, offset)
        if most > self.limit:
            raise HpackFault(Fault.TABLE_SIZE, offset)
        if most != self.most:
            self.generation += 1
        self.most = most
        ring_shrink(&self.ring, most)
        return 0

    cdef tuple find(self, Block* block, int prefix_bits):
        cdef uint64_t index
        cdef Py_ssize_t offset = block.cursor.at - block.start
        if hpack_read_integer(&block.cursor, prefix_bits, &index) and index != 0:
            if index <= HPACK_STATICS:
                return <tuple>STATIC[index - 1]
            if index - HPACK_STATICS <= self.ring.count:
                return ring_get(&self.ring, index - HPACK_STATICS - 1)
        raise HpackFault(Fault.MALFORMED, offset)

    cdef tuple read_literal(self, Block* block, int prefix_bits):
        cdef bytes name
        if block.cursor.at[0] & ((1 << prefix_bits) - 1):
            name = self.find(block, prefix_bits)[0]
        else:
            block.cursor.at += 1
            name = read_text(block)
        return (name, read_text(block))

    cdef int insert(self, tuple field) except -1:
        cdef uint64_t size = size_of(field)
        self.generation += 1
        if size > self.most:        # RFC 7541 4.4: it empties the table, and is no error
            ring_shrink(&self.ring, 0)
            return 0
        ring_shrink(&self.ring, self.most - size)
        return ring_push(&self.ring, field)


cdef bytes read_text(Block* block):
    cdef HpackText text
    cdef bytes found = None
    cdef Py_ssize_t offset = block.cursor.at - block.start
    if hpack_read_text(&block.cursor, &text):
        found = take_text(&text)
    if found is None:
        raise HpackFault(Fault.MALFORMED, offset)
    return found


cdef void put_integer(string* out, uint8_t pattern, int prefix_bits, uint64_t value) noexcept nogil:
    cdef uint8_t[HPACK_INTEGER_BYTES] room
    out.append(<char*>room, hpack_write_integer(room, pattern, prefix_bits, value) - room)


cdef void put_text(string* out, bytes text) noexcept:
    cdef size_t used = out.size()
    out.resize(used + HPACK_INTEGER_BYTES + PyBytes_GET_SIZE(text))
    cdef uint8_t* start = <uint8_t*>out.data()
    cdef const uint8_t* at = <const uint8_t*>PyBytes_AS_STRING(text)
    out.resize(hpack_write_text(start + used, at, PyBytes_GET_SIZE(text)) - start)


cdef int put_field(string* out, tuple field) except -1:
    cdef object index = STATIC_FIELDS.get(field)
    cdef uint64_t name
    if index is not None:
        put_integer(out, INDEXED, 7, index)
        return 0
    name = STATIC_NAMES.get(field[0], 0)
    put_integer(out, NEVER_INDEXED if field[0] in SECRET else 0, 4, name)
    if not name:
        put_text(out, <bytes>field[0])
    put_text(out, <bytes>field[1])
    return 0


cdef inline tuple plain(object field):
    # (bytes, bytes), which the C code may take for granted.
    name, value = field
    if type(name) is not bytes or type(value) is not bytes:
        raise TypeError("a header is a pair of bytes")
    return field if type(field) is tuple else (name, value)


def static_block(headers) -> bytes:
    """A block that uses no dynamic table and changes none: for any connection, any number of times. Two of
    them after each other are one block."""
    cdef string out
    for field in headers:
        put_field(&out, plain(field))
    return PyBytes_FromStringAndSize(out.data(), out.size())
