"""A protobuf message as what comes again with every request of its kind, and what is its own.

    SCHEME = Scheme({3: TEXT, 5: {3: LEADS}, 7: DATA})      the placeholders, by field numbers; a dict is a message within
    skeleton = SCHEME.read(data)             # None for what is no message of this kind
    skeleton.head                            # all of it but what is in placeholders: equal heads, equal requests
    skeleton.id, skeleton.leads, skeleton.sizes                # its own
    skeleton.copy_data(0, memory)            # one copy, to where the tensor goes; False: it does not fit
    SCHEME.read_arrived(body)               # of a large message whose last tensor is still in the socket

TemplateFields and TemplatesPath are what runs for every request whose head is known.

    placeholder    what is in it
    TEXT    the request's id
    DATA    a tensor's bytes, or its numbers, packed
    LEAD    the first axis of a shape, as a number
    LEADS   a whole shape, packed, of which the first number is a placeholder
    First({...})    the first of several messages within; the others are part of the head

Lengths are placeholders too: those of data, and of every message that a scheme enters, which change with the rows.
Where a message within ends is marked in the head (a tag is never 0), so a head can be read back, and no two
requests that differ outside of their placeholders share one. Nothing else of a head is looked at: whether it makes
sense is for the reader of the whole message (`proto_wire`, `tensor_proto`), with the same head.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int8_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from libcpp.string cimport string
from libcpp.vector cimport vector

from proto_verbs cimport *
from proto_writing cimport *

cdef extern from "wire_contents.h" nogil:
    struct Sink:
        uint8_t* at
        uint8_t* end
        uint8_t width
        bint truth
    bint put_packed(const Wire* wire, Span span, Sink* sink)


cdef enum:
    HEAD_BYTES = 4096
    PLACEHOLDERS = 64
    NUMBERS = 32                # fields of higher numbers are part of the head
    NODES = 64
    NUMBER_BYTES = 1 << 20      # of packed numbers that are read on the event loop: 4 ms of the shortest
    PASS = 0
    TEXT_PLACEHOLDER, DATA_PLACEHOLDER, LEAD_PLACEHOLDER, LEADS_PLACEHOLDER, WITHIN, WITHIN_FIRST

MOST_HEAD_BYTES = HEAD_BYTES
MOST_PLACEHOLDERS = PLACEHOLDERS
TEXT, DATA, LEAD, LEADS = TEXT_PLACEHOLDER, DATA_PLACEHOLDER, LEAD_PLACEHOLDER, LEADS_PLACEHOLDER


class First(dict):
    """A message within, of which only the first has placeholders."""


cdef struct Node:
    # One message of a scheme: what each field is, and which node the message in it has.
    uint8_t[NUMBERS] action
    int8_t[NUMBERS] child


cdef struct Placeholder:
    Span span
    int owner                   # which message of the outermost it is in, -1: that itself
    int field


cdef struct Work:
    # A message being split into its head and its placeholders.
    const Node* nodes
    const uint8_t* here         # behind the last byte that is here
    int64_t beyond              # bytes of the message that are not
    int open_placeholder        # the placeholder that they are in, -1: none
    uint8_t* head               # HEAD_BYTES
    int64_t size                # of the head
    Span id
    bint has_id
    int entered                 # messages of the outermost
    vector[Placeholder]* placeholders
    vector[int64_t]* leads


@cython.final
cdef class Scheme:
    """Where the placeholders of a kind of message are."""

    cdef vector[Node] nodes

    def __init__(self, fields) -> None:
        """Raises ValueError for what can be no scheme."""
        self.add(fields)

    cdef int add(self, fields) except -1:
        cdef Node node
        cdef int child, at = <int>self.nodes.size()
        if at == NODES:
            raise ValueError(f"a scheme has at most {NODES} messages")
        memset(&node, 0, sizeof(Node))
        self.nodes.push_back(node)
        for number, what in fields.items():
            if not 0 < number < NUMBERS:
                raise ValueError(f"field {number}: placeholders are in fields 1 to {NUMBERS - 1}")
            if isinstance(what, dict):
                child = self.add(what)      # which moves the nodes
                self.nodes[at].action[<int>number] = WITHIN_FIRST if isinstance(what, First) else WITHIN
                self.nodes[at].child[<int>number] = child
            else:
                self.nodes[at].action[<int>number] = what
        return at

    def read(self, bytes message not None) -> Skeleton | None:
        """The skeleton of a serialized message. None for one whose placeholders are not as they are written by
        protobuf's libraries (packed, an id once and as text), with more than MOST_PLACEHOLDERS of them or none with
        data, whose head is larger than MOST_HEAD_BYTES, or that is no message at all."""
        return self.skeleton_of(message, 0)

    def read_arrived(self, body not None) -> Skeleton | None:
        """The skeleton of a message of which `body.begin` are the first bytes, and all `body.left` others the rest of its
        last tensor, which `body.read_into` reads. None for any other, too."""
        cdef Skeleton skeleton = self.skeleton_of(body.begin, body.left)
        if skeleton is not None:
            skeleton.arrived = body
        return skeleton

    cdef Skeleton skeleton_of(self, bytes message, int64_t beyond):
        cdef Skeleton skeleton = Skeleton.__new__(Skeleton)
        cdef uint8_t[HEAD_BYTES] head
        cdef Work work
        cdef PyObject* text
        cdef Wire wire = open_wire(<const uint8_t*>PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message))
        work.nodes, work.head, work.size = self.nodes.data(), head, 0
        work.has_id, work.entered = False, 0
        work.here, work.beyond, work.open_placeholder = wire.end, beyond, -1
        work.placeholders, work.leads = &skeleton.placeholders, &skeleton.first
        if not take_apart(&wire, &work, 0, 0) or skeleton.placeholders.empty() or (beyond and work.open_placeholder < 0):
            return None
        skeleton.message, skeleton.open_placeholder = message, work.open_placeholder
        skeleton.id = ""
        if work.has_id and work.id.size:
            text = PyUnicode_DecodeUTF8(<const char*>work.id.at, work.id.size, NULL)
            if text is NULL:
                PyErr_Clear()
                return None
            skeleton.id = steal(text)
        skeleton.head = PyBytes_FromStringAndSize(<const char*>head, work.size)
        return skeleton


@cython.final
@cython.no_gc                   # bytes, a text, and a body that knows nothing of skeletons: no cycle can be made of them
@cython.freelist(64)
cdef class Skeleton:
    """One request. Its data stays in the message, which it holds on to, or in `arrived`, whose first bytes that is."""

    cdef bytes message
    cdef readonly object arrived    # None: the message is whole
    cdef int open_placeholder       # the placeholder with data that is not here, -1: none
    cdef vector[Placeholder] placeholders
    cdef vector[int64_t] first
    cdef readonly bytes head
    cdef readonly str id

    @property
    def leads(self) -> tuple[int, ...]:
        """The first axes, in the order of the message."""
        return tuple([lead for lead in self.first])

    @property
    def rows(self) -> int:
        """The first axis, when it is the same everywhere; else -1."""
        return self.common()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each placeholder with data."""
        return tuple([placeholder.span.size for placeholder in self.placeholders])

    @property
    def fields(self) -> tuple[tuple[int, int], ...]:
        """Of each placeholder with data: which of the messages that the outermost holds it is in, -1 for none, and
        its field there."""
        return tuple([(placeholder.owner, placeholder.field) for placeholder in self.placeholders])

    def copy_data(self, index: int, out, width: int = 0, truth: bool = False) -> bool:
        """Data into `out`; False when it has not its size. With a `width` it is numbers of a packed field,
        of which so many bytes each are kept; with `truth` what is not 0 becomes 1. Raises IndexError."""
        return self.put(index, out, width, truth)

    cdef bint put(self, Py_ssize_t index, out, int width, bint truth) except -1:
        if not 0 <= index < <Py_ssize_t>self.placeholders.size():
            raise IndexError(f"no data {index}: there are {self.placeholders.size()}")
        if index == self.open_placeholder:
            raise IndexError(f"data {index} is not here")
        cdef Span span = self.placeholders[<size_t>index].span
        cdef Py_buffer memory
        cdef Sink sink
        cdef bint fits
        sink.width, sink.truth = width, truth
        PyObject_GetBuffer(out, &memory, PyBUF_WRITABLE)
        sink.at = <uint8_t*>memory.buf
        sink.end = sink.at + memory.len
        try:
            if span.size <= GIL_BYTES:
                fits = put_data(span, &sink)
            else:
                with nogil:
                    fits = put_data(span, &sink)
        finally:
            PyBuffer_Release(&memory)
        return fits

    cdef bint receive(self, memory) except -1:
        """The data that is not here, out of the socket. All others are read: of this nothing can be asked again."""
        cdef Span span = self.placeholders[<size_t>self.open_placeholder].span
        if memory.nbytes != span.size:
            return False
        arrived, self.arrived = self.arrived, None
        return arrived.read_into([memory], span.at - <const uint8_t*>PyBytes_AS_STRING(self.message))

    cdef int64_t common(self):
        cdef size_t i
        for i in range(1, self.first.size()):
            if self.first[i] != self.first[0]:
                return -1
        return -1 if self.first.empty() else self.first[0]


