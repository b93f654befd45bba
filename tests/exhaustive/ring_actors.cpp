// Two producers, a worker and an owner over one batch ring and its message rings: the verbs are those of ext/include,
// and what stands between them here is what ext/batch_ring.pyx and fastserve/server/front_pool.py do.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <poll.h>
#include <unistd.h>
#include "stepper.h"

// A clock that stands still, doorbells that the search sees, and clears of memory that are steps.
extern "C" void *stepped_memset(void *, int, size_t);
static int stepped_clock(clockid_t, struct timespec *now);
static ssize_t stepped_write(int bell, const void *, size_t bytes);
static ssize_t stepped_read(int bell, void *, size_t bytes);
static int stepped_poll(struct pollfd *fds, int count, const struct timespec *timeout, const void *);
#include <sys/mman.h>
#define clock_gettime stepped_clock
#define write stepped_write
#define read stepped_read
#define ppoll stepped_poll
#define memset stepped_memset
#include "notify.h"
#include "reclaim.h"
#undef memset
#undef read
#undef write

enum { FRONTS = 3, MAX_SLOTS = 4, MAX_ROWS = 4, MOST_ATTEMPTS = 2, SHARED_BYTES = 128 << 10 };
// Producers are fronts 0 and 1; the owner is a front of its own, which has no requests.
enum { OWNERS_FRONT = 2 };

struct Given {          // a row, as it should be
    uint64_t seq;       // of the slot's opening
    uint32_t request;   // 0: nobody's
    uint32_t over;
};

static struct World {
    alignas(4096) uint8_t shared[SHARED_BYTES];
    uint64_t bells[ACTORS];     // producers', the worker's
    // Of each process alone.
    Arena arenas[ACTORS];
    Claims claims[ACTORS];
    uint64_t held[ACTORS][MAX_SLOTS * MAX_ROWS];
    Given given[MAX_SLOTS][MAX_ROWS];
    Given awaited[2];           // without words: the opening whose end each producer waits for, and its slot
    uint32_t asked[ACTORS], answered[ACTORS];   // requests
    uint32_t still;             // a bit for each actor that is in a verb since the owner began to wait
} world;

// Not in the middle of a verb.
static void settled(int actor) { world.still &= ~(1u << actor); }

static int front_bells[FRONTS] = {FIRST, SECOND, -1}, worker_bells[1] = {WORKER};

static int stepped_clock(clockid_t, struct timespec *now)
{
    now->tv_sec = 0, now->tv_nsec = 1;
    return 0;
}

static ssize_t stepped_write(int bell, const void *, size_t bytes)
{
    __atomic_store_n(&world.bells[bell], (uint64_t)1, __ATOMIC_SEQ_CST);
    return (ssize_t)bytes;
}

static ssize_t stepped_read(int bell, void *, size_t bytes)
{
    __atomic_store_n(&world.bells[bell], (uint64_t)0, __ATOMIC_SEQ_CST);
    return (ssize_t)bytes;
}

static int stepped_poll(struct pollfd *fds, int, const struct timespec *timeout, const void *)
{
    if (timeout == NULL) {
        boundary(13), settled(WORKER);      // it knows no more than that it found nothing
        wait_until(BELL);
    }
    fds[0].revents = __atomic_load_n(&world.bells[fds[0].fd], __ATOMIC_SEQ_CST) ? POLLIN : 0;
    fds[1].revents = 0;
    return fds[0].revents != 0;
}

// Without words nobody sleeps: who waits for a state is let go on by the search once it is so.
static void wake_workers(Arena *a)
{
    if (scenario.words)
        notify_workers(a, worker_bells);
    else
        a->ready = 0;
}

static Slot *slot_of(int64_t lease) { return slot_at(&world.arenas[OWNER], (uint32_t)(lease >> 16)); }

