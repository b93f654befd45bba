// What a dead front leaves in the slots, and how it is let go of. The owner calls these; live fronts and
// workers go on meanwhile.
//
// A front may die between any two instructions. Its rows are found in the row table (slot_reclaim); where it
// died between moving the table and moving the word, the two disagree (slot_lost). Live processes make them
// disagree too, for nanoseconds, so that only what was lost twice, some time in between, is forgiven.
#pragma once
#include "arena.h"
#include "runs.h"

static inline bool row_reclaim(Arena *a, Slot *s, uint32_t r, uint32_t rows)
{
    Row *row = rows_of(s) + r;
    if (swap_row(row, ROW_RESERVED, ROW_DROPPED)) {
        // Attached and not yet given to the lease: the worker that finds the lease dropped lets go of it.
        if (a->slabs.pages && row->in_offset)
            slab_give(&a->slabs, row->in_offset, 1 + row->front, OWNER_LEASE);
        clear_inputs(a, s, r, rows);
        slot_settle_gone(a, s, rows);
        return true;
    }
    if (row_drop(a, s, row, rows))
        return true;
    bool done = word_state(load64(&s->word)) == SLOT_DONE;
    if (!swap_row(row, ROW_ANSWERED, ROW_DROPPED))
        return false;
    if (done) {     // else a worker has counted it or is about to look: slot_lost() tells
        release_slabs(a, row);
        slot_release(a, s, rows);
    }
    return true;
}

// Let go of everything front `front` held in slot `i`, as far as the row table tells; returns how many leases.
static inline uint32_t slot_reclaim(Arena *a, uint32_t i, uint32_t front)
{
    Slot *s = slot_at(a, i);
    Row *rows = rows_of(s);
    uint64_t w = load64(&s->word);
    uint32_t touched = 0, reserved = word_reserved(w);
    if (word_state(w) == SLOT_CLAIMED && word_worker(w) == front)
        return slot_empty(a, s, w);
    if (word_state(w) == SLOT_OPEN && (uint32_t)load64(&a->header->open) != i + 1)
        touched += reserved ? slot_seal(a, i) : slot_close(s, w);
    for (uint32_t r = 0, span; r < reserved && r < a->max_rows; r += span) {
        span = row_span(a, rows, r);
        // In this order: what the dead front holds keeps the slot from going on under us. What it had let go of does not,
        // and the row may be another's by the time we touch it.
        uint32_t state = __atomic_load_n(&rows[r].state, __ATOMIC_ACQUIRE);
        if (state != ROW_EMPTY && state != ROW_DROPPED && rows[r].front == front)
            touched += row_reclaim(a, s, r, span);
    }
    return touched;
}

// Rows that the word counts and no lease accounts for: between moving the one and the other a process is
// a few instructions away from making it right, unless it died there. False when the batch moved meanwhile: nothing
// is known of it, then.
static inline bool slot_lost(const Arena *a, uint32_t i, uint32_t *generation, uint32_t *lost)
{
    Slot *s = slot_at(a, i);
    Row *rows = rows_of(s);
    uint64_t w = load64(&s->word);
    uint32_t state = word_state(w), reserved = word_reserved(w), accounted = 0;
    bool writing = state == SLOT_OPEN || state == SLOT_SEALED;
    *generation = word_generation(w), *lost = 0;
    if (!writing && state != SLOT_DONE)
        return true;
    for (uint32_t r = 0, span; r < reserved && r < a->max_rows; r += span) {
        span = row_span(a, rows, r);
        if (__atomic_load_n(&rows[r].state, __ATOMIC_ACQUIRE) == (uint32_t)(writing ? ROW_RESERVED : ROW_ANSWERED))
            accounted += span;
    }
    uint32_t held = writing ? reserved - word_settled(w) : word_settled(w);
    if (load64(&s->word) != w)
        return false;
    *lost = held > accounted && held <= reserved ? held - accounted : 0;
    return true;
}

// What it held beside rows; its processes are gone with it.
static inline void front_reclaim(const Arena *a, uint32_t front)
{
    slab_reclaim(&a->slabs, 1 + front);
    __atomic_store_n(&a->header->front[front].lined, 0u, __ATOMIC_SEQ_CST);
}

// Make up for rows found lost twice, with enough time in between that only a dead process can have left them.
static inline bool slot_forgive(Arena *a, uint32_t i, uint32_t generation, uint32_t lost)
{
    Slot *s = slot_at(a, i);
    Row *rows = rows_of(s);
    uint64_t w = load64(&s->word);
    uint32_t state = word_state(w), reserved = word_reserved(w);
    if (word_generation(w) != generation || (state != SLOT_OPEN && state != SLOT_SEALED && state != SLOT_DONE))
        return false;
    for (uint32_t r = 0, span; r < reserved && r < a->max_rows; r += span) {
        span = row_span(a, rows, r);
        if (state == SLOT_DONE && rows[r].state == ROW_DROPPED)
            release_slabs(a, rows + r);
        else if (state != SLOT_DONE && rows[r].state == ROW_EMPTY)
            clear_inputs(a, s, r, span);
    }
    if (state == SLOT_DONE)
        slot_release(a, s, lost);
    else
        slot_settle_gone(a, s, lost);
    return true;
}
