"""A ModelInferRequest as what comes again with every request of its kind, and what is its own.

    outline = read_outline(data)        # None unless its raw tensors are its last fields
    outline.head                        # every field before them but the id: equal heads, equal requests
    outline.id, outline.sizes           # its own: the id, the bytes of each raw tensor
    outline.copy_raw(0, memory)         # one copy, to where the tensor goes
    write_known(before, outline.id, after, [memory])

Nothing inside of the head is looked at: whether it makes sense is for whoever read it whole before
(`proto_wire.read_infer_request`), for a request with the same head.
"""

cimport cython
from libcpp.string cimport string
from libcpp.vector cimport vector
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

from proto_verbs cimport *
from proto_writing cimport *


cdef enum:
    HEAD_BYTES = 4096
    RAWS = 64

MOST_HEAD_BYTES = HEAD_BYTES
MOST_RAWS = RAWS


cdef struct Layout:
    # Where things are in a message.
    Span id
    const uint8_t* id_field     # its tag; NULL without an id
    const uint8_t* raw_field    # the first raw tensor's tag; NULL before it was seen


@cython.final
@cython.no_gc                   # bytes and a text: no cycle can be made of them
@cython.freelist(64)
cdef class Outline:
    """One request. Its raw tensors stay in the message, which it holds on to."""

    cdef bytes message
    cdef vector[Span] raws
    cdef readonly bytes head
    cdef readonly str id

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.raws.size() == 1:
            return (self.raws[0].size,)
        return tuple([span.size for span in self.raws])

    def copy_raw(self, index: int, out) -> None:
        """A raw tensor into `out`, which must have its size. Raises WireFault (WRONG_SIZE), IndexError."""
        copy_span(find_raw(&self.raws, index), PyBytes_AS_STRING(self.message), out)


cdef bint take_apart(Wire* wire, Layout* found, vector[Span]* raws) noexcept nogil:
    # False for what is no message, or has its fields in another order.
    cdef uint32_t tag = 0
    cdef Span span
    cdef const uint8_t* field
    while wire.at != wire.end:
        field = wire.at
        if not read_tag(wire, &tag):
            return False
        if tag == BYTES_7:
            if raws.size() == RAWS or not read_span(wire, &span):
                return False
            if found.raw_field is NULL:
                found.raw_field = field
            raws.push_back(span)
        elif found.raw_field is not NULL:
            return False
        elif tag != BYTES_3:
            if not skip_value(wire, tag):
                return False
        elif found.id_field is not NULL or not read_span(wire, &found.id):
            return False
        else:
            found.id_field = field
    return found.raw_field is not NULL


def read_outline(bytes message not None) -> Outline | None:
    """The outline of a serialized ModelInferRequest; None for one whose raw tensors are not its last
    fields, whose id is given twice or is no text, whose head is larger than MOST_HEAD_BYTES, or that is
    no message at all."""
    cdef Outline outline = Outline.__new__(Outline)
    cdef Layout found
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(message)
    cdef Wire wire = open_wire(start, PyBytes_GET_SIZE(message))
    found.id_field = found.raw_field = NULL
    if not take_apart(&wire, &found, &outline.raws) or found.raw_field - start > HEAD_BYTES:
        return None
    outline.message = message
    outline.id = ""
    if found.id_field is NULL:
        outline.head = PyBytes_FromStringAndSize(<const char*>start, found.raw_field - start)
    elif not take_id(outline, start, &found):
        return None
    return outline


cdef bint take_id(Outline outline, const uint8_t* start, Layout* found):
    # The id, and the head from both sides of it. False when it is no text.
    cdef PyObject* text = PyUnicode_DecodeUTF8(<const char*>found.id.at, found.id.size, NULL)
    cdef const uint8_t* end = found.id.at + found.id.size
    cdef Py_ssize_t before = found.id_field - start, after = found.raw_field - end
    if text is NULL:
        PyErr_Clear()
        return False
    outline.id = steal(text)
    outline.head = PyBytes_FromStringAndSize(NULL, before + after)
    memcpy(PyBytes_AS_STRING(outline.head), start, before)
    memcpy(PyBytes_AS_STRING(outline.head) + before, end, after)
    return True


def write_known(bytes before not None, str id not None, bytes after not None, raw) -> bytes:
    """A ModelInferResponse: the fields `before`, the id, the fields `after`, the tensors' bytes.

    Raises WireFault (TOO_LARGE) at 2 GiB.
    """
    cdef string head
    head.reserve(PyBytes_GET_SIZE(before) + PyBytes_GET_SIZE(after) + 64)
    head.append(PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))
    write_text(&head, BYTES_3, id)
    head.append(PyBytes_AS_STRING(after), PyBytes_GET_SIZE(after))
    return join_raw(NULL, &head, BYTES_6, raw)
