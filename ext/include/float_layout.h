// From 9 or 17 digits and a power of ten to text: 0.000123, 12.5, 1e-05. Nearly without jumps.
#pragma once
#include "float_exact.h"
#include "float_table.h"

struct Digits {                 // as text, the first digit in the lowest byte of first
    uint64_t first, second;     // nine digits have one in second
    uint8_t last;               // the 17th
    int count;                  // without trailing zeros; 1 or more
};

// Nine digits, given in threes.
static inline Digits text_of_nine(uint32_t a, uint32_t b, uint32_t c)
{
    Digits d;
    uint32_t last = TRIPLES[c];
    d.first = TRIPLES[a] | (uint64_t)TRIPLES[b] << 24 | (uint64_t)last << 48;
    d.second = last >> 16;
    int count = SIGNIFICANT[a], by_b = SIGNIFICANT[b] + 3, by_c = SIGNIFICANT[c] + 6;
    count = by_b > count ? by_b : count;
    d.count = by_c > count ? by_c : count;
    return d;
}

static inline Digits text_of_nine(uint32_t value)
{
    uint32_t upper = value / 1000, top = value / 1000000;
    return text_of_nine(top, upper - top * 1000, value - upper * 1000);
}

static inline Digits text_of_seventeen(uint64_t value)
{
    uint32_t upper = (uint32_t)(value / 1000000000);            // 8 digits
    Digits h = text_of_nine(upper), l = text_of_nine((uint32_t)(value - upper * (uint64_t)1000000000));
    Digits d;
    d.first = h.first >> 8 | h.second << 56;                    // h begins with a zero
    d.second = l.first;
    d.last = (uint8_t)l.second;
    d.count = l.count > 0 ? l.count + 8 : h.count - 1;
    return d;
}

// Where the digits of a number with a power from -4 to 6 go: `start` bytes from the text's
// beginning, those not in `keep` one byte further, behind `dot`.
struct Place {
    uint64_t keep, move, dot;
    uint8_t start, behind;      // behind = start + 1 if there is a dot among the digits
    uint8_t shortest;           // bytes of the text, which may have to end in ".0"
};

static constexpr Place place_at(int power)
{
    if (power < 0)
        return {~(uint64_t)0, 0, 0, (uint8_t)(1 - power), (uint8_t)(1 - power), 0};
    uint64_t keep = power < 7 ? ((uint64_t)1 << 8 * (power + 1)) - 1 : ~(uint64_t)0;
    return {keep, ~keep << 8, (uint64_t)'.' << 8 * (power + 1), 0, 1, (uint8_t)(power + 3)};
}

static const Place PLACES[11] = {place_at(-4), place_at(-3), place_at(-2), place_at(-1), place_at(0), place_at(1),
                                 place_at(2), place_at(3), place_at(4), place_at(5), place_at(6)};

static inline bool is_placed(int power) { return (unsigned)(power + 4) <= 10; }

template <bool SEVENTEEN>
static inline char *put_placed(char *at, const Digits &d, int power)
{
    // The store that decides where two overlap comes last.
    const Place &place = PLACES[power + 4];
    char *digits = at + place.behind;
    memcpy(at, "0.000000", 8);
    if (SEVENTEEN) {
        digits[16] = (char)d.last;
        memcpy(digits + 8, &d.second, 8);
    } else {
        digits[8] = (char)d.second;
    }
    memcpy(digits, &d.first, 8);
    uint64_t start = (d.first & place.keep) | (d.first << 8 & place.move) | place.dot;
    memcpy(at + place.start, &start, 8);
    int length = d.count + place.behind;
    return at + (length > place.shortest ? length : place.shortest);
}

template <bool SEVENTEEN>
static inline char *put_scientific(char *at, const Digits &d, int power)
{
    put_placed<SEVENTEEN>(at, d, 0);
    at += d.count + (d.count > 1);
    *at++ = 'e';
    *at++ = power < 0 ? '-' : '+';
    unsigned size = power < 0 ? -power : power;
    unsigned skip = size < 100;
    uint32_t text = TRIPLES[size] >> 8 * skip;
    memcpy(at, &text, 4);
    return at + 3 - skip;
}

// Powers that are not placed: with an exponent, or before or behind many zeros.
template <bool SEVENTEEN>
static inline char *put_unplaced(char *at, const Digits &d, int power, int exponent_at)
{
    if (power < -4 || power >= exponent_at)
        return put_scientific<SEVENTEEN>(at, d, power);
    char text[17];
    memcpy(text, &d.first, 8);
    memcpy(text + 8, &d.second, 8);
    text[16] = (char)d.last;
    return put_digits(at, text, d.count, power, exponent_at);
}

// floor(log2(10**power)) for every power in TENS.
static inline int log2_of_ten(int power) { return (power * 217706) >> 16; }

// Without a jump: how many digits a number needs is as good as random.
static inline uint64_t select(bool yes, uint64_t a, uint64_t b) { return b ^ ((a ^ b) & -(uint64_t)yes); }