// --- a producer: a front process and its requests ------------------------------------------------
static void give(int me, int64_t lease, uint32_t rows)
{
    Quiet quiet;
    uint32_t request = ++world.asked[me] << 8 | (uint32_t)me << 4 | 1;
    for (uint32_t r = 0; r < rows; r++) {
        Given *given = &world.given[lease >> 16][(lease & 0xffff) + r];
        if (given->request && !given->over && given->seq == slot_of(lease)->seq)
            violated("a row was given to two");
        *given = {slot_of(lease)->seq, request, 0};
    }
}

static uint32_t request_of(int64_t lease)
{
    Quiet quiet;
    return world.given[lease >> 16][lease & 0xffff].request;
}

static void let_go(int me, int64_t lease, uint32_t rows)
{
    Quiet quiet;
    for (uint32_t r = 0; r < rows; r++)
        world.given[lease >> 16][(lease & 0xffff) + r].over = 1;
    world.answered[me]++;
}

// BatchRing.drain() and is_done(): whether this opening of the slot has been published.
static bool drained(int me, Arena *a, uint32_t slot, uint64_t seq)
{
    bool found = false;
    Message message;
    FrontFlags *flags = &a->header->front[me];
    doorbell_clear(front_bells[me]);
    flag_exchange(&flags->rung, 0);
    MessageRing *ring = ring_of(a, 0, (uint32_t)me);
    while (message_peek(ring, a->ring_capacity, &message)) {
        found = found || (message.slot == slot && message.seq == seq);
        message_drop(ring);
    }
    if (flag_exchange(&flags->rescan, 0))
        found = true;
    Slot *s = slot_at(a, slot);
    return found && s->seq == seq && word_state(load64(&s->word)) == SLOT_DONE;
}

static uint64_t *column_of(const Arena *a, int64_t lease, uint64_t offset)
{
    return (uint64_t *)((uint8_t *)slot_at(a, (uint32_t)(lease >> 16)) + offset) + (lease & 0xffff);
}

static void answer(int me, int64_t lease, uint32_t rows)
{
    const Arena *a = &world.arenas[me];
    Quiet quiet;
    if (slot_of(lease)->status)
        violated("a batch failed that a worker could run");
    if (!claim_answered(a, &world.claims[me], lease, rows))
        violated("a caller cannot tell that the answer is its own");
    for (uint32_t r = 0; r < rows; r++)
        if (column_of(a, lease, a->output_offset[0])[r] != request_of(lease))
            violated("a caller got another's answer");
}

static void wait_for_answer(int me, int64_t lease, uint64_t seq, uint64_t round)
{
    Arena *a = &world.arenas[me];
    for (;;) {
        boundary(4, (uint64_t)lease, seq, round), settled(me);
        if (!scenario.words) {
            world.awaited[me] = {seq, (uint32_t)(lease >> 16), 0};
            settled(me);
            wait_until(ANSWER);
            return;
        }
        if (drained(me, a, (uint32_t)(lease >> 16), seq))
            return;
        settled(me);
        wait_until(BELL);
    }
}

static void produce(int me)
{
    Arena *a = &world.arenas[me];
    Claims *claims = &world.claims[me];
    uint32_t rows = scenario.rows[me];
    for (uint64_t round = 0; round < scenario.requests[me]; round++) {
        int64_t lease;
        for (;;) {
            boundary(1, round), settled(me);
            lease = lease_reserve(a, rows, (uint32_t)me);
            if (lease >= 0 && !claim_rows(a, claims, lease, rows))
                violated("rows came back while they were held");
            if (a->ready)
                wake_workers(a);
            if (lease >= 0)
                break;
            settled(me);
            wait_until(ROOM);
        }
        give(me, lease, rows);
        uint64_t seq = slot_of(lease)->seq;
        boundary(2, (uint64_t)lease, seq, round), settled(me);
        if (scenario.gives_up[me] == 1) {
            let_go(me, lease, rows);
            claim_row(a, lease)->tag = claim_of(a, claims, lease);
            claim_end(a, claims, lease, 0);
            lease_give_back(a, lease, rows);
            boundary(6, round), settled(me);
            wake_workers(a);
            continue;
        }
        {
            Quiet quiet;
            for (uint32_t r = 0; r < rows; r++)
                column_of(a, lease, a->input_offset[0])[r] = request_of(lease);
        }
        lease_commit(a, lease, rows, 1, claim_of(a, claims, lease));
        boundary(3, (uint64_t)lease, seq, round), settled(me);
        wake_workers(a);
        if (scenario.gives_up[me] == 2) {
            boundary(7, (uint64_t)lease, seq, round), settled(me);
            if (!claim_stands(a, claims, lease) || lease_drop(a, lease, rows)) {
                claim_end(a, claims, lease, LEFT);
                let_go(me, lease, rows);
                continue;
            }
        }
        wait_for_answer(me, lease, seq, round);
        answer(me, lease, rows);
        let_go(me, lease, rows);
        boundary(5, (uint64_t)lease, seq, round), settled(me);
        if (claim_stands(a, claims, lease))
            lease_release(a, lease, rows);
        claim_end(a, claims, lease, 0);
    }
    settled(me);
}

