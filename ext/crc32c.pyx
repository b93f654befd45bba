"""CRC-32C (Castagnoli), the checksum of TFRecord files; not zlib's CRC-32.

    crc32c(b"123456789")     -> 0xE3069283
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef uint32_t POLYNOMIAL = 0x82F63B78    # 0x1EDC6F41 with its bits reversed
cdef Py_ssize_t NOGIL_BYTES = 1 << 14    # below, giving the lock up costs more than the work
cdef uint32_t TABLES[8][256]


cdef void _fill(uint32_t polynomial) noexcept nogil:
    cdef uint32_t value
    cdef int byte, bit, table
    for byte in range(256):
        value = <uint32_t>byte
        for bit in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        TABLES[0][byte] = value
    for byte in range(256):
        for table in range(1, 8):
            value = TABLES[table - 1][byte]
            TABLES[table][byte] = (value >> 8) ^ TABLES[0][value & 0xFF]


_fill(POLYNOMIAL)


def crc32c(data) -> int:
    """Of any contiguous buffer."""
    cdef Py_buffer view
    cdef uint32_t crc
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len < NOGIL_BYTES:
            return _sum(<const uint8_t*>view.buf, view.len)
        with nogil:
            crc = _sum(<const uint8_t*>view.buf, view.len)
        return crc
    finally:
        PyBuffer_Release(&view)


cdef inline uint32_t _sum(const uint8_t* at, Py_ssize_t left) noexcept nogil:
    # Eight bytes a step, each through the table of its distance from the end of the eight.
    cdef uint32_t crc = ~<uint32_t>0
    cdef uint64_t word
    while left >= 8:
        memcpy(&word, at, 8)
        word ^= crc
        crc = (
            TABLES[7][word & 0xFF]
            ^ TABLES[6][(word >> 8) & 0xFF]
            ^ TABLES[5][(word >> 16) & 0xFF]
            ^ TABLES[4][(word >> 24) & 0xFF]
            ^ TABLES[3][(word >> 32) & 0xFF]
            ^ TABLES[2][(word >> 40) & 0xFF]
            ^ TABLES[1][(word >> 48) & 0xFF]
            ^ TABLES[0][word >> 56]
        )
        at += 8
        left -= 8
    while left:
        crc = (crc >> 8) ^ TABLES[0][(crc ^ at[0]) & 0xFF]
        at += 1
        left -= 1
    return ~crc
