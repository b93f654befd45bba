// Find the end of a JSON number without reading its value: RFC 8259's grammar, one pass.
#pragma once
#include <stdint.h>
#include "json_fault.h"

static inline const uint8_t *skip_digits(const uint8_t *at, const uint8_t *end)
{
    while (at != end && (uint8_t)(*at - '0') < 10)
        at++;
    return at;
}

// Moves behind the number that begins at `*at`, or to the byte that shows that there is none.
static inline JsonFault skip_number(const uint8_t **at, const uint8_t *end)
{
    const uint8_t *p = *at, *digits;
    if (p != end && *p == '-')
        p++;
    digits = p;
    p = p != end && *p == '0' ? p + 1 : skip_digits(p, end);
    if (p == digits) {
        *at = p;
        return JSON_INVALID_VALUE;
    }
    if (p != end && *p == '.') {
        digits = ++p;
        p = skip_digits(p, end);
        if (p == digits) {
            *at = p;
            return JSON_MISSING_FRACTION;
        }
    }
    if (p != end && (*p | 0x20) == 'e') {
        p++;
        if (p != end && (*p == '+' || *p == '-'))
            p++;
        digits = p;
        p = skip_digits(p, end);
        if (p == digits) {
            *at = p;
            return JSON_MISSING_EXPONENT;
        }
    }
    *at = p;
    return JSON_OK;
}
