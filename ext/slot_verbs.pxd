"""The C side of the batch ring, for the modules that call it: include/reclaim.h and doorbell.h. Header only."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "reclaim.h" nogil:
    enum: MAX_WORKERS, MAX_FRONTS, MAX_COLUMNS, MAX_BATCH_ROWS, ERROR_BYTES, NO_WORKER, SLAB_PAGE
    enum: SLOT_FREE, SLOT_OPEN, SLOT_SEALED, SLOT_READY, SLOT_RUNNING, SLOT_DONE, SLOT_STATES, SLOT_EVENTS
    enum: COUNT_SUCCESS, COUNT_REJECTED, COUNT_KINDS, SPREADS, SPREAD_BUCKETS
    enum: ROW_COMMITTED, ROW_ANSWERED, AWAKE, ASLEEP, ASLEEP_UNTIL_DUE
    const uint8_t SLOT_MOVES[7][11]
    ctypedef struct Row:
        uint32_t state, in_bytes, out_bytes, status, parts_read
        uint64_t in_offset, out_offset, queued_ns, tag, echo
        int front, rows
    ctypedef struct Slot:
        uint64_t word, seq, first_ns, sealed_ns, taken_ns, run_ns, ran_ns, done_ns, moved_ns
        uint32_t attempts, status, error_bytes
        char* error
    ctypedef struct WorkerFlags:
        uint32_t asleep, present
        uint64_t batches
    ctypedef struct FrontFlags:
        uint32_t rung, rescan, lined
    ctypedef struct Counters:
        uint64_t count, ns
    ctypedef struct Spread:
        uint64_t* bucket
    ctypedef struct RunCounters:
        uint64_t runs, input_ns, infer_ns, output_ns
    ctypedef struct ArenaHeader:
        uint32_t slots, max_rows, inputs, outputs, workers, fronts, max_queued
        uint64_t slots_offset, slabs_offset, total_bytes, max_delay_ns, open
        uint64_t* input_row_bytes
        uint64_t* output_row_bytes
        uint64_t* input_offset
        uint64_t* output_offset
        WorkerFlags* worker
        FrontFlags* front
        Counters* counters
        uint64_t served_rows, served_ns
    ctypedef struct Slabs:
        uint8_t* base
        uint32_t pages
    ctypedef struct Arena:
        ArenaHeader* header
        uint8_t* base
        uint32_t owner, front, ready
        uint32_t slots, max_rows, inputs, outputs, workers, fronts, ring_capacity
        uint64_t* input_row_bytes
        uint64_t* output_row_bytes
        uint64_t* input_offset
        uint64_t* output_offset
        Slabs slabs
    ctypedef struct Message:
        uint64_t seq
        uint32_t slot
        uint16_t kind
        uint64_t value, part, tag
    ctypedef struct MessageRing:
        pass
    uint64_t arena_measure(ArenaHeader*)
    void arena_format(ArenaHeader*, uint32_t slab_pages)
    bint arena_attach(Arena*, uint8_t*, uint64_t)
    Slot* slot_at(const Arena*, uint32_t)
    Row* rows_of(Slot*)
    MessageRing* ring_of(const Arena*, uint32_t, uint32_t)
    bint message_push(MessageRing*, uint32_t, const Message*)
    bint message_peek(const MessageRing*, uint32_t, Message*)
    void message_drop(MessageRing*)
    uint64_t monotonic_ns()
    uint64_t load64(const uint64_t*)
    uint32_t word_state(uint64_t)
    uint32_t word_reserved(uint64_t)
    uint32_t word_settled(uint64_t)
    uint32_t word_worker(uint64_t)
    enum: LEASE_FULL, LEASE_OVER
    uint32_t rows_left(const Arena*)
    bint lines_stand(const Arena*)
    bint rows_near(const Arena*, uint32_t, uint32_t)
    int64_t lease_reserve(Arena*, uint32_t, uint32_t)
    void lease_commit(Arena*, int64_t, uint32_t, uint64_t, uint64_t tag)
    void lease_give_back(Arena*, int64_t, uint32_t)
    bint lease_drop(const Arena*, int64_t, uint32_t)
    void lease_release(const Arena*, int64_t, uint32_t)
    bint slot_count_once(Slot*)
    uint32_t slot_queued(const Arena*, uint32_t)
    uint32_t slot_pending(const Arena*, uint32_t)
    void counters_add(const Arena*, uint32_t, uint64_t, uint64_t)
    RunCounters* runs_of(const Arena*, uint32_t)
    Spread* spread_of(const Arena*, uint32_t)
    uint64_t since_ns(uint64_t, uint64_t)
    uint64_t slot_formed_ns(const Slot *)
    bint slot_seal(Arena*, uint32_t)
    int64_t slot_take(Arena*, uint32_t, uint64_t*)
    uint64_t open_due_ns(const Arena*, uint32_t*)
    uint64_t slot_publish(const Arena*, uint32_t, uint32_t, uint32_t ran, uint64_t* freed)
    bint slot_return(Arena*, Slot*, uint32_t)
    uint32_t slot_reclaim(Arena*, uint32_t, uint32_t)
    bint slot_lost(const Arena*, uint32_t, uint32_t*, uint32_t*)
    bint slot_forgive(Arena*, uint32_t, uint32_t, uint32_t)
    uint32_t row_span(const Arena*, const Row*, uint32_t)
    uint64_t slab_allocate(const Slabs*, uint64_t, uint32_t)
    uint32_t slab_owner(const Slabs*, uint64_t)
    bint slab_holds(const Slabs*, uint64_t, uint64_t)
    bint slab_release(const Slabs*, uint64_t)
    bint slab_give(const Slabs*, uint64_t, uint32_t giver, uint32_t taker)
    void front_reclaim(const Arena*, uint32_t)
    uint32_t slab_used(const Slabs*)
    enum: OWNER_LEASE
    uint32_t lease_owner(uint64_t tag)
    void release_slab(const Arena*, uint64_t* held, uint64_t tag)
    uint32_t slot_see(const Arena*, Slot*)

cdef extern from "claims.h" nogil:
    const uint64_t LEFT
    ctypedef struct Claims:
        uint64_t* held
    uint64_t* claims_ran(const Arena*, const Claims*, uint32_t slot)
    bint claims_open(const Arena*, Claims*, uint64_t* lent, uint64_t seed)
    uint64_t claim_of(const Arena*, const Claims*, int64_t lease)
    bint claim_rows(const Arena*, Claims*, int64_t lease, uint32_t rows)
    void claim_refuse(Arena*, int64_t lease, uint32_t rows)
    void claim_end(const Arena*, Claims*, int64_t lease, uint64_t mark)
    Row* claim_row(const Arena*, int64_t lease)
    bint claim_stands(const Arena*, const Claims*, int64_t lease)
    bint claim_answered(const Arena*, const Claims*, int64_t lease, uint32_t rows)

cdef extern from "notify.h" nogil:
    enum: DONE_MESSAGE, PART_MESSAGE, RECORDS_MESSAGE
    void notify_done(const Arena*, uint32_t worker, uint64_t fronts, const int* doorbells, uint32_t slot, uint64_t seq)
    bint part_send(const Arena*, uint32_t worker, uint32_t owner, const int* doorbells, uint32_t slot, uint32_t row, uint64_t offset, uint32_t nbytes, bint final)
    uint32_t part_row(const Message*)
    uint32_t parts_taken(const Arena*, uint32_t slot, uint32_t row)
    void counters_rerun(const Arena*, Slot*, uint32_t rows, uint64_t took_ns)
    bint part_take(const Arena*, const Claims*, uint32_t worker, uint32_t owner, const Message*)
    uint32_t worker_owner(const Arena*, uint32_t worker)
    void life_end(const Arena*, uint32_t worker)
    uint64_t part_keep_inputs(const Arena*, uint32_t owner, uint32_t slot, uint32_t row)
    void notify_workers(Arena*, const int* doorbells)
    void notify_all_workers(Arena*, const int* doorbells)
    bint worker_ping(const Arena*, uint32_t worker, int doorbell)
    bint worker_busy(const Arena*, uint32_t worker, bint parted)
    void request_rescan(const Arena*, const int* doorbells, uint64_t fronts)
    void slot_end_run(Slot*, uint64_t run_ns, uint64_t ran_ns)
    int64_t take_or_wait(Arena*, uint32_t worker, int doorbell, int control, int64_t spin_ns, int64_t longest_ns, int* why)

cdef extern from "doorbell.h" nogil:
    void doorbell_ring(int fd)
    void doorbell_clear(int fd)
    uint32_t flag_exchange(uint32_t*, uint32_t)
    uint32_t flag_load(const uint32_t*)
