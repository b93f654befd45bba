# Reading protobuf bytes: the verbs of wire_read.h, and those that make Python objects with them.
#
# A Wire owns nothing: its maker holds the buffer. What cannot be read is raised as WireFault of
# proto_wire, which is looked up only then, so that every module of messages raises the same class.

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_Clear
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector


cdef extern from "Python.h":
    # As pointers: a try around each text would cost as much as the text.
    PyObject* PyUnicode_DecodeUTF8(const char* text, Py_ssize_t size, const char* errors) noexcept
    str steal "(PyObject*)" (PyObject* text)

cdef extern from "name_cache.h":
    PyObject* make_name(const uint8_t* name, size_t size) noexcept

cdef extern from "wire_read.h" nogil:
    enum:
        WIRE_OK
        WIRE_TRUNCATED
        WIRE_OVERLONG
        WIRE_BAD_TAG
        WIRE_BAD_TYPE
        WIRE_BAD_LENGTH
        WIRE_BAD_PACKED
        WIRE_BAD_GROUP
        WIRE_TOO_DEEP
        WIRE_BAD_TEXT
        WIRE_TOO_MANY
        WIRE_TOO_LARGE
        WIRE_OTHER_KIND
        WIRE_WRONG_SIZE
    struct Wire:
        const uint8_t* at
        const uint8_t* end
        const uint8_t* fault_at
        int fault
    struct Span:
        const uint8_t* at
        int64_t size
    Wire open_wire(const uint8_t* at, int64_t size)
    Wire enter(const Wire* outer, Span span)
    bint refuse(Wire* wire, int fault, const uint8_t* where)
    bint read_varint(Wire* wire, uint64_t* value)
    bint read_short(Wire* wire, uint32_t* value)
    bint read_tag(Wire* wire, uint32_t* tag)
    bint read_span(Wire* wire, Span* span)
    bint skip_value(Wire* wire, uint32_t tag)


cdef enum:
    ENTRIES = 16384             # MOST_ENTRIES of the modules: each becomes objects, which takes 3 us or less
    PIECE_BYTES = 64            # so much of a parameter's text counts as one entry
    FIELDS = 16 * ENTRIES       # of any kind, unknown ones and those given again too: 0.1 us
    GIL_BYTES = 16384           # spans up to this keep the GIL: giving it away costs more

# Tags: field number * 8 + wire type.
cdef enum:
    VARINT_1 = 8
    BYTES_1 = 10
    VARINT_2 = 16
    BYTES_2 = 18
    FIXED32_2 = 21
    VARINT_3 = 24
    BYTES_3 = 26
    VARINT_4 = 32
    FIXED_4 = 33
    BYTES_4 = 34
    VARINT_5 = 40
    BYTES_5 = 42
    VARINT_6 = 48
    BYTES_6 = 50
    VARINT_7 = 56
    BYTES_7 = 58
    VARINT_8 = 64


cdef struct Reading:
    const uint8_t* base
    int64_t left                # entries
    int64_t fields


cdef inline int raise_fault(int code, int64_t offset) except -1:
    from fastserve._ext.proto_wire import WireFault
    raise WireFault(code, offset)


cdef inline int fail(Reading* r, Wire* wire) except -1:
    raise_fault(wire.fault, wire.fault_at - r.base)


cdef inline bint next_tag(Reading* r, Wire* wire, uint32_t* tag) except -1:
    # False at the end of the message.
    tag[0] = 0
    if wire.at == wire.end:
        return False
    r.fields -= 1
    if r.fields < 0:
        refuse(wire, WIRE_TOO_MANY, wire.at)
        fail(r, wire)
    if not read_tag(wire, tag):
        fail(r, wire)
    return True


cdef inline int pass_unknown(Reading* r, Wire* wire, uint32_t tag) except -1:
    return 0 if skip_value(wire, tag) else fail(r, wire)


cdef inline int take_entry(Reading* r, Wire* wire) except -1:
    r.left -= 1
    if r.left < 0:
        refuse(wire, WIRE_TOO_MANY, wire.at)
        fail(r, wire)
    return 0


