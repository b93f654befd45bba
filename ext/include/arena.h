// The one definition of what processes share: an arena of batch slots in a memfd.
//
//   arena:  [ ArenaHeader | message rings, worker x front | RunCounters x (max_rows + 1) | Spread x 5 | slot 0 | slot 1 | ... | slabs (slab.h) ]
//   slot:   [ Slot | Row x max_rows | input column 0 .. | output column 0 .. ]    each part 64-byte aligned
//
// A column holds max_rows rows of one tensor back to back, so a worker sees a batch as one contiguous
// array. Every state change of a slot is ONE compare-and-swap on Slot.word; a process may die between
// any two instructions and the rest can still tell what it held (row table, worker number in the word).
//
//   word:  | generation 16 | worker 8 | state 8 | reserved rows 16 | settled rows 16 |
//
//   settled counts committed and abandoned rows until the batch runs, and rows not yet released once
//   it is done. The state machine (SLOT_MOVES below is the same table, exported to the tests):
//
//      FREE    --claim-->   CLAIMED                  a front found the open pointer stale
//      CLAIMED --open-->    OPEN                     its fields are set; the open pointer follows
//      CLAIMED --close-->   FREE                     nobody is in it
//      OPEN    --reserve--> OPEN | SEALED            SEALED when that filled it
//      OPEN    --settle-->  OPEN | CLAIMED           CLAIMED when that was the last row and nobody waits for any
//      OPEN    --seal-->    SEALED | READY           due | a request does not fit; READY when all settled
//      OPEN    --close-->   FREE                     a front lost the race for the pointer: nothing was reserved
//      OPEN    --leave-->   CLAIMED                  all rows are settled and the last caller has left
//      SEALED  --settle-->  SEALED | READY | CLAIMED the last row to settle makes it READY, or CLAIMED as above
//      READY   --take-->    RUNNING                  by one worker, oldest first
//      READY   --leave-->   CLAIMED                  the last caller has left: there is nothing to run
//      RUNNING --return-->  READY | CLAIMED          that worker died; CLAIMED when nobody waits
//      RUNNING --publish--> DONE | FREE              FREE when nobody waits any more
//      DONE    --release--> DONE | FREE              each request lets go of its rows
#pragma once
#include <stdint.h>
#include <string.h>
#include <time.h>
#include "message.h"
#include "slab.h"

enum {
    ARENA_MAGIC = 0x66737276,   // "fsrv"
    ARENA_LAYOUT = 9,
    MAX_WORKERS = 64,
    MAX_FRONTS = 64,
    MAX_COLUMNS = 64,
    MAX_BATCH_ROWS = 65535,
    ERROR_BYTES = 384,
    NO_WORKER = 0xff,
};

enum SlotState : uint8_t { SLOT_FREE, SLOT_CLAIMED, SLOT_OPEN, SLOT_SEALED, SLOT_READY, SLOT_RUNNING, SLOT_DONE, SLOT_STATES };
enum SlotEvent : uint8_t {
    EVENT_CLAIM, EVENT_OPEN, EVENT_RESERVE, EVENT_SETTLE, EVENT_SEAL, EVENT_CLOSE, EVENT_TAKE, EVENT_RETURN,
    EVENT_PUBLISH, EVENT_RELEASE, EVENT_LEAVE, SLOT_EVENTS,
};
#define TO(state) (1 << SLOT_##state)
// SLOT_MOVES[state][event]: the states (one bit each) the event may lead to; 0 = it may not happen there.
static const uint8_t SLOT_MOVES[SLOT_STATES][SLOT_EVENTS] = {
    //            claim        open      reserve                settle                                seal                    close     take         return                   publish              release              leave
    /* FREE    */ {TO(CLAIMED), 0,        0,                     0,                                    0,                      0,        0,           0,                       0,                   0,                   0},
    /* CLAIMED */ {0,           TO(OPEN), 0,                     0,                                    0,                      TO(FREE), 0,           0,                       0,                   0,                   0},
    /* OPEN    */ {0,           0,        TO(OPEN) | TO(SEALED), TO(OPEN) | TO(CLAIMED),               TO(SEALED) | TO(READY), TO(FREE), 0,           0,                       0,                   0,                   TO(CLAIMED)},
    /* SEALED  */ {0,           0,        0,                     TO(SEALED) | TO(READY) | TO(CLAIMED), 0,                      0,        0,           0,                       0,                   0,                   0},
    /* READY   */ {0,           0,        0,                     0,                                    0,                      0,        TO(RUNNING), 0,                       0,                   0,                   TO(CLAIMED)},
    /* RUNNING */ {0,           0,        0,                     0,                                    0,                      0,        0,           TO(READY) | TO(CLAIMED), TO(DONE) | TO(FREE), 0,                   0},
    /* DONE    */ {0,           0,        0,                     0,                                    0,                      0,        0,           0,                       0,                   TO(DONE) | TO(FREE), 0},
};
#undef TO

