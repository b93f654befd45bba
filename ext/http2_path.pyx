"""The way of a request over HTTP/2 that comes at once and is answered at once: what runs for each, and no more.

    Http2Path.buffer_updated -> take_request -> the service's `answer`, of gRPC HeadPath.answer -> Method.start
    CallPath.reply, or plain HTTP's -> SendingPath.reply -> Http2Path.send_last -> the transport

The classes are bases, as those of fast_path.pyx are: fastserve/net/http2 and fastserve/net/grpc say the rest, which
seldom runs, and which every step here leaves to them by name when something about a request is special. What was twenty
Python frames a call of gRPC is C between the transport, the method and the exchange; see docs/decisions/0018.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_Import
from libc.stdint cimport int64_t, uint32_t, uint64_t

from frame_writing cimport H2_DATA, H2_END_HEADERS, H2_END_STREAM, H2_HEADERS, put_bytes, put_frame, put_head
from starting cimport STARTING_CAPSULE, Starting

from fastserve._ext.grpc_messages import whole_message
from fastserve._ext import fast_path, http2_frames     # fast_path: it gives the capsule out
from fastserve._ext.http2_frames import reply_frames

cdef extern from "arena.h" nogil:
    uint64_t monotonic_ns()

cdef extern from *:
    """
    static inline PyObject *blank(PyObject *type, PyObject *none)
    {
        return ((PyTypeObject *)type)->tp_new((PyTypeObject *)type, none, NULL);
    }
    """
    object blank(object type, tuple none)   # an object without its __init__

cdef enum:
    MOST_AT_ONCE = 16384        # bytes of a reply that goes out as one piece: more would be more than one frame
    PREFIX = 5                  # of a message of gRPC

cdef int WHOLE_REQUEST = http2_frames.REQUEST, DATA_FRAME = http2_frames.DATA, PLACED_DATA = http2_frames.PLACED
cdef Starting* starting = <Starting*>PyCapsule_Import(STARTING_CAPSULE, False)


cdef class StreamFields:
    """`window`: bytes the client will take; the connection's `client_window` at first."""

    cdef public Http2Path connection
    cdef public object head, state, context, inlet, outbox
    cdef public uint32_t id
    cdef public int64_t window
    cdef public int64_t held                # bytes of its request that are here

    def __init__(self, Http2Path connection not None, uint32_t number, head, state) -> None:
        self.begin(connection, number, head, state)

    cdef void begin(self, Http2Path connection, uint32_t number, head, state):
        self.connection, self.id, self.head, self.state = connection, number, head, state
        self.window = connection.client_window


