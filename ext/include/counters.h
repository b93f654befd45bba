// Counting what became of requests and batches, where it is known anyway: a worker as it publishes, a front as
// it turns somebody away. Relaxed adds; a reader sees sums that are each right, not one moment of them all.
#pragma once
#include "arena.h"

static inline void add64(uint64_t *at, uint64_t n) { __atomic_fetch_add(at, n, __ATOMIC_RELAXED); }
// What workers alone write: with one of them nobody else is in between, and the locked add costs more than all the rest.
static inline void bump64(const Arena *a, uint64_t *at, uint64_t n)
{
    if (a->workers > 1)
        add64(at, n);
    else
        __atomic_store_n(at, __atomic_load_n(at, __ATOMIC_RELAXED) + n, __ATOMIC_RELAXED);
}
static inline uint64_t since_ns(uint64_t from, uint64_t to) { return from && to > from ? to - from : 0; }

static inline void counters_add(const Arena *a, uint32_t kind, uint64_t count, uint64_t ns)
{
    add64(&a->header->counters[kind].count, count);
    add64(&a->header->counters[kind].ns, ns);
}

static inline void counters_bump(const Arena *a, uint32_t kind, uint64_t count, uint64_t ns)
{
    bump64(a, &a->header->counters[kind].count, count);
    bump64(a, &a->header->counters[kind].ns, ns);
}

static inline RunCounters *runs_of(const Arena *a, uint32_t rows)
{
    return (RunCounters *)(a->base + a->runs_offset) + (rows <= a->max_rows ? rows : a->max_rows);
}

static inline Spread *spread_of(const Arena *a, uint32_t kind) { return (Spread *)(a->base + a->spreads_offset) + kind; }

static inline uint32_t spread_bucket(uint64_t ns)
{
    if (ns < 1024)
        return 0;
    uint32_t power = 63 - __builtin_clzll(ns);
    uint32_t bucket = (power - 10) * 16 + (ns >> (power - 4) & 15) + 1;
    return bucket < SPREAD_BUCKETS ? bucket : SPREAD_BUCKETS - 1;
}

static inline void spread_add(const Arena *a, uint32_t kind, uint64_t ns, uint64_t count)
{
    bump64(a, &spread_of(a, kind)->bucket[spread_bucket(ns)], count);
}

// The requests of one batch, counted while its rows are walked.
typedef struct { uint64_t well, rows, queue_ns, well_ns, badly, badly_ns; } BatchCounters;

// A lease that has waited since 0 is a row its scheduler needed, and nobody's request.
static inline void counters_lease(const Arena *a, BatchCounters *sum, const Slot *s, const Row *row, uint32_t rows, uint64_t now)
{
    if (!row->queued_ns)
        return;
    uint64_t took = since_ns(row->queued_ns, now), queued = since_ns(row->queued_ns, s->taken_ns);
    if (s->status || row->status) {
        sum->badly++, sum->badly_ns += took;
        return;
    }
    sum->well++, sum->rows += rows, sum->well_ns += took;
    sum->queue_ns += queued;
    spread_add(a, COUNT_SUCCESS, took, 1);
    spread_add(a, COUNT_QUEUE, queued, 1);
}

// Its requests each waited for the whole batch; one that never ran is no execution.
static inline void counters_batch(const Arena *a, const Slot *s, uint32_t rows, const BatchCounters *sum)
{
    uint64_t ran = s->ran_ns ? s->ran_ns : s->done_ns;
    uint64_t input = since_ns(s->taken_ns, s->run_ns), infer = since_ns(s->run_ns, ran), output = since_ns(ran, s->done_ns);
    if (sum->well) {
        counters_bump(a, COUNT_SUCCESS, sum->well, sum->well_ns);
        counters_bump(a, COUNT_QUEUE, sum->well, sum->queue_ns);
        counters_bump(a, COUNT_INPUT, sum->well, sum->well * input);
        counters_bump(a, COUNT_INFER, sum->well, sum->well * infer);
        counters_bump(a, COUNT_OUTPUT, sum->well, sum->well * output);
        spread_add(a, COUNT_INPUT, input, sum->well);
        spread_add(a, COUNT_INFER, infer, sum->well);
        spread_add(a, COUNT_OUTPUT, output, sum->well);
        bump64(a, &a->header->served_rows, sum->rows);
        __atomic_store_n(&a->header->served_ns, s->done_ns, __ATOMIC_RELAXED);
    }
    if (sum->badly)
        counters_add(a, COUNT_BACKEND, sum->badly, sum->badly_ns);
    if (!s->run_ns)
        return;
    RunCounters *runs = runs_of(a, rows);
    bump64(a, &runs->runs, 1), bump64(a, &runs->input_ns, input);
    bump64(a, &runs->infer_ns, infer > s->rerun_ns ? infer - s->rerun_ns : 0), bump64(a, &runs->output_ns, output);
}

// The backend has run a part of a batch again: an execution of its own, whose time is not the whole batch's.
static inline void counters_rerun(const Arena *a, Slot *s, uint32_t rows, uint64_t took_ns)
{
    RunCounters *runs = runs_of(a, rows);
    bump64(a, &runs->runs, 1), bump64(a, &runs->infer_ns, took_ns);
    s->rerun_ns += took_ns;
}
