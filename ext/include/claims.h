// What a front knows of its own leases without asking shared memory, which a worker gone mad may have changed.
//
// Each lease has a tag, a number only its front made and only its rows carry. It travels with the lease:
//
//   front   commit    row.tag = tag                        the inputs are written
//   worker  take      row.echo = tag ^ TAKEN ^ rows               seen before the run, as so many rows
//   worker  publish   row.echo = tag ^ TAKEN ^ rows ^ PUBLISHED   unless another lease covers the row
//   front   answered  row.tag, row.echo and row.rows are what they must be
//
// So the rows of a batch that was never run, was run before they were written, or was given to somebody else
// meanwhile, fail their caller instead of answering with another's numbers. Slabs carry the tag of their
// lease as their owner (lease_owner), and are read and released as that lease's only. This withstands
// accidents, not intent: a worker has the data of every caller of its version anyway.
//
// The claims are this front's private memory, one word a row: no two leases of one front ever overlap,
// whatever the slots' words say. LEFT marks rows whose caller has gone, and that a slot may be reused for.
#pragma once
#include <stdlib.h>
#include "runs.h"

static const uint64_t LEFT = (uint64_t)1 << 63;

typedef struct {
    uint64_t *held;     // tag of the lease each row belongs to, 0 for none; slots x max_rows, zero pages until used
                        // of a worker: how many rows each slot had when it was taken, at the slot's first row
    uint64_t next;      // of tags
} Claims;

// `lent` is zeroed memory for `held`, NULL to take our own, which free() gives back. False without memory.
static inline bool claims_open(const Arena *a, Claims *c, uint64_t *lent, uint64_t seed)
{
    c->held = lent ? lent : (uint64_t *)calloc((size_t)a->slots * a->max_rows, sizeof(uint64_t));
    c->next = seed;
    return c->held != NULL;
}

// splitmix64: every number once, in an order that depends on where `next` began.
static inline uint64_t claim_tag(Claims *c)
{
    uint64_t z = (c->next += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z = (z ^ z >> 31) & ~LEFT;
    return z ? z : 1;
}

static inline uint64_t *claim_at(const Arena *a, const Claims *c, int64_t lease)
{
    return c->held + (uint64_t)(lease >> 16) * a->max_rows + (lease & 0xffff);
}

static inline uint64_t *claims_ran(const Arena *a, const Claims *c, uint32_t slot) { return c->held + (uint64_t)slot * a->max_rows; }

static inline uint64_t claim_of(const Arena *a, const Claims *c, int64_t lease) { return *claim_at(a, c, lease) & ~LEFT; }

// The rows are ours now; false when some of them are already.
static inline bool claim_rows(const Arena *a, Claims *c, int64_t lease, uint32_t rows)
{
    uint64_t *held = claim_at(a, c, lease);
    uint64_t taken = 0;
    for (uint32_t r = 0; r < rows; r++)
        taken |= held[r] & LEFT ? 0 : held[r];
    if (taken)
        return false;
    uint64_t tag = claim_tag(c);
    for (uint32_t r = 0; r < rows; r++)
        held[r] = tag;
    return true;
}

// Rows that shared memory gave us a second time: nobody waits for them, and nothing in them is touched.
static inline void claim_refuse(Arena *a, int64_t lease, uint32_t rows)
{
    Slot *s = slot_at(a, (uint32_t)(lease >> 16));
    __atomic_store_n(&rows_of(s)[lease & 0xffff].state, (uint32_t)ROW_DROPPED, __ATOMIC_RELEASE);
    slot_settle_gone(a, s, rows);
}

// `mark` is what the rows of a lease are left with: 0, or LEFT.
static inline void claim_end(const Arena *a, Claims *c, int64_t lease, uint64_t mark)
{
    uint64_t *held = claim_at(a, c, lease);
    uint64_t tag = *held;
    for (uint32_t r = lease & 0xffff; tag && r < a->max_rows && *held == tag; r++, held++)
        *held = mark ? tag | mark : 0;
}

static inline Row *claim_row(const Arena *a, int64_t lease) { return rows_of(slot_at(a, (uint32_t)(lease >> 16))) + (lease & 0xffff); }

// Whether the row table still says that the lease is ours.
static inline bool claim_stands(const Arena *a, const Claims *c, int64_t lease)
{
    return claim_row(a, lease)->tag == claim_of(a, c, lease);
}

// Whether this very lease was run, after it was committed, and nobody else was put into its rows.
static inline bool claim_answered(const Arena *a, const Claims *c, int64_t lease, uint32_t rows)
{
    uint64_t tag = claim_of(a, c, lease);
    const Row *row = claim_row(a, lease);
    bool whole = tag && row->tag == tag && row->echo == (echo_of(tag, rows) ^ ECHO_PUBLISHED) && row->rows == rows;
    for (uint32_t r = 1; whole && a->fronts > 1 && r < rows; r++)    // one front's leases cannot overlap
        whole = row[r].state == ROW_EMPTY;
    return whole;
}
