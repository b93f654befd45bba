// The primitives of HPACK (RFC 7541, section 5): integers with a prefix, and texts, plain or Huffman-coded.
#pragma once
#include "hpack_huffman.h"
#include <string.h>

struct HpackCursor {
    const uint8_t *at, *end;
};

struct HpackText {
    const uint8_t *at;
    size_t bytes;
    bool huffman;
};

// Octets after the prefix. 35 bits are more than any block holds, and further ones could only be zeros sent
// to waste time (section 5.1 lets a decoder say so).
static constexpr int HPACK_MORE_OCTETS = 5;

static inline bool hpack_read_integer(HpackCursor *cursor, int prefix_bits, uint64_t *value)
{
    if (cursor->at == cursor->end)
        return false;
    uint64_t most = ((uint64_t)1 << prefix_bits) - 1;
    *value = *cursor->at++ & most;
    if (*value < most)
        return true;
    for (int i = 0; i < HPACK_MORE_OCTETS && cursor->at != cursor->end; i++) {
        uint8_t octet = *cursor->at++;
        *value += (uint64_t)(octet & 0x7f) << (7 * i);
        if (!(octet & 0x80))
            return true;
    }
    return false;
}

static inline bool hpack_read_text(HpackCursor *cursor, HpackText *text)
{
    uint64_t bytes;
    if (cursor->at == cursor->end)
        return false;
    text->huffman = *cursor->at & 0x80;
    if (!hpack_read_integer(cursor, 7, &bytes) || bytes > (uint64_t)(cursor->end - cursor->at))
        return false;
    text->at = cursor->at;
    text->bytes = bytes;
    cursor->at += bytes;
    return true;
}

static constexpr size_t HPACK_INTEGER_BYTES = 11;   // of any 64-bit value

static inline uint8_t *hpack_write_integer(uint8_t *out, uint8_t pattern, int prefix_bits, uint64_t value)
{
    uint64_t most = ((uint64_t)1 << prefix_bits) - 1;
    if (value < most) {
        *out++ = (uint8_t)(pattern | value);
        return out;
    }
    *out++ = (uint8_t)(pattern | most);
    for (value -= most; value >= 0x80; value >>= 7)
        *out++ = (uint8_t)(0x80 | value);
    *out++ = (uint8_t)value;
    return out;
}

// The shorter of both ways; at most HPACK_INTEGER_BYTES more than the text.
static inline uint8_t *hpack_write_text(uint8_t *out, const uint8_t *from, size_t bytes)
{
    size_t coded = huffman_size(from, bytes);
    if (coded < bytes)
        return huffman_encode(from, bytes, hpack_write_integer(out, 0x80, 7, coded));
    out = hpack_write_integer(out, 0, 7, bytes);
    if (bytes)
        memcpy(out, from, bytes);
    return out + bytes;
}
