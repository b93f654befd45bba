// The verbs of the slot state machine drawn in arena.h. Each is one compare-and-swap on the word,
// repeated until it sticks or no longer applies. None blocks, none allocates.
#pragma once
#include "counters.h"

enum { PLACE_FULL = -1, PLACE_OVER = -3 };     // no slot is free; more rows wait than may

// Loops that another process could keep from ending, by changing words as fast as we read them, give up.
enum { MOST_TRIES = 1024 };

// --- fronts --------------------------------------------------------------------------------------

// The only way to READY: whoever makes a batch ready owes a worker the word (notify.h: tell_workers), because those
// who sleep until a batch is due hear of nothing else.
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

// Seal slot `i` if it is still the opening `seen`; an empty one stays open.
static inline bool slot_seal(Arena *a, uint32_t i)
{
    Slot *s = slot_at(a, i);
    uint64_t w = load64(&s->word);
    while (word_state(w) == SLOT_OPEN && word_reserved(w) > 0)
        if (swap_ready(a, s, &w, word_seal(w)))
            return true;
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
    s->first_ns = s->taken_ns = s->run_ns = s->ran_ns = s->done_ns = s->moved_ns = s->rerun_ns = 0;
    if (s->error_bytes)     // another batch's words
        memset(s->error, 0, ERROR_BYTES);
    s->counted = s->attempts = 0, s->status = 0, s->error_bytes = 0;
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

// How many more rows may wait. Exact as far as this process goes.
static inline uint32_t rows_left(const Arena *a)
{
    uint64_t waiting = 0;
    for (uint32_t i = 0; a->max_queued && i < a->slots; i++) {
        uint64_t w = load64(&slot_at(a, i)->word);
        waiting += word_waits(w) ? word_reserved(w) : 0;
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

// A place for `rows` rows: slot << 16 | first row, or PLACE_FULL. 1 <= rows <= max_rows.
static inline int64_t place_find(Arena *a, uint32_t rows, uint32_t front)
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
            return PLACE_FULL;
    }
    return PLACE_FULL;
}

// The same, or PLACE_OVER.
static inline int64_t place_reserve(Arena *a, uint32_t rows, uint32_t front)
{
    if (!rows_admit(a, rows))
        return PLACE_OVER;
    int64_t place = place_find(a, rows, front);
    if (place < 0)
        a->credit += rows;
    return place;
}

static inline void slot_settle(Arena *a, Slot *s, uint32_t rows)
{
    uint64_t w = load64(&s->word);
    while (!swap_ready(a, s, &w, word_settle(w, rows)))
        ;
}

// The rows are written: a worker may see them.
static inline void place_commit(Arena *a, int64_t place, uint32_t rows, uint64_t now_ns, uint64_t tag)
{
    Slot *s = slot_at(a, (uint32_t)(place >> 16));
    Row *row = rows_of(s) + (place & 0xffff);
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
static inline bool place_return(Slot *s, uint32_t start, uint32_t rows)
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
static inline void place_abandon(Arena *a, int64_t place, uint32_t rows)
{
    Slot *s = slot_at(a, (uint32_t)(place >> 16));
    uint32_t start = place & 0xffff;
    if (place_return(s, start, rows))
        return;
    clear_inputs(a, s, start, rows);
    slot_settle(a, s, rows);
}

// The caller no longer waits. True: the rows are dropped and need no release.
// False: a worker has answered; release the place when the batch is done.
static inline bool place_drop(const Arena *a, int64_t place)
{
    Row *row = rows_of(slot_at(a, (uint32_t)(place >> 16))) + (place & 0xffff);
    return swap_row(row, ROW_COMMITTED, ROW_DROPPED);
}

static inline void clear_rows(const Arena *a, Slot *s, uint32_t reserved)
{
    memset(rows_of(s), 0, (reserved < a->max_rows ? reserved : a->max_rows) * sizeof(Row));
}

// Taking the offset away first, at once: a slab that two processes let go of could be another's by then.
static inline void release_slab(const Arena *a, uint64_t *held, uint64_t tag)
{
    uint64_t offset = __atomic_exchange_n(held, (uint64_t)0, __ATOMIC_ACQ_REL);
    uint32_t owner = a->slabs.pages && offset ? slab_owner(&a->slabs, offset) : 0;
    if (owner && (owner == place_owner(tag) || owner == OWNER_PLACE))
        slab_release(&a->slabs, offset);
}

static inline void release_slabs(const Arena *a, Row *row)
{
    release_slab(a, &row->in_offset, row->tag);
    release_slab(a, &row->out_offset, row->tag);
}

// The same with the slab of inputs that was attached to it: what could not be submitted.
static inline void place_give_back(Arena *a, int64_t place, uint32_t rows)
{
    Row *row = rows_of(slot_at(a, (uint32_t)(place >> 16))) + (place & 0xffff);
    release_slab(a, &row->in_offset, row->tag);
    place_abandon(a, place, rows);
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
static inline void place_release(const Arena *a, int64_t place, uint32_t rows)
{
    Slot *s = slot_at(a, (uint32_t)(place >> 16));
    Row *row = rows_of(s) + (place & 0xffff);
    if (!swap_row(row, ROW_ANSWERED, ROW_DROPPED))
        return;
    release_slabs(a, row);
    slot_release(a, s, rows);
}

// True for the first front that asks about this opening of the slot.
static inline bool slot_count_once(Slot *s) { return __atomic_exchange_n(&s->counted, 1u, __ATOMIC_RELAXED) == 0; }

// Rows written and not yet taken by a worker.
static inline uint32_t slot_queued(const Arena *a, uint32_t i)
{
    uint64_t w = load64(&slot_at(a, i)->word);
    return word_waits(w) ? word_settled(w) : 0;
}

// --- workers -------------------------------------------------------------------------------------

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

static inline uint32_t row_span(const Arena *a, const Row *rows, uint32_t r)
{
    uint32_t span = rows[r].rows;
    return span && span <= a->max_rows - r ? span : 1;
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

// What a worker says of a place it has taken with so many rows.
static inline uint64_t echo_of(uint64_t tag, uint32_t rows) { return tag ^ ECHO_TAKEN ^ (uint64_t)rows << 48; }

// The worker that took the slot has seen these places, whose inputs are therefore written; how many rows it runs.
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
            counters_place(a, sum, s, rows + r, span, s->done_ns);
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

// The worker that ran it died: give it to another.
static inline bool slot_return(Arena *a, Slot *s, uint32_t worker)
{
    uint64_t w = load64(&s->word);
    if (word_state(w) != SLOT_RUNNING || word_worker(w) != worker)
        return false;
    s->taken_ns = s->run_ns = s->ran_ns = s->moved_ns = s->rerun_ns = 0;
    return swap_ready(a, s, &w, make_word(word_generation(w), NO_WORKER, SLOT_READY, word_reserved(w), word_settled(w)));
}