cdef class Http2Path:
    """One connection. A subclass has `sending`, and for what is special `_take` (every frame but a whole request and
    DATA), `_take_data_frame`, `_request_anew` (a request with something to it), `_refuse_length`, `_finish_stream`, `_set_aside` (what comes after
    the end, or out of turn), `callback_failed` (an exception while reading or sending), `_drop_rapid_resets`, `_put_off`
    (what a turn of the loop has no time for), `_offer_body` (at the end of a read within the body of `arriving`),
    `_renew_window`, `_charge`, `flush`, `_flush_soon`, `look_for_end`. `terms`: points that a connection has at most, how
    many of them it may spend in one turn, what an answer earns, the state of streams whose request is complete, that of
    those whose reply is too, and what makes a stream."""

    cdef public SendingPath sending
    cdef public int64_t client_window       # of the client for each new stream
    cdef public bint over                   # GOAWAY for a fault, or the last reply, is out: input is dropped
    cdef public bint _ended
    cdef public object _reader, _scratch, _transport, _lifetime, _half
    cdef public object _sip                 # the beginning of `_scratch`, where the next read should be a short one
    cdef public StreamFields arriving       # the rest of its body may be read out of the socket
    cdef public object backlog             # what was read and waits for another turn of the loop
    cdef public list _out                   # what is written while input is read
    cdef public int64_t _credit             # what the client may send on all streams
    cdef public int64_t _low                # when it is given back
    cdef public int64_t _abuse_budget, _served
    cdef public int64_t held                # bytes of all requests that are here
    cdef public int64_t _most_held          # beyond, or below the least, the memory budget is updated
    cdef public int64_t _least_held
    cdef public int _leaving                # 1: the client was told to begin no more streams soon, 2: it may not
    cdef public dict blocks                 # heads by blocks that change nothing in the decoder's table
    cdef public dict streams                # those under way, by their numbers
    cdef public int64_t last                # highest number of a stream begun
    cdef public int64_t _stop               # numbers above are not begun any more
    cdef public Py_ssize_t _most            # streams at once
    cdef public int64_t _most_queued        # bytes of replies not taken, beyond which no stream is begun
    cdef int64_t burst, a_turn, earned
    cdef object whole, done, make

    def __init__(self, tuple terms not None, int64_t stop, Py_ssize_t most, int64_t most_queued) -> None:
        self._stop, self._most, self._most_queued = stop, most, most_queued
        self.blocks, self.streams, self.last = {}, {}, -1
        self.burst, self.a_turn, self.earned, self.whole, self.done, self.make = terms
        self._abuse_budget = self.burst

    def get_buffer(self, sizehint):
        """Where the next bytes go; looked at before anybody else's come."""
        return self._scratch if self._sip is None else self._sip

    def buffer_updated(self, Py_ssize_t nbytes) -> None:
        if self.over or self.backlog is not None:
            self._set_aside(nbytes)
        else:
            self._sip = None
            self.take_turn(None, self._scratch, nbytes)

    cdef take_turn(self, list events, object data, Py_ssize_t nbytes):
        """What was read before, else the frames in the first `nbytes` of `data`, as far as one turn goes."""
        cdef tuple event
        cdef int kind
        cdef Py_ssize_t taken = 0, left = nbytes
        cdef int64_t least = self._abuse_budget - self.a_turn
        if self._out is None:
            self._out = []
        if self._lifetime is not None:
            self._lifetime.active = True
        try:
            if events is None:
                events = self._reader.read(data, nbytes)
                left = self._reader.left
                if self._reader.resets:
                    events = self._drop_rapid_resets(events)
            for event in events:
                taken += 1
                kind = event[0]
                if kind == WHOLE_REQUEST:
                    self.spend_window(event[4])
                    self.take_request(<uint32_t>event[2], <bytes>event[3], <bytes>event[1])
                elif kind == DATA_FRAME or kind == PLACED_DATA:
                    self.spend_window(event[4])
                    self._take_data_frame(event[2], event[1] != 0, event[3], event[4])
                else:
                    self._take(event[0], event[1], event[2], event[3], event[4])
                if self.over or self._abuse_budget < least:
                    break
            if (left or taken < len(events)) and not self.over:
                self._put_off(events[taken:], data, nbytes - left, nbytes)
            elif self.arriving is not None and not self.over:
                self._offer_body()
        except Exception as fault:
            self.callback_failed(fault)
        if self._out or self._ended:
            try:
                self.flush()
            except Exception as fault:
                self.callback_failed(fault)
        self._out = None

    def go_on(self, list events, data) -> None:
        """With what was put off: frames, else bytes."""
        self.take_turn(events or None, data, len(data))

    cdef bint has_room(self, int64_t number):
        if number > self._stop or len(self.streams) >= self._most:
            return False
        return self.sending.queued <= self._most_queued

    cpdef spend_window(self, int64_t counted):
        """Take received bytes off the connection's window, which is given back at once: memory is bounded by the
        streams' windows."""
        self._credit -= counted
        if self._credit < self._low:
            self._renew_window()

    def hold(self, StreamFields stream not None, int64_t nbytes) -> bool:
        """Count `nbytes` more that are held for a request; return False when it was refused for want of memory."""
        stream.held += nbytes
        self.held += nbytes
        if self.held <= self._most_held:
            return True
        self._charge()
        return not stream.closed

    def release_bytes(self, StreamFields stream not None, int64_t nbytes) -> None:
        """Count `nbytes` fewer that are held for a request."""
        nbytes = min(nbytes, stream.held)
        stream.held -= nbytes
        self.held -= nbytes
        if self.held < self._least_held:
            self._charge()

    def request(self, number, bytes block not None, bytes body not None) -> None:
        """HEADERS, and the only frame of DATA."""
        self.take_request(number, block, body)

    cdef take_request(self, uint32_t number, bytes block, bytes body):
        cdef StreamFields stream
        cdef int64_t length
        head = self.blocks.get(block)
        if head is None or <int64_t>number != self.last + 2 or not self.has_room(number):
            self._request_anew(number, block, body)
            return
        self.last = number
        length = head.body_bytes
        if length >= 0 and length != PyBytes_GET_SIZE(body):
            self._refuse_length(number)
            return
        stream = <StreamFields>blank(self.make, ())
        stream.begin(self, number, head, self.whole)
        self.streams[number] = stream
        stream.held = PyBytes_GET_SIZE(body)
        self.held += stream.held
        if self.held > self._most_held:
            self._charge()
        service = head.service
        if isinstance(service, HeadPath):
            (<HeadPath>service).take(stream, body)
        else:
            service.answer(stream, body)

    cdef send_last(self, StreamFields stream, bytes data):
        """Send the end of a reply, or all of it."""
        if self._out is not None:
            self._out.append(data)
        elif len(self.streams) == 1:
            self._transport.write(data)
        else:                   # others are likely to end in this turn of the loop too
            self._out = [data]
            self._flush_soon()
        self.sent_end(stream)

    def sent_end(self, StreamFields stream not None) -> None:
        """The last byte of a reply is handed over."""
        self._served += 1
        if stream.held:
            self.held -= stream.held
            stream.held = 0
            if self.held < self._least_held:
                self._charge()
        if self._abuse_budget < self.burst:
            self._abuse_budget += self.earned
        if stream.state is self.whole and stream.outbox is None:    # as most are
            del self.streams[stream.id]
            stream.state = self.done
        else:
            self._finish_stream(stream)
        if self._leaving or self._half is not None:
            self.look_for_end()


