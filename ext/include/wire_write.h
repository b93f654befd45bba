// Protobuf bytes of a message's head, grown in a string; its large fields are copied beside it later.
#pragma once
#include <stdint.h>
#include <string.h>
#include <string>

static inline int size_varint(uint64_t value)
{
    return value < 0x80 ? 1 : (63 - __builtin_clzll(value)) / 7 + 1;
}

static inline uint8_t *put_varint(uint8_t *at, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        *at++ = (uint8_t)value | 0x80;
    *at++ = (uint8_t)value;
    return at;
}

static inline void add_varint(std::string *head, uint64_t value)
{
    uint8_t text[10];
    head->append((const char *)text, put_varint(text, value) - text);
}

static inline void add_number(std::string *head, uint32_t tag, uint64_t value)
{
    add_varint(head, tag);
    add_varint(head, value);
}

static inline void add_text(std::string *head, uint32_t tag, const char *text, size_t size)
{
    add_number(head, tag, size);
    head->append(text, size);
}

// A fixed32 or fixed64 value, in memory order (little-endian, as everywhere here).
static inline void add_fixed(std::string *head, uint32_t tag, const void *value, size_t size)
{
    add_varint(head, tag);
    head->append((const char *)value, size);
}

// A message within: what is added between the two goes in. One byte is kept for the length; a
// longer one moves the message up, which is rare and short.
static inline size_t open_field(std::string *head, uint32_t tag)
{
    add_varint(head, tag);
    head->push_back(0);
    return head->size();
}

static inline void close_field(std::string *head, size_t start)
{
    size_t size = head->size() - start;
    int more = size_varint(size) - 1;
    if (more)
        head->insert(start, (size_t)more, 0);
    put_varint((uint8_t *)&(*head)[start - 1], size);
}