enum RowState : uint32_t { ROW_EMPTY, ROW_RESERVED, ROW_COMMITTED, ROW_ANSWERED, ROW_DROPPED };

// One lease: the rows of one request in one slot, kept at its first row. Slabs attached to it are its
// own (lease_owner) until the process that moves it to DROPPED, or the worker that finds it there, frees them.
typedef struct {
    uint32_t state;         // RowState, atomic
    uint16_t front;         // which front process waits for it
    uint16_t rows;
    uint64_t in_offset;     // slab of its inputs, 0 in the dense form
    uint64_t out_offset;    // slab of its outputs, written by the worker
    uint32_t in_bytes;
    uint32_t out_bytes;
    uint32_t status;        // 0 or the kind of its own failure
    uint32_t parts_read;    // of an answer in parts: how many the front has taken off its hands
    uint64_t queued_ns;     // since when it waits for a worker, CLOCK_MONOTONIC
    uint64_t tag, echo;     // of this lease alone, and what its worker made of it (claims.h)
} Row;

static const uint64_t ECHO_TAKEN = 0x5afe7a6e0a7e5eedu, ECHO_PUBLISHED = 0x0dd5b17e0ff5e75au;

typedef struct {
    alignas(64) uint64_t word;
    uint64_t seq;           // order of opening: batches are taken oldest first
    uint64_t first_ns;      // when its first row was reserved, CLOCK_MONOTONIC
    uint64_t sealed_ns;     // when nothing more could come; a batch of an idle worker is sealed as it is taken
    uint64_t taken_ns, run_ns, ran_ns, done_ns;     // the backend works from run_ns to ran_ns
    uint64_t moved_ns, rerun_ns;    // last sign of life of an answer in parts; of run_ns to ran_ns, in parts of the batch
    uint32_t attempts;      // how often a worker took it
    uint32_t status;        // 0 or the kind of the whole batch's failure
    uint32_t counted;       // a front has recorded it in the metrics
    uint32_t gone;          // rows that nobody waits for, abandoned or dropped: they do not count as waiting
    uint32_t error_bytes;
    char error[ERROR_BYTES];
} Slot;

// What became of requests, and how long that took in all; counters.h counts. Kept with the arena: a version that
// is loaded again begins at nothing, and every process of a version counts in the same place.
enum CounterKind : uint32_t {
    COUNT_SUCCESS, COUNT_QUEUE, COUNT_INPUT, COUNT_INFER, COUNT_OUTPUT,         // of requests answered well
    COUNT_REJECTED, COUNT_CANCELED, COUNT_BACKEND, COUNT_OTHER, COUNT_KINDS,
};
typedef struct { uint64_t count, ns; } Counters;
typedef struct { uint64_t runs, input_ns, infer_ns, output_ns; } RunCounters;      // batches of one size
// How many requests answered well took about how long, for each of COUNT_SUCCESS .. COUNT_OUTPUT: bucket 0 is less than
// 1024 ns; sixteen buckets for every doubling after that (counters.h: spread_bucket).
enum { SPREADS = 5, SPREAD_BUCKETS = 512 };
typedef struct { uint64_t bucket[SPREAD_BUCKETS]; } Spread;

// lives: deaths so far. ping: what the owner asks, pong: what of it the worker's loop has answered (notify.h).
typedef struct { alignas(64) uint32_t asleep; uint32_t present, lives; uint64_t batches; uint32_t ping, pong; } WorkerFlags;
// lined: requests of this front wait in lines of their keys; who comes at any front waits too.
typedef struct { alignas(64) uint32_t rung; uint32_t rescan, lined; } FrontFlags;

// WorkerFlags.asleep. Full: takes nothing now. Behind: neither, but who comes sets what stands still in it going.
enum { AWAKE = 0, ASLEEP = 1, ASLEEP_UNTIL_DUE = 2, ASLEEP_FULL = 3, ASLEEP_BEHIND = 4 };

