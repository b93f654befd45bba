// JSON strings: check and find the end, undo escapes, decode base64.
//
// Bytes of 0x80 and above pass through unread: invalid UTF-8 is kept byte for byte, and a lone low
// surrogate escape becomes its three bytes (TF Serving spec 2.1).
#pragma once
#include <stdint.h>
#include <string.h>
#include "json_fault.h"

static inline int hex_value(uint8_t c)
{
    if ((uint8_t)(c - '0') < 10)
        return c - '0';
    c |= 0x20;
    return (uint8_t)(c - 'a') < 6 ? c - 'a' + 10 : -1;
}

// Four hex digits at `at`, or -1.
static inline int32_t read_hex4(const uint8_t *at, const uint8_t *end)
{
    int32_t value = 0;
    if (end - at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        int digit = hex_value(at[i]);
        if (digit < 0)
            return -1;
        value = value << 4 | digit;
    }
    return value;
}

// `at` is on a backslash; moves behind the escape.
static inline JsonFault check_escape(const uint8_t **at, const uint8_t *end)
{
    const uint8_t *p = *at + 1;
    if (p == end || !*p || !strchr("\"\\/bfnrtu", *p))
        return JSON_BAD_ESCAPE;
    if (*p++ != 'u') {
        *at = p;
        return JSON_OK;
    }
    int32_t unit = read_hex4(p, end);
    if (unit < 0)
        return JSON_BAD_HEX;
    p += 4;
    if (unit >= 0xd800 && unit <= 0xdbff) {
        if (end - p < 2 || p[0] != '\\' || p[1] != 'u')
            return JSON_BAD_SURROGATE;
        unit = read_hex4(p + 2, end);
        if (unit < 0)
            return JSON_BAD_HEX;
        if (unit < 0xdc00 || unit > 0xdfff)
            return JSON_BAD_SURROGATE;
        p += 6;
    }
    *at = p;
    return JSON_OK;
}

// True when one of the eight bytes is a quote, a backslash or a control character.
static inline bool ends_plain_text(uint64_t word)
{
    const uint64_t ONES = 0x0101010101010101u, TOPS = 0x8080808080808080u;
    uint64_t quote = word ^ (ONES * '"'), slash = word ^ (ONES * '\\');
    return ((((quote - ONES) & ~quote) | ((slash - ONES) & ~slash) | ((word - ONES * 0x20) & ~word)) & TOPS) != 0;
}

// `*at` is behind the opening quote; on success it is left behind the closing one. `*escaped` tells
// whether the text between needs unescape_string.
static inline JsonFault scan_string(const uint8_t **at, const uint8_t *end, bool *escaped)
{
    *escaped = false;
    for (;;) {
        uint64_t word;
        while (end - *at >= 8 && (memcpy(&word, *at, 8), !ends_plain_text(word)))
            *at += 8;
        while (*at != end && **at != '"' && **at != '\\' && **at >= 0x20)
            ++*at;
        if (*at == end || **at == 0)
            return JSON_MISSING_QUOTE;
        if (**at == '"') {
            ++*at;
            return JSON_OK;
        }
        if (**at != '\\')
            return JSON_BAD_ESCAPE;
        *escaped = true;
        if (JsonFault fault = check_escape(at, end))
            return fault;
    }
}

static inline uint8_t *write_utf8(uint8_t *out, uint32_t point)
{
    if (point < 0x80) {
        *out++ = (uint8_t)point;
    } else if (point < 0x800) {
        *out++ = (uint8_t)(0xc0 | point >> 6);
        *out++ = (uint8_t)(0x80 | (point & 63));
    } else if (point < 0x10000) {
        *out++ = (uint8_t)(0xe0 | point >> 12);
        *out++ = (uint8_t)(0x80 | (point >> 6 & 63));
        *out++ = (uint8_t)(0x80 | (point & 63));
    } else {
        *out++ = (uint8_t)(0xf0 | point >> 18);
        *out++ = (uint8_t)(0x80 | (point >> 12 & 63));
        *out++ = (uint8_t)(0x80 | (point >> 6 & 63));
        *out++ = (uint8_t)(0x80 | (point & 63));
    }
    return out;
}

// `text` has passed scan_string. Writes at most end - text bytes; returns how many.
static inline int64_t unescape_string(const uint8_t *text, const uint8_t *end, uint8_t *out)
{
    static const char NAMES[] = "\"\\/bfnrt", MEANT[] = "\"\\/\b\f\n\r\t";
    uint8_t *start = out;
    while (text != end) {
        const uint8_t *slash = (const uint8_t *)memchr(text, '\\', (size_t)(end - text));
        int64_t plain = (slash ? slash : end) - text;
        memcpy(out, text, (size_t)plain);
        out += plain;
        text += plain;
        if (text == end)
            break;
        if (text[1] != 'u') {
            *out++ = (uint8_t)MEANT[strchr(NAMES, text[1]) - NAMES];
            text += 2;
            continue;
        }
        uint32_t point = (uint32_t)read_hex4(text + 2, end);
        text += 6;
        if (point >= 0xd800 && point <= 0xdbff) {
            point = 0x10000 + ((point - 0xd800) << 10) + ((uint32_t)read_hex4(text + 2, end) - 0xdc00);
            text += 6;
        }
        out = write_utf8(out, point);
    }
    return out - start;
}

static inline int base64_value(uint8_t c)
{
    if ((uint8_t)(c - 'A') < 26)
        return c - 'A';
    if ((uint8_t)(c - 'a') < 26)
        return c - 'a' + 26;
    if ((uint8_t)(c - '0') < 10)
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// Standard alphabet, white space skipped, padding complete or absent (TF Serving spec 2.5). Decodes
// in place; returns the length, or -1.
static inline int64_t decode_base64(uint8_t *text, int64_t length)
{
    uint8_t *out = text;
    uint32_t bits = 0;
    int64_t taken = 0, padding = 0;
    for (int64_t i = 0; i < length; i++) {
        uint8_t c = text[i];
        int value = base64_value(c);
        if (value >= 0 && !padding) {
            bits = bits << 6 | (uint32_t)value;
            if ((++taken & 3) == 0) {
                *out++ = (uint8_t)(bits >> 16);
                *out++ = (uint8_t)(bits >> 8);
                *out++ = (uint8_t)bits;
            }
        } else if (c == '=') {
            padding++;
        } else if (c != ' ' && (uint8_t)(c - '\t') > 4) {
            return -1;
        }
    }
    int64_t left = taken & 3;
    if (left == 1 || (padding && padding != (4 - left) % 4))
        return -1;
    if (left >= 2)
        *out++ = (uint8_t)(left == 2 ? bits >> 4 : bits >> 10);
    if (left == 3)
        *out++ = (uint8_t)(bits >> 2);
    return out - text;
}
