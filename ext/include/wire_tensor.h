// TensorProto (spec tfserving 4.1, 4.2): values counted once, then written once into a tensor's memory.
//
// A repeated field may come packed, one value at a time, in several pieces, and the whole message several
// times; all of it is one list. Nothing is kept but counts: filling walks the bytes again. tensor_content,
// where it is not empty, goes before all values. A last value is repeated to the end, values too many are
// dropped, and none at all are zeros.
#pragma once
#include "tensor.h"
#include "wire_contents.h"
#include "wire_write.h"

enum TensorField : uint32_t {
    TF_DTYPE = 1, TF_SHAPE = 2, TF_CONTENT = 4, TF_FLOAT = 5, TF_DOUBLE = 6, TF_INT = 7, TF_STRING = 8,
    TF_COMPLEX = 9, TF_INT64 = 10, TF_BOOL = 11, TF_DCOMPLEX = 12, TF_HALF = 13, TF_UINT32 = 16,
    TF_UINT64 = 17, TF_FIELDS = 18,
};

// The field that holds values of a dtype, and the dtype's number in DataType.
struct TensorKind {
    uint8_t field, number;
};

static inline TensorKind tensor_kind(uint8_t dtype)
{
    static const TensorKind KINDS[DT_COUNT] = {
        {0, 0}, {TF_BOOL, 10}, {TF_INT, 4}, {TF_INT, 17}, {TF_UINT32, 22}, {TF_UINT64, 23},
        {TF_INT, 6}, {TF_INT, 5}, {TF_INT, 3}, {TF_INT64, 9}, {TF_HALF, 19}, {TF_HALF, 14},
        {TF_FLOAT, 1}, {TF_DOUBLE, 2}, {TF_COMPLEX, 8}, {TF_DCOMPLEX, 18}, {TF_STRING, 7},
    };
    return KINDS[dtype < DT_COUNT ? dtype : 0];
}

// The wire type of one value that is not packed; WIRE_END_GROUP: no field of values.
static inline uint32_t value_type(uint32_t field)
{
    switch (field) {
    case TF_FLOAT: case TF_COMPLEX: return WIRE_FIXED32;
    case TF_DOUBLE: case TF_DCOMPLEX: return WIRE_FIXED64;
    case TF_STRING: return WIRE_BYTES;
    case TF_INT: case TF_INT64: case TF_BOOL: case TF_HALF: case TF_UINT32: case TF_UINT64: return WIRE_VARINT;
    }
    return WIRE_END_GROUP;
}

static inline bool is_value(uint32_t tag)
{
    uint32_t type = value_type(tag >> 3);
    return type != WIRE_END_GROUP && ((tag & 7) == WIRE_BYTES || (tag & 7) == type);
}

// One value, or a field of packed ones: well formed, all of them.
static inline bool pass_values(Wire *wire, uint32_t tag)
{
    Span span;
    int64_t count = 0;
    uint32_t type = value_type(tag >> 3);
    if ((tag & 7) != WIRE_BYTES || type == WIRE_BYTES)
        return skip_value(wire, tag);
    if (!read_span(wire, &span))
        return false;
    if (type == WIRE_VARINT)
        return count_varints(wire, span, &count);
    return span.size % (type == WIRE_FIXED32 ? 4 : 8) ? refuse(wire, WIRE_BAD_PACKED, span.at) : true;
}

// -- filling -------------------------------------------------------------------------------------

struct Filler {
    uint8_t *start;
    uint8_t *at;
    uint8_t *end;
    uint32_t field;
    uint32_t width;             // bytes of an item
};

static inline void fill_bytes(Filler *to, Span span)
{
    int64_t room = to->end - to->at;
    int64_t size = span.size < room ? span.size : room;
    memcpy(to->at, span.at, (size_t)size);
    to->at += size;
}

template <class T>
static inline void fill_varints(Filler *to, Wire packed)
{
    uint64_t value;
    bool truth = to->field == TF_BOOL;
    uint8_t *at = to->at;
    while (packed.at < packed.end && at < to->end && read_varint(&packed, &value)) {
        T item = truth ? (T)(value != 0) : (T)value;    // the low bytes: narrow integers truncate
        memcpy(at, &item, sizeof(T));
        at += sizeof(T);
    }
    to->at = at;
}

static inline void fill_numbers(Filler *to, Wire packed)
{
    switch (to->width) {
    case 1: fill_varints<uint8_t>(to, packed); break;
    case 2: fill_varints<uint16_t>(to, packed); break;
    case 4: fill_varints<uint32_t>(to, packed); break;
    default: fill_varints<uint64_t>(to, packed);
    }
}

