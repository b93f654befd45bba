// The verbs of the slot state machine drawn in arena.h, as fronts use them; workers' are in runs.h. Each is one
// compare-and-swap on the word, repeated until it sticks or no longer applies. None blocks, none allocates.
#pragma once
#include "counters.h"

enum { LEASE_FULL = -1, LEASE_OVER = -3 };     // no slot is free; more rows wait than may

// Loops that another process could keep from ending, by changing words as fast as we read them, give up.
enum { MOST_TRIES = 1024 };

// The only way to READY: a process that makes a batch ready must wake a worker (notify.h: notify_workers), because those
// that sleep until a batch is due are woken by nothing else.
static inline bool swap_ready(Arena *a, Slot *s, uint64_t *expected, uint64_t wanted)
{
    if (!swap_word(&s->word, expected, wanted))
        return false;
    a->ready += word_state(wanted) == SLOT_READY;
    return true;
}

// All rows settled and nothing more may come: hand it to the workers.
static inline uint64_t word_settle(uint64_t w, uint32_t rows)
{
    uint64_t next = w + rows;
    if (word_state(w) == SLOT_SEALED && word_settled(next) == word_reserved(next))
        next = make_word(word_generation(w), NO_WORKER, SLOT_READY, word_reserved(next), word_settled(next));
    return next;
}

static inline uint64_t word_seal(uint64_t w)
{
    uint32_t state = word_settled(w) == word_reserved(w) ? SLOT_READY : SLOT_SEALED;
    return make_word(word_generation(w), NO_WORKER, state, word_reserved(w), word_settled(w));
}

// Before the word says so: once it does, the batch may be run and the slot another's. Whoever loses the race for the
// word was some instructions early or late.
static inline void mark_sealed(Slot *s)
{
    __atomic_store_n(&s->sealed_ns, monotonic_ns(), __ATOMIC_RELAXED);
}

// How long a batch formed that a worker has taken. A worker may have written anything: it is no moment to come.
static inline uint64_t slot_formed_ns(const Slot *s)
{
    uint64_t now = monotonic_ns(), end = s->sealed_ns < s->taken_ns ? s->sealed_ns : s->taken_ns;
    return since_ns(s->first_ns, end < now ? end : now);
}

// Seal slot `i` if it is still the opening `seen`; an empty one stays open.
static inline bool slot_seal(Arena *a, uint32_t i)
{
    Slot *s = slot_at(a, i);
    uint64_t w = load64(&s->word);
    while (word_state(w) == SLOT_OPEN && word_reserved(w) > 0) {
        mark_sealed(s);
        if (swap_ready(a, s, &w, word_seal(w)))
            return true;
    }
    return false;
}

// A slot nobody reserved in goes back.
static inline bool slot_close(Slot *s, uint64_t w)
{
    return swap_word(&s->word, &w, word_freed(w));
}

// FREE -> CLAIMED -> OPEN for slot `i`; the claim keeps others off while its fields are set.
static inline bool slot_open_at(const Arena *a, uint32_t i, uint32_t front, uint64_t *opened)
{
    Slot *s = slot_at(a, i);
    uint64_t w = load64(&s->word);
    uint64_t claimed = make_word(word_generation(w), front, SLOT_CLAIMED, 0, 0);
    if (word_state(w) != SLOT_FREE || !swap_word(&s->word, &w, claimed))
        return false;
    s->first_ns = s->sealed_ns = s->taken_ns = s->run_ns = s->ran_ns = s->done_ns = s->moved_ns = s->rerun_ns = 0;
    if (s->error_bytes)     // another batch's words
        memset(s->error, 0, ERROR_BYTES);
    s->counted = s->attempts = s->gone = 0, s->status = 0, s->error_bytes = 0;
    s->seq = __atomic_add_fetch(&a->header->next_seq, 1, __ATOMIC_RELAXED);
    *opened = make_word(word_generation(w), NO_WORKER, SLOT_OPEN, 0, 0);
    return swap_word(&s->word, &claimed, *opened);
}

// Make a free slot the open one; `seen` is the pointer found stale. False when every slot is in use.
static inline bool slot_open(Arena *a, uint64_t seen, uint32_t front)
{
    uint64_t opened;
    // Lowest first, not round robin: pages already touched are far cheaper than fresh ones.
    for (uint32_t i = 0; i < a->slots; i++) {
        if (!slot_open_at(a, i, front, &opened))
            continue;
        uint64_t pointer = ((seen >> 32) + 1) << 32 | (i + 1);
        // Lost the race: close it, unless another front found it through an old pointer and is in it.
        if (!swap_word(&a->header->open, &seen, pointer) && !slot_close(slot_at(a, i), opened))
            slot_seal(a, i);
        return true;
    }
    return load64(&a->header->open) != seen;
}