# -- messages that are known -----------------------------------------------------------------------

cdef struct Origin:
    int placeholder
    int width
    bint truth


cdef class TemplateFields:
    """The part of a message template that every request uses; the base of fastserve/serving/request_templates.py's MessageTemplate.

    `sources`: (placeholder, width, truth) of each input, as `copy_data` takes them; `find_version`: the version that such
    a request asks for now; `leads`: of the message it was learned from; `rows`: of the request at hand."""

    cdef vector[Origin] origins
    cdef public object find_version
    cdef public tuple leads
    cdef public int64_t rows
    cdef public bint batching

    @property
    def sources(self) -> list[tuple[int, int, bool]]:
        return [(one.placeholder, one.width, one.truth) for one in self.origins]

    @sources.setter
    def sources(self, given) -> None:
        cdef Origin one
        self.origins.clear()
        for one.placeholder, one.width, one.truth in given:
            self.origins.push_back(one)

    def is_met_by(self, Skeleton skeleton not None, queue) -> bool:
        """Whether the first axes are rows that fit, or without rows the same; then they are the request's. More numbers
        than are read in passing are never met."""
        return self.meets(skeleton, queue)

    cdef bint meets(self, Skeleton skeleton, queue) except -1:
        cdef Origin one
        cdef int64_t numbers = 0
        for one in self.origins:
            if one.width and <size_t>one.placeholder < skeleton.placeholders.size():
                numbers += skeleton.placeholders[one.placeholder].span.size
        if numbers > NUMBER_BYTES:
            return False
        if not self.batching:
            self.rows = 1
            return skeleton.leads == self.leads
        self.rows = skeleton.common()
        return 0 < self.rows <= <int64_t>queue.max_rows

    def fill(self, Skeleton source not None, list memory not None) -> bool:
        """The inputs, each to where it goes; False when one has not its size. Raises ValueError for another number of
        places than of inputs."""
        cdef size_t i
        cdef Origin one
        cdef Py_ssize_t open_at = -1
        if <size_t>len(memory) != self.origins.size():
            raise ValueError(f"{len(memory)} places for {self.origins.size()} inputs")
        for i in range(self.origins.size()):
            one = self.origins[i]
            if one.placeholder == source.open_placeholder:
                if one.width or open_at >= 0:
                    return False        # numbers are read one by one, and bytes out of a socket once
                open_at = <Py_ssize_t>i
            elif not source.put(one.placeholder, memory[<Py_ssize_t>i], one.width, one.truth):
                return False
        if source.open_placeholder < 0:
            return True
        return open_at >= 0 and source.receive(memory[open_at])


