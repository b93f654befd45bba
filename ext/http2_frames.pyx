"""HTTP/2 frames: out of received bytes that are split anywhere, and into bytes to send.

    reader = FrameReader(most_frame=1 << 20, most_block=65536, most_parts=16)
    for kind, flags, stream, payload, value in reader.read(scratch, nbytes): ...

READ_EVENTS frames are returned at once, and no more: a read of 256 KiB holds thirty thousand empty ones. `left` says how
many of its bytes were not looked at; they are given again. Sizes, padding, places and the order of frames are checked
here (include/http2_frames.h); what a stream may do, and HPACK, are not known. Header blocks come whole, DATA in the pieces it was received in. A payload of
BORROWED_BYTES and more is a memoryview of what was read: valid until the next read.

    kind            flags       payload         value
    DATA            END_STREAM  bytes or view   bytes that count against windows: padding too
    HEADERS         END_STREAM  the block       1 when the stream depends on itself
    REQUEST         the body    the block       its bytes: HEADERS and one DATA frame that ends the stream;
                                                between the two nothing came but those of other streams
    SETTINGS, PING  ACK         bytes
    RST_STREAM      -           b""             the error code
    WINDOW_UPDATE   -           b""             the increment
    PLACED          END_STREAM  bytes of DATA   as of DATA: they lie in the place of the stream (`divert`)
    GOAWAY, PRIORITY, UNKNOWN   b""
    FAULT           0           what is wrong   the error code; stream 0: the connection is over
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from frame_writing cimport H2_DATA, H2_END_HEADERS, H2_END_STREAM, H2_HEADERS, put_frame, put_head

cdef extern from "http2_frames.h" nogil:
    enum:
        H2_PRIORITY, H2_RST_STREAM, H2_SETTINGS, H2_PUSH_PROMISE, H2_PING, H2_GOAWAY
        H2_WINDOW_UPDATE, H2_CONTINUATION, H2_UNKNOWN, H2_FAULT
    cppclass Http2Event:
        uint8_t kind, flags, reason
        bint first
        uint32_t stream
        const uint8_t* at
        uint32_t size, value
    cppclass Http2Reader:
        bint settled
        uint32_t left
        const uint8_t* at
        const uint8_t* end
        Http2Reader(uint32_t, uint32_t, uint32_t)
        void feed(const uint8_t*, int64_t)
        bint step(Http2Event*)
        bint take_body(const Http2Event*, Http2Event*)
        bint waits()

cdef extern from "<sys/ioctl.h>" nogil:
    const unsigned long FIONREAD
    int ioctl(int, unsigned long, int*)

cdef extern from "http2_arrived.h" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len
    cppclass Http2Arrived:
        Http2Reader* reader
        uint32_t stream, frames
        vector[iovec] places
        vector[uint8_t] odd
        bint plan(int64_t)
        int64_t receive(int, int64_t)

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
UNKNOWN, FAULT, REQUEST, PLACED = range(16, 20)
BORROWED_BYTES = 4096
READ_EVENTS = 256
HEAD_BYTES = 9

cdef enum:
    MOST_EVENTS = 256
    BORROWED = 4096
    HEAD_SIZE = 9
    WHOLE_REQUEST = 18
    IN_PLACE = 19

cdef tuple REASONS = (
    "",
    "the connection preface is not that of HTTP/2",
    "the first frame is not SETTINGS",
    "a frame is longer than SETTINGS_MAX_FRAME_SIZE",
    "a frame has a length that its type does not have",
    "a frame stands on a stream where its type does not belong",
    "a frame has more padding than payload",
    "WINDOW_UPDATE with an increment of 0",
    "a frame within a header block that is not complete",
    "CONTINUATION without a header block",
    "PUSH_PROMISE from a client",
    "a header block is over the limit (setting limits.header_bytes)",
    "a header block has too many CONTINUATION frames",
    "a stream depends on itself",
)


@cython.final
cdef class FrameReader:
    """One direction of a connection, from its preface on. `settled`: the client's first SETTINGS has come."""

    cdef Http2Reader* reader
    cdef readonly uint32_t resets       # RST_STREAM frames in what was read last
    cdef readonly Py_ssize_t left       # bytes of it that are to be read again
    cdef object place           # a buffer: what of the diverted body is still to come; asked anew for each read
    cdef readonly uint32_t diverted     # the stream whose body it is, 0: nobody's
    cdef char* room                     # of its memory, while a read goes on
    cdef Py_ssize_t room_bytes
    cdef uint32_t filled, reported, counted # DATA put into it by this read, how much of it was told, what of the rest counts

    def __cinit__(self, uint32_t most_frame, uint32_t most_block, uint32_t most_parts):
        self.reader = new Http2Reader(most_frame, most_block, most_parts)

    def __dealloc__(self):
        del self.reader

    @property
    def settled(self) -> bool:
        return self.reader.settled

    @property
    def waits(self) -> bool:
        """Whether the preface, the first SETTINGS, a header block or any frame but DATA is half there."""
        return self.reader.waits()

    def divert(self, uint32_t stream, place) -> None:
        """From the next read on DATA of this stream goes straight into `place`, a writable buffer of the room that it
        has then, and what comes in one read is one event. What it has no room for is reported as ever, and so is the rest of
        that read. 0: no more."""
        self.diverted, self.place = stream, place if stream else None

    def missing_of(self, int file, uint32_t stream, int64_t rest) -> int:
        """How many bytes of the `rest` of a body are not in the socket yet, with the heads of its frames, if all of them
        have the usual size and the last one ends the stream: 0, `receive` gets all of it. -1: what has come
        of the body says otherwise, or that is too much."""
        cdef Http2Arrived arrived
        cdef int there = 0
        arrived.reader, arrived.stream = self.reader, stream
        if not arrived.plan(rest) or ioctl(file, FIONREAD, &there):
            return -1
        return max(rest + HEAD_SIZE * <int64_t>arrived.frames - there, 0)

    def receive(self, int file, uint32_t stream, list places not None) -> tuple[int, bytes]:
        """Read the rest of a body, for which `places` have the room, after `missing_of`. Returns how many bytes of it lie
        in their places, and what came behind these that is no frame as expected: the next input of `read`."""
        cdef Http2Arrived arrived
        cdef vector[Py_buffer] views
        cdef Py_buffer view
        cdef int64_t rest = 0, placed = 0
        arrived.reader, arrived.stream = self.reader, stream
        try:
            for place in places:
                PyObject_GetBuffer(place, &view, PyBUF_WRITABLE)
                views.push_back(view)
                arrived.places.push_back(iovec(view.buf, <size_t>view.len))
                rest += view.len
            if arrived.plan(rest):
                with nogil:
                    placed = arrived.receive(file, rest)
        finally:
            for view in views:
                PyBuffer_Release(&view)
        return max(placed, 0), arrived.odd.data()[:arrived.odd.size()]

    def read(self, data, Py_ssize_t nbytes) -> list[tuple[int, object, int, object, int]]:
        """The frames in the first `nbytes` of `data`, and those that these bytes complete, as far as READ_EVENTS go."""
        cdef Py_buffer view, room
        cdef bint lent = False
        cdef list events = []
        self.resets = 0
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.room_bytes = 0
            self.filled = self.reported = self.counted = 0
            if self.diverted:
                PyObject_GetBuffer(self.place, &room, PyBUF_WRITABLE)
                lent = True
                self.room, self.room_bytes = <char*>room.buf, room.len
            if nbytes < 0 or nbytes > view.len:
                raise ValueError(f"{nbytes} bytes of {view.len}")
            self.reader.feed(<const uint8_t*>view.buf, nbytes)
            self.report(events, data, <const uint8_t*>view.buf)
            self.left = self.reader.end - self.reader.at
            self.reader.feed(NULL, 0)
        finally:
            if lent:
                PyBuffer_Release(&room)
            PyBuffer_Release(&view)
        return events

    cdef int report(self, list events, object data, const uint8_t* begin) except -1:
        # events[first:stop] are HEADERS whose DATA may follow: clients with many streams send the heads of
        # several requests before their bodies. A body goes back to its head, past heads and bodies alone.
        cdef Py_ssize_t first = 0, stop = 0
        cdef Http2Event event, body
        while True:
            if first < stop:
                event.stream = <uint32_t>(<tuple>events[first])[2]
                if self.reader.take_body(&event, &body):
                    events[first] = request(event.stream, (<tuple>events[first])[3], &body)
                    first += 1
                    continue
            if len(events) >= MOST_EVENTS or not self.reader.step(&event):
                self.report_placed(events, 0)
                return 0
            if event.kind == H2_DATA and self.takes(&event):
                first = stop = 0
                if event.flags:
                    self.report_placed(events, event.flags)
                continue
            self.report_placed(events, 0)
            if event.kind == H2_HEADERS and not event.flags and not event.reason:
                if self.reader.take_body(&event, &body):
                    events.append(request(event.stream, copied(&event), &body))
                    continue
                if stop != len(events):
                    first = stop = len(events)
                stop += 1
            else:
                first = stop = 0
                self.resets += event.kind == H2_RST_STREAM
            events.append(describe(&event, data, begin))


    cdef inline bint takes(self, const Http2Event* event) noexcept:
        """Whether this DATA has found its place."""
        if event.stream != self.diverted or not event.size:
            return False
        if <Py_ssize_t>event.size > self.room_bytes - <Py_ssize_t>self.filled:
            self.room_bytes = 0     # what follows in this read stands behind these bytes: it goes their way
            return False
        memcpy(self.room + self.filled, event.at, event.size)
        self.filled += event.size
        self.counted += event.value
        return True

    cdef inline int report_placed(self, list events, int flags) except -1:
        """All that has come for the diverted body since it was told last."""
        if self.filled > self.reported:
            events.append((IN_PLACE, flags, self.diverted, self.filled - self.reported, self.counted))
            self.reported, self.counted = self.filled, 0
        return 0


