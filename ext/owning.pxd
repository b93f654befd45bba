# Memory that is measured first and then written (`twice`), as strings are, and protobuf's integers: a worker may
# change in between what it shares, so it is copied, without the GIL where it is large. Bytes nobody changes.

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

cdef enum:
    OWNED_GIL_BYTES = 16384     # copies up to this keep the GIL: giving it away costs more


cdef inline object owned(object memory, bint twice):
    cdef Py_buffer view
    cdef bytes copy
    cdef char* to
    if not twice or type(memory) is bytes:
        return memory
    PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE)
    try:
        copy = PyBytes_FromStringAndSize(NULL, view.len)
        to = PyBytes_AS_STRING(copy)
        if view.len <= OWNED_GIL_BYTES:
            memcpy(to, view.buf, view.len)
        else:
            with nogil:
                memcpy(to, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return copy