cdef class TemplatesPath:
    """From a skeleton to the fast path of a known message; the base of the same module's MessageTemplates. `find` gives
    the path and the message of a head, or None; `drop` forgets a head whose requests mean something else now."""

    cdef public object find, drop

    def start(self, Skeleton skeleton not None, exchange, deadline_ns) -> bool:
        """Take a request, which has that time, or return False: nothing has happened then."""
        cdef TemplateFields message
        known = self.find(skeleton.head)
        if known is None:
            return False
        path, message = <tuple?>known
        if message.find_version() is not path.version:
            self.drop(skeleton.head)
            return False
        if not message.meets(skeleton, path.queue):
            return False
        if skeleton.arrived is not None and not path.takes_arrived(message):
            return False
        return path.start(exchange, message, skeleton, skeleton.id, deadline_ns)


cdef bint put_data(Span span, Sink* sink) noexcept nogil:
    cdef Wire wire
    if sink.width:
        wire = open_wire(span.at, span.size)
        return put_packed(&wire, span, sink) and sink.at == sink.end
    if sink.end - sink.at != span.size:
        return False
    memcpy(sink.at, span.at, span.size)
    return True


cdef bint take_apart(Wire* wire, Work* work, int at, int level) noexcept nogil:
    # One message: what is no placeholder goes to the head. False for what has no skeleton.
    cdef const uint8_t* start = wire.at
    cdef const uint8_t* field
    cdef const Node* node = &work.nodes[at]
    cdef uint32_t tag = 0, number, seen = 0
    cdef uint8_t action
    while wire.at != wire.end:
        field = wire.at
        if not read_tag(wire, &tag):
            return False
        number = tag >> 3
        action = node.action[number] if number < NUMBERS else <uint8_t>PASS
        if action == WITHIN_FIRST and seen & 1u << number:
            action = PASS
        if action == PASS:
            if not skip_value(wire, tag):
                return False
            continue
        seen |= 1u << number
        # A request without an id has the same head.
        if not keep(work, start, field if action == TEXT_PLACEHOLDER else wire.at):
            return False
        if not take_placeholder(wire, work, action, tag, node.child[number], level):
            return False
        start = wire.at
    return keep(work, start, wire.at)


