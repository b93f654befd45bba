// Words from process to process: which front hears that a batch is done or gets a part of an answer, which
// worker is woken. A word is a message in the one-writer ring between the two, and a ring of the doorbell.
//
//   DONE  {seq, slot}                           the batch has been published
//   PART  {seq, slot, slab, row, bytes, final}  one part of the answer to one lease of a batch still running
//   RECORDS {slab, bytes}                       tokens of any number of sequences (token_records.h)
//
// A slab that is sent stays its worker's until the message is in the ring: a worker that dies before leaves it to be
// reclaimed with the worker. The front takes it before it drops the message, so that the next front finds both or
// neither. A message that outlives its slab names a life that no lease is of.
#pragma once
#include "doorbell.h"
#include "claims.h"

enum { DONE_MESSAGE = 1, PART_MESSAGE = 2, RECORDS_MESSAGE = 3 };

static inline bool notify_front(const Arena *a, uint32_t worker, uint32_t front, int doorbell, const Message *message)
{
    bool sent = message_push(ring_of(a, worker, front), a->ring_capacity, message);
    FrontFlags *flags = &a->header->front[front];
    if (!sent && message->kind == DONE_MESSAGE)
        flag_exchange(&flags->rescan, 1);
    else if (!sent)
        return false;
    if (flag_exchange(&flags->rung, 1) == 0 && doorbell >= 0)
        doorbell_ring(doorbell);
    return sent;
}

// `fronts` has a bit for each front that waits for the batch.
static inline void notify_done(const Arena *a, uint32_t worker, uint64_t fronts, const int *doorbells, uint32_t slot, uint64_t seq)
{
    Message message = {seq, slot, DONE_MESSAGE, 0, 0, 0, 0};
    for (uint32_t f = 0; f < a->fronts; f++)
        if (fronts >> f & 1)
            notify_front(a, worker, f, doorbells[f], &message);
}

// How a worker is known as an owner of slabs: one that comes after its death is another.
static inline uint32_t worker_owner(const Arena *a, uint32_t worker)
{
    return life_owner(worker, __atomic_load_n(&a->header->worker[worker].lives, __ATOMIC_ACQUIRE));
}

// A worker has died: its slabs are free, and what it has sent and not handed over is nobody's.
static inline void life_end(const Arena *a, uint32_t worker)
{
    uint32_t owner = worker_owner(a, worker);
    __atomic_add_fetch(&a->header->worker[worker].lives, 1, __ATOMIC_ACQ_REL);
    slab_reclaim(&a->slabs, owner);
}

static inline uint16_t life_of(uint32_t owner) { return owner >> 16; }

// The slab of a message of `worker` becomes `owner`'s. False when it is no longer what the message was about.
static inline bool sent_take(const Arena *a, uint32_t worker, uint32_t owner, const Message *message)
{
    return slab_give(&a->slabs, message->value, life_owner(worker, message->life), owner);
}

// The slab at `offset` (0: none), held by `owner`, is sent to a lease's front; false when the ring has no room. Once
// it is, it is the lease's, unless the front was quicker: an answer whose batch is done outlives its worker.
static inline bool part_send(const Arena *a, uint32_t worker, uint32_t owner, const int *doorbells, uint32_t slot, uint32_t row,
                             uint64_t offset, uint32_t nbytes, bool final)
{
    const Row *lease = rows_of(slot_at(a, slot)) + row;
    uint32_t front = lease->front;
    uint64_t tag = lease->tag;
    if (front >= a->fronts)
        return false;
    Message message = {slot_at(a, slot)->seq, slot, PART_MESSAGE, life_of(owner), offset,
                       (uint64_t)final << 63 | (uint64_t)row << 32 | nbytes, tag};
    if (!notify_front(a, worker, front, doorbells[front], &message))
        return false;
    if (offset)
        slab_give(&a->slabs, offset, owner, lease_owner(tag));
    slot_at(a, slot)->moved_ns = monotonic_ns();
    return true;
}

// How many parts of a lease the front has taken. A worker that asks waits for its reader, and does not hang.
static inline uint32_t parts_taken(const Arena *a, uint32_t slot, uint32_t row)
{
    slot_at(a, slot)->moved_ns = monotonic_ns();
    return flag_load(&rows_of(slot_at(a, slot))[row < a->max_rows ? row : a->max_rows - 1].parts_read);
}

static inline uint32_t part_row(const Message *message) { return message->part >> 32 & 0xffff; }

// Whether a part that came is for a lease of ours; its slab is this front's from here on. A part for a lease
// that is no longer ours (its caller left and the slot went on, or it was for a front that died) goes back.
static inline bool part_take(const Arena *a, const Claims *claims, uint32_t worker, uint32_t owner, const Message *message)
{
    if (message->slot >= a->slots || part_row(message) >= a->max_rows)
        return false;
    // In the order in which it changes hands, so that it is met in the one or the other.
    if (message->value && !sent_take(a, worker, owner, message) &&
        !slab_give(&a->slabs, message->value, lease_owner(message->tag), owner))
        return false;   // not what the worker sent, or it died as it did
    bool ours = message->tag == claim_of(a, claims, (int64_t)message->slot << 16 | part_row(message));
    if (message->value && !ours)
        slab_release(&a->slabs, message->value);
    return ours;
}