cdef class SendingPath:
    """The sending half. A subclass has `_reply_in_parts`, for what cannot go at once."""

    cdef public int64_t window              # the connection's
    cdef public int64_t queued              # bytes, of all streams
    cdef public bint choked                 # the socket takes no more
    cdef public bytes _prefix               # before the next header block
    cdef public Http2Path _connection

    def __init__(self, Http2Path connection not None, int64_t window) -> None:
        self._connection, self.window, self._prefix = connection, window, b""

    cdef bint fits(self, StreamFields stream, Py_ssize_t size, Py_ssize_t blocks):
        """Whether a reply can go at once. It is the caller's to take `size` off the window then."""
        if size > stream.window or size > self.window or self.queued or self.choked or PyBytes_GET_SIZE(self._prefix):
            return False
        return size + blocks <= MOST_AT_ONCE

    def reply(self, StreamFields stream not None, bytes block not None, bytes body not None,
              bytes trailers not None) -> None:
        """A whole reply."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(body)
        if self.fits(stream, size, PyBytes_GET_SIZE(block) + PyBytes_GET_SIZE(trailers)):
            self.window -= size
            self._connection.send_last(stream, reply_frames(stream.id, block, body, trailers))
        else:
            self._reply_in_parts(stream, block, body, trailers)

    cdef bint answer(self, StreamFields stream, bytes block, bytes message, bytes trailers) except -1:
        """A call's whole answer, in one piece of memory from the start. False: it cannot go at once."""
        cdef Py_ssize_t size = PREFIX + PyBytes_GET_SIZE(message)
        if not self.fits(stream, size, PyBytes_GET_SIZE(block) + PyBytes_GET_SIZE(trailers)):
            return False
        self.window -= size
        self._connection.send_last(stream, answer_frames(stream.id, block, message, trailers))
        return True


cdef bytes answer_frames(uint32_t stream, bytes block, bytes message, bytes trailers):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(message)
    cdef Py_ssize_t total = 3 * 9 + PREFIX + size + PyBytes_GET_SIZE(block) + PyBytes_GET_SIZE(trailers)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, total)
    cdef char* at = put_frame(PyBytes_AS_STRING(out), H2_HEADERS, H2_END_HEADERS, stream, block)
    at = put_head(at, PREFIX + size, H2_DATA, 0, stream)
    at[0], at[1] = 0, <char>(size >> 24)
    at[2], at[3], at[4] = <char>(size >> 16), <char>(size >> 8), <char>size
    at = put_bytes(at + PREFIX, message)
    put_frame(at, H2_HEADERS, H2_END_HEADERS | H2_END_STREAM, stream, trailers)
    return out


cdef class CallsPath:
    """All calls of a listener. A subclass has `begin`, for calls that may not be answered, or have a deadline."""

    cdef public int64_t running
    cdef public int64_t most_at_once        # 0: any number
    cdef public int64_t plain_bytes         # of replies with nothing to be seen to
    cdef public uint64_t most_bytes         # of a message
    cdef public object deadlines, opening
    cdef public bint logged                 # every call's end is logged
    cdef public int64_t epoch               # of API keys; 0 without
    cdef bytes block, trailers
    cdef object closed, make

    def __init__(self, tuple terms not None) -> None:
        """The header block of plain answers, their trailers, the state of closed streams, and what makes a call."""
        self.block, self.trailers, self.closed, self.make = terms


