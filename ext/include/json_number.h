// One JSON number of any length, read carefully: bounds checked byte by byte, always right,
// linear in its length. number_run.h has the hurried reader for rows of numbers; it comes here
// whenever it is unsure.
//
// Literals without '.' and exponent are integers while they fit 64 bits (TF Serving spec 2.1);
// everything else, NaN, Inf and Infinity included, is a double.
#pragma once
#include <charconv>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "decimal.h"
#include "json_fault.h"

enum NumberKind : uint8_t { NUMBER_INT64, NUMBER_UINT64, NUMBER_DOUBLE };  // UINT64: above 2**63 - 1

struct Number {
    NumberKind kind;
    int64_t integer;        // the two's complement bits of INT64 and UINT64
    double real;            // always set
};

// Digits as they are met: the first 19 that count, and where the decimal point went.
struct Digits {
    uint64_t value = 0;
    int kept = 0;           // at most 19: any 19 digits fit 64 bits
    int64_t power = 0;
    bool dropped = false;   // a nonzero digit did not fit
};

static inline bool is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

static inline void keep_digit(Digits *d, uint8_t c, bool after_point)
{
    if (d->kept < 19) {
        d->value = d->value * 10 + (c - '0');
        d->kept += d->value != 0;
        d->power -= after_point;
    } else {
        d->dropped |= c != '0';
        d->power += !after_point;
    }
}

static inline bool take_word(const uint8_t **at, const uint8_t *end, const char *word)
{
    // Moves past what matches, so that a fault names the byte that did not.
    for (; *word; word++, ++*at)
        if (*at == end || **at != (uint8_t)*word)
            return false;
    return true;
}

static inline JsonFault read_non_finite(const uint8_t **at, const uint8_t *end, bool negative, double *value)
{
    if (**at == 'N') {
        *value = NAN;
        return take_word(at, end, "NaN") ? JSON_OK : JSON_INVALID_VALUE;
    }
    *value = negative ? -INFINITY : INFINITY;
    if (!take_word(at, end, "Inf"))
        return JSON_INVALID_VALUE;
    if (*at != end && **at == 'i' && !take_word(at, end, "inity"))
        return JSON_INVALID_VALUE;
    return JSON_OK;
}

static inline JsonFault read_exponent(const uint8_t **at, const uint8_t *end, int64_t *power)
{
    const int64_t FAR = (int64_t)1 << 50;   // farther than any body's digits can shift back
    int64_t size = 0;
    bool negative = *at != end && **at == '-';
    if (*at != end && (**at == '-' || **at == '+'))
        ++*at;
    if (*at == end || !is_digit(**at))
        return JSON_MISSING_EXPONENT;
    for (; *at != end && is_digit(**at); ++*at)
        size = size < FAR ? size * 10 + (**at - '0') : size;
    *power += negative ? -size : size;
    return JSON_OK;
}

// More than 19 digits: if both neighbours of the kept ones agree, so does everything between.
static inline double nearest_double(const uint8_t *text, const uint8_t *end, const Digits *d)
{
    double value = decimal_to_double(d->value, d->power);
    if (!d->dropped || value == decimal_to_double(d->value + 1, d->power))
        return value;
    double exact = value;
    auto parsed = std::from_chars((const char *)text, (const char *)end, exact);
    if (parsed.ec == std::errc::result_out_of_range)  // too far either way; `exact` is untouched
        return value > 1.0 ? HUGE_VAL : 0.0;
    return exact;
}

static inline bool read_integer(const uint8_t *text, const uint8_t *end, bool negative, Number *n)
{
    uint64_t value = 0;
    if (end - text > 20)
        return false;
    for (; text != end; text++)
        if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value))
            return false;
    if (negative && value > (uint64_t)1 << 63)
        return false;
    n->kind = !negative && value >> 63 ? NUMBER_UINT64 : NUMBER_INT64;
    n->integer = (int64_t)(negative ? 0 - value : value);
    n->real = negative ? (double)n->integer : (double)value;
    return true;
}