// --- the worker ----------------------------------------------------------------------------------
static void work()
{
    Arena *a = &world.arenas[WORKER];
    for (;;) {
        boundary(10), settled(WORKER);
        int why = 0;
        uint64_t due;
        if (!scenario.words)
            wait_until(WORK);
        int64_t slot = scenario.words ? take_or_wait(a, 0, WORKER, -1, 0, -1, &why) : slot_take(a, 0, &due);
        if (slot < 0)
            continue;
        Slot *s = slot_at(a, (uint32_t)slot);
        uint64_t *ran = claims_ran(a, &world.claims[WORKER], (uint32_t)slot);
        *ran = slot_see(a, s);
        s->attempts += 1;
        s->status = 0;
        boundary(11, (uint64_t)slot), settled(WORKER);
        {
            Quiet quiet;
            for (uint32_t r = 0; r < *ran; r++)
                column_of(a, slot << 16, a->output_offset[0])[r] = column_of(a, slot << 16, a->input_offset[0])[r];
        }
        uint64_t freed, seq = s->seq;
        uint64_t fronts = slot_publish(a, (uint32_t)slot, 0, (uint32_t)*ran, &freed);
        boundary(12, (uint64_t)slot, fronts << 32 | freed, seq), settled(WORKER);
        if (!scenario.words)
            continue;
        notify_done(a, 0, fronts, front_bells, (uint32_t)slot, seq);
        request_rescan(a, front_bells, freed);
    }
}

// --- the owner, after a death --------------------------------------------------------------------
static void bury_worker(Arena *a)
{
    for (uint32_t i = 0; i < a->slots; i++) {
        Slot *s = slot_at(a, i);
        boundary(20, i);
        if (word_state(load64(&s->word)) != SLOT_RUNNING || word_worker(load64(&s->word)) != 0)
            continue;
        if (s->attempts >= MOST_ATTEMPTS)
            violated("one death was counted twice");
        slot_return(a, s, 0);
    }
    boundary(21);
    life_end(a, 0);
    if (scenario.words) {
        flag_exchange(&a->header->worker[0].asleep, AWAKE);
        request_rescan(a, front_bells, ~(uint64_t)0);
        notify_all_workers(a, worker_bells);
    }
    boundary(22);
    spawn(WORKER);
}

// What the owner has seen in a slot: rows that were lost, and the word then.
struct Seen {
    uint64_t word;
    uint32_t generation, rows;
    bool suspected;
};

static uint64_t seen_key(const Arena *a, const Seen *seen)
{
    uint64_t key = 0;
    for (uint32_t i = 0; i < a->slots; i++)
        key = (key * 31 + seen[i].word) * 0x9e3779b97f4a7c15u + seen[i].generation * 64 + seen[i].rows * 2 + seen[i].suspected;
    return key;
}

