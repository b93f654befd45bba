"""The numbers of a protobuf message's tensors, cut out before the protobuf library parses it.

    cut = cut_numbers(data, 5, 1, {7: INT32, 11: FLOAT64})   these fields of each message 1 in messages 5
    cut.rest                                                 the message without them
    cut.count(0, 7)                                          numbers in field 7 of the first message
    cut.take(0, 7, width, low, high)                         them as memory; None: one is beyond the bounds
    list_fields(data, 0, len(data), 1024)                    the fields of a message, without a look into them
    count_fields(data, begin, end, 3)                        how many it has, and the bytes of all fields 3

The library unpacks whole numbers in one go: ten million of one byte hold the GIL for 0.1 s and take 130 MB. Here
they are counted and read without the GIL. A field may come packed, number by number, and in several pieces.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from proto_verbs cimport *

cdef extern from "wire_contents.h" nogil:
    bint count_varints(Wire* wire, Span span, int64_t* count)

cdef extern from "wire_write.h" nogil:
    void add_varint(string* head, uint64_t value)

cdef enum:
    TAGS = 32                   # fields of higher numbers stay where they are
    NO_NUMBER, UINT32_NUMBER, INT32_NUMBER, INT64_NUMBER, FLOAT32_NUMBER, FLOAT64_NUMBER

UINT32, INT32, INT64 = UINT32_NUMBER, INT32_NUMBER, INT64_NUMBER
FLOAT32, FLOAT64 = FLOAT32_NUMBER, FLOAT64_NUMBER


cdef struct Piece:
    Span span
    int64_t count
    int field


cdef struct Cut:
    # A message being cut.
    uint32_t outer
    uint32_t inner
    const uint8_t* kinds        # TAGS
    vector[Piece]* pieces
    vector[size_t]* starts      # of each message within: its first piece


cdef inline uint32_t type_of(uint8_t kind) noexcept nogil:
    # The wire type of one number.
    return 5 if kind == FLOAT32_NUMBER else 1 if kind == FLOAT64_NUMBER else 0


cdef bint cut_fields(Wire* wire, Cut* cut, string* rest) noexcept nogil:
    # One message within: numbers to the pieces, all else to the rest.
    cdef const uint8_t* start
    cdef uint32_t tag, field, size
    cdef uint8_t kind
    cdef Piece piece
    cut.starts.push_back(cut.pieces.size())
    while wire.at < wire.end:
        start = wire.at
        if not read_tag(wire, &tag):
            return False
        field = tag >> 3
        kind = cut.kinds[field] if field < TAGS else <uint8_t>NO_NUMBER
        if kind == NO_NUMBER or (tag & 7 != 2 and tag & 7 != type_of(kind)):
            if not skip_value(wire, tag):
                return False
            rest.append(<const char*>start, wire.at - start)
            continue
        if tag & 7 == 2:
            if not read_span(wire, &piece.span):
                return False
        else:
            piece.span.at = wire.at
            if not skip_value(wire, tag):
                return False
            piece.span.size = wire.at - piece.span.at
        piece.field, piece.count = <int>field, 0
        if type_of(kind) == 0:
            if not count_varints(wire, piece.span, &piece.count):
                return False
        else:
            size = 4 if kind == FLOAT32_NUMBER else 8
            if piece.span.size % size:
                return refuse(wire, WIRE_BAD_PACKED, piece.span.at)
            piece.count = piece.span.size // size
        cut.pieces.push_back(piece)
    return True


cdef bint cut_level(Wire* wire, Cut* cut, bint outermost, string* rest) noexcept nogil:
    # The outermost message, or one that holds messages with numbers.
    cdef const uint8_t* start
    cdef uint32_t tag, wanted = (cut.outer if outermost else cut.inner) << 3 | 2
    cdef Span span
    cdef Wire within
    cdef string inner
    cdef bint good
    while wire.at < wire.end:
        start = wire.at
        if not read_tag(wire, &tag):
            return False
        if tag != wanted:
            if not skip_value(wire, tag):
                return False
            rest.append(<const char*>start, wire.at - start)
            continue
        if not read_span(wire, &span):
            return False
        within = enter(wire, span)
        inner.clear()
        good = cut_level(&within, cut, False, &inner) if outermost else cut_fields(&within, cut, &inner)
        if not good:
            return refuse(wire, within.fault, within.fault_at)
        add_varint(rest, tag)
        add_varint(rest, inner.size())
        rest.append(inner)
    return True


cdef bint put_whole(Piece* piece, uint8_t kind, int width, int64_t low, int64_t high, char** to) noexcept nogil:
    # Little-endian, as this machine has them. False: a number is beyond the bounds.
    cdef Wire wire = open_wire(piece.span.at, piece.span.size)
    cdef char* at = to[0]
    cdef uint64_t raw = 0
    cdef int64_t number
    while wire.at < wire.end:
        read_varint(&wire, &raw)        # counted before
        if kind == INT64_NUMBER:
            number = <int64_t>raw
        elif kind == INT32_NUMBER:
            number = <int32_t>raw
        else:
            number = <uint32_t>raw
        if number < low or number > high:
            return False
        memcpy(at, &number, width)
        at += width
    to[0] = at
    return True


@cython.final
@cython.no_gc                   # bytes: no cycle can be made of them
cdef class Numbers:
    """Fields that were cut out of a message, which this object keeps alive. `rest` is the message without them."""

    cdef bytes message
    cdef uint8_t[TAGS] kinds
    cdef vector[Piece] pieces
    cdef vector[size_t] starts
    cdef readonly bytes rest

    def count(self, owner: int, field: int) -> int:
        """How many numbers a field of one of the messages has. Raises IndexError."""
        cdef int64_t count = 0
        cdef size_t i
        for i in range(self.first(owner), self.first(owner + 1)):
            if self.pieces[i].field == field:
                count += self.pieces[i].count
        return count

    def take(self, owner: int, field: int, width: int = 0, low: int = 0, high: int = 0) -> bytes | None:
        """The numbers in memory: floats as they are, whole numbers in `width` bytes each; None where one of these
        is not within `low` to `high`. Raises IndexError."""
        cdef size_t i, begin = self.first(owner), end = self.first(owner + 1)
        cdef int wanted = field, size = width
        cdef int64_t least = low, most = high
        cdef uint8_t kind = self.kinds[wanted] if 0 < wanted < TAGS else <uint8_t>NO_NUMBER
        if type_of(kind):
            size = 4 if kind == FLOAT32_NUMBER else 8
        elif size not in (1, 2, 4, 8):
            raise ValueError(f"whole numbers have 1, 2, 4 or 8 bytes, not {size}")
        cdef bytes made = PyBytes_FromStringAndSize(NULL, self.count(owner, field) * size)
        cdef char* at = PyBytes_AS_STRING(made)
        cdef bint good = True
        with nogil:
            for i in range(begin, end):
                if self.pieces[i].field != wanted:
                    continue
                if type_of(kind):
                    memcpy(at, self.pieces[i].span.at, self.pieces[i].span.size)
                    at += self.pieces[i].span.size
                elif not put_whole(&self.pieces[i], kind, size, least, most, &at):
                    good = False
                    break
        return made if good else None

    cdef size_t first(self, Py_ssize_t owner) except? 7:
        if not 0 <= owner <= <Py_ssize_t>self.starts.size():
            raise IndexError(f"no message {owner}: there are {self.starts.size()}")
        return self.starts[owner] if owner < <Py_ssize_t>self.starts.size() else self.pieces.size()


def cut_numbers(bytes message not None, outer: int, inner: int, dict kinds not None) -> Numbers:
    """Raises WireFault for bytes that are no such message; what of it is text is not looked at."""
    cdef Numbers numbers = Numbers.__new__(Numbers)
    cdef string rest
    cdef Cut cut
    cdef bint good
    cdef Wire wire = open_wire(<const uint8_t*>PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message))
    for field in range(TAGS):
        numbers.kinds[<int>field] = kinds.get(field, NO_NUMBER)
    cut.outer, cut.inner, cut.kinds = outer, inner, numbers.kinds
    cut.pieces, cut.starts = &numbers.pieces, &numbers.starts
    with nogil:
        good = cut_level(&wire, &cut, True, &rest)
    if not good:
        raise_fault(wire.fault, wire.fault_at - <const uint8_t*>PyBytes_AS_STRING(message))
    numbers.message = message
    numbers.rest = PyBytes_FromStringAndSize(rest.data(), rest.size())
    return numbers


# -- fields, for bounds ------------------------------------------------------------------------------

cdef struct Field:
    Py_ssize_t begin, start, end
    uint32_t tag


cdef inline bint next_field(Wire* wire, const uint8_t* base, Field* field) noexcept nogil:
    # The next field: where it begins, where its value does, where that ends. Groups are no part of any message here.
    cdef Span span
    field.begin = wire.at - base
    if not read_tag(wire, &field.tag):
        return False
    if field.tag & 7 == 3 or field.tag & 7 == 4:
        return refuse(wire, WIRE_BAD_GROUP, wire.at)
    field.start = wire.at - base
    if field.tag & 7 == 2:
        if not read_span(wire, &span):
            return False
        field.start = span.at - base
    elif not skip_value(wire, field.tag):
        return False
    field.end = wire.at - base
    return True


cdef inline int open_part(bytes message, Py_ssize_t begin, Py_ssize_t end, Wire* wire) except -1:
    if not 0 <= begin <= end <= PyBytes_GET_SIZE(message):
        raise IndexError(f"bytes {begin} to {end} of {PyBytes_GET_SIZE(message)}")
    wire[0] = open_wire(<const uint8_t*>PyBytes_AS_STRING(message) + begin, end - begin)
    return 0


def list_fields(bytes message not None, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t most) -> list:
    """Return (number, begin, begin of the value, end) of each field of message[begin:end], `most` + 1 at most; the
    number of one that is not length-delimited is 0. Raises WireFault for what is no message, IndexError."""
    cdef Wire wire
    cdef Field field
    cdef const uint8_t* base = <const uint8_t*>PyBytes_AS_STRING(message)
    cdef list found = []
    open_part(message, begin, end, &wire)
    while wire.at < wire.end and len(found) <= most:
        if not next_field(&wire, base, &field):
            raise_fault(wire.fault, wire.fault_at - base)
        found.append((field.tag >> 3 if field.tag & 7 == 2 else 0, field.begin, field.start, field.end))
    return found


def count_fields(bytes message not None, Py_ssize_t begin, Py_ssize_t end, int number = 0) -> tuple[int, int]:
    """Return how many fields message[begin:end] has, and the bytes of all length-delimited ones of that number. Raises WireFault for what is no message, IndexError."""
    cdef Wire wire
    cdef Field field
    cdef const uint8_t* base = <const uint8_t*>PyBytes_AS_STRING(message)
    cdef uint32_t wanted = <uint32_t>number << 3 | 2
    cdef Py_ssize_t count = 0, nbytes = 0
    cdef bint good = True
    open_part(message, begin, end, &wire)
    with nogil:
        while wire.at < wire.end:
            if not next_field(&wire, base, &field):
                good = False
                break
            count += 1
            if field.tag == wanted:
                nbytes += field.end - field.start
    if not good:
        raise_fault(wire.fault, wire.fault_at - base)
    return count, nbytes