typedef struct {
    uint32_t magic, layout;
    uint32_t slots, max_rows, inputs, outputs, workers, fronts;
    uint64_t slot_bytes, slots_offset, rings_offset, ring_bytes, runs_offset, spreads_offset, slabs_offset, total_bytes;
    uint32_t ring_capacity;
    uint32_t max_queued;    // rows that may wait for a worker at a time, 0 for any number
    uint64_t max_delay_ns;
    uint64_t input_row_bytes[MAX_COLUMNS], output_row_bytes[MAX_COLUMNS];
    uint64_t input_offset[MAX_COLUMNS], output_offset[MAX_COLUMNS];     // within a slot
    alignas(64) uint64_t open;      // | openings 32 | slot + 1, or 0, 32 |
    alignas(64) uint64_t next_seq;
    WorkerFlags worker[MAX_WORKERS];
    FrontFlags front[MAX_FRONTS];
    alignas(64) Counters counters[COUNT_KINDS];
    uint64_t served_rows, served_ns;        // rows of requests answered well, and when the last of them was
} ArenaHeader;

static inline uint64_t align64(uint64_t n) { return (n + 63) & ~(uint64_t)63; }

static inline uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// --- the word ------------------------------------------------------------------------------------
static inline uint32_t word_settled(uint64_t w) { return w & 0xffff; }
static inline uint32_t word_reserved(uint64_t w) { return w >> 16 & 0xffff; }
static inline uint32_t word_state(uint64_t w) { return w >> 32 & 0xff; }
static inline uint32_t word_worker(uint64_t w) { return w >> 40 & 0xff; }
static inline uint32_t word_generation(uint64_t w) { return w >> 48; }

static inline uint64_t make_word(uint32_t generation, uint32_t worker, uint32_t state, uint32_t reserved, uint32_t settled)
{
    return (uint64_t)(generation & 0xffff) << 48 | (uint64_t)worker << 40 | (uint64_t)state << 32 | (uint64_t)reserved << 16 | settled;
}
static inline uint64_t word_freed(uint64_t w) { return make_word(word_generation(w) + 1, NO_WORKER, SLOT_FREE, 0, 0); }

