// InferTensorContents (spec triton_v2 16): typed values of one tensor, counted once, copied once.
//
// A repeated field may come packed, one value at a time, in several pieces, and the whole message
// several times; all of it is one list. Nothing is kept but counts: the copy walks the bytes again.
#pragma once
#include "tensor.h"
#include "wire_read.h"

enum ContentsKind : uint32_t {      // field numbers
    KIND_NONE, KIND_BOOL, KIND_INT, KIND_INT64, KIND_UINT, KIND_UINT64, KIND_FP32, KIND_FP64, KIND_BYTES,
    KIND_COUNT,
};

struct Contents {
    int64_t counts[KIND_COUNT];
    int64_t text_bytes;             // of all bytes values
    bool given;
};

static inline uint32_t kind_wire_type(uint32_t kind)
{
    static const uint32_t TYPES[KIND_COUNT] = {
        WIRE_BYTES, WIRE_VARINT, WIRE_VARINT, WIRE_VARINT, WIRE_VARINT, WIRE_VARINT,
        WIRE_FIXED32, WIRE_FIXED64, WIRE_BYTES,
    };
    return TYPES[kind];
}

// The field that holds values of a dtype (spec 11); KIND_NONE: only raw bytes can.
static inline uint32_t kind_of_dtype(uint8_t dtype)
{
    switch (dtype) {
    case DT_BOOL: return KIND_BOOL;
    case DT_INT8: case DT_INT16: case DT_INT32: return KIND_INT;
    case DT_INT64: return KIND_INT64;
    case DT_UINT8: case DT_UINT16: case DT_UINT32: return KIND_UINT;
    case DT_UINT64: return KIND_UINT64;
    case DT_FLOAT32: return KIND_FP32;
    case DT_FLOAT64: return KIND_FP64;
    case DT_BYTES: return KIND_BYTES;
    }
    return KIND_NONE;
}

static inline bool count_varints(Wire *wire, Span span, int64_t *count)
{
    const uint8_t *at = span.at, *end = at + span.size, *start = at;
    int64_t ends = 0;
    for (; at < end; at++) {
        if (*at < 0x80) {
            ends++;
            start = at + 1;
        } else if (__builtin_expect(at - start >= 9, 0)) {
            return refuse(wire, WIRE_OVERLONG, start);
        }
    }
    if (start != end)
        return refuse(wire, WIRE_BAD_PACKED, start);
    *count += ends;
    return true;
}

static inline bool count_packed(Wire *wire, uint32_t kind, Span span, Contents *contents)
{
    if (kind_wire_type(kind) == WIRE_VARINT)
        return count_varints(wire, span, &contents->counts[kind]);
    int width = kind == KIND_FP32 ? 4 : 8;
    if (span.size % width)
        return refuse(wire, WIRE_BAD_PACKED, span.at);
    contents->counts[kind] += span.size / width;
    return true;
}

// One contents message: every value counted, every byte checked.
static inline bool count_contents(Wire *wire, Contents *contents)
{
    contents->given = true;
    while (wire->at < wire->end) {
        uint32_t tag;
        Span span;
        if (!read_tag(wire, &tag))
            return false;
        uint32_t kind = tag >> 3, type = tag & 7;
        if (kind >= KIND_COUNT || (type != WIRE_BYTES && type != kind_wire_type(kind))) {
            if (!skip_value(wire, tag))
                return false;
        } else if (type == WIRE_BYTES) {
            if (!read_span(wire, &span))
                return false;
            if (kind == KIND_BYTES) {
                contents->counts[kind]++;
                contents->text_bytes += span.size;
            } else if (!count_packed(wire, kind, span, contents)) {
                return false;
            }
        } else {
            if (!skip_value(wire, tag))
                return false;
            contents->counts[kind]++;
        }
    }
    return true;
}

// -- the copy ------------------------------------------------------------------------------------

struct Sink {
    uint8_t *at;
    uint8_t *end;
    uint8_t width;              // bytes of an item
    bool truth;                 // what is not 0 becomes 1
};

static inline bool put_item(Sink *sink, const void *item, int64_t size)
{
    if (sink->end - sink->at < size)
        return false;
    memcpy(sink->at, item, (size_t)size);
    sink->at += size;
    return true;
}

static inline bool put_varint_item(Wire *wire, Sink *sink)
{
    uint64_t value;
    if (!read_varint(wire, &value))
        return false;
    if (sink->truth)
        value = value != 0;
    return put_item(sink, &value, sink->width);     // the low bytes: narrow integers truncate
}

template <class T>
static inline bool put_varints(Wire packed, Sink *sink)
{
    uint64_t value;
    uint8_t *at = sink->at, *last = sink->end - sizeof(T);
    for (; packed.at < packed.end; at += sizeof(T)) {
        if (at > last || !read_varint(&packed, &value))
            return false;
        T item = sink->truth ? (T)(value != 0) : (T)value;
        memcpy(at, &item, sizeof(T));               // a slab's columns need not be aligned
    }
    sink->at = at;
    return true;
}

static inline bool put_packed(const Wire *wire, Span span, Sink *sink)
{
    Wire packed = enter(wire, span);
    switch (sink->width) {
    case 1: return put_varints<uint8_t>(packed, sink);
    case 2: return put_varints<uint16_t>(packed, sink);
    case 4: return put_varints<uint32_t>(packed, sink);
    }
    return put_varints<uint64_t>(packed, sink);
}

static inline bool put_field(Wire *wire, uint32_t kind, uint32_t tag, Sink *sink)
{
    Span span;
    uint32_t type = tag & 7;
    if (type == WIRE_BYTES) {
        if (!read_span(wire, &span))
            return false;
        uint32_t size = (uint32_t)span.size;
        if (kind == KIND_BYTES)
            return put_item(sink, &size, 4) && put_item(sink, span.at, span.size);
        if (kind_wire_type(kind) != WIRE_VARINT)
            return put_item(sink, span.at, span.size);
        return put_packed(wire, span, sink);
    }
    if (type == WIRE_VARINT)
        return put_varint_item(wire, sink);
    const uint8_t *item = wire->at;
    return skip_value(wire, tag) && put_item(sink, item, wire->at - item);
}

// The values of one kind in one contents message, one after the other. False: not what was counted.
static inline bool copy_contents(Wire *wire, uint32_t kind, Sink *sink)
{
    while (wire->at < wire->end) {
        uint32_t tag;
        if (!read_tag(wire, &tag))
            return false;
        uint32_t type = tag & 7;
        bool wanted = tag >> 3 == kind && (type == WIRE_BYTES || type == kind_wire_type(kind));
        if (wanted ? !put_field(wire, kind, tag, sink) : !skip_value(wire, tag))
            return false;
    }
    return true;
}

// The same for a whole input tensor, whose contents are field 5 and may come in pieces.
static inline bool copy_input(Span input, uint32_t kind, Sink *sink)
{
    Wire wire = open_wire(input.at, input.size);
    while (wire.at < wire.end) {
        uint32_t tag;
        Span span;
        if (!read_tag(&wire, &tag))
            return false;
        if (tag != (5 << 3 | WIRE_BYTES)) {
            if (!skip_value(&wire, tag))
                return false;
            continue;
        }
        if (!read_span(&wire, &span))
            return false;
        Wire inner = enter(&wire, span);
        if (!copy_contents(&inner, kind, sink))
            return false;
    }
    return sink->at == sink->end;
}