static inline bool word_waits(uint64_t w)
{
    return word_state(w) == SLOT_OPEN || word_state(w) == SLOT_SEALED || word_state(w) == SLOT_READY;
}

// How many rows of `counted` somebody waits for.
static inline uint32_t rows_wanted(const Slot *s, uint32_t counted)
{
    uint32_t gone = __atomic_load_n(&s->gone, __ATOMIC_SEQ_CST);
    return counted > gone ? counted - gone : 0;
}

// How many more rows may wait. Exact as far as this process goes.
static inline uint32_t rows_left(const Arena *a)
{
    uint64_t waiting = 0;
    for (uint32_t i = 0; a->max_queued && i < a->slots; i++) {
        uint64_t w = load64(&slot_at(a, i)->word);
        waiting += word_waits(w) ? rows_wanted(slot_at(a, i), word_reserved(w)) : 0;
    }
    return !a->max_queued ? UINT32_MAX : waiting < a->max_queued ? a->max_queued - (uint32_t)waiting : 0;
}

// Whether so many rows more may wait. Rows are counted again only when what was left at the last count has been
// reserved: a queue far from full is never counted. Several fronts share what is left, and may together exceed it by
// what each was granted.
static inline bool rows_admit(Arena *a, uint32_t rows)
{
    if (rows > a->credit) {
        uint32_t left = rows_left(a);
        if (rows > left)
            return false;
        a->credit = left / a->fronts < rows ? rows : left / a->fronts;
    }
    a->credit -= rows;
    return true;
}

// A lease for `rows` rows: slot << 16 | first row, or LEASE_FULL. 1 <= rows <= max_rows.
static inline int64_t lease_find(Arena *a, uint32_t rows, uint32_t front)
{
    for (uint32_t tries = 0; tries < MOST_TRIES; tries++) {
        uint64_t open = load64(&a->header->open);
        uint32_t i = (uint32_t)open - 1;
        if (i < a->slots) {
            Slot *s = slot_at(a, i);
            uint64_t w = load64(&s->word);
            uint32_t start = word_reserved(w);
            if (word_state(w) == SLOT_OPEN && start + rows <= a->max_rows) {
                uint32_t state = start + rows == a->max_rows ? SLOT_SEALED : SLOT_OPEN;
                uint64_t next = make_word(word_generation(w), NO_WORKER, state, start + rows, word_settled(w));
                if (state == SLOT_SEALED)
                    mark_sealed(s);
                if (!swap_word(&s->word, &w, next))
                    continue;
                Row *row = rows_of(s) + start;
                row->front = front, row->rows = rows;
                row->in_offset = row->out_offset = 0;
                row->in_bytes = row->out_bytes = row->status = 0;
                row->queued_ns = row->tag = row->echo = 0;
                __atomic_store_n(&row->state, (uint32_t)ROW_RESERVED, __ATOMIC_RELEASE);
                if (start == 0)
                    __atomic_store_n(&s->first_ns, monotonic_ns(), __ATOMIC_RELEASE);
                return (int64_t)i << 16 | start;
            }
            if (word_state(w) == SLOT_OPEN)
                slot_seal(a, i);
        }
        if (!slot_open(a, open, front))
            return LEASE_FULL;
    }
    return LEASE_FULL;
}

// The same, or LEASE_OVER.
static inline int64_t lease_reserve(Arena *a, uint32_t rows, uint32_t front)
{
    if (!rows_admit(a, rows))
        return LEASE_OVER;
    int64_t lease = lease_find(a, rows, front);
    if (lease < 0)
        a->credit += rows;
    return lease;
}

static inline uint32_t row_span(const Arena *a, const Row *rows, uint32_t r)
{
    uint32_t span = rows[r].rows;
    return span && span <= a->max_rows - r ? span : 1;
}

static inline void clear_rows(const Arena *a, Slot *s, uint32_t reserved)
{
    memset(rows_of(s), 0, (reserved < a->max_rows ? reserved : a->max_rows) * sizeof(Row));
}

