// Memory that a burst has touched and nobody has used since: given back to the machine, in every process at once.
//
// One process looks, every few seconds. What is looked at is first made ours, as a page under lease or as a slot
// that is CLAIMED, so that nobody writes into what is being dropped, and a death in between is reclaimed like any
// other. Slots and pages are taken lowest first, so what a steady load uses stays.
#pragma once
#include <stdlib.h>
#include <sys/mman.h>
#include "arena.h"
#include "slots.h"

enum { TRIM_PAGES = 4096 };     // at a time: 16 MB take some 4 ms

// What the process that looks remembers of a slot: the generation it found at its last look, and the one whose
// columns hold no memory.
typedef struct { uint16_t seen, clean; } SlotScan;
typedef struct { SlotScan *slots; uint32_t slot, page; } ArenaScan;

static inline bool scan_open(const Arena *a, ArenaScan *t)
{
    t->slots = (SlotScan *)calloc(a->slots, sizeof(SlotScan));
    return t->slots != NULL;
}

// Drop what the columns of a free slot hold; pages that they share with the row table stay. How many pages.
static inline uint32_t slot_drop(const Arena *a, uint32_t i, uint32_t front, uint64_t w, SlotScan *scan)
{
    Slot *s = slot_at(a, i);
    uint64_t claimed = make_word(word_generation(w), front, SLOT_CLAIMED, 0, 0);
    if (!swap_word(&s->word, &w, claimed))
        return 0;
    uintptr_t from = ((uintptr_t)(rows_of(s) + a->max_rows) + SLAB_PAGE - 1) & ~(uintptr_t)(SLAB_PAGE - 1);
    uintptr_t to = ((uintptr_t)s + a->slot_bytes) & ~(uintptr_t)(SLAB_PAGE - 1);
    if (to > from)
        madvise((void *)from, to - from, MADV_REMOVE);
    scan->seen = scan->clean = (uint16_t)(word_generation(claimed) + 1);
    slot_close(s, claimed);
    return to > from ? (uint32_t)((to - from) / SLAB_PAGE) : 0;
}

static inline uint32_t slot_trim(const Arena *a, uint32_t i, uint32_t front, SlotScan *scan)
{
    uint64_t w = load64(&slot_at(a, i)->word);
    uint16_t generation = (uint16_t)word_generation(w);
    bool old = generation == scan->seen && generation != scan->clean;
    scan->seen = generation;
    return old && word_state(w) == SLOT_FREE ? slot_drop(a, i, front, w, scan) : 0;
}

// One look, or a part of one: true when it was cut short, and is to go on soon.
static inline bool arena_trim(const Arena *a, ArenaScan *t, uint32_t front)
{
    uint32_t given = 0;
    for (; t->slot < a->slots && given < TRIM_PAGES; t->slot++)
        given += slot_trim(a, t->slot, front, &t->slots[t->slot]);
    if (t->slot < a->slots)
        return true;
    if (a->slabs.pages && given < TRIM_PAGES)
        slab_trim(&a->slabs, 1 + front, TRIM_PAGES - given, &t->page);
    else if (a->slabs.pages)
        return true;
    if (t->page == 0)
        t->slot = 0;
    return t->page != 0;
}
