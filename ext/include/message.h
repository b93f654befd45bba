// One-writer one-reader ring of fixed-size messages in shared memory.
//
//   [ tail (writer) | head (reader) | entry 0 | entry 1 | ... ]      capacity is a power of two
//
// The writer alone moves tail, the reader alone moves head; both only grow. The reader masks every
// index it reads from memory, so a hostile writer can confuse messages but never lead it outside.
#pragma once
#include <stdint.h>

typedef struct {
    uint64_t seq;       // which opening of the slot this is about
    uint32_t slot;
    uint16_t kind;      // *_MESSAGE
    uint16_t life;      // of the worker that sends a slab (slab.h)
    uint64_t value;     // a part: the offset of its slab, 0 for none
    uint64_t part;      // a part: | final 1 | unused 15 | row 16 | bytes 32 |; tokens: bytes
    uint64_t tag;       // a part: of the place it is for (claims.h)
} Message;

typedef struct {
    alignas(64) uint64_t tail;
    uint32_t capacity;
    alignas(64) uint64_t head;
    alignas(64) Message entries[1];
} MessageRing;

static inline uint64_t message_ring_bytes(uint32_t capacity)
{
    return (sizeof(MessageRing) + ((uint64_t)capacity - 1) * sizeof(Message) + 63) & ~(uint64_t)63;
}

// False when the ring is full: the message was not written.
static inline bool message_push(MessageRing *ring, uint32_t capacity, const Message *message)
{
    uint64_t tail = __atomic_load_n(&ring->tail, __ATOMIC_RELAXED);
    uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE);
    if (tail - head >= capacity)
        return false;
    ring->entries[tail & (capacity - 1)] = *message;
    __atomic_store_n(&ring->tail, tail + 1, __ATOMIC_RELEASE);
    return true;
}

// The oldest message, left where it is; false when the ring is empty.
static inline bool message_peek(const MessageRing *ring, uint32_t capacity, Message *message)
{
    uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_RELAXED);
    uint64_t tail = __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE);
    if (head == tail)
        return false;
    *message = ring->entries[head & (capacity - 1)];
    return true;
}

// The oldest message has been dealt with. What comes with it is taken before: a reader that dies in between leaves
// both to the next one, or neither.
static inline void message_drop(MessageRing *ring)
{
    __atomic_store_n(&ring->head, __atomic_load_n(&ring->head, __ATOMIC_RELAXED) + 1, __ATOMIC_RELEASE);
}

// False when the ring is empty.
static inline bool message_pop(MessageRing *ring, uint32_t capacity, Message *message)
{
    if (!message_peek(ring, capacity, message))
        return false;
    message_drop(ring);
    return true;
}