// It becomes this process's first: of two that let go of it one has it, and should that one die it is reclaimed with it.
static inline void release_slab(const Arena *a, uint64_t *held, uint64_t tag)
{
    uint64_t offset = load64(held);
    uint32_t owner = a->slabs.pages && offset ? slab_owner(&a->slabs, offset) : 0;
    bool ours = owner && (owner == lease_owner(tag) || owner == OWNER_LEASE) && slab_give(&a->slabs, offset, owner, a->owner);
    __atomic_compare_exchange_n(held, &offset, (uint64_t)0, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    if (ours)
        slab_release(&a->slabs, offset);
}

static inline void release_slabs(const Arena *a, Row *row)
{
    release_slab(a, &row->in_offset, row->tag);
    release_slab(a, &row->out_offset, row->tag);
}

// Whether the slot has rows, all of them settled, and nobody waits for any. The count spares the look at the table,
// which is right also where a process died before it had counted.
static inline bool slot_deserted(const Arena *a, Slot *s, uint64_t w)
{
    uint32_t state = word_state(w), reserved = word_reserved(w);
    if ((state != SLOT_OPEN && state != SLOT_READY) || !reserved || word_settled(w) != reserved || rows_wanted(s, reserved))
        return false;
    Row *rows = rows_of(s);
    for (uint32_t r = 0; r < reserved && r < a->max_rows; r += row_span(a, rows, r)) {
        uint32_t row = __atomic_load_n(&rows[r].state, __ATOMIC_ACQUIRE);
        if (row != ROW_DROPPED && row != ROW_EMPTY)
            return false;
    }
    return true;
}

static inline uint64_t word_claimed(const Arena *a, uint64_t w)
{
    return make_word(word_generation(w), a->front, SLOT_CLAIMED, word_reserved(w), word_settled(w));
}

// Of a slot that is ours: what its leases still hold goes back, and so does the slot.
static inline bool slot_empty(const Arena *a, Slot *s, uint64_t claimed)
{
    Row *rows = rows_of(s);
    uint32_t reserved = word_reserved(claimed);
    for (uint32_t r = 0; r < reserved && r < a->max_rows; r += row_span(a, rows, r))
        release_slabs(a, rows + r);
    clear_rows(a, s, reserved);
    return slot_close(s, claimed);
}

// The last caller may have left: there is nothing to run, then. Two fronts that leave at once may both miss it; the
// slot's rows do not count as waiting even so, and the worker that takes it frees it.
static inline bool slot_leave(const Arena *a, Slot *s)
{
    uint64_t w = load64(&s->word);
    while (slot_deserted(a, s, w)) {
        uint64_t claimed = word_claimed(a, w);
        if (swap_word(&s->word, &w, claimed))
            return slot_empty(a, s, claimed);
    }
    return false;
}

static inline void slot_settle(Arena *a, Slot *s, uint32_t rows)
{
    uint64_t next, w = load64(&s->word);
    do {
        next = word_settle(w, rows);
        if (slot_deserted(a, s, next))
            next = word_claimed(a, next);
    } while (!swap_ready(a, s, &w, next));
    if (word_state(next) == SLOT_CLAIMED)
        slot_empty(a, s, next);
}

// Rows that nobody waits for: counted before they are settled, so that it is their batch that counts them.
static inline void slot_settle_gone(Arena *a, Slot *s, uint32_t rows)
{
    __atomic_add_fetch(&s->gone, rows, __ATOMIC_SEQ_CST);
    slot_settle(a, s, rows);
}

// The rows are written: a worker may see them.
static inline void lease_commit(Arena *a, int64_t lease, uint32_t rows, uint64_t now_ns, uint64_t tag)
{
    Slot *s = slot_at(a, (uint32_t)(lease >> 16));
    Row *row = rows_of(s) + (lease & 0xffff);
    row->queued_ns = now_ns, row->tag = tag;
    __atomic_store_n(&row->state, (uint32_t)ROW_COMMITTED, __ATOMIC_RELEASE);
    slot_settle(a, s, rows);
}

static inline void clear_inputs(const Arena *a, Slot *s, uint32_t first, uint32_t rows)
{
    for (uint32_t c = 0; c < a->inputs; c++)
        memset((uint8_t *)s + a->input_offset[c] + first * a->input_row_bytes[c], 0, rows * a->input_row_bytes[c]);
}

// Give the last rows of an open slot back, as if never reserved.
static inline bool lease_return(Slot *s, uint32_t start, uint32_t rows)
{
    Row *row = rows_of(s) + start;
    uint64_t w = load64(&s->word);
    row->rows = 0;
    __atomic_store_n(&row->state, (uint32_t)ROW_EMPTY, __ATOMIC_RELEASE);
    while (word_state(w) == SLOT_OPEN && word_reserved(w) == start + rows)
        if (swap_word(&s->word, &w, w - ((uint64_t)rows << 16)))
            return true;
    row->rows = rows;
    __atomic_store_n(&row->state, (uint32_t)ROW_DROPPED, __ATOMIC_RELEASE);
    return false;
}

// The rows will not be written. They are given back if they are the last of an open slot; else the
// batch keeps them as zeros. Either way they may have been what the batch waited for.
static inline void lease_abandon(Arena *a, int64_t lease, uint32_t rows)
{
    Slot *s = slot_at(a, (uint32_t)(lease >> 16));
    uint32_t start = lease & 0xffff;
    if (lease_return(s, start, rows)) {
        slot_leave(a, s);
        return;
    }
    clear_inputs(a, s, start, rows);
    slot_settle_gone(a, s, rows);
}

// Nobody waits for these rows any more. False when they are not, or no longer, COMMITTED. They are counted while they
// hold the slot: afterwards it could be another batch.
static inline bool row_drop(const Arena *a, Slot *s, Row *row, uint32_t rows)
{
    if (__atomic_load_n(&row->state, __ATOMIC_ACQUIRE) != ROW_COMMITTED)
        return false;
    __atomic_add_fetch(&s->gone, rows, __ATOMIC_SEQ_CST);
    if (swap_row(row, ROW_COMMITTED, ROW_DROPPED)) {
        slot_leave(a, s);
        return true;
    }
    __atomic_sub_fetch(&s->gone, rows, __ATOMIC_SEQ_CST);
    return false;
}

// The caller no longer waits. True: the rows are dropped and need no release.
// False: a worker has answered; release the lease when the batch is done.
static inline bool lease_drop(const Arena *a, int64_t lease, uint32_t rows)
{
    Slot *s = slot_at(a, (uint32_t)(lease >> 16));
    return row_drop(a, s, rows_of(s) + (lease & 0xffff), rows);
}

// The same with the slab of inputs that was attached to it: what could not be submitted.
static inline void lease_give_back(Arena *a, int64_t lease, uint32_t rows)
{
    Row *row = rows_of(slot_at(a, (uint32_t)(lease >> 16))) + (lease & 0xffff);
    release_slab(a, &row->in_offset, row->tag);
    lease_abandon(a, lease, rows);
}

// `rows` rows of a done batch need it no longer. The last release frees its slot.
static inline void slot_release(const Arena *a, Slot *s, uint32_t rows)
{
    uint64_t w = load64(&s->word);
    for (;;) {
        bool last = word_settled(w) == rows;
        if (last)
            clear_rows(a, s, word_reserved(w));
        if (word_state(w) != SLOT_DONE || word_settled(w) < rows)
            return;     // only a worker that scribbles over the arena gets here
        if (swap_word(&s->word, &w, last ? word_freed(w) : w - rows))
            return;
    }
}

// The answer has been read; once, however often it is said (a reclaim may say it for a dying front).
static inline void lease_release(const Arena *a, int64_t lease, uint32_t rows)
{
    Slot *s = slot_at(a, (uint32_t)(lease >> 16));
    Row *row = rows_of(s) + (lease & 0xffff);
    if (!swap_row(row, ROW_ANSWERED, ROW_DROPPED))
        return;
    release_slabs(a, row);
    slot_release(a, s, rows);
}

// True for the first front that asks about this opening of the slot.
static inline bool slot_count_once(Slot *s) { return __atomic_exchange_n(&s->counted, 1u, __ATOMIC_RELAXED) == 0; }

// Whether requests wait in lines of their keys, at this front or another.
static inline bool lines_stand(const Arena *a)
{
    for (uint32_t f = 0; f < a->fronts; f++)
        if (__atomic_load_n(&a->header->front[f].lined, __ATOMIC_SEQ_CST))
            return true;
    return false;
}

// Whether `rows` rows more may be reserved while `ahead` may wait beside a batch for every worker. A batch that runs
// counts as full, so that the room behind it is there before its worker says that it is done.
static inline bool rows_near(const Arena *a, uint32_t rows, uint32_t ahead)
{
    uint64_t waiting = 0;
    uint32_t running = 0;
    for (uint32_t i = 0; i < a->slots; i++) {
        uint64_t w = load64(&slot_at(a, i)->word);
        waiting += word_waits(w) ? rows_wanted(slot_at(a, i), word_reserved(w)) : 0;
        running += word_state(w) == SLOT_RUNNING;
    }
    uint32_t idle = running < a->workers ? a->workers - running : 0;
    return waiting + rows <= ahead + (uint64_t)idle * a->max_rows || (!waiting && (ahead || idle));
}

// Rows written, not yet taken by a worker, and waited for.
static inline uint32_t slot_queued(const Arena *a, uint32_t i)
{
    uint64_t w = load64(&slot_at(a, i)->word);
    return word_waits(w) ? rows_wanted(slot_at(a, i), word_settled(w)) : 0;
}

// Requests written and not yet taken by a worker.
static inline uint32_t slot_pending(const Arena *a, uint32_t i)
{
    Slot *s = slot_at(a, i);
    uint64_t w = load64(&s->word);
    uint32_t found = 0, reserved = word_waits(w) && word_reserved(w) <= a->max_rows ? word_reserved(w) : 0;
    for (uint32_t r = 0; r < reserved; r += row_span(a, rows_of(s), r))
        found += __atomic_load_n(&rows_of(s)[r].state, __ATOMIC_ACQUIRE) == ROW_COMMITTED && rows_of(s)[r].queued_ns;
    return found;
}