static inline uint64_t load64(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static inline bool swap_word(uint64_t *at, uint64_t *expected, uint64_t wanted)
{
    return __atomic_compare_exchange_n(at, expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}
static inline bool swap_row(Row *row, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(&row->state, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

// --- where things are ----------------------------------------------------------------------------
typedef struct {        // one process's view: trusted copies of the geometry, never re-read from shared memory
    ArenaHeader *header;
    uint8_t *base;
    uint8_t *slot_base;
    uint32_t owner;         // of slabs: whose death gives back what is being released
    uint32_t front;         // which front this process is; what it empties is CLAIMED by that number
    uint32_t ready;         // batches this process has made READY and not yet woken a worker for
    uint32_t credit;        // rows it may reserve before it counts again how many wait
    uint32_t slots, max_rows, inputs, outputs, workers, fronts, ring_capacity, max_queued;
    uint64_t slot_bytes, rings_offset, ring_bytes, runs_offset, spreads_offset, max_delay_ns;
    uint64_t input_row_bytes[MAX_COLUMNS], output_row_bytes[MAX_COLUMNS];
    uint64_t input_offset[MAX_COLUMNS], output_offset[MAX_COLUMNS];
    Slabs slabs;            // .pages == 0 when the arena has none
} Arena;

static inline Slot *slot_at(const Arena *a, uint32_t i) { return (Slot *)(a->slot_base + i * a->slot_bytes); }
static inline Row *rows_of(Slot *s) { return (Row *)((uint8_t *)s + align64(sizeof(Slot))); }
static inline MessageRing *ring_of(const Arena *a, uint32_t worker, uint32_t front)
{
    return (MessageRing *)(a->base + a->rings_offset + ((uint64_t)worker * a->fronts + front) * a->ring_bytes);
}

// Fills the header's geometry; returns the bytes of everything before the slabs.
static inline uint64_t arena_measure(ArenaHeader *h)
{
    h->ring_capacity = 16;
    while (h->ring_capacity < h->slots * 2)
        h->ring_capacity *= 2;
    h->ring_bytes = message_ring_bytes(h->ring_capacity);
    h->rings_offset = align64(sizeof(ArenaHeader));
    h->runs_offset = h->rings_offset + (uint64_t)h->workers * h->fronts * h->ring_bytes;
    h->spreads_offset = align64(h->runs_offset + (h->max_rows + 1) * sizeof(RunCounters));
    h->slots_offset = h->spreads_offset + SPREADS * sizeof(Spread);
    uint64_t at = align64(sizeof(Slot)) + align64((uint64_t)h->max_rows * sizeof(Row));
    for (uint32_t i = 0; i < h->inputs; i++) {
        h->input_offset[i] = at;
        at += align64(h->input_row_bytes[i] * h->max_rows);
    }
    for (uint32_t i = 0; i < h->outputs; i++) {
        h->output_offset[i] = at;
        at += align64(h->output_row_bytes[i] * h->max_rows);
    }
    h->slot_bytes = at;
    h->slabs_offset = (h->slots_offset + at * h->slots + 4095) & ~(uint64_t)4095;
    return h->slabs_offset;
}

// `h` is measured and lies at the start of zeroed memory of total_bytes bytes.
static inline void arena_format(ArenaHeader *h, uint32_t slab_pages)
{
    h->total_bytes = h->slabs_offset + (slab_pages ? slab_header_bytes(slab_pages) + (uint64_t)slab_pages * SLAB_PAGE : 0);
    if (slab_pages)
        slab_format((uint8_t *)h + h->slabs_offset, slab_pages);
    h->layout = ARENA_LAYOUT;
    for (uint32_t i = 0; i < h->slots; i++)
        ((Slot *)((uint8_t *)h + h->slots_offset + i * h->slot_bytes))->word = make_word(0, NO_WORKER, SLOT_FREE, 0, 0);
    for (uint32_t i = 0; i < h->workers; i++)
        h->worker[i].asleep = AWAKE;
    __atomic_store_n(&h->magic, (uint32_t)ARENA_MAGIC, __ATOMIC_RELEASE);
}

// Whether `h`, a copy nobody else can write, describes an arena that lies within `bytes` bytes: what is
// derived must be what arena_measure() derives, and no product of it may overflow.
static inline bool arena_sound(ArenaHeader *h, uint64_t bytes)
{
    ArenaHeader expected = *h;
    if (h->magic != ARENA_MAGIC || h->layout != ARENA_LAYOUT || h->total_bytes > bytes || bytes > (uint64_t)1 << 46)
        return false;
    if (h->slots < 1 || h->slots > 65536 || h->max_rows < 1 || h->max_rows > MAX_BATCH_ROWS)
        return false;
    if (h->workers < 1 || h->workers > MAX_WORKERS || h->fronts < 1 || h->fronts > MAX_FRONTS)
        return false;
    if (h->inputs > MAX_COLUMNS || h->outputs > MAX_COLUMNS)
        return false;
    for (uint32_t i = 0; i < MAX_COLUMNS; i++)
        if (h->input_row_bytes[i] > bytes / h->max_rows || h->output_row_bytes[i] > bytes / h->max_rows)
            return false;
    uint64_t slabs_offset = arena_measure(h);
    return slabs_offset <= h->total_bytes && slabs_offset == expected.slabs_offset && h->slot_bytes == expected.slot_bytes;
}

// False when the memory does not hold an arena this code understands. A worker may have scribbled over
// the header before another front joins: it is copied once, and only a sound copy is believed.
static inline bool arena_attach(Arena *a, uint8_t *base, uint64_t bytes)
{
    if (bytes < sizeof(ArenaHeader))
        return false;
    ArenaHeader h = *(ArenaHeader *)base;
    if (!arena_sound(&h, bytes))
        return false;
    a->header = (ArenaHeader *)base;
    a->base = base;
    a->front = a->ready = a->credit = 0;
    a->owner = OWNER_LEASE;     // until it is known
    a->slot_base = base + h.slots_offset;
    a->slots = h.slots, a->max_rows = h.max_rows, a->workers = h.workers, a->fronts = h.fronts;
    a->inputs = h.inputs, a->outputs = h.outputs;
    a->slot_bytes = h.slot_bytes, a->rings_offset = h.rings_offset, a->ring_bytes = h.ring_bytes;
    a->runs_offset = h.runs_offset, a->spreads_offset = h.spreads_offset;
    a->ring_capacity = h.ring_capacity, a->max_delay_ns = h.max_delay_ns, a->max_queued = h.max_queued;
    memcpy(a->input_row_bytes, h.input_row_bytes, sizeof h.input_row_bytes);
    memcpy(a->output_row_bytes, h.output_row_bytes, sizeof h.output_row_bytes);
    memcpy(a->input_offset, h.input_offset, sizeof h.input_offset);
    memcpy(a->output_offset, h.output_offset, sizeof h.output_offset);
    memset(&a->slabs, 0, sizeof a->slabs);
    return h.slabs_offset == h.total_bytes || slab_attach(&a->slabs, base + h.slabs_offset, h.total_bytes - h.slabs_offset);
}
