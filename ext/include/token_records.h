// Text generation across the process line: prompts to a worker, tokens to a front.
//
//   prompt, in the slab of its lease:  [ PromptHead | int32 x ids | note ]
//   tokens, in a slab of the worker's: [ RecordsHead | TokenRecord x count | their extra bytes, one after the other ]
//
// A front gets tokens in one RECORDS message for all of a step that are for it. The slab is the worker's until the
// front takes it (notify.h). A sequence is known by its rid,
// | 01 | of its lease's tag 46 | slot 16 |: as its front alone made the tag, whatever is written elsewhere in shared
// memory brings nobody the tokens of somebody else.
#pragma once
#include "notify.h"

enum { PROMPT_MAGIC = 0x746d7270, EXTRA_MOST = 0xffffff, FINISHES = 16 };

typedef struct { uint32_t magic, ids; uint64_t note_bytes; } PromptHead;
typedef struct { uint64_t nbytes; uint32_t count, unused; } RecordsHead;
typedef struct {
    uint64_t rid;
    int32_t token;          // -1 for none
    uint32_t took_us, index;
    uint32_t tail;          // | finish 8 | extra bytes 24 |
} TokenRecord;

static inline uint64_t rid_of(uint64_t tag, uint32_t slot) { return ((tag | (uint64_t)1 << 62) & ~((uint64_t)1 << 63 | 0xffff)) | slot; }
static inline uint32_t record_extra(const TokenRecord *r) { return r->tail & EXTRA_MOST; }
static inline uint32_t record_finish(const TokenRecord *r) { return r->tail >> 24; }

// Bytes of a prompt's note, or -1 when these are no prompt.
static inline int64_t prompt_note(const uint8_t *at, uint64_t nbytes, PromptHead *head)
{
    if (nbytes < sizeof(PromptHead))
        return -1;
    memcpy(head, at, sizeof(PromptHead));
    uint64_t before = sizeof(PromptHead) + (uint64_t)head->ids * sizeof(int32_t);
    return head->magic == PROMPT_MAGIC && before <= nbytes && head->note_bytes == nbytes - before ? (int64_t)head->note_bytes : -1;
}

// Whether the records and their extra bytes fill the slab's bytes exactly.
static inline bool records_sound(const uint8_t *at, uint64_t nbytes, RecordsHead *head)
{
    if (nbytes < sizeof(RecordsHead))
        return false;
    memcpy(head, at, sizeof(RecordsHead));
    uint64_t need = sizeof(RecordsHead) + (uint64_t)head->count * sizeof(TokenRecord);
    if (head->nbytes != nbytes || need > nbytes)
        return false;
    const TokenRecord *records = (const TokenRecord *)(at + sizeof(RecordsHead));
    for (uint32_t i = 0; i < head->count; i++)
        need += record_extra(records + i);
    return need == nbytes;
}

// --- the worker: who sits where -------------------------------------------------------------------

typedef struct {
    uint64_t rid;           // 0: nobody
    uint64_t deadline_ns;
    uint32_t sent;          // records
    uint32_t at;            // among those active
    uint16_t front;
    bool end_sent;              // the engine was told to end it
    bool refused;           // it had no room when the engine last asked
} Seat;

typedef struct { uint8_t *records, *extra; uint64_t used, room, extra_used, extra_room; } Pile;

typedef struct {
    Seat *seats;            // by slot
    uint32_t *active, *ended;
    uint32_t actives, endings, window;
    Pile piles[MAX_FRONTS];
} Sender;

static inline bool sender_open(const Arena *a, Sender *s, uint32_t window)
{
    s->seats = (Seat *)calloc(a->slots, sizeof(Seat));
    s->active = (uint32_t *)calloc(a->slots, sizeof(uint32_t));
    s->ended = (uint32_t *)calloc(a->slots, sizeof(uint32_t));
    s->window = window;
    return s->seats && s->active && s->ended;
}

static inline void sender_close(Sender *s)
{
    free(s->seats), free(s->active), free(s->ended);
    for (uint32_t f = 0; f < MAX_FRONTS; f++)
        free(s->piles[f].records), free(s->piles[f].extra);
}

