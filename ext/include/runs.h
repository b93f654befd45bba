// What workers do with slots: take a batch, answer its leases, publish it; and give it to another after a death.
#pragma once
#include "slots.h"

static inline bool word_take(Slot *s, uint64_t w, uint32_t worker)
{
    uint64_t next = make_word(word_generation(w), worker, SLOT_RUNNING, word_reserved(w), word_settled(w));
    return swap_word(&s->word, &w, next);
}

// The oldest ready slot, made ours; -1 when none is ready.
static inline int64_t slot_take_ready(const Arena *a, uint32_t worker)
{
    for (uint32_t tries = 0; tries < MOST_TRIES; tries++) {
        int64_t best = -1;
        uint64_t best_seq = 0, best_word = 0;
        for (uint32_t i = 0; i < a->slots; i++) {
            Slot *s = slot_at(a, i);
            uint64_t w = load64(&s->word);
            if (word_state(w) == SLOT_READY && (best < 0 || s->seq < best_seq))
                best = i, best_seq = s->seq, best_word = w;
        }
        if (best < 0 || word_take(slot_at(a, (uint32_t)best), best_word, worker))
            return best;
    }
    return -1;
}

// When the open slot may be sealed without being full: 0 = not now. With no delay, a batch some of whose
// rows are still being written stays open to others: its last commit wakes a worker.
static inline uint64_t open_due_ns(const Arena *a, uint32_t *slot)
{
    uint32_t i = (uint32_t)load64(&a->header->open) - 1;
    if (i >= a->slots)
        return 0;
    Slot *s = slot_at(a, i);
    uint64_t w = load64(&s->word);
    if (word_state(w) != SLOT_OPEN || word_settled(w) == 0)
        return 0;
    if (a->max_delay_ns == 0 && word_settled(w) != word_reserved(w))
        return 0;
    *slot = i;
    uint64_t first = __atomic_load_n(&s->first_ns, __ATOMIC_ACQUIRE);
    return (first ? first : monotonic_ns()) + a->max_delay_ns;
}

// One batch for this worker, or -1 and *due_ns = when to look again (0 = when woken).
static inline int64_t slot_take(Arena *a, uint32_t worker, uint64_t *due_ns)
{
    uint32_t i = 0;
    *due_ns = 0;
    int64_t taken = slot_take_ready(a, worker);
    if (taken >= 0)
        return taken;
    uint64_t due = open_due_ns(a, &i);
    if (due == 0)
        return -1;
    if (a->max_delay_ns && due > monotonic_ns()) {
        *due_ns = due;
        return -1;
    }
    slot_seal(a, i);
    return slot_take_ready(a, worker);
}

// What a worker says of a lease it has taken with so many rows.
static inline uint64_t echo_of(uint64_t tag, uint32_t rows) { return tag ^ ECHO_TAKEN ^ (uint64_t)rows << 48; }

// The worker that took the slot has seen these leases, whose inputs are therefore written; how many rows it runs.
static inline uint32_t slot_see(const Arena *a, Slot *s)
{
    uint64_t w = load64(&s->word);
    uint32_t reserved = word_reserved(w) <= a->max_rows ? word_reserved(w) : a->max_rows;
    Row *rows = rows_of(s);
    for (uint32_t r = 0, span; r < reserved; r += span) {
        span = row_span(a, rows, r);
        rows[r].echo = r + span <= reserved ? echo_of(rows[r].tag, span) : 0;
    }
    return reserved;
}

// The backend is done now; or a device was, which computed from `run_ns` to `ran_ns`, and not before the batch was taken.
static inline void slot_end_run(Slot *s, uint64_t run_ns, uint64_t ran_ns)
{
    if (run_ns)
        s->run_ns = run_ns > s->taken_ns ? run_ns : s->taken_ns;
    s->ran_ns = !ran_ns ? monotonic_ns() : ran_ns > s->run_ns ? ran_ns : s->run_ns;
}

// How many rows of a running batch still have somebody waiting; marks them answered. `fronts` and `left` get
// a bit for each front that waits for some, or no longer does.
static inline uint32_t slot_answer(const Arena *a, Slot *s, uint32_t reserved, uint64_t *fronts, uint64_t *left, BatchCounters *sum)
{
    uint32_t live = 0;
    Row *rows = rows_of(s);
    for (uint32_t r = 0; r < reserved;) {
        uint32_t span = row_span(a, rows, r);
        swap_row(rows + r, ROW_COMMITTED, ROW_ANSWERED);
        if (__atomic_load_n(&rows[r].state, __ATOMIC_ACQUIRE) == ROW_ANSWERED) {
            live += span;
            bool seen = r + span <= reserved && rows[r].echo == echo_of(rows[r].tag, span);
            rows[r].echo = seen ? rows[r].echo ^ ECHO_PUBLISHED : 0;
            *fronts |= (uint64_t)1 << (rows[r].front & 63);
            counters_lease(a, sum, s, rows + r, span, s->done_ns);
        } else {
            *left |= (uint64_t)1 << (rows[r].front & 63);
            release_slabs(a, rows + r);
        }
        r += span;
    }
    return live;
}

// RUNNING -> DONE (or FREE when nobody waits). Returns the fronts to tell, one bit each; of a batch that
// everybody has left, `freed` are the fronts whose callers may be waiting for its room. `ran` is how many rows
// the batch had when it was taken.
static inline uint64_t slot_publish(const Arena *a, uint32_t i, uint32_t worker, uint32_t ran, uint64_t *freed)
{
    Slot *s = slot_at(a, i);
    uint64_t w = load64(&s->word), fronts = 0, left = 0;
    *freed = 0;
    if (word_state(w) != SLOT_RUNNING || word_worker(w) != worker)
        return 0;
    uint32_t reserved = word_reserved(w) <= ran ? word_reserved(w) : ran;
    BatchCounters sum = {};
    __atomic_store_n(&s->done_ns, monotonic_ns(), __ATOMIC_RELAXED);
    uint32_t live = slot_answer(a, s, reserved, &fronts, &left, &sum);
    counters_batch(a, s, reserved, &sum);
    if (live == 0)
        clear_rows(a, s, reserved);
    uint64_t next = live ? make_word(word_generation(w), worker, SLOT_DONE, reserved, live) : word_freed(w);
    if (!swap_word(&s->word, &w, next))
        return 0;
    if (live == 0)
        *freed = left;
    return fronts;
}

// The worker that ran it died: give it to another. False when there is nothing to give: nobody waits for it.
static inline bool slot_return(Arena *a, Slot *s, uint32_t worker)
{
    uint64_t w = load64(&s->word);
    if (word_state(w) != SLOT_RUNNING || word_worker(w) != worker)
        return false;
    s->taken_ns = s->run_ns = s->ran_ns = s->moved_ns = s->rerun_ns = 0;
    uint64_t next = make_word(word_generation(w), NO_WORKER, SLOT_READY, word_reserved(w), word_settled(w));
    if (!slot_deserted(a, s, next))
        return swap_ready(a, s, &w, next);
    next = word_claimed(a, next);
    if (swap_word(&s->word, &w, next))
        slot_empty(a, s, next);
    return false;
}
