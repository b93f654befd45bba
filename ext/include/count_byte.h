// How often one byte occurs in a span, at the speed memory is read: 64 lanes of byte counters,
// emptied before they can wrap. Plain loops; the compiler makes vectors of them.
#pragma once
#include <stdint.h>

static inline int64_t count_byte(const uint8_t *at, const uint8_t *end, uint8_t wanted)
{
    const int LANES = 64;
    int64_t total = 0;
    while (end - at >= LANES) {
        uint8_t seen[LANES] = {0};
        int64_t blocks = (end - at) / LANES;
        if (blocks > 255)
            blocks = 255;
        for (; blocks > 0; blocks--, at += LANES)
            for (int i = 0; i < LANES; i++)
                seen[i] += at[i] == wanted;
        for (int i = 0; i < LANES; i++)
            total += seen[i];
    }
    for (; at != end; at++)
        total += *at == wanted;
    return total;
}
