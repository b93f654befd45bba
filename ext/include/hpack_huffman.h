// The Huffman code of HPACK (RFC 7541, appendix B), both ways.
//
// The code is canonical: codes of one length follow each other in the order of their symbols, so that the
// lengths say all of it, and the compiler makes the tables. Decoding takes four bits a step; a state is an
// inner node of the code's tree, that is, the bits read since the last symbol.
#pragma once
#include <stddef.h>
#include <stdint.h>

static constexpr int HUFFMAN_SYMBOLS = 257;     // the last is the end of the string, never sent whole
static constexpr int HUFFMAN_EOS = 256;

static constexpr uint8_t HUFFMAN_BITS[HUFFMAN_SYMBOLS] = {
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
     6, 10, 10, 12, 13,  6,  8, 11, 10, 10,  8, 11,  8,  6,  6,  6,
     5,  5,  5,  6,  6,  6,  6,  6,  6,  6,  7,  8, 15,  6, 12, 10,
    13,  6,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,
     7,  7,  7,  7,  7,  7,  7,  7,  8,  7,  8, 13, 19, 13, 14,  6,
    15,  5,  6,  5,  6,  5,  6,  6,  6,  5,  7,  7,  6,  6,  6,  5,
     6,  7,  6,  5,  5,  6,  7,  7,  7,  7,  7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
};

struct HuffmanCodes {
    uint32_t of[HUFFMAN_SYMBOLS] = {};
};

static constexpr HuffmanCodes make_huffman_codes()
{
    HuffmanCodes codes;
    uint32_t next = 0;
    for (int bits = 1; bits <= 30; bits++, next <<= 1)
        for (int symbol = 0; symbol < HUFFMAN_SYMBOLS; symbol++)
            if (HUFFMAN_BITS[symbol] == bits)
                codes.of[symbol] = next++;
    return codes;
}

static constexpr HuffmanCodes HUFFMAN_CODES = make_huffman_codes();

enum : uint8_t {
    HUFFMAN_EMITS = 1,      // the step ends a symbol; of five bits or more, so never two
    HUFFMAN_MAY_END = 2,    // what was read since is padding: at most seven bits, all of them ones
    HUFFMAN_FAILS = 4,      // the end of the string was spelled out
};

struct HuffmanStep {
    uint8_t next = 0, symbol = 0, flags = 0;
};

struct HuffmanSteps {
    HuffmanStep of[256][16] = {};
};

static constexpr HuffmanSteps make_huffman_steps()
{
    // 257 leaves hang on 256 inner nodes. A child below 0 is a leaf: ~symbol.
    int children[256][2] = {};
    int nodes = 1;
    bool padding[256] = {true};
    for (int symbol = 0; symbol < HUFFMAN_SYMBOLS; symbol++) {
        int node = 0;
        for (int bit = HUFFMAN_BITS[symbol] - 1; bit > 0; bit--) {
            int side = (HUFFMAN_CODES.of[symbol] >> bit) & 1;
            if (!children[node][side]) {
                int depth = HUFFMAN_BITS[symbol] - bit;
                padding[nodes] = depth <= 7 && padding[node] && side;
                children[node][side] = nodes++;
            }
            node = children[node][side];
        }
        children[node][HUFFMAN_CODES.of[symbol] & 1] = ~symbol;
    }
    HuffmanSteps steps;
    for (int state = 0; state < 256; state++)
        for (int four = 0; four < 16; four++) {
            HuffmanStep &step = steps.of[state][four];
            int node = state;
            for (int bit = 3; bit >= 0; bit--) {
                int child = children[node][(four >> bit) & 1];
                node = child < 0 ? 0 : child;
                if (child == ~HUFFMAN_EOS)
                    step.flags |= HUFFMAN_FAILS;
                else if (child < 0) {
                    step.flags |= HUFFMAN_EMITS;
                    step.symbol = (uint8_t)~child;
                }
            }
            step.next = (uint8_t)node;
            if (padding[node])
                step.flags |= HUFFMAN_MAY_END;
        }
    return steps;
}

static constexpr HuffmanSteps HUFFMAN_STEPS = make_huffman_steps();

// The shortest code has five bits.
static inline size_t huffman_most_decoded(size_t bytes) { return bytes * 8 / 5; }

// Writes at most huffman_most_decoded(bytes). Returns what it wrote, -1 for what is no text in this code.
static inline ptrdiff_t huffman_decode(const uint8_t *from, size_t bytes, uint8_t *out)
{
    const uint8_t *start = out;
    uint8_t state = 0, flags = HUFFMAN_MAY_END;
    for (size_t i = 0; i < bytes; i++) {
        HuffmanStep step = HUFFMAN_STEPS.of[state][from[i] >> 4];
        if (step.flags & HUFFMAN_EMITS)
            *out++ = step.symbol;
        uint8_t failed = step.flags;
        step = HUFFMAN_STEPS.of[step.next][from[i] & 15];
        if (step.flags & HUFFMAN_EMITS)
            *out++ = step.symbol;
        flags = step.flags;
        state = step.next;
        if ((failed | flags) & HUFFMAN_FAILS)
            return -1;
    }
    return flags & HUFFMAN_MAY_END ? out - start : -1;
}

static inline size_t huffman_size(const uint8_t *from, size_t bytes)
{
    uint64_t bits = 0;
    for (size_t i = 0; i < bytes; i++)
        bits += HUFFMAN_BITS[from[i]];
    return (bits + 7) / 8;
}

// Writes huffman_size bytes and returns the place after them.
static inline uint8_t *huffman_encode(const uint8_t *from, size_t bytes, uint8_t *out)
{
    uint64_t held = 0;      // its lowest `count` bits are still to be written
    int count = 0;
    for (size_t i = 0; i < bytes; i++) {
        held = held << HUFFMAN_BITS[from[i]] | HUFFMAN_CODES.of[from[i]];
        for (count += HUFFMAN_BITS[from[i]]; count >= 8; count -= 8)
            *out++ = (uint8_t)(held >> (count - 8));
    }
    if (count)
        *out++ = (uint8_t)(held << (8 - count) | (0xff >> count));
    return out;
}
