"""How HTTP/2 frames are put down, for the modules that write them."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

cdef extern from "http2_frames.h" nogil:
    enum:
        H2_DATA, H2_HEADERS, H2_END_STREAM, H2_END_HEADERS


cdef inline char* put_head(char* at, Py_ssize_t size, uint8_t kind, uint8_t flags, uint32_t stream) noexcept nogil:
    at[0], at[1], at[2] = <char>(size >> 16), <char>(size >> 8), <char>size
    at[3], at[4] = <char>kind, <char>flags
    at[5], at[6], at[7], at[8] = <char>(stream >> 24), <char>(stream >> 16), <char>(stream >> 8), <char>stream
    return at + 9


cdef inline char* put_bytes(char* at, bytes payload) noexcept:
    cdef Py_ssize_t size = PyBytes_GET_SIZE(payload)
    memcpy(at, PyBytes_AS_STRING(payload), size)
    return at + size


cdef inline char* put_frame(char* at, uint8_t kind, uint8_t flags, uint32_t stream, bytes payload) noexcept:
    return put_bytes(put_head(at, PyBytes_GET_SIZE(payload), kind, flags, stream), payload)