// `*at` is left behind the number, or on the byte that shows the fault (at the number's start if
// it is too big). Nothing at or after `end` is read.
static inline JsonFault read_number(const uint8_t **at, const uint8_t *end, Number *n)
{
    const uint8_t *start = *at;
    bool negative = start != end && *start == '-';
    const uint8_t *text = *at = start + negative;
    Digits digits;

    *n = {NUMBER_DOUBLE, 0, 0.0};
    if (text == end)
        return JSON_INVALID_VALUE;
    if (*text == 'N' || *text == 'I')
        return read_non_finite(at, end, negative, &n->real);
    if (!is_digit(*text))
        return JSON_INVALID_VALUE;
    if (*text == '0')
        ++*at;              // nothing may follow a leading zero but '.', 'e' or the next token
    else
        for (; *at != end && is_digit(**at); ++*at)
            keep_digit(&digits, **at, false);

    bool point = *at != end && **at == '.';
    if (!point && (*at == end || (**at | 0x20) != 'e') && read_integer(text, *at, negative, n))
        return JSON_OK;
    if (point) {
        ++*at;
        if (*at == end || !is_digit(**at))
            return JSON_MISSING_FRACTION;
        for (; *at != end && is_digit(**at); ++*at)
            keep_digit(&digits, **at, true);
    }
    if (*at != end && (**at | 0x20) == 'e') {
        ++*at;
        if (JsonFault fault = read_exponent(at, end, &digits.power))
            return fault;
    }
    n->real = nearest_double(text, *at, &digits);
    if (isinf(n->real)) {
        *at = start;
        return JSON_NUMBER_TOO_BIG;
    }
    if (negative)
        n->real = -n->real;
    return JSON_OK;
}

static inline double add_digit(double value, uint8_t digit)
{
    volatile double tens = value * 10.0;    // rounded before the sum, as there: never a fused multiply-add
    return tens + (double)(digit - '0');
}

static inline double scale_once(double value, int64_t power)
{
    if (power < -308)
        return 0.0;
    return power < 0 ? value / decimal_to_double(1, -power) : value * decimal_to_double(1, power);
}

// The double of a literal that `read_number` took for one, as TF Serving's parser reads it: RapidJSON's normal
// precision. Digits go on in doubles from where the next would overflow an integer (2**64 - 1, or 2**63 behind a
// minus), of a fraction 17 count, and one power of ten scales the whole, so the last bits differ from the nearest
// double. `nearest` stands in where that parser would have refused the literal.
static inline double read_in_normal_precision(const uint8_t *text, const uint8_t *end, double nearest)
{
    const uint64_t EXACT = ((uint64_t)1 << 53) - 1;
    bool negative = *text == '-', doubled = false;
    const uint64_t most = negative ? (uint64_t)1 << 63 : UINT64_MAX;
    uint64_t whole = 0;
    int64_t power = 0;
    int counted = -1;           // digits of the significand behind its first one
    double value = 0.0;
    text += negative;
    if (!is_digit(*text))
        return nearest;         // NaN, Infinity
    for (; text != end && is_digit(*text) && whole <= (most - (*text - '0')) / 10; ++text, ++counted)
        whole = whole * 10 + (*text - '0');
    value = (double)whole;
    for (; text != end && is_digit(*text); ++text, doubled = true)
        value = add_digit(value, *text);
    if (text != end && *text == '.') {
        ++text;
        for (; !doubled && text != end && is_digit(*text) && whole <= EXACT; ++text, --power) {
            whole = whole * 10 + (*text - '0');
            counted += whole != 0;
        }
        value = doubled ? value : (double)whole;
        for (; text != end && is_digit(*text); ++text)
            if (counted < 17) {
                value = add_digit(value, *text);
                --power;
                counted += value > 0.0;
            }
    }
    if (text != end && read_exponent(&++text, end, &power) != JSON_OK)
        return nearest;
    value = power < -308 ? scale_once(scale_once(value, -308), power + 308)
        : power > 308 ? nearest : scale_once(value, power);
    return !isfinite(value) ? nearest : negative && power <= 308 ? -value : value;
}
