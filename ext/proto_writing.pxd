# Writing protobuf bytes: the verbs of wire_write.h over Python objects, and the join that copies raw
# tensors to their place in a bytes object of the final size, once.

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from proto_verbs cimport GIL_BYTES, WIRE_TOO_LARGE, raise_fault

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef extern from "wire_write.h" nogil:
    int size_varint(uint64_t value)
    uint8_t* put_varint(uint8_t* at, uint64_t value)
    void add_varint(string* head, uint64_t value) except +
    void add_number(string* head, uint32_t tag, uint64_t value) except +
    void add_text(string* head, uint32_t tag, const char* text, size_t size) except +
    void add_fixed(string* head, uint32_t tag, const void* value, size_t size) except +
    size_t open_field(string* head, uint32_t tag) except +
    void close_field(string* head, size_t start) except +


cdef enum:
    MOST_BYTES = 0x7fffffff     # protobuf's and gRPC's own limit


cdef inline int write_text(string* head, uint32_t tag, str text) except -1:
    # proto3: the empty string is not written.
    cdef Py_ssize_t size
    cdef const char* memory = PyUnicode_AsUTF8AndSize(text, &size)
    if size:
        add_text(head, tag, memory, size)
    return 0


cdef inline int write_number(string* head, uint32_t tag, uint64_t value) except -1:
    if value:
        add_number(head, tag, value)
    return 0


cdef inline int write_int64s(string* head, uint32_t tag, values) except -1:
    cdef size_t start
    if not values:
        return 0
    start = open_field(head, tag)
    for value in values:
        add_varint(head, <uint64_t><int64_t>value)
    close_field(head, start)
    return 0


cdef inline int release_all(vector[Py_buffer]* views) except -1:
    cdef size_t i
    for i in range(views.size()):
        PyBuffer_Release(&views.at(i))
    return 0


cdef inline bytes join_raw(string* before, string* head, uint32_t tag, raw):
    # `head`, then each tensor of `raw` as field `tag` (one byte). With `before`, which ends in the tag
    # of a message, all that is that message, so its length comes between.
    cdef vector[Py_buffer] views
    cdef Py_buffer view
    cdef uint64_t size = head.size()
    try:
        for tensor in raw:
            PyObject_GetBuffer(tensor, &view, PyBUF_SIMPLE)
            views.push_back(view)
            size += 1 + size_varint(view.len) + view.len
        return fill_message(before, head, tag, &views, size)
    finally:
        release_all(&views)


cdef inline bytes fill_message(
    string* before, string* head, uint32_t tag, vector[Py_buffer]* views, uint64_t size
):
    cdef uint64_t total = size
    if before is not NULL:
        total += before.size() + size_varint(size)
    if total > MOST_BYTES:
        raise_fault(WIRE_TOO_LARGE, 0)
    cdef bytes message = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t* at = <uint8_t*>PyBytes_AS_STRING(message)
    if before is not NULL:
        memcpy(at, before.data(), before.size())
        at = put_varint(at + before.size(), size)
    memcpy(at, head.data(), head.size())
    at += head.size()
    if total <= GIL_BYTES:
        put_views(at, tag, views)
    else:
        with nogil:
            put_views(at, tag, views)
    return message


cdef inline void put_views(uint8_t* at, uint32_t tag, vector[Py_buffer]* views) noexcept nogil:
    cdef size_t i
    for i in range(views.size()):
        at = put_varint(put_varint(at, tag), views.at(i).len)
        memcpy(at, views.at(i).buf, views.at(i).len)
        at += views.at(i).len
