"""What HTTP/2 makes for each request: an object for its stream, and one for its call of gRPC. Their fields and
first values alone; what is done with them is said by the classes that begin here, wire/http2/stream.py and
wire/grpc/call.py.

Sixteen fields set by a Python __init__ are a third of what a call costs between the socket and its method.
"""

from libc.stdint cimport int64_t, uint64_t


cdef extern from "arena.h" nogil:
    uint64_t monotonic_ns()


cdef class StreamFields:
    """`window`: bytes the client will take; the connection's `client_window` at first."""

    cdef public object connection, head, state, context, inlet, outbox
    cdef public object id, window

    def __init__(self, connection, number, head, state) -> None:
        self.connection, self.id, self.head, self.state = connection, number, head, state
        self.window = connection.client_window


cdef class CallFields:
    """`received_ns` is now; `deadline_ns` follows by the head's `timeout_ns`, 0 where that is below 0: none."""

    cdef public object head, stream
    cdef public object on_gone
    cdef public object received_ns, deadline_ns
    cdef public bint over               # answered, or nobody waits
    cdef public int64_t sent_bytes
    cdef public bint begun              # the head of the answer is sent
    cdef public object coding           # of its messages, b"" for none
    cdef public object trailing         # metadata after them
    cdef public object writable         # the future of who waits for the client to take more

    def __init__(self, head, stream) -> None:
        cdef int64_t now_ns = <int64_t>monotonic_ns(), timeout_ns = head.timeout_ns
        self.head, self.stream, self.received_ns = head, stream, now_ns
        self.deadline_ns = now_ns + timeout_ns if timeout_ns >= 0 else 0
        self.coding, self.trailing = b"", ()