cdef class HeadPath:
    """What the headers of a call say; the service of such streams. `start`: Method.start, None where it is not asked;
    `ordinary`: calls may be answered, and have no deadline; `timeout_ns`: below 0 for none; `count`: called for a call
    that ends well, where that is all its end takes."""

    cdef public CallsPath calls
    cdef public object start, count
    cdef public object timeout_ns
    cdef public object usage                # of its key, an Account; None without
    cdef public bint ordinary, takes_stream
    cdef public int64_t epoch               # in which its key was looked at; 0 for never

    def answer(self, StreamFields stream not None, bytes body not None) -> None:
        """A whole request."""
        self.take(stream, body)

    cdef take(self, StreamFields stream, bytes body):
        cdef CallsPath calls = self.calls
        cdef CallPath call = <CallPath>blank(calls.make, ())
        call.open(self, stream)
        stream.context = call
        if self.ordinary and self.epoch == calls.epoch and not calls.most_at_once:
            calls.running += 1
        elif not calls.begin(call):
            return
        message = None if self.takes_stream else whole_message(body, calls.most_bytes)
        if message is not None:
            call.run_method(message, False)
        else:
            call.listen()
            call.feed(body)
            call.end_input()


cdef class CallPath:
    """One call. `received_ns` is now; `deadline_ns` follows by the head's `timeout_ns`, 0 for none. A subclass has `run`,
    for methods that are coroutines, `fail`, `_reply_in_parts`, and `_end_settling`."""

    cdef public HeadPath head
    cdef public StreamFields stream
    cdef public object on_gone
    cdef public object received_ns, deadline_ns
    cdef public bint over                   # answered, or nobody waits
    cdef public int64_t sent_bytes
    cdef public bint begun                  # the head of the answer is sent
    cdef public bytes coding                # of its messages, b"" for none
    cdef public tuple trailing              # metadata after them
    cdef public object writable             # the future of who waits for the client to take more

    def __init__(self, HeadPath head not None, StreamFields stream not None) -> None:
        self.open(head, stream)

    cdef open(self, HeadPath head, StreamFields stream):
        cdef int64_t now_ns = <int64_t>monotonic_ns()
        self.head, self.stream, self.received_ns = head, stream, now_ns
        self.deadline_ns = 0
        if not head.ordinary:
            timeout_ns = head.timeout_ns
            if timeout_ns >= 0:
                self.deadline_ns = now_ns + timeout_ns
        self.coding, self.trailing = b"", ()

    def begin(self, bytes message not None, bint compressed) -> None:
        """The one message of the request is here."""
        self.run_method(message, compressed)

    cdef run_method(self, bytes message, bint compressed):
        cdef Starting before = starting[0]
        start, usage = self.head.start, self.head.usage
        if start is None or compressed or not self.head.calls.opening.done:
            self.run((message, compressed))
            return
        if usage is not None:
            starting.exchange, starting.account = <PyObject*>self, <PyObject*>usage
        try:
            taken = start(message, self)
        except Exception as error:
            self.fail(error)
            return
        finally:
            starting[0] = before
        if not taken:
            self.run((message, False))

    def reply(self, message) -> None:
        """The answer of a method that gives one message, in one part or several."""
        cdef CallsPath calls = self.head.calls
        if self.over:
            return
        plain = PyBytes_CheckExact(message) and not self.coding and not self.trailing
        if not plain or PyBytes_GET_SIZE(<bytes>message) > calls.plain_bytes:
            self._reply_in_parts(message)
            return
        self.sent_bytes = PyBytes_GET_SIZE(<bytes>message)
        if self.stream.state is not calls.closed:
            sending = self.stream.connection.sending
            if not sending.answer(self.stream, calls.block, <bytes>message, calls.trailers):
                self._reply_in_parts(message)
                return
        self.end(0)

    def settle(self, int code) -> None:
        """It is answered, or its client is gone."""
        self.end(code)

    cdef end(self, int code):
        cdef CallsPath calls = self.head.calls
        self.over = True
        self.on_gone = self.stream.context = None
        calls.running -= 1
        if self.deadline_ns:
            calls.deadlines.remove(self)
        if calls.logged or self.writable is not None:
            count = self.head.count
            if count is None or code or self.writable is not None:
                self._end_settling(code)
            else:
                count()