// The worker takes a lease's input slab over; its offset, 0 when there is none. A batch without its inputs
// cannot be run again: should the worker die before it has published it, it fails. The lease forgets it last: it
// lets go of what is its own alone, so a death in between leaves nothing.
static inline uint64_t part_keep_inputs(const Arena *a, uint32_t owner, uint32_t slot, uint32_t row)
{
    Row *lease = rows_of(slot_at(a, slot)) + row;
    __atomic_store_n(&slot_at(a, slot)->attempts, UINT32_MAX, __ATOMIC_RELEASE);
    uint64_t offset = __atomic_load_n(&lease->in_offset, __ATOMIC_ACQUIRE);
    if (!offset || !slab_give(&a->slabs, offset, lease_owner(lease->tag), owner))
        return 0;
    __atomic_store_n(&lease->in_offset, (uint64_t)0, __ATOMIC_RELEASE);
    return offset;
}

// Wake a sleeper for every batch this process has made ready, and one more for the rows of the open batch; who
// sleeps until a batch is due is not woken for those.
static inline void notify_workers(Arena *a, const int *doorbells)
{
    uint32_t open, ready = a->ready, wanted = ready + (open_due_ns(a, &open) != 0);
    a->ready = 0;
    for (uint32_t i = 0; i < a->workers && wanted; i++) {
        uint32_t asleep = flag_load(&a->header->worker[i].asleep);
        if (asleep == AWAKE || asleep >= ASLEEP_FULL || (asleep == ASLEEP_UNTIL_DUE && ready == 0))
            continue;
        if (flag_exchange(&a->header->worker[i].asleep, AWAKE) != AWAKE && doorbells[i] >= 0) {
            doorbell_ring(doorbells[i]);
            wanted--, ready -= ready != 0;
        }
    }
    for (uint32_t i = 0; i < a->workers && wanted; i++)     // whom nobody may be free to take
        if (flag_load(&a->header->worker[i].asleep) == ASLEEP_BEHIND &&
            flag_exchange(&a->header->worker[i].asleep, AWAKE) != AWAKE && doorbells[i] >= 0)
            doorbell_ring(doorbells[i]);
}

// Every worker is to look: whom a dead one was woken in place of, nobody knows.
static inline void notify_all_workers(Arena *a, const int *doorbells)
{
    a->ready = 0;
    for (uint32_t i = 0; i < a->workers; i++)
        if (doorbells[i] >= 0)
            doorbell_ring(doorbells[i]);
}

// Fronts (one bit each) are to look at every lease they wait for: a word to them may have been lost.
static inline void request_rescan(const Arena *a, const int *doorbells, uint64_t fronts)
{
    for (uint32_t f = 0; f < a->fronts; f++)
        if (fronts >> f & 1) {
            flag_exchange(&a->header->front[f].rescan, 1);
            if (doorbells[f] >= 0)
                doorbell_ring(doorbells[f]);
        }
}

// The worker's loop has come round: it answers what the owner has asked. Most rounds find nothing new.
static inline void worker_turn(const Arena *a, uint32_t worker)
{
    WorkerFlags *flags = &a->header->worker[worker];
    uint32_t ping = __atomic_load_n(&flags->ping, __ATOMIC_RELAXED);
    if (ping != __atomic_load_n(&flags->pong, __ATOMIC_RELAXED))
        __atomic_store_n(&flags->pong, ping, __ATOMIC_RELEASE);
}

// Ask a worker for a sign of life, and wake it: whether it had answered the last time. Who wakes looks for batches as well,
// so none waits for long because the worker that was woken for it does not run.
static inline bool worker_ping(const Arena *a, uint32_t worker, int doorbell)
{
    WorkerFlags *flags = &a->header->worker[worker];
    uint32_t ping = __atomic_load_n(&flags->ping, __ATOMIC_RELAXED);
    bool answered = __atomic_load_n(&flags->pong, __ATOMIC_ACQUIRE) == ping;
    if (answered)
        __atomic_store_n(&flags->ping, ping + 1, __ATOMIC_RELEASE);
    if (doorbell >= 0)
        doorbell_ring(doorbell);
    return answered;
}

// Whether a worker is in a batch. Of one whose answers come in parts (`parted`) only until execute() is over.
static inline bool worker_busy(const Arena *a, uint32_t worker, bool parted)
{
    for (uint32_t i = 0; i < a->slots; i++) {
        Slot *s = slot_at(a, i);
        uint64_t w = load64(&s->word);
        if (word_state(w) == SLOT_RUNNING && word_worker(w) == worker && !(parted && s->ran_ns))
            return true;
    }
    return false;
}

// A batch for this worker; -1 after a sleep that *why explains (doorbell_wait). Spins for a while before it sleeps, and
// sleeps no longer than `longest_ns` unless that is negative: who has something else to look at comes back to it.
static inline int64_t take_or_wait(Arena *a, uint32_t worker, int doorbell, int control, int64_t spin_ns, int64_t longest_ns, int *why)
{
    worker_turn(a, worker);
    uint64_t due, until = spin_ns > 0 ? monotonic_ns() + spin_ns : 0;
    uint32_t *asleep = &a->header->worker[worker].asleep;
    int64_t slot = slot_take(a, worker, &due);
    while (slot < 0 && until && monotonic_ns() < until) {
        spin_pause();
        slot = slot_take(a, worker, &due);
    }
    if (slot >= 0)
        return slot;
    // Say that we sleep, then look once more: a front that commits after the look sees the flag.
    flag_exchange(asleep, due ? ASLEEP_UNTIL_DUE : ASLEEP);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);    // slot_take() only acquires
    slot = slot_take(a, worker, &due);
    if (slot < 0) {
        uint64_t now = monotonic_ns();
        int64_t wait = due == 0 ? -1 : due > now ? (int64_t)(due - now) : 0;
        *why = doorbell_wait(doorbell, control, longest_ns >= 0 && (wait < 0 || wait > longest_ns) ? longest_ns : wait);
    }
    flag_exchange(asleep, AWAKE);
    return slot >= 0 ? slot : slot_take(a, worker, &due);
}
