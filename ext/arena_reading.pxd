"""The contents of an arena as Python objects. Nothing here changes it. Header only."""

from libc.stdint cimport uint32_t, uint64_t
from slot_verbs cimport *

cdef extern from "token_records.h" nogil:
    bint records_take(const Arena*, uint32_t worker, uint32_t owner, const Message*)


cdef inline dict read_moves(tuple states, tuple events):
    """SLOT_MOVES by names."""
    cdef int state, event, i
    table = {}
    for state in range(SLOT_STATES):
        for event in range(SLOT_EVENTS):
            targets = [states[i] for i in range(SLOT_STATES) if SLOT_MOVES[state][event] >> i & 1]
            if targets:
                table[states[state], events[event]] = frozenset(targets)
    return table


cdef inline list read_leases(const Arena* arena, Slot* slot, uint32_t reserved, uint32_t most):
    """(first row, rows, input slab offset, bytes) of the first `most` leases somebody waits for."""
    cdef Row* rows = rows_of(slot)
    cdef uint32_t r = 0, count = 0
    cdef uint64_t slab
    found = []
    while r < reserved and count < most:
        if rows[r].state == ROW_COMMITTED or rows[r].state == ROW_ANSWERED:
            count += 1
            slab = rows[r].in_offset        # its own, or somebody wrote over the table
            if slab and slab_owner(&arena.slabs, slab) != lease_owner(rows[r].tag):
                slab = 0
            found.append((r, rows[r].rows, slab, rows[r].in_bytes))
        r += row_span(arena, rows, r)
    return found


cdef inline int read_message(const Arena* arena, const Claims* claims, uint32_t worker, uint32_t owner, const Message* message, list found) except -1:
    """Adds what a worker says to `owner`: (slot, seq), or (PART, (slot, seq, row, slab offset, bytes, final)), or (RECORDS,
    (slab offset, bytes)); PART is -2, RECORDS -3."""
    if message.kind == PART_MESSAGE:
        if part_take(arena, claims, worker, owner, message):
            found.append((-2, (message.slot, message.seq, part_row(message), message.value,
                               <uint32_t>message.part, bool(message.part >> 63))))
    elif message.kind == RECORDS_MESSAGE:
        if records_take(arena, worker, owner, message):
            found.append((-3, (message.value, message.part)))
    elif message.slot < arena.slots:
        found.append((message.slot, message.seq))
    return 0


cdef inline int read_ring(const Arena* arena, const Claims* claims, uint32_t worker, uint32_t owner, MessageRing* ring, list found) except -1:
    """Adds all that one worker says."""
    cdef Message message
    cdef uint32_t left = arena.ring_capacity     # it may claim to have written any number
    while left and message_peek(ring, arena.ring_capacity, &message):
        left -= 1
        read_message(arena, claims, worker, owner, &message, found)
        message_drop(ring)
    return 0


cdef inline list read_lost(const Arena* arena):
    """(slot, generation, rows) of rows that no process answers for; of a batch that did not hold still, 0 rows."""
    cdef uint32_t i, tries, rows = 0, generation = 0
    cdef bint still = False
    found = []
    for i in range(arena.slots):
        for tries in range(64):
            still = slot_lost(arena, i, &generation, &rows)
            if still:
                break
        if rows or not still:
            found.append((i, generation, rows))
    return found


cdef inline tuple read_counters(const Arena* arena):
    """(count, ns) by kind; rows of requests answered well; when the last of them was, never in the future."""
    cdef ArenaHeader* header = arena.header
    cdef int i
    found = []
    for i in range(COUNT_KINDS):
        found.append((header.counters[i].count, header.counters[i].ns))
    return tuple(found), header.served_rows, min(header.served_ns, monotonic_ns())


cdef inline list read_runs(const Arena* arena):
    """(rows, runs, input ns, infer ns, output ns) of every size of batch that has run."""
    cdef uint32_t rows
    cdef RunCounters* run
    found = []
    for rows in range(1, arena.max_rows + 1):
        run = runs_of(arena, rows)
        if run.runs:
            found.append((rows, run.runs, run.input_ns, run.infer_ns, run.output_ns))
    return found


cdef inline uint64_t read_outstanding(const Arena* arena):
    """Rows reserved and not yet freed."""
    cdef uint32_t i
    return sum([word_reserved(load64(&slot_at(arena, i).word)) for i in range(arena.slots)])


cdef inline uint64_t read_queued(const Arena* arena):
    """Rows committed, waited for and not yet taken by a worker."""
    cdef uint32_t i
    return sum([slot_queued(arena, i) for i in range(arena.slots)])


cdef inline uint64_t read_pending(const Arena* arena):
    """Requests committed and not yet taken by a worker."""
    cdef uint32_t i
    return sum([slot_pending(arena, i) for i in range(arena.slots)])


cdef inline tuple read_spreads(const Arena* arena):
    """The buckets of each spread, as native uint64."""
    cdef int kind
    return tuple([<bytes>(<char*>spread_of(arena, kind).bucket)[:SPREAD_BUCKETS * sizeof(uint64_t)] for kind in range(SPREADS)])
