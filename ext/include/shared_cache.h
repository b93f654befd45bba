// The response cache of several processes: one table in memory that they share (ext/response_cache.pyx uses it).
//
//     head | buckets: first record of each hash | records | next block of each block | blocks of 512 bytes
//
// A record and its blocks hold the key, a note that says what the bytes after it are, and the bytes. The holder of the mutex may change
// anything; a reader takes it to find a record and to make it the newest, and copies the bytes without it: `seq` says whether they were
// still the record's afterwards. A process may be killed anywhere. The kernel says so to the next one that takes the mutex, which
// empties the table: it is a cache. Nobody waits long: a process that does not get the mutex soon does without (its holder may be stopped).
#pragma once
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static const uint64_t CACHE_MAGIC = 0x3165686361437366ull;
static const uint32_t CACHE_NONE = 0xffffffffu;
enum { CACHE_BLOCK = 512, CACHE_SPIN_NS = 200000 };

typedef struct CacheHead {
    uint64_t magic, capacity, seed;
    uint32_t record_max, block_max, bucket_mask, unused;
    pthread_mutex_t mutex;
    // under the mutex
    uint64_t used, next_seq;
    uint32_t entries, oldest, newest;
    uint32_t free_record, records_touched;
    uint32_t free_block, blocks_touched, blocks_used;
    // by anybody, atomically
    uint64_t hits, misses, evictions, lookup_ns, insertion_ns, resets;
} CacheHead;

typedef struct CacheRecord {
    uint64_t seq;                           // 0 of a free record; another one with every use
    uint64_t hash, nbytes, data_bytes;
    uint32_t key_bytes, note_bytes, first;
    uint32_t chain, older, newer;           // `chain`: in its bucket, or among free records
} CacheRecord;

typedef struct CacheView {
    CacheHead *head;
    uint32_t *buckets;
    CacheRecord *records;
    uint32_t *next;
    char *blocks;
} CacheView;

static inline uint64_t cache_blocks(uint64_t bytes) { return (bytes + CACHE_BLOCK - 1) / CACHE_BLOCK; }

// Sizes of a table. Every entry is counted with 512 bytes beside key and data, so that its blocks are nearly paid for.
static inline void cache_sizes(uint64_t capacity, uint64_t *records, uint64_t *blocks, uint64_t *buckets)
{
    *records = capacity / CACHE_BLOCK + 1;
    *blocks = capacity / CACHE_BLOCK + capacity / (8 * CACHE_BLOCK) + 16;
    for (*buckets = 64; *buckets < *records && *buckets < (1u << 30); *buckets *= 2);
}

