// Check that bytes are UTF-8.
#pragma once
#include <stdint.h>
#include <string.h>

// The first byte that is no UTF-8 (RFC 3629: shortest forms, no surrogates, up to U+10FFFF); `end` for none.
static inline const uint8_t *find_not_utf8(const uint8_t *at, const uint8_t *end)
{
    while (at < end) {
        if (*at < 0x80) {
            uint64_t eight;
            for (; end - at >= 8; at += 8) {
                memcpy(&eight, at, 8);
                if (eight & 0x8080808080808080u)
                    break;
            }
            while (at < end && *at < 0x80)
                at++;
            continue;
        }
        // Bounds of the second byte: they leave out what has a shorter form, surrogates, and what is too large.
        uint8_t lead = *at, low = 0x80, high = 0xBF;
        int more;
        if (lead >= 0xC2 && lead <= 0xDF) {
            more = 1;
        } else if (lead >= 0xE0 && lead <= 0xEF) {
            more = 2;
            if (lead == 0xE0)
                low = 0xA0;
            else if (lead == 0xED)
                high = 0x9F;
        } else if (lead >= 0xF0 && lead <= 0xF4) {
            more = 3;
            if (lead == 0xF0)
                low = 0x90;
            else if (lead == 0xF4)
                high = 0x8F;
        } else {
            return at;
        }
        if (end - at <= more || at[1] < low || at[1] > high)
            return at;
        for (int i = 2; i <= more; i++)
            if ((at[i] & 0xC0) != 0x80)
                return at;
        at += more + 1;
    }
    return end;
}
