// A read position in borrowed protobuf bytes, and the verbs that move it. No message is known here.
//
// What is good and bad is what protobuf's own parser holds: tags and lengths take at most 5 bytes,
// values at most 10 (bits beyond the 64th fall off), a known field of another wire type is unknown,
// unknown groups nest as deep as messages may.
#pragma once
#include <stdint.h>
#include <string.h>

static constexpr int WIRE_DEPTH = 100;      // messages and groups, one in the other

enum WireFault : int {
    WIRE_OK = 0,
    WIRE_TRUNCATED,         // the bytes end inside a tag, a value or a group
    WIRE_OVERLONG,          // a varint that does not end where it must
    WIRE_BAD_TAG,           // field number 0
    WIRE_BAD_TYPE,          // wire types 6 and 7
    WIRE_BAD_LENGTH,        // a length past the end
    WIRE_BAD_PACKED,        // packed values that do not fill their field
    WIRE_BAD_GROUP,         // an end without its start
    WIRE_TOO_DEEP,
    WIRE_BAD_TEXT,          // a string that is not UTF-8
    WIRE_TOO_MANY,          // more entries than a request may have
    WIRE_TOO_LARGE,         // a reply of 2 GiB or more
    WIRE_OTHER_KIND,        // contents that cannot be this dtype
    WIRE_WRONG_SIZE,        // memory that does not fit what goes there
};

enum WireType : uint32_t { WIRE_VARINT, WIRE_FIXED64, WIRE_BYTES, WIRE_GROUP, WIRE_END_GROUP, WIRE_FIXED32 };

struct Wire {
    const uint8_t *at;
    const uint8_t *end;
    const uint8_t *fault_at;
    int fault;
    int depth;              // levels left below this one
};

struct Span {
    const uint8_t *at = nullptr;
    int64_t size = 0;
};

static inline bool refuse(Wire *wire, int fault, const uint8_t *where)
{
    wire->fault = fault;
    wire->fault_at = where;
    return false;
}

static inline Wire open_wire(const uint8_t *at, int64_t size)
{
    return Wire{at, at + size, at, WIRE_OK, WIRE_DEPTH};
}

static inline Wire enter(const Wire *outer, Span span)
{
    return Wire{span.at, span.at + span.size, span.at, WIRE_OK, outer->depth - 1};
}

static inline bool read_long(Wire *wire, uint64_t *value, int most)
{
    const uint8_t *at = wire->at;
    uint64_t sum = 0;
    for (int i = 0; i < most; i++) {
        if (at + i == wire->end)
            return refuse(wire, WIRE_TRUNCATED, wire->at);
        sum |= (uint64_t)(at[i] & 0x7f) << (7 * i);
        if (at[i] < 0x80) {
            wire->at = at + i + 1;
            *value = sum;
            return true;
        }
    }
    return refuse(wire, WIRE_OVERLONG, at);
}

static inline bool read_varint(Wire *wire, uint64_t *value)
{
    if (__builtin_expect(wire->at < wire->end && *wire->at < 0x80, 1)) {
        *value = *wire->at++;
        return true;
    }
    return read_long(wire, value, 10);
}

// Tags and lengths: 5 bytes at most, and less than 2^32.
static inline bool read_short(Wire *wire, uint32_t *value)
{
    const uint8_t *start = wire->at;
    if (__builtin_expect(start < wire->end && *start < 0x80, 1)) {
        *value = *wire->at++;
        return true;
    }
    uint64_t wide;
    if (!read_long(wire, &wide, 5))
        return false;
    *value = (uint32_t)wide;
    return wide >> 32 ? refuse(wire, WIRE_OVERLONG, start) : true;
}

static inline bool read_tag(Wire *wire, uint32_t *tag)
{
    const uint8_t *start = wire->at;
    if (!read_short(wire, tag))
        return false;
    return *tag >> 3 ? true : refuse(wire, WIRE_BAD_TAG, start);
}

static inline bool read_span(Wire *wire, Span *span)
{
    const uint8_t *start = wire->at;
    uint32_t size;
    if (!read_short(wire, &size))
        return false;
    if ((int64_t)size > wire->end - wire->at)
        return refuse(wire, WIRE_BAD_LENGTH, start);
    *span = Span{wire->at, size};
    wire->at += size;
    return true;
}

static inline bool pass_bytes(Wire *wire, int64_t count)
{
    if (wire->end - wire->at < count)
        return refuse(wire, WIRE_TRUNCATED, wire->at);
    wire->at += count;
    return true;
}

static bool skip_group(Wire *wire, uint32_t field);

// Passes the value after `tag`.
static inline bool skip_value(Wire *wire, uint32_t tag)
{
    uint64_t value;
    Span span;
    switch (tag & 7) {
    case WIRE_VARINT:
        return read_varint(wire, &value);
    case WIRE_FIXED64:
        return pass_bytes(wire, 8);
    case WIRE_BYTES:
        return read_span(wire, &span);
    case WIRE_GROUP:
        return skip_group(wire, tag >> 3);
    case WIRE_END_GROUP:
        return refuse(wire, WIRE_BAD_GROUP, wire->at);
    case WIRE_FIXED32:
        return pass_bytes(wire, 4);
    }
    return refuse(wire, WIRE_BAD_TYPE, wire->at);
}

static bool skip_group(Wire *wire, uint32_t field)
{
    uint32_t open[WIRE_DEPTH];
    int level = 0;
    open[level++] = field;
    if (level > wire->depth)
        return refuse(wire, WIRE_TOO_DEEP, wire->at);
    while (level) {
        uint32_t tag;
        const uint8_t *start = wire->at;
        if (!read_short(wire, &tag))    // field number 0 passes inside of what is unknown
            return false;
        if ((tag & 7) == WIRE_GROUP) {
            if (level >= wire->depth)
                return refuse(wire, WIRE_TOO_DEEP, start);
            open[level++] = tag >> 3;
        } else if ((tag & 7) == WIRE_END_GROUP) {
            if (open[--level] != tag >> 3)
                return refuse(wire, WIRE_BAD_GROUP, start);
        } else if (!skip_value(wire, tag)) {
            return false;
        }
    }
    return true;
}
