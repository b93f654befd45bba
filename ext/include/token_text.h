// What the events of a stream of tokens are written with, beside the verbs of text_put.h.
#pragma once
#include <math.h>
#include "text_put.h"

// Microseconds as milliseconds with three digits.
static inline char *put_millis(char *at, int64_t us)
{
    if (us < 0)
        us = 0;
    at = put_integer(at, us / 1000);
    int rest = (int)(us % 1000);
    *at++ = '.';
    *at++ = (char)('0' + rest / 100);
    *at++ = (char)('0' + rest / 10 % 10);
    *at++ = (char)('0' + rest % 10);
    return at;
}

// The shortest text that reads back the same, with a point or an exponent; JSON has no word for what is no number.
static inline char *put_number(char *at, double value)
{
    if (!isfinite(value))
        return put(at, "null");
    char *end = std::to_chars(at, at + 28, value).ptr;
    for (char *c = at; c != end; c++)
        if (*c == '.' || *c == 'e')
            return end;
    return put(end, ".0");
}

// put_string without control characters, but for tab, line feed and carriage return.
static inline char *put_stripped(char *at, const uint8_t *from, size_t count)
{
    *at++ = '"';
    for (size_t i = 0; i < count; i++) {
        uint8_t byte = from[i];
        if (escaped_size(byte) == 1)
            *at++ = (char)byte;
        else if (byte >= 0x20 || byte == '\t' || byte == '\n' || byte == '\r')
            at = put_escape(at, byte);
    }
    *at++ = '"';
    return at;
}