static inline uint64_t cache_round(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

static inline uint64_t cache_bytes(uint64_t capacity)
{
    uint64_t records, blocks, buckets;
    cache_sizes(capacity, &records, &blocks, &buckets);
    return cache_round(sizeof(CacheHead)) + cache_round(buckets * 4) + cache_round(records * sizeof(CacheRecord))
        + cache_round(blocks * 4) + blocks * CACHE_BLOCK;
}

static inline CacheView cache_view(char *memory, uint64_t capacity)
{
    uint64_t records, blocks, buckets;
    cache_sizes(capacity, &records, &blocks, &buckets);
    CacheView view;
    view.head = (CacheHead *)memory;
    view.buckets = (uint32_t *)(memory + cache_round(sizeof(CacheHead)));
    view.records = (CacheRecord *)((char *)view.buckets + cache_round(buckets * 4));
    view.next = (uint32_t *)((char *)view.records + cache_round(records * sizeof(CacheRecord)));
    view.blocks = (char *)view.next + cache_round(blocks * 4);
    return view;
}

// Buckets and chains keep a record's number + 1: zero is the end.
static inline void cache_empty(CacheView *view)
{
    CacheHead *head = view->head;
    for (uint32_t i = 0; i < head->records_touched && i < head->record_max; i++)
        __atomic_store_n(&view->records[i].seq, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memset(view->buckets, 0, ((uint64_t)head->bucket_mask + 1) * 4);
    head->used = 0;
    head->entries = head->records_touched = head->blocks_touched = head->blocks_used = 0;
    head->oldest = head->newest = head->free_record = head->free_block = CACHE_NONE;
}

static inline bool cache_lay_out(CacheView *view, uint64_t capacity, uint64_t seed)
{
    uint64_t records, blocks, buckets;
    CacheHead *head = view->head;
    pthread_mutexattr_t attributes;
    cache_sizes(capacity, &records, &blocks, &buckets);
    head->capacity = capacity;
    head->seed = seed;
    head->record_max = (uint32_t)records;
    head->block_max = (uint32_t)blocks;
    head->bucket_mask = (uint32_t)(buckets - 1);
    head->next_seq = 1;
    cache_empty(view);
    pthread_mutexattr_init(&attributes);
    bool made = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0
        && pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0
        && pthread_mutex_init(&head->mutex, &attributes) == 0;
    pthread_mutexattr_destroy(&attributes);
    if (made) __atomic_store_n(&head->magic, CACHE_MAGIC, __ATOMIC_RELEASE);
    return made;
}

static inline uint64_t cache_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void cache_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// False: do without. A process that died with the mutex may have left anything.
static inline bool cache_lock(CacheView *view)
{
    CacheHead *head = view->head;
    uint64_t until = 0;
    for (uint32_t turn = 1;; turn++) {
        int found = pthread_mutex_trylock(&head->mutex);
        if (found == 0) return true;
        if (found == EOWNERDEAD) {
            cache_empty(view);      // once more if this one dies here as well
            __atomic_fetch_add(&head->resets, 1, __ATOMIC_RELAXED);
            pthread_mutex_consistent(&head->mutex);
            return true;
        }
        if (found != EBUSY) return false;
        if (turn % 64 == 0) {
            uint64_t now = cache_now_ns();
            if (!until) until = now + CACHE_SPIN_NS;
            if (now >= until) return false;
        }
        cache_pause();
    }
}

static inline void cache_unlock(CacheView *view) { pthread_mutex_unlock(&view->head->mutex); }

static inline uint64_t cache_mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xe7037ed1a0b428dbull);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t cache_hash(uint64_t seed, const char *data, uint64_t size)
{
    uint64_t hash = cache_mix(seed, size), word;
    uint64_t at = 0;
    for (; at + 8 <= size; at += 8) {
        memcpy(&word, data + at, 8);
        hash = cache_mix(hash ^ word, seed);
    }
    word = 0;
    memcpy(&word, data + at, size - at);
    return cache_mix(hash ^ word, seed + 1);
}

// A place in a record's bytes. Every block is checked before it is touched: what a reader follows may be another's by now.
typedef struct CacheCursor {
    const CacheView *view;
    uint32_t block, at;
} CacheCursor;

static inline bool cache_step(CacheCursor *cursor)
{
    if (cursor->block >= cursor->view->head->block_max) return false;
    if (cursor->at == CACHE_BLOCK) {
        cursor->block = __atomic_load_n(&cursor->view->next[cursor->block], __ATOMIC_RELAXED);
        cursor->at = 0;
        if (cursor->block >= cursor->view->head->block_max) return false;
    }
    return true;
}

static inline bool cache_read(CacheCursor *cursor, char *to, uint64_t size)
{
    while (size) {
        if (!cache_step(cursor)) return false;
        uint64_t piece = CACHE_BLOCK - cursor->at;
        if (piece > size) piece = size;
        memcpy(to, cursor->view->blocks + (uint64_t)cursor->block * CACHE_BLOCK + cursor->at, piece);
        to += piece;
        size -= piece;
        cursor->at += (uint32_t)piece;
    }
    return true;
}

static inline bool cache_write(CacheCursor *cursor, const char *from, uint64_t size)
{
    while (size) {
        if (!cache_step(cursor)) return false;
        uint64_t piece = CACHE_BLOCK - cursor->at;
        if (piece > size) piece = size;
        memcpy(cursor->view->blocks + (uint64_t)cursor->block * CACHE_BLOCK + cursor->at, from, piece);
        from += piece;
        size -= piece;
        cursor->at += (uint32_t)piece;
    }
    return true;
}

static inline bool cache_equals(CacheCursor *cursor, const char *key, uint64_t size)
{
    while (size) {
        if (!cache_step(cursor)) return false;
        uint64_t piece = CACHE_BLOCK - cursor->at;
        if (piece > size) piece = size;
        if (memcmp(cursor->view->blocks + (uint64_t)cursor->block * CACHE_BLOCK + cursor->at, key, piece)) return false;
        key += piece;
        size -= piece;
        cursor->at += (uint32_t)piece;
    }
    return true;
}

// --- under the mutex

static inline uint32_t cache_find(CacheView *view, uint64_t hash, const char *key, uint32_t key_bytes)
{
    uint32_t found = view->buckets[hash & view->head->bucket_mask];
    while (found) {
        CacheRecord *record = &view->records[found - 1];
        CacheCursor cursor = {view, record->first, 0};
        if (record->hash == hash && record->key_bytes == key_bytes && cache_equals(&cursor, key, key_bytes)) return found - 1;
        found = record->chain;
    }
    return CACHE_NONE;
}

static inline void cache_unlink(CacheView *view, uint32_t number)
{
    CacheRecord *record = &view->records[number];
    if (record->older != CACHE_NONE) view->records[record->older].newer = record->newer;
    else view->head->oldest = record->newer;
    if (record->newer != CACHE_NONE) view->records[record->newer].older = record->older;
    else view->head->newest = record->older;
}

static inline void cache_link(CacheView *view, uint32_t number)
{
    CacheHead *head = view->head;
    CacheRecord *record = &view->records[number];
    record->newer = CACHE_NONE;
    record->older = head->newest;
    if (head->newest != CACHE_NONE) view->records[head->newest].newer = number;
    else head->oldest = number;
    head->newest = number;
}

static inline void cache_drop(CacheView *view, uint32_t number)
{
    CacheHead *head = view->head;
    CacheRecord *record = &view->records[number];
    __atomic_store_n(&record->seq, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);    // before anything of it changes: a reader looks at it last
    cache_unlink(view, number);
    uint32_t *link = &view->buckets[record->hash & head->bucket_mask];
    while (*link != number + 1) link = &view->records[*link - 1].chain;
    *link = record->chain;
    uint64_t count = cache_blocks(record->key_bytes + record->note_bytes + record->data_bytes);
    uint32_t block = record->first;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t after = view->next[block];
        __atomic_store_n(&view->next[block], head->free_block, __ATOMIC_RELAXED);
        head->free_block = block;
        block = after;
    }
    head->blocks_used -= (uint32_t)count;
    head->used -= record->nbytes;
    head->entries--;
    record->chain = head->free_record;
    head->free_record = number;
}

