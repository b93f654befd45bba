// How tensors lie in a slab: the one definition of what fronts and workers write and read there.
//
//   slab:  [ TensorsHead | TensorEntry x count | tensor 0 | tensor 1 | ... ]     every tensor starts 64-byte aligned
//
// A slab with a note (codec/slab_contents.py) ends in it: [ ... | note | its bytes, 32 bits ], and its magic says so.
// An entry names its tensor by its number in the model's own order of inputs or outputs. What is read was
// written by another process, which may go on writing: an entry is copied once, and only the copy is judged.
#pragma once
#include <stdint.h>
#include <string.h>
#include "tensor.h"

enum { TENSORS_MAGIC = 0x74616c73, TENSORS_NOTED = 0x74616c6e, TENSOR_AXES = 16, NOTE_TAIL = 4 };
enum TensorsFault { TENSORS_FINE, TENSORS_NONE, TENSORS_TABLE, TENSORS_SIZE, TENSORS_NOTE };

typedef struct { uint32_t magic, count; } TensorsHead;
typedef struct {
    uint16_t number;
    uint8_t code, rank;
    uint32_t unused;
    uint64_t offset, bytes;         // from the slab's start
    int64_t shape[TENSOR_AXES];     // zeros behind the last axis
} TensorEntry;
static_assert(sizeof(TensorsHead) == 8 && sizeof(TensorEntry) == 152, "the layout is shared between processes");

static inline uint64_t tensors_align(uint64_t size) { return (size + 63) & ~(uint64_t)63; }
static inline uint64_t tensors_body_at(uint64_t count) { return tensors_align(sizeof(TensorsHead) + count * sizeof(TensorEntry)); }

// The head of a slab of `size` bytes, if its table lies inside.
static inline TensorsFault tensors_head(const uint8_t *slab, uint64_t size, TensorsHead *head)
{
    if (size < sizeof *head)
        return TENSORS_NONE;
    memcpy(head, slab, sizeof *head);
    bool known = head->magic == TENSORS_MAGIC || head->magic == TENSORS_NOTED;
    return known && tensors_body_at(head->count) <= size ? TENSORS_FINE : TENSORS_NONE;
}

// Elements of a shape; false when there are more than 64 bits can count.
static inline bool tensor_items(const TensorEntry *entry, uint64_t *items)
{
    *items = 1;
    for (uint32_t axis = 0; axis < entry->rank; axis++)
        if (entry->shape[axis] == 0)
            return *items = 0, true;
    for (uint32_t axis = 0; axis < entry->rank; axis++)
        if (__builtin_mul_overflow(*items, (uint64_t)entry->shape[axis], items))
            return false;
    return true;
}

// Entry `i` of a slab whose head was fine.
static inline TensorsFault tensors_entry(const uint8_t *slab, uint64_t size, uint32_t i, TensorEntry *entry)
{
    memcpy(entry, slab + sizeof(TensorsHead) + i * sizeof *entry, sizeof *entry);
    if (entry->code == DT_NONE || entry->code >= DT_COUNT || entry->rank > TENSOR_AXES)
        return TENSORS_TABLE;
    if (entry->bytes > size || entry->offset > size - entry->bytes)
        return TENSORS_TABLE;
    for (uint32_t axis = 0; axis < TENSOR_AXES; axis++)
        if (entry->shape[axis] < 0)
            return TENSORS_SIZE;
    uint64_t needed;
    if (entry->code == DT_BYTES)
        return TENSORS_FINE;
    bool counted = tensor_items(entry, &needed) && !__builtin_mul_overflow(needed, (uint64_t)dtype_bytes(entry->code), &needed);
    return counted && needed == entry->bytes ? TENSORS_FINE : TENSORS_SIZE;
}

// Where the note of a slab whose head was fine begins, and its bytes; 0 bytes when it has none.
static inline TensorsFault tensors_note(const uint8_t *slab, uint64_t size, const TensorsHead *head, uint64_t *at, uint32_t *bytes)
{
    *at = *bytes = 0;
    if (head->magic != TENSORS_NOTED)
        return TENSORS_FINE;
    if (size < sizeof *head + NOTE_TAIL)
        return TENSORS_NOTE;
    memcpy(bytes, slab + size - NOTE_TAIL, NOTE_TAIL);
    if (*bytes > size - NOTE_TAIL - sizeof *head)
        return TENSORS_NOTE;
    *at = size - NOTE_TAIL - *bytes;
    return TENSORS_FINE;
}
