// Pages leased from the end of an arena, for tensors whose size no column can foresee.
//
//   slabs:  [ SlabHeader | page word x pages | page 0 | page 1 | ... ]
//
// One word per page:  owner << 32 | n = first page of a lease of n pages,  owner << 32 | INSIDE = a later page
// of a lease,  owner 0 = free: FREE_CLEAN holds no memory, FREE_WARM was leased lately, FREE_OLD not since the
// last look (slab_trim). A lease claims its words one by one and gives back what it got when it meets a taken
// one, so no lock exists that a dying process could hold; slab_reclaim() finds what a dead owner held, half-made
// leases included.
//
// Leases begin at the lowest page that is free, so that a version keeps as many pages touched as it uses at a
// time, and no more: every page handed out in turn would cost the whole pool (512 MB) after a minute's load.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

// Owners: fronts are 1.., workers WORKER_OWNER.. with the number of their life above it (worker_owner()), so that nobody
// takes a lease of the next life for one of the last; what is attached to a lease has an owner made of its tag, or
// OWNER_LEASE where the one that attached it died.
enum { SLAB_PAGE = 4096, SLAB_MAGIC = 0x626c7361, WORKER_OWNER = 0x4000, OWNER_LEASE = 0xffff };
static const uint32_t INSIDE = 0xffffffffu;
enum { FREE_CLEAN = 0, FREE_WARM = 1, FREE_OLD = 2 };
enum { HINT_TRIES = 64, TRIM_RUN = 256 };
static const uint32_t LEASES = 0x80000000u;
static inline uint32_t lease_owner(uint64_t tag) { return LEASES | (uint32_t)tag; }
static inline uint32_t life_owner(uint32_t worker, uint32_t life) { return WORKER_OWNER + worker + ((life & 0x7fff) << 16); }
static inline bool same_process(uint32_t a, uint32_t b) { return a == b || (((a | b) & LEASES) == 0 && (a & 0xffff) == (b & 0xffff)); }

// `hint` is | how often something was freed 32 | a page 32 |: no page below it is free. `top`: no page from it on was ever leased.
typedef struct { uint32_t magic, pages; uint64_t pages_offset; alignas(64) uint64_t hint; uint64_t top; alignas(64) uint64_t words[1]; } SlabHeader;
typedef struct { SlabHeader *header; uint8_t *base; uint32_t pages; uint64_t pages_offset; } Slabs;

static inline void slab_format(uint8_t *base, uint32_t pages)
{
    SlabHeader *h = (SlabHeader *)base;
    h->pages = pages;
    __atomic_store_n(&h->magic, (uint32_t)SLAB_MAGIC, __ATOMIC_RELEASE);
}

static inline uint64_t slab_header_bytes(uint32_t pages)
{
    return (sizeof(SlabHeader) + (uint64_t)pages * 8 + SLAB_PAGE - 1) & ~(uint64_t)(SLAB_PAGE - 1);
}

static inline bool slab_attach(Slabs *s, uint8_t *base, uint64_t bytes)
{
    SlabHeader *h = (SlabHeader *)base;
    if (bytes < sizeof(SlabHeader) || h->magic != SLAB_MAGIC)
        return false;
    uint32_t pages = __atomic_load_n(&h->pages, __ATOMIC_RELAXED);
    if (pages < 1 || slab_header_bytes(pages) + (uint64_t)pages * SLAB_PAGE > bytes)
        return false;
    s->header = h, s->base = base, s->pages = pages, s->pages_offset = slab_header_bytes(pages);
    return true;
}

static inline uint64_t *slab_word(const Slabs *s, uint32_t page) { return &s->header->words[page]; }

static inline uint64_t slab_load(const Slabs *s, uint32_t page) { return __atomic_load_n(slab_word(s, page), __ATOMIC_ACQUIRE); }
static inline bool word_free(uint64_t word) { return word >> 32 == 0; }

// Pages below this may have been leased; only these need a look.
static inline uint32_t slab_top(const Slabs *s)
{
    if (s->pages == 0)
        return 0;
    uint64_t top = __atomic_load_n(&s->header->top, __ATOMIC_ACQUIRE);
    return top < s->pages ? (uint32_t)top : s->pages;
}

