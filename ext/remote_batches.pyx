"""The messages between a remote runner and its remote workers, and the batches that lie in them.

    frames = WireMessage(kind, ...).pack()           one frame, or a head and its parts behind it
    messages = read_messages(frames)                 one or more; raises ProtocolFault

    runner:  outgoing.take(ready)                   batches that wait, to workers that have room; they leave with the next flush
             outgoing.land(peer, message)           an answer, into the arena
    worker:  leases = incoming.put(message)         a batch into this process's own arena, as a front would
             incoming.collect(message, slot, leases)    the frames of what a worker has made of it

The layout is in workers/remote/protocol.py. Under load each batch passes through here four times, several of them in one
frame: an interpreter took half of what a remote batch cost both sides. Lengths and numbers are checked before anything is
written, so a message that is refused leaves no trace.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from enum import IntEnum
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef enum:
    ENTRY_BYTES = 8
    LENGTH_BYTES = 8

PROTOCOL = 3
MOST_PARTS = 1 << 16
MOST_JOINED = 64            # messages in one frame
COPIED_BYTES = 65536        # parts up to this size together are copied into their message's frame

cdef packed struct Head:
    char[4] magic
    uint16_t protocol, kind
    uint64_t batch
    uint32_t rows, entries, word, parts
    uint64_t nbytes, ran_ns

# Batches that wait at a worker's side hide the way there, and wait behind one queue more: worth it only as far as they
# take no longer than the way.
AHEAD_S, MOST_AHEAD = 0.002, 16
# From so many batches at a worker on, another is taken once it is full: those it has hide the way, and rows that wait
# meanwhile make one batch, as they do while a local worker is busy. A worker with more than half of what it may have gets
# no more: then several leave together, which costs little more than one.
FEW = 2

HEADER_BYTES = sizeof(Head)
cdef const char* MAGIC = "FSRW"
cdef uint16_t PROTOCOL_SPOKEN = PROTOCOL
cdef uint32_t PARTS_MAX = MOST_PARTS
cdef Py_ssize_t JOINED_MAX = MOST_JOINED
cdef uint64_t COPIED_MAX = COPIED_BYTES
cdef double AHEAD_SECONDS = AHEAD_S
cdef Py_ssize_t AHEAD_MAX = MOST_AHEAD, FEW_FLIGHTS = FEW


class ProtocolFault(Exception):
    """The other side has sent a message that breaks the rules of the protocol."""


class MessageKind(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    FETCH = 4
    DATA = 5
    LOADED = 6
    GO = 7
    READY = 8
    BATCH = 9
    ANSWER = 10
    PING = 11
    PONG = 12
    BYE = 13
    FAILED = 14
    WAITING = 15


cdef list KINDS = [None, *MessageKind]      # an enum's own look-up takes a microsecond
cdef object OF_BATCH = MessageKind.BATCH
cdef object OF_ANSWER = MessageKind.ANSWER


cdef class WireMessage:
    """One message. Parts that were received lie in the frames that brought them."""

    cdef readonly object kind
    cdef public uint64_t batch, ran_ns
    cdef public uint32_t rows, word
    cdef public object table, parts

    def __init__(self, kind, uint64_t batch=0, uint32_t rows=0, uint32_t word=0, uint64_t ran_ns=0, table=(), parts=()):
        self.kind, self.batch, self.rows, self.word, self.ran_ns = kind, batch, rows, word, ran_ns
        self.table, self.parts = table, parts

    def pack(self) -> list:
        """Return its frames."""
        return pack_frames(self.kind, self.batch, self.rows, self.word, self.ran_ns, self.table, self.parts)


cdef char* put_head(char* to, Head* head, uint16_t kind, uint64_t batch, uint32_t rows, uint32_t word, uint64_t ran_ns,
                    uint32_t entries, uint32_t parts, uint64_t nbytes) noexcept:
    # Writes a header; returns where what follows begins.
    memcpy(head.magic, MAGIC, 4)
    head.protocol, head.kind, head.batch, head.rows, head.word, head.ran_ns = PROTOCOL_SPOKEN, kind, batch, rows, word, ran_ns
    head.entries, head.parts, head.nbytes = entries, parts, nbytes
    memcpy(to, head, sizeof(Head))
    return to + sizeof(Head)


cdef list pack_frames(kind, uint64_t batch, uint32_t rows, uint32_t word, uint64_t ran_ns, table, parts):
    # The frames of a message: a single one, unless its parts are large.
    cdef Head head
    cdef uint64_t length, nbytes = 0
    cdef Py_ssize_t entries = len(table), count = len(parts)
    cdef uint32_t[2] pair
    cdef bytes frame
    cdef char* to
    cdef bint whole
    for part in parts:
        nbytes += <uint64_t>len(part)
    whole = nbytes < COPIED_MAX
    frame = PyBytes_FromStringAndSize(NULL, sizeof(Head) + entries * ENTRY_BYTES + count * LENGTH_BYTES + (nbytes if whole else 0))
    to = PyBytes_AS_STRING(frame)
    to = put_head(to, &head, kind, batch, rows, word, ran_ns, entries, count, nbytes)
    for entry in table:
        pair[0], pair[1] = (<tuple?>entry)[0], (<tuple?>entry)[1]
        memcpy(to, pair, ENTRY_BYTES)
        to += ENTRY_BYTES
    for part in parts:
        length = <uint64_t>len(part)
        memcpy(to, &length, LENGTH_BYTES)
        to += LENGTH_BYTES
    if not whole:
        return [frame, *parts]
    for part in parts:
        to += copy_bytes(to, part, len(part))
    return [frame]


cdef Py_ssize_t copy_bytes(char* to, object data, Py_ssize_t count) except -1:
    # Copies memory of `count` bytes.
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len != count:
            raise ValueError(f"a part of {view.len} bytes and {count} items")
        memcpy(to, view.buf, count)
    finally:
        PyBuffer_Release(&view)
    return count


def read_messages(frames) -> list:
    """Read the messages that have come in these frames, one or more. Raises ProtocolFault."""
    cdef Py_buffer view
    cdef list found = []
    cdef Py_ssize_t at = 0
    head, separate = frames[0], frames[1:]
    PyObject_GetBuffer(head, &view, PyBUF_SIMPLE)
    try:
        while at < view.len or not found:
            if len(found) == JOINED_MAX:
                raise ProtocolFault(f"more than {MOST_JOINED} messages in one frame")
            at = read_one(<const char*>view.buf, view.len, at, head, separate, found)
    finally:
        PyBuffer_Release(&view)
    return found


cdef Py_ssize_t read_one(const char* data, Py_ssize_t end, Py_ssize_t at, head, separate, list found) except -1:
    # Reads the message at `at` into `found`; returns where the next begins.
    cdef Head fields
    cdef uint64_t length, nbytes = 0
    cdef uint32_t i
    cdef uint32_t[2] pair
    cdef Py_ssize_t lengths, left = end - at
    cdef list table = [], parts = []
    cdef WireMessage message
    if left < <Py_ssize_t>sizeof(Head):
        raise ProtocolFault(f"a header of {left} bytes instead of {HEADER_BYTES}")
    memcpy(&fields, data + at, sizeof(Head))
    if memcmp(fields.magic, MAGIC, 4) or fields.protocol != PROTOCOL_SPOKEN or not 0 < fields.kind < len(KINDS) or fields.parts > PARTS_MAX:
        raise explain(&fields)
    lengths = at + <Py_ssize_t>sizeof(Head) + <Py_ssize_t>fields.entries * ENTRY_BYTES
    at = lengths + <Py_ssize_t>fields.parts * LENGTH_BYTES
    if at > end:
        raise ProtocolFault(f"a table of {fields.entries} entries and {fields.parts} lengths in {left} bytes")
    if separate and len(separate) != fields.parts:
        raise ProtocolFault("frames of other lengths than were announced")
    for i in range(fields.parts):
        memcpy(&length, data + lengths + i * LENGTH_BYTES, LENGTH_BYTES)
        if length > fields.nbytes - nbytes:
            raise ProtocolFault(f"more bytes of parts than the {fields.nbytes} that were announced")
        nbytes += length
        if separate:
            part = separate[i]
            if <uint64_t>len(part) != length:
                raise ProtocolFault("frames of other lengths than were announced")
            parts.append(part)
        elif length > <uint64_t>(end - at):
            raise ProtocolFault("a message that is longer or shorter than was announced")
        else:
            parts.append(head[at:at + <Py_ssize_t>length])
            at += <Py_ssize_t>length
    if nbytes != fields.nbytes:
        raise ProtocolFault(f"{nbytes} bytes of parts where {fields.nbytes} were announced")
    if separate and at != end:
        raise ProtocolFault("a message that is longer or shorter than was announced")
    for i in range(fields.entries):
        memcpy(pair, data + lengths - <Py_ssize_t>(fields.entries - i) * ENTRY_BYTES, ENTRY_BYTES)
        table.append((pair[0], pair[1]))
    message = WireMessage.__new__(WireMessage)
    message.kind, message.batch, message.rows, message.word = KINDS[fields.kind], fields.batch, fields.rows, fields.word
    message.ran_ns, message.table, message.parts = fields.ran_ns, table, parts
    found.append(message)
    return at


cdef object explain(Head* fields):
    # A fault of a header.
    if memcmp(fields.magic, MAGIC, 4):
        return ProtocolFault("a message that does not begin as one of fastserve's")
    if fields.protocol != PROTOCOL_SPOKEN:
        return ProtocolFault(f"a message of protocol {fields.protocol}; protocol {PROTOCOL} is spoken here")
    return ProtocolFault(f"a message of kind {fields.kind} and {fields.parts} parts, which is none")


def read_protocol(frame) -> int:
    """Return the protocol of a frame that may be of another version, 0 where it is no header."""
    start = bytes(frame[:6])
    return int.from_bytes(start[4:], "little") if len(start) == 6 and start[:4] == <bytes>MAGIC else 0


cdef uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1_000_000_000 + <uint64_t>now.tv_nsec


cdef class RemoteBatch:
    """One batch at one remote worker."""

    cdef readonly uint64_t number
    cdef readonly int slot, attempt
    cdef public double sent_s       # by time.monotonic()
    cdef public uint32_t requests   # that still waited when they were last looked at

    def __init__(self, uint64_t number, int slot, int attempt, double sent_s, uint32_t requests):
        self.number, self.slot, self.attempt, self.sent_s, self.requests = number, slot, attempt, sent_s, requests


cdef class RemotePeer:
    """One remote worker, as long as one connection of its lasts."""

    cdef readonly object identity, instance, name, node, place
    cdef public object state, model
    cdef public double heard_s
    cdef public double head_s       # since when the oldest batch in flight is at its head
    cdef public double run_s        # of a batch, on average of the last ones; 0 before the first
    cdef public int batches
    cdef public dict flights        # number -> RemoteBatch
    cdef public list joined         # messages that leave in one frame
    cdef public Py_ssize_t joined_bytes

    def __init__(self, identity, instance, name, node, place, state, double heard_s):
        self.identity, self.instance, self.name, self.node, self.place = identity, instance, name, node, place
        self.state, self.heard_s, self.flights, self.joined = state, heard_s, {}, []


cdef class SlotColumns:
    # The columns of an arena's slots, or its slabs; `ring` is the ring of whom they belong to.

    cdef object ring, memory
    cdef Py_buffer whole
    cdef char* base             # NULL once it is closed
    cdef int inputs, outputs
    cdef bint dense
    cdef dict spans             # slot -> (offset, bytes of a row) of each input, and of each output

    def __init__(self, ring, memory, int inputs, int outputs, *, bint dense):
        """`memory` is a view of the whole arena, of bytes."""
        PyObject_GetBuffer(memory, &self.whole, PyBUF_WRITABLE)
        self.base = <char*>self.whole.buf
        self.ring, self.memory, self.inputs, self.outputs, self.dense = ring, memory, inputs, outputs, dense
        self.spans = {}

    def __dealloc__(self):
        if self.base != NULL:
            PyBuffer_Release(&self.whole)

    cdef tuple columns(self, slot):
        found = self.spans.get(slot)
        if found is None:
            ring = self.ring
            found = self.spans[slot] = (
                [ring.column_span(slot, i, False) for i in range(self.inputs)],
                [ring.column_span(slot, i, True) for i in range(self.outputs)],
            )
        return <tuple>found

    cdef list views(self, list spans, Py_ssize_t rows):
        # The first rows of these columns, where they lie.
        cdef list found = []
        for at, row_bytes in spans:
            found.append(self.memory[at:at + rows * <Py_ssize_t>row_bytes])
        return found

    cdef bytes copied(self, kind, uint64_t batch, uint32_t rows, uint32_t word, uint64_t ran_ns, list leases, list spans):
        # The frame of a message with the first rows of these columns, and nothing else; None where they are too large.
        cdef Head head
        cdef uint64_t length, nbytes = 0
        cdef uint32_t[2] pair
        cdef Py_ssize_t at
        cdef bytes frame
        cdef char* to
        for span in spans:
            nbytes += <uint64_t>rows * <uint64_t>(<tuple>span)[1]
        if nbytes >= COPIED_MAX:
            return None
        frame = PyBytes_FromStringAndSize(
            NULL, sizeof(Head) + len(leases) * ENTRY_BYTES + len(spans) * LENGTH_BYTES + <Py_ssize_t>nbytes
        )
        to = PyBytes_AS_STRING(frame)
        to = put_head(to, &head, kind, batch, rows, word, ran_ns, len(leases), len(spans), nbytes)
        for lease in leases:
            pair[0], pair[1] = (<tuple>lease)[0], (<tuple>lease)[1]
            memcpy(to, pair, ENTRY_BYTES)
            to += ENTRY_BYTES
        for span in spans:
            length = <uint64_t>rows * <uint64_t>(<tuple>span)[1]
            memcpy(to, &length, LENGTH_BYTES)
            to += LENGTH_BYTES
        for span in spans:
            at, length = (<tuple>span)[0], <uint64_t>rows * <uint64_t>(<tuple>span)[1]
            memcpy(to, self.base + at, length)
            to += length
        return frame

    cdef int write(self, list spans, Py_ssize_t rows, parts) except -1:
        # Writes a part into each of these columns; nothing where one has another length.
        cdef Py_ssize_t i, at, nbytes
        for i in range(len(spans)):
            nbytes = rows * <Py_ssize_t>(<tuple>spans[i])[1]
            if len(parts[i]) != nbytes:
                raise ProtocolFault(f"a column of {len(parts[i])} bytes instead of {nbytes}")
        for i in range(len(spans)):
            at = (<tuple>spans[i])[0]
            copy_bytes(self.base + at, parts[i], len(parts[i]))
        return 0

    def close(self) -> None:
        """Let go of the arena's memory."""
        if self.base != NULL:
            self.base = NULL
            PyBuffer_Release(&self.whole)
            self.memory.release()
        self.spans.clear()


