// The smallest verbs of text: put_x(at, ...) writes x at `at` and returns the place after it.
//
// Nothing here checks room. Whoever calls has asked the size_x twin for a bound first and holds
// that much memory plus WIDE_STORE bytes, because short texts are written by stores wider than they are.
#pragma once
#include <charconv>
#include <stdint.h>
#include <string.h>

static constexpr int WIDE_STORE = 32;
static constexpr int INDENT = 4;

template <size_t N>
static inline char *put(char *at, const char (&text)[N])
{
    memcpy(at, text, N - 1);
    return at + N - 1;
}

static inline char *put_bytes(char *at, const void *from, size_t count)
{
    memcpy(at, from, count);
    return at + count;
}

static inline char *put_line_break(char *at, int depth)
{
    *at++ = '\n';
    memset(at, ' ', (size_t)depth * INDENT);
    return at + depth * INDENT;
}

template <class T>
static inline char *put_integer(char *at, T value)
{
    return std::to_chars(at, at + 24, value).ptr;
}

// What a byte of a string becomes (spec tfserving 3.1): 1 itself, 2 a backslash and a letter,
// 6 \u00XX. DEL, '/' and everything beyond ASCII pass, so invalid UTF-8 passes too.
static inline int escaped_size(uint8_t byte)
{
    if (byte >= 0x20)
        return byte == '"' || byte == '\\' ? 2 : 1;
    return byte == '\b' || byte == '\f' || byte == '\n' || byte == '\r' || byte == '\t' ? 2 : 6;
}

static inline size_t size_string(const uint8_t *from, size_t count)
{
    size_t total = 2;
    for (size_t i = 0; i < count; i++)
        total += escaped_size(from[i]);
    return total;
}

static inline char *put_escape(char *at, uint8_t byte)
{
    static const char LETTERS[] = "btn?fr";     // \b is 8
    static const char HEX[] = "0123456789ABCDEF";
    if (escaped_size(byte) == 2) {
        *at++ = '\\';
        *at++ = byte >= 0x20 ? (char)byte : LETTERS[byte - '\b'];
        return at;
    }
    at = put(at, "\\u00");
    *at++ = HEX[byte >> 4];
    *at++ = HEX[byte & 15];
    return at;
}

static inline char *put_string(char *at, const uint8_t *from, size_t count)
{
    *at++ = '"';
    size_t plain = 0;           // start of the stretch that needs no escape
    for (size_t i = 0; i < count; i++) {
        if (escaped_size(from[i]) == 1)
            continue;
        at = put_bytes(at, from + plain, i - plain);
        at = put_escape(at, from[i]);
        plain = i + 1;
    }
    at = put_bytes(at, from + plain, count - plain);
    *at++ = '"';
    return at;
}

static inline size_t size_base64(size_t count) { return (count + 2) / 3 * 4; }

static inline char *put_base64(char *at, const uint8_t *from, size_t count)
{
    static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (; count >= 3; count -= 3, from += 3) {
        uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 8 | from[2];
        *at++ = DIGITS[bits >> 18];
        *at++ = DIGITS[bits >> 12 & 63];
        *at++ = DIGITS[bits >> 6 & 63];
        *at++ = DIGITS[bits & 63];
    }
    if (count) {
        uint32_t bits = (uint32_t)from[0] << 16 | (count == 2 ? (uint32_t)from[1] << 8 : 0);
        *at++ = DIGITS[bits >> 18];
        *at++ = DIGITS[bits >> 12 & 63];
        *at++ = count == 2 ? DIGITS[bits >> 6 & 63] : '=';
        *at++ = '=';
    }
    return at;
}