// FrontPool does the first part when it hears of the death, LostRows.look() both.
static void look(Arena *a, uint32_t front, uint32_t number, Seen *seen)
{
    for (uint32_t i = 0; i < a->slots; i++) {
        boundary(23, i, number, seen_key(a, seen)), settled(OWNER);
        slot_reclaim(a, i, front);
    }
    front_reclaim(a, front);
    if (scenario.words)
        notify_all_workers(a, worker_bells);
    for (uint32_t i = 0; number && i < a->slots; i++) {
        boundary(24, i, number, seen_key(a, seen));
        Seen before = seen[i], now = {};
        // Another try of `read_lost` would be an owner that comes later.
        bool still = slot_lost(a, i, &now.generation, &now.rows);
        now.word = load64(&slot_at(a, i)->word);
        now.suspected = (!still || now.rows) && (number == 1 || (before.suspected && before.generation == now.generation));
        seen[i] = {};
        if (!now.suspected)
            continue;
        if (number == 1) {
            slot_seal(a, i);
            seen[i] = {0, now.generation, 0, true};
        } else if (!still || before.rows != now.rows || before.word != now.word)
            seen[i] = now;
        else
            slot_forgive(a, i, now.generation, now.rows);
    }
    wake_workers(a);
}

static void bury_front(Arena *a, uint32_t front)
{
    Seen seen[MAX_SLOTS] = {};
    look(a, front, 0, seen);
    bool again = true;
    for (uint32_t number = 1; again && number <= scenario.looks; number++) {
        boundary(25, number, 0, seen_key(a, seen));
        world.still = moving() & ~(1u << OWNER);
        wait_until(STILL);
        look(a, front, number, seen);
        again = false;
        for (uint32_t i = 0; i < a->slots; i++)
            again = again || seen[i].suspected;
    }
    boundary(40);
    if (scenario.reborn)
        spawn((int)front);
}

// --- for the search ------------------------------------------------------------------------------
void run_actor(int actor)
{
    if (actor == WORKER)
        work();
    else if (actor != OWNER)
        produce(actor);
    else {
        wait_until(DEATH);
        if (dead_actor() == WORKER)
            bury_worker(&world.arenas[OWNER]);
        else
            bury_front(&world.arenas[OWNER], (uint32_t)dead_actor());
    }
}

static void open_arena(int actor, uint32_t front)
{
    Arena *a = &world.arenas[actor];
    arena_attach(a, world.shared, SHARED_BYTES);
    a->front = front;
    a->owner = actor == WORKER ? worker_owner(a, 0) : 1 + front;
    stepped_memset(world.held[actor], 0, sizeof world.held[actor]);
    world.claims[actor].held = world.held[actor];
    world.claims[actor].next += 1000 * (actor + 1);
}

void world_begin()
{
    ArenaHeader h = {};
    h.magic = ARENA_MAGIC, h.slots = scenario.slots, h.max_rows = scenario.max_rows, h.workers = 1, h.fronts = FRONTS;
    h.inputs = h.outputs = 1, h.input_row_bytes[0] = h.output_row_bytes[0] = 8;
    if (arena_measure(&h) > SHARED_BYTES || h.slots > MAX_SLOTS || h.max_rows > MAX_ROWS) {
        fprintf(stderr, "too large\n");
        exit(2);
    }
    memcpy(world.shared, &h, sizeof h);
    arena_format((ArenaHeader *)world.shared, 0);
    for (int actor = 0; actor < ACTORS; actor++)
        open_arena(actor, actor == OWNER ? (uint32_t)OWNERS_FRONT : actor == WORKER ? 0 : (uint32_t)actor);
}

// Its memory goes with it, its requests are nobody's, and its successor opens the arena anew.
void died(int actor)
{
    open_arena(actor, actor == WORKER ? 0 : (uint32_t)actor);
    for (uint32_t i = 0; i < scenario.slots; i++)
        for (uint32_t r = 0; actor != WORKER && r < scenario.max_rows; r++)
            if ((world.given[i][r].request >> 4 & 0xf) == (uint32_t)actor)
                world.given[i][r].over = 1;
    world.answered[actor] = 0;
    settled(actor);
}