static inline uint32_t cache_take_block(CacheView *view)
{
    CacheHead *head = view->head;
    uint32_t block = head->free_block;
    if (block != CACHE_NONE) head->free_block = view->next[block];
    else block = head->blocks_touched++;
    head->blocks_used++;
    return block;
}

// Room for a new record; what is used least recently goes. CACHE_NONE: there is one of that key, or it would not fit at all.
static inline uint32_t cache_make(
    CacheView *view, uint64_t hash, const char *key, uint32_t key_bytes, uint32_t note_bytes, uint64_t data_bytes, uint64_t nbytes)
{
    CacheHead *head = view->head;
    uint64_t count = cache_blocks((uint64_t)key_bytes + note_bytes + data_bytes);
    if (nbytes > head->capacity || count > head->block_max || cache_find(view, hash, key, key_bytes) != CACHE_NONE) return CACHE_NONE;
    while (head->oldest != CACHE_NONE
           && (head->used + nbytes > head->capacity || head->blocks_used + count > head->block_max || head->entries == head->record_max)) {
        cache_drop(view, head->oldest);
        __atomic_fetch_add(&head->evictions, 1, __ATOMIC_RELAXED);
    }
    uint32_t number = head->free_record;
    if (number != CACHE_NONE) head->free_record = view->records[number].chain;
    else number = head->records_touched++;
    CacheRecord *record = &view->records[number];
    uint32_t last = CACHE_NONE;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t block = cache_take_block(view);
        if (last == CACHE_NONE) record->first = block;
        else __atomic_store_n(&view->next[last], block, __ATOMIC_RELAXED);
        last = block;
    }
    record->hash = hash;
    record->nbytes = nbytes;
    record->data_bytes = data_bytes;
    record->key_bytes = key_bytes;
    record->note_bytes = note_bytes;
    uint32_t *bucket = &view->buckets[hash & head->bucket_mask];
    record->chain = *bucket;
    *bucket = number + 1;
    cache_link(view, number);
    head->used += nbytes;
    head->entries++;
    return number;
}

static inline void cache_show(CacheView *view, uint32_t number)     // its bytes are written
{
    __atomic_store_n(&view->records[number].seq, view->head->next_seq++, __ATOMIC_RELEASE);
}

// Drops records of [from, from + count) whose keys begin so; returns where to go on, CACHE_NONE at the end.
static inline uint32_t cache_forget(CacheView *view, uint32_t from, uint32_t count, const char *prefix, uint32_t size)
{
    uint32_t end = from + count < view->head->records_touched ? from + count : view->head->records_touched;
    for (uint32_t i = from; i < end; i++) {
        CacheRecord *record = &view->records[i];
        CacheCursor cursor = {view, record->first, 0};
        if (record->seq && record->key_bytes >= size && cache_equals(&cursor, prefix, size)) cache_drop(view, i);
    }
    return end == view->head->records_touched ? CACHE_NONE : end;
}

// --- for tests: 0 if everything in the table fits together, else the number of what does not

static inline int cache_audit(CacheView *view)
{
    CacheHead *head = view->head;
    uint64_t used = 0, blocks = 0;
    uint32_t entries = 0, before = CACHE_NONE;
    for (uint32_t at = head->oldest; at != CACHE_NONE; at = view->records[at].newer) {
        if (at >= head->records_touched) return 1;
        CacheRecord *record = &view->records[at];
        if (record->older != before) return 2;
        if (!record->seq || record->seq >= head->next_seq) return 3;
        uint32_t found = view->buckets[record->hash & head->bucket_mask];
        while (found && found != at + 1) found = view->records[found - 1].chain;
        if (!found) return 4;
        used += record->nbytes;
        blocks += cache_blocks(record->key_bytes + record->note_bytes + record->data_bytes);
        before = at;
        if (++entries > head->record_max) return 5;
    }
    uint64_t free_blocks = 0, free_records = 0;
    for (uint32_t at = head->free_block; at != CACHE_NONE; at = view->next[at])
        if (at >= head->blocks_touched || ++free_blocks > head->block_max) return 6;
    for (uint32_t at = head->free_record; at != CACHE_NONE; at = view->records[at].chain)
        if (at >= head->records_touched || ++free_records > head->record_max) return 7;
    if (before != head->newest || entries != head->entries || used != head->used) return 8;
    if (blocks != head->blocks_used || blocks + free_blocks != head->blocks_touched) return 9;
    if (entries + free_records != head->records_touched || used > head->capacity) return 10;
    return 0;
}