cdef inline int take_pieces(Reading* r, Wire* wire, Py_ssize_t size) except -1:
    # A long text counts as many entries.
    r.left -= size // PIECE_BYTES
    if r.left < 0:
        refuse(wire, WIRE_TOO_MANY, wire.at)
        fail(r, wire)
    return 0


cdef inline int take_span(Reading* r, Wire* wire, Span* span) except -1:
    return 0 if read_span(wire, span) else fail(r, wire)


cdef inline uint64_t take_number(Reading* r, Wire* wire) except? 7:
    cdef uint64_t value = 0
    if not read_varint(wire, &value):
        fail(r, wire)
    return value


cdef inline int open_inner(Reading* r, Wire* wire, Wire* inner) except -1:
    cdef Span span
    take_span(r, wire, &span)
    inner[0] = enter(wire, span)
    return 0


cdef inline str take_text(Reading* r, Wire* wire):
    cdef Span span
    cdef PyObject* text
    take_span(r, wire, &span)
    text = PyUnicode_DecodeUTF8(<const char*>span.at, span.size, NULL)
    if text is NULL:
        refuse_text(r, wire, span)
    return steal(text)


cdef inline str take_name(Reading* r, Wire* wire):
    # A text that comes again with the next request.
    cdef Span span
    cdef PyObject* text
    take_span(r, wire, &span)
    text = make_name(span.at, span.size)
    if text is NULL:
        refuse_text(r, wire, span)
    return steal(text)


cdef inline int refuse_text(Reading* r, Wire* wire, Span span) except -1:
    PyErr_Clear()
    try:
        span.at[:span.size].decode()
    except UnicodeDecodeError as error:
        refuse(wire, WIRE_BAD_TEXT, span.at + <int64_t>error.start)
    return fail(r, wire)


cdef inline double take_double(Reading* r, Wire* wire, uint32_t tag) except? -1.0:
    cdef double value
    pass_unknown(r, wire, tag)
    memcpy(&value, wire.at - 8, 8)
    return value


cdef inline int take_int64s(Reading* r, Wire* wire, uint32_t tag, list shape) except -1:
    cdef Wire packed
    if tag & 7 == 0:
        take_entry(r, wire)
        shape.append(<int64_t>take_number(r, wire))
        return 0
    open_inner(r, wire, &packed)
    while packed.at < packed.end:
        take_entry(r, &packed)
        shape.append(<int64_t>take_number(r, &packed))
    return 0


# -- raw tensors ---------------------------------------------------------------------------------

cdef inline int borrow(object message, Py_buffer* view, Reading* r, Wire* wire) except -1:
    PyObject_GetBuffer(message, view, PyBUF_SIMPLE)
    r.base = <const uint8_t*>view.buf
    r.left = ENTRIES
    r.fields = FIELDS
    wire[0] = open_wire(r.base, view.len)
    return 0


cdef inline int take_raw(Reading* r, Wire* wire, vector[Span]* raws) except -1:
    cdef Span span
    take_entry(r, wire)
    take_span(r, wire, &span)
    raws.push_back(span)
    return 0


cdef inline Span find_raw(vector[Span]* raws, Py_ssize_t index) except *:
    if not 0 <= index < <Py_ssize_t>raws.size():
        raise IndexError(f"no raw tensor {index}: there are {raws.size()}")
    return raws.at(index)


cdef inline int copy_span(Span span, const void* base, object out) except -1:
    cdef Py_buffer memory
    PyObject_GetBuffer(out, &memory, PyBUF_WRITABLE)
    try:
        if memory.len != span.size:
            raise_fault(WIRE_WRONG_SIZE, span.at - <const uint8_t*>base)
        if span.size <= GIL_BYTES:
            memcpy(memory.buf, span.at, span.size)
        else:
            with nogil:
                memcpy(memory.buf, span.at, span.size)
    finally:
        PyBuffer_Release(&memory)
    return 0