// Before the pages are claimed: a process that dies with them is looked for up to there.
static inline void slab_raise(const Slabs *s, uint64_t end)
{
    uint64_t top = __atomic_load_n(&s->header->top, __ATOMIC_RELAXED);
    while (top < end && !__atomic_compare_exchange_n(&s->header->top, &top, end, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
}

// Something from `page` on was freed. Counting it keeps a lease that looked before from moving the hint past it.
static inline void slab_lower(const Slabs *s, uint32_t page)
{
    uint64_t seen = __atomic_load_n(&s->header->hint, __ATOMIC_RELAXED);
    for (uint32_t tries = 0; tries < HINT_TRIES; tries++) {
        uint32_t low = (uint32_t)seen < page ? (uint32_t)seen : page;
        uint64_t next = ((seen >> 32) + 1) << 32 | low;
        if (__atomic_compare_exchange_n(&s->header->hint, &seen, next, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return;
    }
}

static inline void slab_free_pages(const Slabs *s, uint32_t first, uint32_t count, uint64_t free_word)
{
    for (uint32_t i = count; i-- > 0;)
        __atomic_store_n(slab_word(s, first + i), free_word, __ATOMIC_RELEASE);
    if (count)
        slab_lower(s, first);
}

// Claim pages [first, first + count); false leaves them free and names the taken page.
static inline bool slab_claim(const Slabs *s, uint32_t first, uint32_t count, uint32_t owner, uint32_t *taken)
{
    slab_raise(s, (uint64_t)first + count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t word = slab_load(s, first + i);
        if (!word_free(word) || !__atomic_compare_exchange_n(slab_word(s, first + i), &word, (uint64_t)owner << 32 | INSIDE, false,
                                                             __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            slab_free_pages(s, first, i, FREE_WARM);
            *taken = first + i;
            return false;
        }
    }
    __atomic_store_n(slab_word(s, first), (uint64_t)owner << 32 | count, __ATOMIC_RELEASE);
    return true;
}

// How many pages are free from `page` on, at most `count`.
static inline uint32_t slab_run(const Slabs *s, uint32_t page, uint32_t count)
{
    uint32_t run = 0;
    while (run < count && word_free(slab_load(s, page + run)))
        run++;
    return run;
}

// First fit in [from, to); returns the first page or -1.
static inline int64_t slab_fit(const Slabs *s, uint64_t from, uint32_t to, uint32_t count, uint32_t owner)
{
    uint32_t taken = 0;
    for (uint64_t page = from; page + count <= to;) {
        uint32_t run = slab_run(s, (uint32_t)page, count);
        if (run == count && slab_claim(s, (uint32_t)page, count, owner, &taken))
            return (int64_t)page;
        if (run == count) {     // another was faster
            page = (uint64_t)taken + 1;
            continue;
        }
        uint32_t held = (uint32_t)slab_load(s, (uint32_t)page + run);     // a whole lease is passed at once
        page += run + (held > 1 && held <= s->pages ? held : 1);
    }
    return -1;
}

// A lease of at least `bytes` bytes: its offset from the slabs' start, or 0 when there is no room.
static inline uint64_t slab_allocate(const Slabs *s, uint64_t bytes, uint32_t owner)
{
    uint64_t count = (bytes + SLAB_PAGE - 1) / SLAB_PAGE;
    if (count == 0)
        count = 1;
    if (count > s->pages)
        return 0;
    uint64_t hint = __atomic_load_n(&s->header->hint, __ATOMIC_ACQUIRE);
    uint32_t low = (uint32_t)hint < s->pages ? (uint32_t)hint : 0;
    int64_t page = slab_fit(s, low, s->pages, (uint32_t)count, owner);
    if (page >= 0 && (count == 1 || page == low)) {     // nothing is left free before its end
        uint64_t next = hint >> 32 << 32 | (uint32_t)(page + (int64_t)count);
        __atomic_compare_exchange_n(&s->header->hint, &hint, next, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }
    if (page < 0 && low > 0)    // what a process freed that died before it could say so
        page = slab_fit(s, 0, s->pages, (uint32_t)count, owner);
    if (page < 0)
        return 0;
    return s->pages_offset + (uint64_t)page * SLAB_PAGE;
}

// The first page of the lease at `offset`, with its pages in *count; -1 when no lease starts there. The
// word is read once: another process may change it between two looks.
static inline int64_t slab_find(const Slabs *s, uint64_t offset, uint32_t *count)
{
    if (offset < s->pages_offset || (offset - s->pages_offset) % SLAB_PAGE)
        return -1;
    uint64_t page = (offset - s->pages_offset) / SLAB_PAGE;
    if (page >= s->pages)
        return -1;
    uint64_t word = slab_load(s, (uint32_t)page);
    *count = (uint32_t)word;
    return !word_free(word) && *count != 0 && *count <= s->pages - page ? (int64_t)page : -1;
}

// Who holds the lease at `offset`, 0 when none starts there.
static inline uint32_t slab_owner(const Slabs *s, uint64_t offset)
{
    uint32_t count = 0;
    int64_t page = slab_find(s, offset, &count);
    return page < 0 ? 0 : (uint32_t)(__atomic_load_n(slab_word(s, (uint32_t)page), __ATOMIC_ACQUIRE) >> 32);
}

// True when `offset` is the start of a lease that holds `bytes` bytes.
static inline bool slab_holds(const Slabs *s, uint64_t offset, uint64_t bytes)
{
    uint32_t count = 0;
    return slab_find(s, offset, &count) >= 0 && bytes <= (uint64_t)count * SLAB_PAGE;
}

static inline bool slab_release(const Slabs *s, uint64_t offset)
{
    uint32_t count = 0;
    int64_t page = slab_find(s, offset, &count);
    if (page < 0)
        return false;
    // A half-released lease must not look like a whole one: its later pages may already be another's.
    __atomic_fetch_or(slab_word(s, (uint32_t)page), (uint64_t)INSIDE, __ATOMIC_ACQ_REL);
    slab_free_pages(s, (uint32_t)page, count, FREE_WARM);
    return true;
}

// The lease changes hands: from the process that filled it to the one that will release it. False when it is
// not the giver's, as when somebody wrote over the word and the pages are leased anew.
static inline bool slab_give(const Slabs *s, uint64_t offset, uint32_t from, uint32_t to)
{
    uint32_t count = 0;
    int64_t page = slab_find(s, offset, &count);
    uint64_t held = (uint64_t)from << 32 | count;
    return page >= 0 && __atomic_compare_exchange_n(slab_word(s, (uint32_t)page), &held, (uint64_t)to << 32 | count, false,
                                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

// Free what a dead owner held, in any of its lives; returns the number of pages. Later pages of a lease keep the
// owner that claimed them, so a whole lease is judged by its first page: who takes it over meanwhile (slab_give)
// has all of it, or nothing.
static inline uint32_t slab_reclaim(const Slabs *s, uint32_t owner)
{
    uint32_t freed = 0, top = slab_top(s);
    for (uint32_t page = 0; page < top;) {
        uint64_t word = slab_load(s, page);
        uint32_t count = (uint32_t)word;
        if (word_free(word) || count == 0 || count == INSIDE || count > s->pages - page)
            count = 1;
        bool whole = count > 1, theirs = !word_free(word) && same_process((uint32_t)(word >> 32), owner);
        if (theirs && whole && !__atomic_compare_exchange_n(slab_word(s, page), &word, word | INSIDE, false,
                                                            __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        for (uint32_t i = count; theirs && i-- > 0;) {
            uint64_t held = i ? slab_load(s, page + i) : whole ? word | INSIDE : word;
            if (word_free(held) || (i && (uint32_t)held != INSIDE))
                continue;
            freed += __atomic_compare_exchange_n(slab_word(s, page + i), &held, (uint64_t)FREE_WARM, false,
                                                 __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        }
        page += count;
    }
    if (freed)
        slab_lower(s, 0);
    return freed;
}

static inline uint32_t slab_used(const Slabs *s)
{
    uint32_t used = 0, top = slab_top(s);
    for (uint32_t page = 0; page < top; page++)
        used += !word_free(slab_load(s, page));
    return used;
}

// --- giving memory back --------------------------------------------------------------------------

static inline bool swap_free(const Slabs *s, uint32_t page, uint64_t from, uint64_t to)
{
    return __atomic_compare_exchange_n(slab_word(s, page), &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

// Claim the old pages from `first` on, at most TRIM_RUN, drop what they hold and free them; how many there were.
// They are `owner`'s meanwhile, so nobody else writes there, and a death in between is reclaimed like any other.
// The memory goes in every process that maps it, and reads as zeros afterwards.
static inline uint32_t slab_drop_run(const Slabs *s, uint32_t first, uint32_t to, uint32_t owner, bool *dropped)
{
    uint32_t run = 0;
    while (run < TRIM_RUN && first + run < to && swap_free(s, first + run, FREE_OLD, (uint64_t)owner << 32 | INSIDE))
        run++;
    if (run == 0)
        return 0;
    *dropped = madvise(s->base + s->pages_offset + (uint64_t)first * SLAB_PAGE, (size_t)run * SLAB_PAGE, MADV_REMOVE) == 0;
    slab_free_pages(s, first, run, *dropped ? FREE_CLEAN : FREE_WARM);
    return run;
}

// One look at the pages from *at on: what was freed since the last look grows old, what was old already is given
// back to the machine, `most` pages at most. Returns how many; *at is where to go on, 0 at the end.
static inline uint32_t slab_trim(const Slabs *s, uint32_t owner, uint32_t most, uint32_t *at)
{
    uint32_t given = 0, top = slab_top(s), page = *at;
    while (page < top && given < most) {
        uint64_t word = slab_load(s, page);
        bool dropped = false;
        uint32_t run = word == FREE_OLD ? slab_drop_run(s, page, top, owner, &dropped) : 0;
        if (word == FREE_WARM)
            swap_free(s, page, FREE_WARM, FREE_OLD);
        given += dropped ? run : 0;
        page += run ? run : 1;
    }
    *at = page < top ? page : 0;
    return given;
}