// The values of one TensorProto, or of a piece of one. False: not what was read before.
static inline bool fill_values(Wire *wire, Filler *to)
{
    uint32_t type = value_type(to->field), tag;
    while (wire->at < wire->end && to->at < to->end) {
        Span span;
        if (!read_tag(wire, &tag))
            return false;
        if (tag >> 3 != to->field || !is_value(tag)) {
            if (!skip_value(wire, tag))
                return false;
            continue;
        }
        if ((tag & 7) == WIRE_BYTES) {
            if (!read_span(wire, &span))
                return false;
        } else {
            span.at = wire->at;
            if (!skip_value(wire, tag))
                return false;
            span.size = wire->at - span.at;
        }
        if (type == WIRE_VARINT)
            fill_numbers(to, enter(wire, span));
        else
            fill_bytes(to, span);
    }
    return true;
}

// What is left after the last value: that again and again, or zeros where there is none. Half a complex
// number is none.
static inline void fill_rest(Filler *to)
{
    to->at -= (to->at - to->start) % to->width;
    if (to->at == to->start) {
        memset(to->at, 0, (size_t)(to->end - to->at));
    } else {
        const uint8_t *last = to->at - to->width;
        for (; to->at < to->end; to->at += to->width)
            memcpy(to->at, last, to->width);
    }
    to->at = to->end;
}

// -- strings -------------------------------------------------------------------------------------

struct Strings {
    int64_t wanted;             // elements still to come
    int64_t bytes;              // of those that came, as packed
    uint8_t *at;                // where they go; nullptr: they are only counted
    Span last;
    bool any;
};

static inline void take_string(Strings *to, Span span)
{
    uint32_t size = (uint32_t)span.size;
    to->wanted--;
    to->bytes += 4 + span.size;
    to->last = span;
    to->any = true;
    if (to->at) {
        memcpy(to->at, &size, 4);
        if (size)   // an empty string may have no memory, and memcpy takes no null pointer even then
            memcpy(to->at + 4, span.at, size);
        to->at += 4 + span.size;
    }
}

static inline bool take_strings(Wire *wire, Strings *to)
{
    uint32_t tag;
    Span span;
    while (wire->at < wire->end && to->wanted) {
        if (!read_tag(wire, &tag))
            return false;
        if (tag != (TF_STRING << 3 | WIRE_BYTES)) {
            if (!skip_value(wire, tag))
                return false;
        } else {
            if (!read_span(wire, &span))
                return false;
            take_string(to, span);
        }
    }
    return true;
}

// tensor_content of strings: the lengths of all, then all bytes, and nothing behind them.
static inline bool take_content(Span content, Strings *to)
{
    Wire lengths = open_wire(content.at, content.size), bytes = lengths;
    uint64_t size;
    for (int64_t i = 0; i < to->wanted; i++)
        if (!read_varint(&bytes, &size))
            return false;
    while (to->wanted) {
        if (!read_varint(&lengths, &size) || size > (uint64_t)(bytes.end - bytes.at))
            return false;
        take_string(to, Span{bytes.at, (int64_t)size});
        bytes.at += size;
    }
    return bytes.at == bytes.end;
}

// -- writing -------------------------------------------------------------------------------------

// One varint of an item in memory, as protobuf has it: int32 and int64 with their signs.
static inline uint64_t wide_item(const uint8_t *at, uint8_t dtype)
{
    uint64_t bits = 0;
    uint32_t width = dtype_bytes(dtype);
    memcpy(&bits, at, width);
    if (dtype == DT_INT8 || dtype == DT_INT16 || dtype == DT_INT32) {
        int shift = 64 - 8 * (int)width;
        bits = (uint64_t)((int64_t)(bits << shift) >> shift);
    }
    return dtype == DT_BOOL ? bits != 0 : bits;
}

static inline int64_t measure_items(const uint8_t *at, int64_t size, uint8_t dtype)
{
    int64_t sum = 0;
    uint32_t width = dtype_bytes(dtype);
    for (const uint8_t *end = at + size; at < end; at += width)
        sum += size_varint(wide_item(at, dtype));
    return sum;
}

static inline uint8_t *put_items(uint8_t *to, const uint8_t *at, int64_t size, uint8_t dtype)
{
    uint32_t width = dtype_bytes(dtype);
    for (const uint8_t *end = at + size; at < end; at += width)
        to = put_varint(to, wide_item(at, dtype));
    return to;
}

// Packed strings as fields of string_val; -1 for memory that is not packed so.
static inline int64_t measure_strings(const uint8_t *at, int64_t size)
{
    int64_t sum = 0;
    uint32_t length;
    for (const uint8_t *end = at + size; at < end; at += length) {
        if (end - at < 4)
            return -1;
        memcpy(&length, at, 4);
        at += 4;
        if (end - at < (int64_t)length)
            return -1;
        sum += 1 + size_varint(length) + length;
    }
    return sum;
}

static inline uint8_t *put_strings(uint8_t *to, const uint8_t *at, int64_t size)
{
    uint32_t length;
    for (const uint8_t *end = at + size; at < end; at += length) {
        memcpy(&length, at, 4);
        at += 4;
        *to++ = TF_STRING << 3 | WIRE_BYTES;
        to = put_varint(to, length);
        memcpy(to, at, length);
        to += length;
    }
    return to;
}
