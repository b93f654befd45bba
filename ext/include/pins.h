// Arenas whose memory a device reads and writes by DMA where it lies, in a process that a front has told to.
//
// A registered page that trimming dropped (trim.h) would go on being read and written as it was, and nobody would see
// it: so while any front says `pinned`, nothing is dropped. Who pins and who trims each say so first and look second, in
// one order for all (SEQ_CST): one of them sees the other. The one that pins waits; the one that trims does not begin.
#pragma once
#include "arena.h"

// True when nothing is being dropped, and nothing will be until pins_drop(); else to be asked again.
static inline bool pins_take(const Arena *a, uint32_t front)
{
    __atomic_store_n(&a->header->front[front].pinned, 1, __ATOMIC_SEQ_CST);
    return !__atomic_load_n(&a->header->trimming, __ATOMIC_SEQ_CST);
}

// Nothing is registered for this front any more: it said so, or it is dead.
static inline void pins_drop(const Arena *a, uint32_t front)
{
    __atomic_store_n(&a->header->front[front].pinned, 0, __ATOMIC_SEQ_CST);
}

static inline void pins_leave(const Arena *a) { __atomic_store_n(&a->header->trimming, 0, __ATOMIC_SEQ_CST); }

// Before anything is dropped; with true, pins_leave() comes after it.
static inline bool pins_allow(const Arena *a)
{
    __atomic_store_n(&a->header->trimming, 1, __ATOMIC_SEQ_CST);
    for (uint32_t f = 0; f < a->fronts; f++)
        if (__atomic_load_n(&a->header->front[f].pinned, __ATOMIC_SEQ_CST)) {
            pins_leave(a);
            return false;
        }
    return true;
}
