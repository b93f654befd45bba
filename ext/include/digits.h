// Runs of decimal digits, eight bytes at a time, and the hurried number reader built on them.
//
// Everything here reads up to HURRY_BYTES (number_run.h) past the number's start without asking:
// the caller has looked. Little-endian machines only, as the rest of the wire format.
#pragma once
#include <stdint.h>
#include <string.h>
#include <type_traits>
#include "decimal.h"

static const uint64_t POWERS_OF_TEN[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

static inline uint64_t load8(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

// How many of the eight bytes are digits before the first that is not.
static inline int count_digits8(uint64_t word)
{
    uint64_t zeroed = word ^ 0x3030303030303030u;   // digits become 0..9
    uint64_t other = (zeroed | (zeroed + 0x0606060606060606u)) & 0xf0f0f0f0f0f0f0f0u;
    return other ? __builtin_ctzll(other) >> 3 : 8;
}

// The value of the first `count` digits (0..8): shifted up, the missing ones read as leading zeros.
static inline uint64_t value_of_digits8(uint64_t word, int count)
{
    word = (word & 0x0f0f0f0f0f0f0f0fu) << 1 << ((63 - 8 * count) & 63);
    word = count ? word : 0;
    word = word * 10 + (word >> 8);
    uint64_t low = (word & 0x000000ff000000ffu) * (100 + (1000000ull << 32));
    uint64_t high = ((word >> 16) & 0x000000ff000000ffu) * (1 + (10000ull << 32));
    return (low + high) >> 32;
}

// Up to 16 digits and then some: false when there are more than 24.
static inline bool take_digits(const uint8_t **at, uint64_t *value, int *count)
{
    for (int block = 0; block < 3; block++) {
        uint64_t word = load8(*at);
        int n = count_digits8(word);
        *value = *value * POWERS_OF_TEN[n] + value_of_digits8(word, n);
        *at += n;
        *count += n;
        if (n < 8)
            return true;
    }
    return false;
}

template <typename T>
static inline const uint8_t *hurry_item(const uint8_t *at, T *out)
{
    bool negative = *at == '-';
    at += negative;
    uint64_t digits = 0;
    int whole = 0, fraction = 0;
    const uint8_t *first = at;

    if constexpr (std::is_floating_point_v<T>) {
        if (*at == '0' && at[1] == '.') {
            at += 2;
        } else {
            if (!take_digits(&at, &digits, &whole) || whole == 0 || *first == '0' || *at != '.')
                return nullptr;
            at++;
        }
        if (!take_digits(&at, &digits, &fraction) || fraction == 0 || whole + fraction > 19 ||
            (*at | 0x20) == 'e')
            return nullptr;
        double value = decimal_to_double(digits, -fraction);
        T stored = (T)(negative ? -value : value);
        memcpy(out, &stored, sizeof stored);
        return at;
    } else {
        return nullptr;
    }
}
