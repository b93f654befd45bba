"""Messages of gRPC: out of the bytes of a stream, split anywhere, and back.

    reader = MessageReader(most_bytes=1 << 20)
    for message, compressed in reader.feed(piece): ...
    whole_message(body, 1 << 20)        # the usual case: one message, not compressed, all at once
    frame_message(message)

Each has a prefix: a byte that tells whether it is compressed, and its length (gRPC over HTTP/2, "Requests").
That length is looked at before memory is taken; memory for more than CLAIMED_BYTES is taken as bytes
arrive, as much again each time. A message is a bytes object, filled in its place: no pieces, no join.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX
    PyObject* PyBytes_FromStringAndSize_owned "PyBytes_FromStringAndSize" (const char*, Py_ssize_t)
    int _PyBytes_Resize(PyObject**, Py_ssize_t) except -1
    char* PyBytes_AS_STRING_of "PyBytes_AS_STRING" (PyObject*)
    void Py_DECREF_of "Py_DECREF" (PyObject*)
    void Py_XDECREF(PyObject*)

cdef enum:
    PREFIX = 5
    CLAIMED = 16 << 20

PREFIX_BYTES = PREFIX
CLAIMED_BYTES = CLAIMED


class MessageFault(ValueError):
    """What is no message that is read here: `size` is its length where that is too much, else -1."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a message of {size} bytes" if size >= 0 else "the flag of a message is neither 0 nor 1")
        self.size = size


cdef inline uint32_t length_at(const uint8_t* at) noexcept nogil:
    return <uint32_t>at[0] << 24 | <uint32_t>at[1] << 16 | <uint32_t>at[2] << 8 | at[3]


@cython.final
@cython.no_gc                   # bytes alone
cdef class MessageReader:
    """One direction of a call. After MessageFault it is of no more use."""

    cdef uint64_t most
    cdef uint8_t[PREFIX] prefix
    cdef int prefixed           # bytes of the prefix that are there
    cdef PyObject* body         # owned: the message under way, of which `have` bytes are there
    cdef Py_ssize_t room, have, size
    cdef readonly Py_ssize_t used   # bytes of the last piece that `feed` has read

    def __init__(self, uint64_t most_bytes):
        self.most = most_bytes

    def __dealloc__(self):
        Py_XDECREF(self.body)

    @property
    def wanted(self) -> int:
        """Bytes of the message under way, its prefix included; 0 while its length is not known."""
        return PREFIX + self.size if self.prefixed == PREFIX else 0

    @property
    def partial(self) -> bool:
        """Whether a message, or its prefix, is half there."""
        return self.prefixed > 0

    @property
    def missing(self) -> int:
        """Bytes to come of a message under way that is not compressed; 0 without one."""
        return self.size - self.have if self.prefixed == PREFIX and not self.prefix[0] else 0

    def begun(self) -> bytes:
        """The bytes of the message under way that are here."""
        if self.body is NULL:
            return b""
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING_of(self.body), self.have)

    def __getbuffer__(self, Py_buffer* view, int flags):
        """Room for what is missing of the message under way: its writer says so by `placed`, and lets go of
        it before anything else is done here."""
        if self.body is NULL:
            PyBuffer_FillInfo(view, self, &self.prefix[0], 0, 0, flags)
        else:
            PyBuffer_FillInfo(view, self, PyBytes_AS_STRING_of(self.body) + self.have, self.room - self.have, 0, flags)

    def placed(self, Py_ssize_t nbytes) -> list:
        """So many bytes were written where they belong: what `feed` would have said to them."""
        if self.body is NULL or nbytes < 0 or nbytes > self.room - self.have:
            raise ValueError(f"{nbytes} bytes where there was no room for them")
        self.have += nbytes
        return [self.end()] if self.have == self.size else []

    def feed(self, piece, Py_ssize_t most=PY_SSIZE_T_MAX) -> list:
        """The messages that these bytes complete, each with whether it is compressed: at most so many, and then the bytes
        after the first `used` were not looked at."""
        cdef Py_buffer view
        cdef list messages = []
        PyObject_GetBuffer(piece, &view, PyBUF_SIMPLE)
        try:
            self.used = 0
            self.take(<const uint8_t*>view.buf, view.len, messages, most)
        finally:
            PyBuffer_Release(&view)
        return messages

    cdef int take(self, const uint8_t* at, Py_ssize_t left, list messages, Py_ssize_t most) except -1:
        cdef Py_ssize_t some
        while left and len(messages) < most:
            if self.prefixed < PREFIX:
                some = min(left, PREFIX - self.prefixed)
                memcpy(&self.prefix[self.prefixed], at, some)
                self.prefixed += some
                if self.prefixed == PREFIX:
                    self.begin()
            else:
                some = min(left, self.size - self.have)
                self.make_room(self.have + some)
                memcpy(PyBytes_AS_STRING_of(self.body) + self.have, at, some)
                self.have += some
            at += some
            left -= some
            self.used += some
            if self.prefixed == PREFIX and self.have == self.size:
                messages.append(self.end())
        return 0

    cdef int begin(self) except -1:
        cdef uint32_t size = length_at(&self.prefix[1])
        if self.prefix[0] > 1 or size > self.most:
            self.prefixed = 0
            raise MessageFault(size if self.prefix[0] <= 1 else -1)
        self.size, self.have = size, 0
        self.room = min(<Py_ssize_t>size, <Py_ssize_t>CLAIMED)
        self.body = PyBytes_FromStringAndSize_owned(NULL, self.room)
        if self.body is NULL:
            raise MemoryError
        return 0

    cdef int make_room(self, Py_ssize_t need) except -1:
        if need > self.room:
            self.room = min(self.size, max(need, 2 * self.room))
            _PyBytes_Resize(&self.body, self.room)      # nobody else has seen it
        return 0

    cdef tuple end(self):
        cdef bytes message = <bytes>self.body
        Py_DECREF_of(self.body)
        self.body = NULL
        self.prefixed = 0
        return (message, self.prefix[0] == 1)


def whole_message(bytes body not None, uint64_t most_bytes) -> bytes | None:
    """The message that `body` is, None unless it is one, not compressed, of at most `most_bytes`."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(body) - PREFIX
    cdef const uint8_t* at = <const uint8_t*>PyBytes_AS_STRING(body)
    if size < 0 or at[0] != 0 or <uint64_t>size > most_bytes or length_at(at + 1) != <uint64_t>size:
        return None
    return PyBytes_FromStringAndSize(<const char*>at + PREFIX, size)


def message_prefix(uint32_t size, bint compressed=False) -> bytes:
    """Return the five bytes before a message of `size` bytes."""
    cdef bytes out = PyBytes_FromStringAndSize(NULL, PREFIX)
    put_prefix(PyBytes_AS_STRING(out), size, compressed)
    return out


def frame_message(bytes message not None, bint compressed=False) -> bytes:
    """The prefix, and the message. Raises OverflowError from 4 GiB on."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(message)
    if size > 0xffffffff:
        raise OverflowError(f"a message of {size} bytes")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, PREFIX + size)
    put_prefix(PyBytes_AS_STRING(out), <uint32_t>size, compressed)
    memcpy(PyBytes_AS_STRING(out) + PREFIX, PyBytes_AS_STRING(message), size)
    return out


cdef inline void put_prefix(char* at, uint32_t size, bint compressed) noexcept nogil:
    at[0] = compressed
    at[1], at[2], at[3], at[4] = <char>(size >> 24), <char>(size >> 16), <char>(size >> 8), <char>size