cdef class OutgoingBatches(SlotColumns):
    """The batches of a remote runner's arena, whose worker it is, and the table of those in flight.

    `connections` sends what it is given; `notes`, (the trace notes of the arena, where their sheets begin, bytes of a sheet,
    fronts), go with a batch. `in_flight` is the number of batches that a worker may have, 0: as their time says; `limit_ms`
    is the time that a batch has."""

    cdef object connections, traces
    cdef list joining               # peers with joined messages
    cdef Py_ssize_t notes_at, sheet_bytes
    cdef int fronts, in_flight
    cdef uint32_t limit_ms, lost_status
    cdef Py_ssize_t max_rows
    cdef public int flying
    cdef public uint64_t rows       # of batches that have landed, since somebody set it to 0

    def __init__(self, ring, memory, int inputs, int outputs, *, bint dense, connections, notes, int in_flight,
                 uint32_t limit_ms, uint32_t lost_status):
        """`lost_status` is that of an answer for which there is no memory."""
        SlotColumns.__init__(self, ring, memory, inputs, outputs, dense=dense)
        self.connections, self.joining = connections, connections.joining
        self.traces, self.notes_at, self.sheet_bytes, self.fronts = notes
        self.in_flight, self.limit_ms, self.lost_status, self.max_rows = in_flight, limit_ms, lost_status, ring.max_rows

    cdef Py_ssize_t most(self, RemotePeer peer):
        # How many batches a worker may have.
        cdef double count
        if self.in_flight:
            return self.in_flight
        if peer.run_s <= 0.0:
            return 1
        count = AHEAD_SECONDS / peer.run_s
        return 1 if count < 1.0 else AHEAD_MAX if count > AHEAD_MAX else <Py_ssize_t>count

    def choose(self, list ready) -> RemotePeer | None:
        """Return the worker with the fewest batches, of those that have room."""
        cdef RemotePeer best = None
        cdef Py_ssize_t flights, least = AHEAD_MAX
        for one in ready:
            flights = len((<RemotePeer?>one).flights)
            if flights < least and flights < self.most(<RemotePeer>one):
                best, least = <RemotePeer>one, flights
                if not flights:
                    break
        return best

    def take(self, list ready) -> bool:
        """Send batches that workers can have now. Returns whether one can have the next, of any size."""
        cdef RemotePeer peer = self.choose(ready)
        cdef int slot
        ring = self.ring
        if peer is None or 2 * len(peer.flights) > self.most(peer):
            return False
        while peer is not None:
            if len(peer.flights) >= FEW_FLIGHTS and <Py_ssize_t>ring.queued() < self.max_rows:
                break
            slot = ring.take()
            if slot < 0:
                break
            self.send(slot, 0, peer)
            peer = self.choose(ready)
        return peer is not None and len(peer.flights) < FEW_FLIGHTS

    def send(self, int slot, int attempt, RemotePeer peer) -> None:
        """Have a batch leave for a worker, with the next flush; where its connection ends at that, it is given back.
        Columns and slabs lie in the arena still where they are frames of their own. Published when everybody left."""
        cdef uint64_t number, seq
        cdef list leases, frames, parts, spans = []
        cdef bytes frame = None
        cdef uint32_t rows
        cdef double now_s
        ring = self.ring
        leases = ring.leases(slot)
        if not leases:
            ring.publish(slot)
            return
        seq, rows, now_s = ring.seq(slot), ring.batch_rows(slot), now_ns() * 1e-9
        number = (seq & 0xffffffff) << 32 | <uint64_t>(slot & 0xffff) << 16 | <uint64_t>(attempt & 0xffff)
        ring.start_run(slot)
        noted = self.noted(slot, seq)
        if self.dense:
            spans = <list>self.columns(slot)[0]
            if not noted:
                frame = self.copied(OF_BATCH, number, rows, self.limit_ms, 0, leases, spans)
        if frame is not None:
            frames = [frame]
        else:
            parts = self.views(spans, rows) if self.dense else [ring.slab(at, n) if at else b"" for _, _, at, n in leases]
            if noted:
                parts.append(self.traces.packed(slot, seq))
            frames = pack_frames(OF_BATCH, number, rows, self.limit_ms, 0, [lease[:2] for lease in leases], parts)
        if not peer.flights:
            peer.head_s = now_s
        peer.flights[number] = RemoteBatch(number, slot, attempt, now_s, len(leases))
        self.flying += 1
        self.join(peer, frames)

    cdef bint noted(self, int slot, uint64_t seq):
        # Whether any front has noted traces of this batch.
        cdef uint64_t[2] head
        cdef int front
        for front in range(self.fronts):
            memcpy(head, self.base + self.notes_at + (<Py_ssize_t>slot * self.fronts + front) * self.sheet_bytes, sizeof(head))
            if head[0] == seq and head[1]:
                return True
        return False

    cdef int join(self, RemotePeer peer, list frames) except -1:
        # Sends a message with others, by the next flush at the latest.
        if len(frames) > 1:
            self.connections.send(peer, frames)
            return 0
        if not peer.joined:
            self.joining.append(peer)
        peer.joined.append(frames[0])
        peer.joined_bytes += len(<bytes>frames[0])
        if peer.joined_bytes >= <Py_ssize_t>COPIED_MAX or len(peer.joined) == JOINED_MAX:
            self.connections.send_joined(peer)
        return 0

    def land(self, RemotePeer peer, WireMessage answer) -> None:
        """Write an answer and publish it. One of a batch that was given to somebody else meanwhile is refused. Raises
        ProtocolFault, and then nothing was written, and the batch is still in flight."""
        cdef RemoteBatch flight = peer.flights.get(answer.batch)
        cdef uint64_t now = now_ns(), ran_ns, sent_ns
        cdef double ran_s
        cdef int slot
        if flight is None:
            return
        ring, slot = self.ring, flight.slot
        if answer.batch >> 32 != <uint64_t>(ring.seq(slot) & 0xffffffff):
            raise ProtocolFault("an answer to another generation of its slot")
        self.write_answer(slot, answer)
        del peer.flights[answer.batch]
        self.flying -= 1
        sent_ns = <uint64_t>(flight.sent_s * 1e9)
        ran_ns = min(answer.ran_ns, now - sent_ns if now > sent_ns else 0)
        ran_s = (ran_ns if ran_ns else 1) * 1e-9
        peer.run_s += (ran_s - peer.run_s) / 8 if peer.run_s else ran_s
        peer.batches += 1
        peer.head_s = now * 1e-9
        self.rows += <uint64_t>ring.batch_rows(slot)
        ring.end_run(slot, now - ran_ns, now)
        ring.publish(slot)

    cdef int write_answer(self, int slot, WireMessage answer) except -1:
        # Checks all of an answer, then writes it.
        cdef list outputs
        cdef Py_ssize_t at = 0
        ring, table, parts = self.ring, answer.table, answer.parts
        if answer.word:
            if len(parts) != 1:
                raise ProtocolFault("a failure without its text")
            ring.fail(slot, answer.word, bytes(parts[0]).decode("utf-8", "replace"))
            return 0
        if len(parts) != (self.outputs if self.dense else 0) + len(table):
            raise ProtocolFault("an answer with parts of another number than its model's outputs, or its requests")
        if self.dense:
            if table and not all([status for _, status in table]):
                raise ProtocolFault("an answer that names a request, and not its failure")
            outputs = <list>self.columns(slot)[1]
            at = len(outputs)
            self.write(outputs, ring.batch_rows(slot), parts)
        if not table:
            return 0
        leases = {row for row, _, _, _ in ring.leases(slot)}
        for row, status in table:
            if row in leases:
                self.answer_one(slot, row, status, parts[at])
            at += 1
        return 0

    cdef int answer_one(self, int slot, row, status, data) except -1:
        nbytes = len(data)
        offset = self.ring.allocate_slab(nbytes) if nbytes else 0
        if offset:
            self.ring.slab(offset, nbytes, True)[:] = data
        else:
            nbytes, status = 0, status or self.lost_status
        self.ring.answer_lease(slot, row, status, offset, nbytes)
        return 0