bool is_ready(int actor, Wait what)
{
    if (what == BELL)
        return world.bells[actor];
    if (what == DEATH)
        return dead_actor() >= 0;
    if (what == STILL)
        return world.still == 0;
    const Arena *a = &world.arenas[OWNER];
    uint32_t open = (uint32_t)world.arenas[OWNER].header->open - 1;
    if (what == ANSWER) {
        const Slot *s = slot_at(a, world.awaited[actor].request);
        return s->seq == world.awaited[actor].seq && word_state(s->word) == SLOT_DONE;
    }
    for (uint32_t i = 0; what == WORK && i < a->slots; i++) {
        uint64_t w = slot_at(a, i)->word;
        if (word_state(w) == SLOT_READY || (i == open && word_state(w) == SLOT_OPEN && word_settled(w) && word_settled(w) == word_reserved(w)))
            return true;
    }
    for (uint32_t i = 0; what == ROOM && i < a->slots; i++) {
        uint32_t state = word_state(slot_at(a, i)->word);
        if (state == SLOT_FREE || (state == SLOT_OPEN && i == open))
            return true;
    }
    return false;
}

void check_end()
{
    for (int me = FIRST; me <= SECOND; me++)
        if ((me != dead_actor() || scenario.reborn) && world.answered[me] != scenario.requests[me])
            violated("a caller waits for ever");
    const Arena *a = &world.arenas[OWNER];
    for (uint32_t i = 0; i < a->slots; i++) {
        uint64_t w = slot_at(a, i)->word;
        if (word_state(w) != SLOT_FREE && !(word_state(w) == SLOT_OPEN && word_reserved(w) == 0))
            violated("a slot never comes back");
    }
}

Range world_memory() { return {&world, sizeof world}; }

Range shared_memory() { return {&world, offsetof(World, arenas)}; }

// Geometry that nobody changes, counts that nobody decides by, moments of a clock that stands still, and slabs, of which
// there are none here (tests/ext/test_torn_verbs.py has their deaths).
bool is_quiet(const void *at)
{
    const Arena *a = &world.arenas[OWNER];
    const uint8_t *place = (const uint8_t *)at;
    const ArenaHeader *h = a->header;
    if (place < (const uint8_t *)&h->open || (place >= (const uint8_t *)h->counters && place < a->base + a->rings_offset))
        return true;
    if (place >= a->base + a->runs_offset && place < a->slot_base)
        return true;
    for (uint32_t i = 0; i < a->slots; i++) {
        const Slot *s = slot_at(a, i);
        if (place >= (const uint8_t *)&s->first_ns && place < (const uint8_t *)&s->attempts)
            return true;
        if (place >= (const uint8_t *)&s->error_bytes && place < (const uint8_t *)(s + 1))
            return true;
        const Row *rows = rows_of((Slot *)s);
        if (place < (const uint8_t *)rows || place >= (const uint8_t *)(rows + a->max_rows))
            continue;
        size_t within = (size_t)(place - (const uint8_t *)rows) % sizeof(Row);
        return within >= offsetof(Row, in_offset) && within < offsetof(Row, tag);
    }
    return place >= (const uint8_t *)&h->worker[0].ping && place < (const uint8_t *)&h->worker[1];
}

const char *place_of(const void *at)
{
    static char text[64];
    const Arena *a = &world.arenas[OWNER];
    for (uint32_t i = 0; i < a->slots; i++) {
        const uint8_t *s = (const uint8_t *)slot_at(a, i), *place = (const uint8_t *)at;
        if (place < s || place >= s + a->slot_bytes)
            continue;
        size_t in_row = (size_t)(place - (const uint8_t *)rows_of((Slot *)s));
        if (place == s)
            snprintf(text, sizeof text, "slot%u.word", i);
        else if (place < (const uint8_t *)rows_of((Slot *)s))
            snprintf(text, sizeof text, "slot%u+%zu", i, (size_t)(place - s));
        else
            snprintf(text, sizeof text, "slot%u.row%zu+%zu", i, in_row / sizeof(Row), in_row % sizeof(Row));
        return text;
    }
    snprintf(text, sizeof text, "arena+%zu", (size_t)((const uint8_t *)at - world.shared));
    return text;
}
