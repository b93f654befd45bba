// float64 text; float32_text.h explains the method. Here S has up to 17 digits before its point and
// is computed from a 128-bit power of ten with 64 bits behind the point, 24 of which are compared.
// Nobody can try all values: what is closer than DOUBT goes to float_exact.h instead, as do the
// denormals and the powers of two that no short text reads back to.
#pragma once
#include "float32_text.h"

static constexpr int64_t DOUBT = 4;          // S and half are off by less than 2 of their last bits

struct Scaled64 {
    uint64_t whole;             // S rounded, half to even
    int64_t delta;              // S - whole, in 2**-24
    int64_t half;               // in 2**-24
    bool unsure;                // of whole
};

// `binary` is the power of two of the mantissa's highest bit.
static inline Scaled64 scale64(uint64_t mantissa, int binary, int ten_power)
{
    uint64_t ten = TENS[ten_power - LOWEST_TEN], ten_below = TENS_BELOW[ten_power - LOWEST_TEN];
    int shift = binary + log2_of_ten(ten_power) - 51;
    uint64_t moved = mantissa << shift;                          // puts the point of S at bit 128
    unsigned __int128 low = (unsigned __int128)moved * ten_below;
    unsigned __int128 wide = (unsigned __int128)moved * ten + (uint64_t)(low >> 64);
    uint64_t whole = (uint64_t)(wide >> 64), fraction = (uint64_t)wide | ((uint64_t)low != 0);
    bool up = (fraction >> 63) & ((fraction << 1 != 0) | (whole & 1));
    Scaled64 s;
    s.whole = whole + up;
    s.delta = (int64_t)(fraction >> 40 | ((fraction & 0xffffffffff) != 0)) - ((int64_t)up << 24);
    s.half = (int64_t)(ten >> (41 - shift));
    bool exact = (unsigned)ten_power <= 55;                      // the tabled power is, so a tie is one
    s.unsure = !exact & (fraction - (0x8000000000000000u - DOUBT) <= 2 * DOUBT);
    return s;
}

struct Candidate {
    uint64_t digits;            // the multiple of UNIT nearest to S
    bool reads_back, unsure;
};

template <uint64_t UNIT>
static inline Candidate nearest(const Scaled64 &s, bool lopsided)
{
    Candidate c;
    uint64_t rest = s.whole % UNIT;
    int64_t above = (int64_t)(rest << 24) + s.delta;
    uint64_t up = above > (int64_t)((UNIT / 2) << 24);           // ties are never near enough
    c.digits = s.whole - rest + (UNIT & -up);
    int64_t distance = above - (int64_t)((UNIT << 24) & -up);
    int64_t half = s.half >> (lopsided & (distance > 0));
    int64_t margin = half - (distance < 0 ? -distance : distance);
    c.reads_back = margin > 0;
    c.unsure = (uint64_t)(margin + DOUBT) <= 2 * DOUBT;
    return c;
}

struct Seventeen {
    uint64_t digits;            // 17, trailing zeros included
    int power;                  // of the first
    bool few, unsure;
};

static inline Seventeen choose_tfs(uint64_t mantissa, int binary, bool lopsided)
{
    static constexpr uint64_t SIX = 100000000000;
    int power = (binary * 315653) >> 20;                         // floor(log10(2**binary))
    uint64_t next = TENS[power + 1 - LOWEST_TEN];
    power += (log2_of_ten(power + 1) == binary) & (mantissa << 11 >= next);
    Scaled64 s = scale64(mantissa, binary, 16 - power);
    Seventeen c = {s.whole, power, false, s.unsure};
    if (s.whole % SIX - 16 < SIX - 32)      // half < 12
        return c;
    Candidate six = nearest<SIX>(s, lopsided);
    c.few = six.reads_back;
    c.unsure |= six.unsure;
    c.digits = select(six.reads_back, six.digits, c.digits);
    return c;
}

static inline Seventeen choose_shortest(uint64_t mantissa, int binary, bool lopsided)
{
    int k = -(((binary - 52) * 315653) >> 20);                   // 2**(binary - 52) * 10**k in [1, 10)
    Scaled64 s = scale64(mantissa, binary, k);
    Candidate ten = nearest<10>(s, lopsided);
    Seventeen c;
    c.digits = select(ten.reads_back, ten.digits, s.whole);
    bool seventeen = c.digits >= 10000000000000000;
    c.digits += 9 * c.digits & ((uint64_t)seventeen - 1);
    c.power = 15 - k + seventeen;
    c.few = ten.reads_back;
    c.unsure = s.unsure | ten.unsure | (lopsided & !ten.reads_back);
    return c;
}

template <int MODE>
static __attribute__((noinline)) char *put_unplaced64(char *at, uint64_t digits, int power, bool six)
{
    int exponent_at = MODE == FLOAT_SHORTEST ? 16 : six ? 6 : 17;
    return put_unplaced<true>(at, text_of_seventeen(digits), power, exponent_at);
}

template <int MODE>
static __attribute__((noinline)) char *put_float_slow(char *at, double value)
{
    if (value == 0)
        return signbit(value) ? put(at, "-0.0") : put(at, "0.0");
    return put_float_exact<double, MODE>(at, value);
}

template <int MODE>
static inline char *put_float(char *at, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint64_t fraction = bits & 0xfffffffffffff;
    int exponent = (int)(bits >> 52) & 0x7ff;
    if (__builtin_expect((unsigned)exponent - 1 >= 2046, 0))
        return put_float_slow<MODE>(at, value);
    uint64_t mantissa = fraction | 0x10000000000000;
    Seventeen c = MODE == FLOAT_TFS ? choose_tfs(mantissa, exponent - 1023, fraction == 0)
                                    : choose_shortest(mantissa, exponent - 1023, fraction == 0);
    if (__builtin_expect(c.unsure | (c.digits >= 100000000000000000), 0))
        return put_float_slow<MODE>(at, value);

    *at = '-';
    at += bits >> 63;
    if (__builtin_expect((unsigned)(c.power + 4) > 10u - (MODE == FLOAT_TFS && c.few), 0))
        return put_unplaced64<MODE>(at, c.digits, c.power, c.few);
    return put_placed<true>(at, text_of_seventeen(c.digits), c.power);
}