cdef bint take_placeholder(Wire* wire, Work* work, uint8_t action, uint32_t tag, int child, int level) noexcept nogil:
    cdef Span span
    cdef Placeholder placeholder
    cdef Wire inner
    cdef uint64_t number
    if action == LEAD_PLACEHOLDER:
        return tag & 7 == 0 and read_varint(wire, &number) and add_lead(work, number)
    if tag & 7 != 2 or not (read_open(wire, &span, work) if work.beyond else read_span(wire, &span)):
        return False
    if action == DATA_PLACEHOLDER:
        if span.size > work.here - span.at:
            work.open_placeholder = <int>work.placeholders.size()
        placeholder.span, placeholder.field, placeholder.owner = span, <int>(tag >> 3), work.entered - 1 if level else -1
        work.placeholders.push_back(placeholder)
        return work.placeholders.size() <= PLACEHOLDERS
    if action == TEXT_PLACEHOLDER:
        if span.size > work.here - span.at:
            return False
        work.id = span
        work.has_id, number = True, work.has_id
        return not number
    inner = enter(wire, span)
    if span.size > work.here - span.at:
        if action == LEADS_PLACEHOLDER:
            return False
        inner.end = work.here
    if action == LEADS_PLACEHOLDER:
        return read_varint(&inner, &number) and add_lead(work, number) and keep_rest(work, &inner)
    work.entered += level == 0
    return take_apart(&inner, work, child, level + 1) and keep_byte(work, 0)


cdef bint read_open(Wire* wire, Span* span, Work* work) noexcept nogil:
    # A length, and so many bytes: those here, or all that are left of the message, the ones to come included.
    cdef uint32_t size
    if not read_short(wire, &size):
        return False
    span.at, span.size = wire.at, size
    if span.size <= wire.end - wire.at:
        wire.at += size
        return True
    if wire.end != work.here or span.size != work.here - wire.at + work.beyond:
        return False
    wire.at = wire.end
    return True


cdef bint add_lead(Work* work, uint64_t number) noexcept nogil:
    work.leads.push_back(<int64_t>number)
    return work.leads.size() <= PLACEHOLDERS


cdef bint keep(Work* work, const uint8_t* start, const uint8_t* end) noexcept nogil:
    if work.size + (end - start) > HEAD_BYTES:
        return False
    memcpy(work.head + work.size, start, end - start)
    work.size += end - start
    return True


cdef bint keep_byte(Work* work, uint8_t byte) noexcept nogil:
    return keep(work, &byte, &byte + 1)


cdef bint keep_rest(Work* work, Wire* inner) noexcept nogil:
    # The other axes of a packed shape, and before them how many bytes they are.
    return (
        inner.end - inner.at < 256
        and keep_byte(work, <uint8_t>(inner.end - inner.at))
        and keep(work, inner.at, inner.end)
    )


def write_from_template(bytes before not None, str id not None, bytes after not None, raw) -> bytes:
    """A ModelInferResponse: the fields `before`, the id, the fields `after`, the tensors' bytes.

    Raises WireFault (TOO_LARGE) at 2 GiB.
    """
    cdef string head
    head.reserve(PyBytes_GET_SIZE(before) + PyBytes_GET_SIZE(after) + 64)
    head.append(PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))
    write_text(&head, BYTES_3, id)
    head.append(PyBytes_AS_STRING(after), PyBytes_GET_SIZE(after))
    return join_raw(NULL, &head, BYTES_6, raw)