cdef class IncomingBatches(SlotColumns):
    """The batches that a remote worker gets, in an arena of its own of which it is the front, `ring`, and the worker."""

    cdef readonly object notes      # of the batch that was put last; b"" for none

    def put(self, WireMessage batch) -> list:
        """Write a batch as a front would, for the worker to take; the leases of its requests, (lease, rows). What
        lies between them is a lease that nobody waits for: here, too, nobody waits for rows whose caller has
        left. Raises ProtocolFault."""
        cdef uint64_t at = 0
        cdef list spans = [], leases, wanted = []
        cdef set asked = set()
        table, rows, front = batch.table, batch.rows, self.ring
        if not 1 <= rows <= front.max_rows or not table or len(table) > rows:
            raise ProtocolFault(f"a batch of {rows} rows")
        expected = self.inputs if self.dense else len(table)
        if not expected <= len(batch.parts) <= expected + 1:
            raise ProtocolFault("a batch with parts of another number than its model's inputs, or its requests")
        self.notes = batch.parts[expected] if len(batch.parts) > expected else b""
        for row, count in table:
            if row < at or count < 1 or row + count > rows:
                raise ProtocolFault("a table of requests that overlap, or lie outside of their batch")
            if row > at:
                spans.append((at, row - at))
            asked.add(row)
            spans.append((row, count))
            at = row + count
        if at < rows:
            spans.append((at, rows - at))
        leases = self.reserve(spans)
        for lease, count in leases:
            if (lease & 0xffff) in asked:
                wanted.append((lease, count))
        try:
            self.fill(rows, wanted, batch.parts)
        except BaseException:
            for lease, count in leases:
                front.abandon(lease, count)
            raise
        for lease, count in leases:
            front.commit(lease, count)
        if len(wanted) < len(leases):
            for lease, count in leases:
                if (lease & 0xffff) not in asked:
                    front.drop(lease, count)
        front.seal(leases[0][0])
        return wanted

    cdef list reserve(self, list spans):
        cdef list leases = []
        for row, count in spans:
            lease = self.ring.reserve(count)
            if lease < 0 or (lease & 0xffff) != row:
                raise ProtocolFault("a batch that does not fit into a slot, or while none is free")
            leases.append((lease, count))
        return leases

    cdef int fill(self, rows, list wanted, parts) except -1:
        cdef Py_ssize_t i
        if self.dense:
            self.write(<list>self.columns((<tuple>wanted[0])[0] >> 16)[0], rows, parts)
            return 0
        for i in range(len(wanted)):
            nbytes = len(parts[i])
            offset = self.ring.allocate_slab(nbytes) if nbytes else 0
            if not offset:
                raise ProtocolFault("a request without tensors, or of more than fit here")
            self.ring.slab(offset, nbytes, True)[:] = parts[i]
            self.ring.attach_slab((<tuple>wanted[i])[0], offset, nbytes)
        return 0

    def collect(self, WireMessage batch, int slot, list leases) -> list:
        """Return the frames of the answer to a batch that was published. Large outputs lie in the slot still."""
        cdef list table = [], parts = [], spans = []
        cdef bytes frame
        cdef uint64_t ran_ns
        front = self.ring
        _, _, began_ns, ended_ns, _ = front.times_ns(slot)
        ran_ns = max(ended_ns - began_ns, 0)
        failed = front.failure(slot)
        if failed is not None:
            parts = [failed[1].encode("utf-8", "replace")]
            return pack_frames(OF_ANSWER, batch.batch, batch.rows, failed[0], ran_ns, table, parts)
        for lease, _ in leases:
            status = front.lease_status(lease)
            if status or not self.dense:
                table.append((lease & 0xffff, status))
                offset, nbytes = front.answer_slab(lease)
                parts.append(front.slab(offset, nbytes) if offset else b"")
        if self.dense:
            spans = <list>self.columns(slot)[1]
            if not table:
                frame = self.copied(OF_ANSWER, batch.batch, batch.rows, 0, ran_ns, table, spans)
                if frame is not None:
                    return [frame]
            parts = self.views(spans, batch.rows) + parts
        return pack_frames(OF_ANSWER, batch.batch, batch.rows, 0, ran_ns, table, parts)
