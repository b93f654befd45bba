# One copy of bytes into shared memory, with the GIL given up while it is long.

from libc.stdint cimport uint8_t
from libc.string cimport memcpy


cdef enum:
    GIL_FREE_BYTES = 16384      # below this, letting go of the GIL costs more than the copy


cdef inline void copy_one(uint8_t* to, const uint8_t* data, Py_ssize_t count):
    if count == 0:              # an empty tensor has no memory, and memcpy takes no null pointer even then
        return
    if count < GIL_FREE_BYTES:
        memcpy(to, data, count)
        return
    with nogil:
        memcpy(to, data, count)
