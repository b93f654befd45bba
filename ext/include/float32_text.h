// float32 text at about 12 ns a number; what is written is said in float_exact.h.
//
// A float is m * 2**e. One product with a tabled power of ten, S = m * 2**e * 10**k, is a fixed
// point number with 32 bits behind the point; the same power, shifted, is `half` a unit of the
// float's last place on the scale of S. "Does the decimal c read back?" is then |c - S| < half.
//
// TFS: k makes nine digits before the point; rounded, S is all of %.9g. %.6g is the multiple of
// 1000 nearest to S, if that reads back.
// SHORTEST: k makes 2 * half at least 1 and less than 10. Then S rounded reads back, and at most
// one multiple of 10 does; that one is the shortest if there is one, trailing zeros cut.
//
// S and half are truncated. That this is never seen, and that what is closer than TIE_DOUBT is a
// tie, was proved by comparing all 2**31 magnitudes in both modes with float_exact.h, which still
// writes the denormals and some powers of two, whose interval is not symmetric.
#pragma once
#include "float_layout.h"

static constexpr int64_t TIE_DOUBT = 4;      // in 2**-32

struct Scaled32 {
    uint64_t point;             // S; its lowest bit stands for everything below it
    int64_t half;
};

static inline Scaled32 scale32(uint32_t mantissa, int shift, int ten_power)
{
    uint64_t ten = TENS[ten_power - LOWEST_TEN];
    unsigned __int128 wide = (unsigned __int128)((uint64_t)mantissa << shift) * ten;
    uint64_t below = (uint64_t)wide != 0;       // else S may be a tie
    // An even mantissa also owns the ends of its interval.
    int64_t half = (int64_t)(ten >> (65 - shift)) + TIE_DOUBT - 2 * TIE_DOUBT * (mantissa & 1);
    return {(uint64_t)(wide >> 64) | below, half};
}

// S to a whole number, half to even.
static inline uint32_t round32(uint64_t point)
{
    return (uint32_t)((point + 0x7fffffff + (point >> 32 & 1)) >> 32);
}

struct Rounded {                // to a multiple of UNIT
    uint32_t quotient;
    bool reads_back;
};

// The multiple of UNIT nearest to S, given S rounded to a whole number.
template <uint32_t UNIT>
static inline Rounded round_to(const Scaled32 &s, uint32_t whole)
{
    uint32_t quotient = whole / UNIT;
    int64_t above = (int64_t)(s.point - ((uint64_t)(quotient * UNIT) << 32));
    bool over = above + s.half >= (int64_t)UNIT << 32;          // the multiple above S reads back
    return {quotient + over, (bool)(over | (above + s.half < 2 * s.half))};
}

struct Nine {                   // what is to be written: nine digits, upper * 1000 + lower
    uint32_t upper, lower;
    int power;                  // of the first
    bool few;                   // a multiple of 1000 (TFS), of 10 (SHORTEST) reads back
};

// A NINES entry, lowest bits first: 25 bits the mantissa from which on nine rounded digits begin at
// the next power of ten; 7 bits 64 + the power below that mantissa; two bytes the shifts below and
// from it.
static inline Nine choose_tfs(uint32_t mantissa, int exponent)
{
    uint64_t entry = NINES[exponent];
    bool next = mantissa >= (entry & 0x1ffffff);
    int power = (int)((uint32_t)entry >> 25) - 64 + next;
    Scaled32 s = scale32(mantissa, (int)(entry >> (32 + 8 * next)) & 0xff, 8 - power);
    uint32_t whole = round32(s.point);
    Rounded six = round_to<1000>(s, whole);
    uint32_t lower = (whole - whole / 1000 * 1000) & ((uint32_t)six.reads_back - 1);
    if (__builtin_expect(six.quotient == 1000000, 0))   // 0.00999999978 is 0.01
        return {six.quotient / 10, 0, power + 1, true};
    return {six.quotient, lower, power, six.reads_back};
}

// A SHORTS entry: a byte 64 + k, a byte the shift.
static inline Nine choose_shortest(uint32_t mantissa, int exponent)
{
    static const uint32_t TO_NINE[3] = {100, 10, 1};
    int k = (int)(SHORTS[exponent] & 0xff) - 64;
    Scaled32 s = scale32(mantissa, SHORTS[exponent] >> 8, k);
    s.half >>= mantissa == 0x800000;    // the next float32 below is half as far
    int beyond_seven = (s.point >= (uint64_t)10000000 << 32) + (s.point >= (uint64_t)100000000 << 32);
    uint32_t factor = TO_NINE[beyond_seven], whole = round32(s.point);
    int power = 6 - k + beyond_seven;
    Rounded ten = round_to<10>(s, whole);
    uint32_t digits = (uint32_t)select(ten.reads_back, ten.quotient * 10 * factor, whole * factor);
    if (__builtin_expect(digits == 1000000000, 0))
        return {100000, 0, power + 1, true};
    return {digits / 1000, digits % 1000, power, ten.reads_back};
}

template <int MODE>
static __attribute__((noinline)) char *put_unplaced32(char *at, Nine n)
{
    int exponent_at = MODE == FLOAT_SHORTEST ? 16 : n.few ? 6 : 9;
    return put_unplaced<false>(at, text_of_nine(n.upper * 1000 + n.lower), n.power, exponent_at);
}

template <int MODE>
static __attribute__((noinline)) char *put_float_slow(char *at, float value)
{
    if (value == 0)
        return signbit(value) ? put(at, "-0.0") : put(at, "0.0");
    return put_float_exact<float, MODE>(at, value);
}

template <int MODE>
static inline char *put_float(char *at, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t fraction = bits & 0x7fffff;
    int exponent = (int)(bits >> 23) & 0xff;
    if (__builtin_expect((unsigned)exponent - 1 >= 254, 0))
        return put_float_slow<MODE>(at, value);
    uint32_t mantissa = fraction | 0x800000;
    Nine n = MODE == FLOAT_TFS ? choose_tfs(mantissa, exponent) : choose_shortest(mantissa, exponent);
    // The only asymmetric intervals that matter: in TFS 2**88 to 2**93.
    if (__builtin_expect(fraction == 0 && (exponent > 214 || (MODE == FLOAT_SHORTEST && !n.few)), 0))
        return put_float_slow<MODE>(at, value);

    *at = '-';
    at += bits >> 31;
    // %.6g begins to use an exponent at 1e6, which %.9g still places.
    if (__builtin_expect((unsigned)(n.power + 4) > 10u - (MODE == FLOAT_TFS && n.few), 0))
        return put_unplaced32<MODE>(at, n);
    uint32_t top = n.upper / 1000;
    return put_placed<false>(at, text_of_nine(top, n.upper - top * 1000, n.lower), n.power);
}