// The sequence of a slot this worker has taken.
static inline uint64_t seat_take(const Arena *a, Sender *s, uint32_t slot, uint64_t deadline_ns)
{
    Seat *seat = s->seats + slot;
    Row *row = rows_of(slot_at(a, slot));
    memset(seat, 0, sizeof(Seat));
    seat->rid = rid_of(row->tag, slot);
    seat->deadline_ns = deadline_ns;
    seat->front = row->front < a->fronts ? row->front : 0;
    seat->at = s->actives;
    s->active[s->actives++] = slot;
    return seat->rid;
}

// NULL for a sequence that is not, or no longer, here.
static inline Seat *seat_of(const Arena *a, const Sender *s, uint64_t rid)
{
    Seat *seat = (rid & 0xffff) < a->slots ? s->seats + (rid & 0xffff) : NULL;
    return seat && rid && seat->rid == rid ? seat : NULL;
}

static inline bool pile_fit(uint8_t **at, uint64_t *room, uint64_t need)
{
    if (need <= *room)
        return true;
    uint64_t wanted = *room ? *room : 1024;
    while (wanted < need)
        wanted *= 2;
    uint8_t *grown = (uint8_t *)realloc(*at, wanted);
    if (!grown)
        return false;
    *at = grown, *room = wanted;
    return true;
}

static inline bool pile_put(Pile *pile, const TokenRecord *record, const uint8_t *extra, uint32_t extra_bytes)
{
    if (!pile_fit(&pile->records, &pile->room, pile->used + sizeof(TokenRecord)) ||
        !pile_fit(&pile->extra, &pile->extra_room, pile->extra_used + extra_bytes))
        return false;
    memcpy(pile->records + pile->used, record, sizeof(TokenRecord));
    if (extra_bytes)    // most tokens have none, and no memory was ever taken for any
        memcpy(pile->extra + pile->extra_used, extra, extra_bytes);
    pile->used += sizeof(TokenRecord), pile->extra_used += extra_bytes;
    return true;
}

// One record more of a sequence. False without memory. From the first one on it cannot begin again elsewhere, so
// its prompt is let go of, and the process that ends it after a death sees that it had begun.
static inline bool seat_say(const Arena *a, Sender *s, uint32_t owner, Seat *seat, int32_t token, uint32_t finish, uint32_t took_us,
                            const uint8_t *extra, uint32_t extra_bytes)
{
    uint32_t slot = seat->rid & 0xffff;
    TokenRecord record = {seat->rid, token, took_us, seat->sent, finish << 24 | extra_bytes};
    if (!pile_put(s->piles + seat->front, &record, extra, extra_bytes))
        return false;
    if (seat->sent++ == 0) {
        uint64_t prompt = part_keep_inputs(a, owner, slot, 0);
        if (prompt)
            slab_release(&a->slabs, prompt);
    }
    if (!finish)
        return true;
    uint32_t last = s->active[--s->actives];
    s->active[seat->at] = last, s->seats[last].at = seat->at;
    s->ended[s->endings++] = slot;
    seat->rid = 0;
    return true;
}

static inline bool reader_near(const Arena *a, const Sender *s, const Seat *seat)
{
    uint32_t read = flag_load(&rows_of(slot_at(a, seat->rid & 0xffff))->parts_read);
    return (int32_t)(seat->sent - read) < (int32_t)s->window;
}

// Whether its reader is near enough for one record more.
static inline bool seat_room(const Arena *a, const Sender *s, Seat *seat)
{
    seat->refused = !reader_near(a, s, seat);
    return !seat->refused;
}

