// Float text, plainly: through the standard library's exact conversions, about 100 ns a number.
//
// float32_text.h and float64_text.h decide nearly every number and come here when they cannot be sure.
//
// TFS (spec tfserving 3.2): %.6g; if that does not read back to the same value of the same width,
// %.9g (float32) or %.17g (float64); ".0" where there is neither '.' nor 'e'.
// SHORTEST: the fewest digits that read back, laid out as Python's repr lays them out: 1.0, 0.0001,
// 1e-05, 1234567890123456.0, 1e+16.
// Both: NaN, Infinity, -Infinity.
#pragma once
#include <charconv>
#include <math.h>
#include "text_put.h"

enum FloatMode : uint8_t { FLOAT_TFS = 0, FLOAT_SHORTEST = 1 };

static constexpr int FLOAT32_TEXT = 19, FLOAT64_TEXT = 24;     // longest texts

template <class T>
static inline char *put_non_finite(char *at, T value)
{
    if (value != value)
        return put(at, "NaN");
    return signbit(value) ? put(at, "-Infinity") : put(at, "Infinity");
}

// Lay out `count` digits (no trailing zeros) of d.ddd * 10**power, with an exponent when the
// power is below -4 or at least `exponent_at`.
static inline char *put_digits(char *at, const char *digits, int count, int power, int exponent_at)
{
    if (power < -4 || power >= exponent_at) {
        *at++ = digits[0];
        if (count > 1)
            *at++ = '.';
        at = put_bytes(at, digits + 1, count - 1);
        *at++ = 'e';
        *at++ = power < 0 ? '-' : '+';
        int size = power < 0 ? -power : power;
        if (size < 10)
            *at++ = '0';
        return put_integer(at, size);
    }
    if (power < 0) {
        at = put_bytes(at, "0.000", 1 - power);
        return put_bytes(at, digits, count);
    }
    int whole = power + 1 < count ? power + 1 : count;
    at = put_bytes(at, digits, whole);
    memset(at, '0', power + 1 - whole);
    at += power + 1 - whole;
    *at++ = '.';
    if (whole == count)
        *at++ = '0';
    return put_bytes(at, digits + whole, count - whole);
}

template <class T>
static char *put_finite_tfs_exact(char *at, T value)
{
    char *end = std::to_chars(at, at + 32, value, std::chars_format::general, 6).ptr;
    T back = 0;
    auto read = std::from_chars(at, end, back);
    if (read.ec != std::errc() || back != value)
        end = std::to_chars(at, at + 32, value, std::chars_format::general, sizeof(T) == 4 ? 9 : 17).ptr;
    for (char *c = at; c < end; c++)
        if (*c == '.' || *c == 'e')
            return end;
    return put(end, ".0");
}

template <class T>
static char *put_finite_shortest_exact(char *at, T value)
{
    if (signbit(value))
        *at++ = '-';
    char text[32], digits[20];
    char *end = std::to_chars(text, text + 32, fabs(value), std::chars_format::scientific).ptr;
    int count = 0, power = 0;
    const char *c = text;
    for (; *c != 'e'; c++)
        if (*c != '.')
            digits[count++] = *c;
    std::from_chars(c + (c[1] == '+' ? 2 : 1), end, power);
    return put_digits(at, digits, count, power, 16);
}

template <class T, int MODE>
static char *put_float_exact(char *at, T value)
{
    if (!isfinite(value))
        return put_non_finite(at, value);
    return MODE == FLOAT_TFS ? put_finite_tfs_exact(at, value) : put_finite_shortest_exact(at, value);
}
