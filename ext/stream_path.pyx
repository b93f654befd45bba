"""A piece of a streamed reply on its way to the socket: what runs for each, and no more.

    text_tokens.Flow -> StreamPath.ready, StreamPath.send -> the transport's write

A base, as those of fast_path.pyx are: fastserve/net/request.py says the rest, which seldom runs, and what HTTP/2 does
otherwise is said by name (`_may_send`, `_send_piece`). A connection of HTTP/1.1 has `_current`, the call whose turn it is,
`_choked`, whether its client does not read, and `_transport`, which may change as it goes on.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t
from libc.string cimport memcpy

cdef const char* DIGITS = "0123456789abcdef"


cdef class StreamPath:
    """One reply; `head` goes before its first piece. `silent`: its body is not sent, as of a HEAD."""

    cdef readonly object _call, _connection
    cdef public bytes _head
    cdef public bint _closed
    cdef readonly bint _chunked, _silent
    cdef public int64_t sent_bytes          # of its body

    def __init__(self, call, connection, bytes head not None, bint chunked, bint silent):
        self._call, self._connection, self._head = call, connection, head
        self._chunked, self._silent = chunked, silent

    @property
    def ready(self):
        """Whether a piece would go out at once: it is this reply's turn, and the client reads."""
        return not self._closed and not self._call.gone and self._may_send()

    def send(self, bytes data not None):
        """`write`, for callbacks that found it `ready`: any number of times until they return."""
        self.sent_bytes += PyBytes_GET_SIZE(data)
        self._send_piece(data)

    cpdef bint _may_send(self) except -1:
        return self._connection._current is self._call and not self._connection._choked

    cpdef _send_piece(self, bytes data):
        cdef bint nothing = self._silent or PyBytes_GET_SIZE(data) == 0     # an empty chunk would end the reply
        head, self._head = self._head, b""
        if not nothing:
            data = chunk(head, data) if self._chunked else head + data
        elif head:
            data = head
        else:
            return
        self._connection._transport.write(data)


cdef bytes chunk(bytes head, bytes data):
    """The head, and one chunk of these bytes (RFC 9112 7.1)."""
    cdef Py_ssize_t before = PyBytes_GET_SIZE(head), size = PyBytes_GET_SIZE(data), digits = 1, left = size >> 4
    while left:
        digits += 1
        left >>= 4
    cdef bytes made = PyBytes_FromStringAndSize(NULL, before + digits + 2 + size + 2)
    cdef char* at = PyBytes_AS_STRING(made)
    memcpy(at, PyBytes_AS_STRING(head), before)
    at += before
    left = size
    for i in range(digits - 1, -1, -1):
        at[i] = DIGITS[left & 15]
        left >>= 4
    at += digits
    memcpy(at, b"\r\n", 2)
    memcpy(at + 2, PyBytes_AS_STRING(data), size)
    memcpy(at + 2 + size, b"\r\n", 2)
    return made