// Write a front's pile into a slab and say so. False: no memory or no room in the ring now, the pile is kept.
static inline bool pile_send(const Arena *a, Sender *s, uint32_t worker, uint32_t owner, uint32_t front, int doorbell)
{
    Pile *pile = s->piles + front;
    RecordsHead head = {sizeof(RecordsHead) + pile->used + pile->extra_used, (uint32_t)(pile->used / sizeof(TokenRecord)), 0};
    uint64_t offset = slab_allocate(&a->slabs, head.nbytes, owner);
    if (!offset)
        return false;
    uint8_t *at = a->slabs.base + offset;
    memcpy(at, &head, sizeof head);
    memcpy(at + sizeof head, pile->records, pile->used);
    if (pile->extra_used)
        memcpy(at + sizeof head + pile->used, pile->extra, pile->extra_used);
    Message message = {0, 0, RECORDS_MESSAGE, life_of(owner), offset, head.nbytes, 0};
    if (!notify_front(a, worker, front, doorbell, &message)) {
        slab_release(&a->slabs, offset);
        return false;
    }
    pile->used = pile->extra_used = 0;
    return true;
}

// Every active sequence gives a sign of life: who hangs in a step does not.
// Wait until there is something to do: a prompt (unless `full`), room for who was refused, a prompt that nobody else can
// take while somebody was refused, or somebody left. Bits as of doorbell_wait. With no time to wait it is a look at the
// control line.
static inline int sender_sleep(const Arena *a, const Sender *s, uint32_t worker, int doorbell, int control, int64_t most_ns, bool full)
{
    worker_turn(a, worker);
    if (most_ns == 0)
        return doorbell_wait(doorbell, control, 0);
    uint32_t *asleep = &a->header->worker[worker].asleep;
    bool behind = false, wanted = false;
    for (uint32_t i = 0; i < s->actives && !behind; i++)
        behind = s->seats[s->active[i]].refused;
    flag_exchange(asleep, !full ? ASLEEP : behind ? ASLEEP_BEHIND : ASLEEP_FULL);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    // Once more, now that who comes after the look sees the flag.
    for (uint32_t i = 0; i < s->actives && !wanted; i++)
        wanted = s->seats[s->active[i]].refused && reader_near(a, s, s->seats + s->active[i]);
    for (uint32_t i = 0; i < a->slots && !wanted && (!full || behind); i++)
        wanted = word_state(load64(&slot_at(a, i)->word)) == SLOT_READY;
    int why = doorbell_wait(doorbell, control, wanted ? 0 : most_ns);
    flag_exchange(asleep, AWAKE);
    return why;
}

static inline void sender_beat(const Arena *a, const Sender *s)
{
    uint64_t now = monotonic_ns();
    for (uint32_t i = 0; i < s->actives; i++)
        slot_at(a, s->active[i])->moved_ns = now;
}

// --- the front ------------------------------------------------------------------------------------

// The slab of a RECORDS message becomes this front's, to be read and given back. False when it is no longer what the
// message was about: its worker died.
static inline bool records_take(const Arena *a, uint32_t worker, uint32_t owner, const Message *message)
{
    return slab_holds(&a->slabs, message->value, message->part) && sent_take(a, worker, owner, message);
}

typedef struct { uint64_t rid; uint32_t came, taken; } Listener;

// Wake the worker that runs a slot, if it sleeps.
static inline void wake_worker(const Arena *a, const int *doorbells, uint32_t slot)
{
    uint32_t worker = word_worker(load64(&slot_at(a, slot)->word));
    if (worker < a->workers && flag_load(&a->header->worker[worker].asleep) != AWAKE &&
        flag_exchange(&a->header->worker[worker].asleep, AWAKE) != AWAKE && doorbells[worker] >= 0)
        doorbell_ring(doorbells[worker]);
}

// So many records more have been passed on. Who sleeps because of them is woken once half of them are read.
static inline void listener_taken(const Arena *a, Listener *l, const int *doorbells, uint32_t slot, uint32_t count, uint32_t window)
{
    Row *row = rows_of(slot_at(a, slot));
    uint32_t before = l->came - l->taken;
    l->taken += count;
    flag_exchange(&row->parts_read, l->taken);
    if (before > window / 2 && (int32_t)(l->came - l->taken) <= (int32_t)(window / 2))
        wake_worker(a, doorbells, slot);
}
