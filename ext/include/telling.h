// Words from process to process: which front hears that a batch is done or gets a part of an answer, which
// worker is woken. A word is a message in the one-writer ring between the two, and a ring of the doorbell.
//
//   DONE  {seq, slot}                           the batch has been published
//   PART  {seq, slot, slab, row, bytes, final}  one part of the answer to one place of a batch still running
#pragma once
#include "doorbell.h"
#include "slots.h"

enum { DONE_MESSAGE = 1, PART_MESSAGE = 2 };

static inline bool tell_front(const Arena *a, uint32_t worker, uint32_t front, int bell, const Message *message)
{
    bool told = message_push(ring_of(a, worker, front), a->ring_capacity, message);
    FrontDesk *desk = &a->header->front[front];
    if (!told && message->kind == DONE_MESSAGE)
        desk_exchange(&desk->rescan, 1);
    else if (!told)
        return false;
    if (desk_exchange(&desk->rung, 1) == 0 && bell >= 0)
        bell_ring(bell);
    return told;
}

// `fronts` has a bit for each front that waits for the batch.
static inline void tell_done(const Arena *a, uint32_t worker, uint64_t fronts, const int *bells, uint32_t slot, uint64_t seq)
{
    Message message = {seq, slot, DONE_MESSAGE, 0, 0};
    for (uint32_t f = 0; f < a->fronts; f++)
        if (fronts >> f & 1)
            tell_front(a, worker, f, bells[f], &message);
}

// The slab at `offset` (0: none), held by `owner`, becomes the front's; false when the ring has no room.
static inline bool part_send(const Arena *a, uint32_t worker, uint32_t owner, const int *bells, uint32_t slot, uint32_t row,
                             uint64_t offset, uint32_t nbytes, bool final)
{
    uint32_t front = rows_of(slot_at(a, slot))[row].front;
    if (front >= a->fronts)
        return false;
    Message message = {slot_at(a, slot)->seq, slot, PART_MESSAGE, offset, (uint64_t)final << 63 | (uint64_t)row << 32 | nbytes};
    if (offset)
        slab_give(&a->slabs, offset, 1 + front);
    if (tell_front(a, worker, front, bells[front], &message))
        return true;
    if (offset)
        slab_give(&a->slabs, offset, owner);
    return false;
}

static inline uint32_t part_row(const Message *message) { return message->part >> 32 & 0xffff; }

// Whether a part that came makes sense, and its slab is this front's: a slab that is not was swept with the
// process it was sent to.
static inline bool part_holds(const Arena *a, uint32_t owner, const Message *message)
{
    bool placed = message->slot < a->slots && part_row(message) < a->max_rows;
    return placed && (!message->value || slab_owner(&a->slabs, message->value) == owner);
}

// The worker takes a place's input slab over; its offset, 0 when there is none.
static inline uint64_t part_keep_inputs(const Arena *a, uint32_t owner, uint32_t slot, uint32_t row)
{
    uint64_t offset = __atomic_exchange_n(&rows_of(slot_at(a, slot))[row].in_offset, (uint64_t)0, __ATOMIC_ACQ_REL);
    if (offset)
        slab_give(&a->slabs, offset, owner);
    return offset;
}

// Wake sleepers for `ready` batches, or one of them for rows of an open batch; who sleeps until a batch is
// due need not hear of those.
static inline void wake_workers(const Arena *a, const int *bells, uint32_t ready)
{
    uint32_t wanted = ready ? ready : 1;
    for (uint32_t i = 0; i < a->workers && wanted; i++) {
        uint32_t asleep = desk_load(&a->header->worker[i].asleep);
        if (asleep == AWAKE || (asleep == ASLEEP_UNTIL_DUE && ready == 0))
            continue;
        if (desk_exchange(&a->header->worker[i].asleep, AWAKE) != AWAKE && bells[i] >= 0) {
            bell_ring(bells[i]);
            wanted--;
        }
    }
}
