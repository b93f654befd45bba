// Runs of leaves of a V2 request's "data" into memory: number_run.h with Triton's rules for what an
// integer may be (spec triton_v2, section 3): any 64-bit integer of the right signedness, cut to the
// width of the datatype. Floats and bools follow the same rules in both protocols.
//
// A list may stand where a number could: "1, [2, 3]" is good data. A run ends before it.
#pragma once
#include "number_run.h"

template <typename T>
static inline bool wrap_integer(const Number &n, T *out)
{
    if (n.kind == NUMBER_DOUBLE || (std::is_signed_v<T> ? n.kind == NUMBER_UINT64
                                                        : n.kind == NUMBER_INT64 && n.integer < 0))
        return false;
    T value = (T)n.integer;
    memcpy(out, &value, sizeof value);
    return true;
}

// The number that ends at `at`, which a run has refused; `start` is the first byte of that run.
static inline const uint8_t *number_start(const uint8_t *at, const uint8_t *start)
{
    while (at != start && at[-1] != ',' && at[-1] != '[' && !is_space(at[-1]))
        at--;
    return at;
}

template <typename T>
static JsonFault read_leaf_run(const uint8_t **at, const uint8_t *end, T *out, int64_t room, int64_t *count)
{
    const uint8_t *start = *at;
    int64_t got = 0;
    JsonFault fault = JSON_OK;
    *count = 0;
    for (;;) {
        fault = read_run<T>(at, end, out + *count, room - *count, &got);
        *count += got;
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
            const uint8_t *past = number_start(*at, start);
            Number n;
            if (fault == BODY_WRONG_TYPE && read_number(&past, end, &n) == JSON_OK && wrap_integer(n, out + *count)) {
                ++*count;
                *at = past = skip_spaces(past, end);
                if (*count == room || past == end || *past != ',')
                    return JSON_OK;
                *at = skip_spaces(past + 1, end);
                continue;
            }
        }
        return fault;
    }
}

// Too narrow to be refused a sign by number_run.h, which reads them as int32: through uint32.
template <typename T>
static JsonFault read_narrow_run(const uint8_t **at, const uint8_t *end, T *out, int64_t room, int64_t *count)
{
    static const int64_t CHUNK = 256;
    uint32_t wide[CHUNK];
    *count = 0;
    for (;;) {
        int64_t here = room - *count < CHUNK ? room - *count : CHUNK, got;
        JsonFault fault = read_leaf_run(at, end, wide, here, &got);
        for (int64_t i = 0; i < got; i++)
            out[*count + i] = (T)wide[i];
        *count += got;
        if (fault || got < here || *count == room || *at == end || **at != ',')
            return fault;
        *at = skip_spaces(*at + 1, end);
    }
}

// Behind at least one leaf: only spaces lie between the last comma and here.
static inline bool is_after_comma(const uint8_t *at)
{
    while (is_space(*--at)) {
    }
    return *at == ',';
}

// As read_numbers. `*more`: the last comma is read and a list follows it.
static inline JsonFault read_leaves(uint8_t dtype, const uint8_t **at, const uint8_t *end, void *out, int64_t room,
                                    int64_t *count, bool *more)
{
    JsonFault fault;
    switch (dtype) {
    case DT_INT32: fault = read_leaf_run(at, end, (int32_t *)out, room, count); break;
    case DT_INT16: fault = read_leaf_run(at, end, (int16_t *)out, room, count); break;
    case DT_INT8: fault = read_leaf_run(at, end, (int8_t *)out, room, count); break;
    case DT_UINT32: fault = read_leaf_run(at, end, (uint32_t *)out, room, count); break;
    case DT_UINT16: fault = read_narrow_run(at, end, (uint16_t *)out, room, count); break;
    case DT_UINT8: fault = read_narrow_run(at, end, (uint8_t *)out, room, count); break;
    default: fault = read_numbers(dtype, at, end, out, room, count);
    }
    *more = fault != JSON_OK && *count > 0 && *at != end && **at == '[' && is_after_comma(*at);
    return *more ? JSON_OK : fault;
}
