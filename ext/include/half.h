// float16 and bfloat16 as bits. No machine type is assumed; both round to nearest, ties to even.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t half_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 48 & 0x8000);
    if (isnan(value))
        return sign | 0x7e00;
    double size = fabs(value);
    if (size >= 65520.0)                        // halfway above the largest, 65504
        return sign | 0x7c00;
    if (size < 0x1p-14)                         // subnormal: steps of 2**-24
        return sign | (uint16_t)nearbyint(size * 0x1p24);
    memcpy(&bits, &size, sizeof bits);
    bits += (1ull << 41) - 1 + (bits >> 42 & 1);
    return sign | (uint16_t)((bits >> 42) - ((1023 - 15) << 10));
}

static inline double double_of_half(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

static inline uint16_t bfloat_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isnan(value))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline double double_of_bfloat(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}
