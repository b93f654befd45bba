// Float text as the V2 protocol has it (spec triton_v2, section 3): the fewest digits that read back to the
// DOUBLE a value widens to, laid out as 0.000001, 1.0, 123456789012345680000.0, 1e21, 1e-7, with NaN and
// Infinity as bare tokens.
//
// The digits of a double come from float64_text.h. A float32 has only 24 bits of mantissa, so S (see there)
// is one product with a number tabled per exponent; every one of the 2**31 magnitudes was compared with the
// double's text, and a number takes 21 ns instead of 25.
#pragma once
#include "float64_text.h"
#include "text_put.h"

static constexpr int DOUBLE_TEXT = 26;      // -0.0000012345678901234567

// `count` digits of d.ddd * 10**power.
static inline char *put_wide_digits(char *at, const char *digits, int count, int power)
{
    if (power >= -6 && power < 21) {
        if (power >= 0)
            return put_digits(at, digits, count, power, 21);
        at = put_bytes(at, "0.00000", 1 - power);
        return put_bytes(at, digits, count);
    }
    *at++ = digits[0];
    if (count > 1)
        *at++ = '.';
    at = put_bytes(at, digits + 1, count - 1);
    *at++ = 'e';
    return put_integer(at, power);
}

static __attribute__((noinline)) char *put_wide_exact(char *at, double value)
{
    if (!isfinite(value))
        return put_non_finite(at, value);
    if (signbit(value))
        *at++ = '-';
    if (value == 0)
        return put(at, "0.0");
    char text[32], digits[20];
    char *end = std::to_chars(text, text + 32, fabs(value), std::chars_format::scientific).ptr;
    int count = 0, power = 0;
    const char *c = text;
    for (; *c != 'e'; c++)
        if (*c != '.')
            digits[count++] = *c;
    std::from_chars(c + (c[1] == '+' ? 2 : 1), end, power);
    return put_wide_digits(at, digits, count, power);
}

static __attribute__((noinline)) char *put_wide_unplaced(char *at, uint64_t digits, int power)
{
    Digits d = text_of_seventeen(digits);
    char text[17];
    memcpy(text, &d.first, 8);
    memcpy(text + 8, &d.second, 8);
    text[16] = (char)d.last;
    return put_wide_digits(at, text, d.count, power);
}

// From S, near which the shortest text lies, to text. `lopsided`: the double is a power of two.
__attribute__((always_inline)) static inline char *put_near(char *at, const Scaled64 &s, int ten_power, bool lopsided,
                                                            double value)
{
    Candidate ten = nearest<10>(s, lopsided);
    uint64_t digits = select(ten.reads_back, ten.digits, s.whole);
    bool seventeen = digits >= 10000000000000000;
    digits += 9 * digits & ((uint64_t)seventeen - 1);
    bool unsure = s.unsure | ten.unsure | (lopsided & !ten.reads_back) | (digits >= 100000000000000000);
    if (__builtin_expect(unsure, 0))
        return put_wide_exact(at, value);
    int power = 15 - ten_power + seventeen;
    *at = '-';
    at += (bool)signbit(value);
    if (__builtin_expect(!is_placed(power), 0))
        return put_wide_unplaced(at, digits, power);
    return put_placed<true>(at, text_of_seventeen(digits), power);
}

// Puts 16 or 17 digits before the point of S.
static inline int ten_power_of(int binary) { return -(((binary - 52) * 315653) >> 20); }

static inline char *put_wide(char *at, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint64_t fraction = bits & 0xfffffffffffff;
    int exponent = (int)(bits >> 52) & 0x7ff;
    if (__builtin_expect((unsigned)exponent - 1 >= 2046, 0))
        return put_wide_exact(at, value);
    int ten_power = ten_power_of(exponent - 1023);
    Scaled64 s = scale64(fraction | 0x10000000000000, exponent - 1023, ten_power);
    return put_near(at, s, ten_power, fraction == 0, value);
}

// ---- float32 -----------------------------------------------------------------------------------

struct LastPlace {              // of the mantissas of one exponent, on the scale of S
    uint64_t whole, fraction;   // its value: 64 bits behind the point
    int64_t half;               // half a last place of the DOUBLE, in 2**-24
    int ten_power;
};

struct LastPlaces {
    LastPlace of[255];          // by the exponent's bits; denormals have none

    LastPlaces()
    {
        for (int exponent = 1; exponent < 255; exponent++) {
            int binary = exponent - 127, ten_power = ten_power_of(binary), log2 = log2_of_ten(ten_power);
            uint64_t ten = TENS[ten_power - LOWEST_TEN];
            unsigned __int128 value = (unsigned __int128)ten << 64 | TENS_BELOW[ten_power - LOWEST_TEN];
            value >>= 213 - log2 - exponent;    // the table's point is at bit 127, a mantissa's at bit 23
            int64_t half = (int64_t)(ten >> (92 - binary - log2));
            of[exponent] = {(uint64_t)(value >> 64), (uint64_t)value, half, ten_power};
        }
    }
};

static const LastPlaces LAST_PLACES;

static inline char *put_wide(char *at, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    int exponent = (int)(bits >> 23) & 0xff;
    if (__builtin_expect((unsigned)exponent - 1 >= 254, 0))
        return put_wide_exact(at, value);
    uint64_t mantissa = (bits & 0x7fffff) | 0x800000;
    const LastPlace &place = LAST_PLACES.of[exponent];
    unsigned __int128 low = (unsigned __int128)mantissa * place.fraction;
    uint64_t whole = mantissa * place.whole + (uint64_t)(low >> 64), fraction = (uint64_t)low;
    bool up = (fraction >> 63) & ((fraction << 1 != 0) | (whole & 1));
    Scaled64 s;
    s.whole = whole + up;
    s.delta = (int64_t)(fraction >> 40 | ((fraction & 0xffffffffff) != 0)) - ((int64_t)up << 24);
    s.half = place.half;
    // The table is cut at 2**-64, which the mantissa makes 2**-40. Up to 10**38 nothing is lost by that.
    bool exact = (unsigned)place.ten_power <= 38;
    s.unsure = !exact & (fraction - (((uint64_t)1 << 63) - ((uint64_t)1 << 24)) <= (uint64_t)2 << 24);
    return put_near(at, s, place.ten_power, mantissa == 0x800000, value);
}

template <class T>
struct WideItem {
    static inline char *put_item(char *at, const uint8_t *&from, int)
    {
        T value;
        memcpy(&value, from, sizeof value);
        from += sizeof value;
        return put_wide(at, value);
    }
};