cdef inline tuple request(uint32_t stream, bytes block, Http2Event* body):
    return (WHOLE_REQUEST, copied(body), stream, block, body.size)


cdef tuple describe(Http2Event* event, object data, const uint8_t* begin):
    if event.kind == H2_DATA:
        return (H2_DATA, event.flags, event.stream, piece(event, data, begin), event.value)
    if event.kind == H2_FAULT:
        return (H2_FAULT, 0, event.stream, REASONS[event.reason], event.value)
    if event.kind == H2_HEADERS:
        return (H2_HEADERS, event.flags, event.stream, copied(event), 1 if event.reason else 0)
    return (event.kind, event.flags, event.stream, copied(event), event.value)


cdef inline bytes copied(Http2Event* event):
    return PyBytes_FromStringAndSize(<const char*>event.at, event.size) if event.size else b""


cdef inline object piece(Http2Event* event, object data, const uint8_t* begin):
    cdef Py_ssize_t start
    if event.size < BORROWED:
        return copied(event)
    start = event.at - begin
    return memoryview(data)[start:start + event.size]


def frame_head(Py_ssize_t size, int kind, int flags, uint32_t stream) -> bytes:
    """The nine bytes before a payload of `size`."""
    if size < 0 or size >= 1 << 24:
        raise ValueError(f"a frame of {size} bytes")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, 9)
    put_head(PyBytes_AS_STRING(out), size, kind, flags, stream)
    return out


