// digits * 10**power as the nearest double: the Eisel-Lemire method
// (Lemire, "Number Parsing at a Gigabyte per Second", 2021; that no fallback is needed for up to
// 64 bits of digits: Mushtak and Lemire, "Fast Number Parsing Without Fallback", 2023).
//
// This is not a text reader: json_number.h finds the digits.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "decimal_table.h"

static inline double double_of_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The steps below 2**-1022, where a double loses digits one by one.
static inline double subnormal_of(uint64_t mantissa, int64_t exponent)
{
    int64_t shift = 1 - exponent;
    if (shift >= 64)
        return 0.0;
    mantissa >>= shift;
    mantissa = (mantissa + (mantissa & 1)) >> 1;
    return double_of_bits(mantissa);    // a carry into bit 52 is exactly the smallest normal one
}

static inline double decimal_to_double(uint64_t digits, int64_t power)
{
    if (digits == 0 || power < LOWEST_POWER)
        return 0.0;
    if (power > HIGHEST_POWER)
        return HUGE_VAL;

    // 1. Multiply, top bit first; the power's low half matters only when 9 low bits are all ones.
    int shift = __builtin_clzll(digits);
    const uint64_t *ten = POWERS[power - LOWEST_POWER];
    unsigned __int128 wide = (unsigned __int128)(digits << shift) * ten[0];
    uint64_t high = (uint64_t)(wide >> 64), low = (uint64_t)wide;
    if ((high & 0x1ff) == 0x1ff) {
        uint64_t rest = (uint64_t)(((unsigned __int128)(digits << shift) * ten[1]) >> 64);
        low += rest;
        high += low < rest;
    }

    // 2. Keep 54 bits. 217706 / 65536 is log2(10).
    int top = (int)(high >> 63);
    uint64_t mantissa = high >> (top + 9);
    int64_t exponent = ((217706 * power) >> 16) + 63 + top - shift + 1023;
    if (exponent <= 0)
        return subnormal_of(mantissa, exponent);

    // 3. Round half to even: only these powers can hit a half exactly.
    if (low <= 1 && power >= -4 && power <= 23 && (mantissa & 3) == 1 && (mantissa << (top + 9)) == high)
        mantissa &= ~(uint64_t)1;
    mantissa = (mantissa + (mantissa & 1)) >> 1;
    if (mantissa >> 53) {
        mantissa >>= 1;
        exponent += 1;
    }
    if (exponent >= 2047)
        return HUGE_VAL;
    return double_of_bits((uint64_t)exponent << 52 | (mantissa & 0x000fffffffffffffu));
}