def frame(int kind, int flags, uint32_t stream, bytes payload not None) -> bytes:
    """A whole frame."""
    if PyBytes_GET_SIZE(payload) >= 1 << 24:
        raise ValueError(f"a frame of {len(payload)} bytes")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, 9 + PyBytes_GET_SIZE(payload))
    put_frame(PyBytes_AS_STRING(out), kind, flags, stream, payload)
    return out


def reply_frames(uint32_t stream, bytes block not None, bytes body not None, bytes trailers not None) -> bytes:
    """A whole reply, which ends the stream: HEADERS, DATA unless `body` is empty, HEADERS unless `trailers` is."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(body), last = PyBytes_GET_SIZE(trailers)
    cdef Py_ssize_t total = 9 + PyBytes_GET_SIZE(block) + (9 + size if size else 0) + (9 + last if last else 0)
    if size >= 1 << 24 or last >= 1 << 24 or PyBytes_GET_SIZE(block) >= 1 << 24:
        raise ValueError("a frame of 16 MiB and more")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, total)
    cdef char* at = PyBytes_AS_STRING(out)
    at = put_frame(at, H2_HEADERS, H2_END_HEADERS | (0 if size or last else H2_END_STREAM), stream, block)
    if size:
        at = put_frame(at, H2_DATA, 0 if last else H2_END_STREAM, stream, body)
    if last:
        put_frame(at, H2_HEADERS, H2_END_HEADERS | H2_END_STREAM, stream, trailers)
    return out
