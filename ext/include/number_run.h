// Rows of JSON numbers straight into tensor memory: "0.1, 0.25, 3" -> out[0..2].
//
// A run is numbers with commas between; it ends before the first token that is neither. The
// hurried reader handles the forms clients send and returns null for everything else, which then
// goes to json_number.h: it decides alone what is right and what is a fault.
//
// TF Serving spec 2.6 says what each dtype takes: floats any number, integers only integer
// literals (the types narrower than int32 take any int32 and wrap), bools only true and false.
#pragma once
#include <limits>
#include <type_traits>
#include "digits.h"
#include "json_number.h"
#include "tensor.h"

// The hurried reader looks at most this far from a number's first byte; nearer to the end of the
// body only the careful one runs.
static const int64_t HURRY_BYTES = 64;

static inline bool is_space(uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static inline const uint8_t *skip_spaces(const uint8_t *at, const uint8_t *end)
{
    while (at != end && is_space(*at))
        at++;
    return at;
}

// -- one item, carefully ------------------------------------------------------------------------

template <typename T>
static inline JsonFault store_integer(const Number &n, T *out)
{
    typedef std::conditional_t<(sizeof(T) < 4), int32_t, T> Taken;
    if (n.kind == NUMBER_DOUBLE)
        return BODY_WRONG_TYPE;
    if (n.kind == NUMBER_UINT64 ? !std::is_same_v<Taken, uint64_t>
        : std::is_same_v<Taken, uint64_t> ? n.integer < 0
        : n.integer < (int64_t)std::numeric_limits<Taken>::min() ||
          n.integer > (int64_t)std::numeric_limits<Taken>::max())
        return BODY_WRONG_TYPE;
    T value = (T)n.integer;
    memcpy(out, &value, sizeof value);
    return JSON_OK;
}

template <typename T>
static JsonFault read_item(const uint8_t **at, const uint8_t *end, T *out)
{
    Number n;
    if constexpr (std::is_same_v<T, bool>) {
        uint8_t value = *at != end && **at == 't';
        memcpy(out, &value, 1);
        return take_word(at, end, value ? "true" : "false") ? JSON_OK : BODY_WRONG_TYPE;
    } else {
        if (JsonFault fault = read_number(at, end, &n))
            return fault;
        if constexpr (std::is_floating_point_v<T>) {
            T value = (T)n.real;
            memcpy(out, &value, sizeof value);
            return JSON_OK;
        } else {
            return store_integer(n, out);
        }
    }
}

// -- runs ---------------------------------------------------------------------------------------

static const double EXACT_TENS[23] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                      1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

// 10**(k - 16), and its negative.
static const double SCALES[17][2] = {
    {1e-16, -1e-16}, {1e-15, -1e-15}, {1e-14, -1e-14}, {1e-13, -1e-13}, {1e-12, -1e-12}, {1e-11, -1e-11}, {1e-10,
    -1e-10}, {1e-9, -1e-9}, {1e-8, -1e-8}, {1e-7, -1e-7}, {1e-6, -1e-6}, {1e-5, -1e-5}, {1e-4, -1e-4}, {1e-3,
    -1e-3}, {1e-2, -1e-2}, {1e-1, -1e-1}, {1e0, -1e0}};

// -DPLAIN_DIGITS leaves the vector reader out, to test the other one on a machine that has both.
namespace plain {
#define READ_DIGITS16 read_digits16
#include "number_loop.h"
#undef READ_DIGITS16
}

#if defined(__x86_64__) && !defined(PLAIN_DIGITS)
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt")
namespace wide {
#define READ_DIGITS16 read_digits16_wide
#define PLAIN_RUNS
#include "number_loop.h"
#undef READ_DIGITS16
#undef PLAIN_RUNS
}
#pragma GCC pop_options
#endif

template <typename T>
static inline JsonFault read_run(const uint8_t **at, const uint8_t *end, void *out, int64_t room, int64_t *count)
{
#if defined(__x86_64__) && !defined(PLAIN_DIGITS)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
        return wide::read_run(at, end, (T *)out, room, count);
#endif
    return plain::read_run(at, end, (T *)out, room, count);
}

// `room` items at most from `*at` into `out`; see read_run in number_loop.h for what is left where.
static inline JsonFault read_numbers(uint8_t dtype, const uint8_t **at, const uint8_t *end, void *out,
                                     int64_t room, int64_t *count)
{
    switch (dtype) {
    case DT_FLOAT32: return read_run<float>(at, end, out, room, count);
    case DT_FLOAT64: return read_run<double>(at, end, out, room, count);
    case DT_INT64: return read_run<int64_t>(at, end, out, room, count);
    case DT_INT32: return read_run<int32_t>(at, end, out, room, count);
    case DT_INT16: return read_run<int16_t>(at, end, out, room, count);
    case DT_INT8: return read_run<int8_t>(at, end, out, room, count);
    case DT_UINT64: return read_run<uint64_t>(at, end, out, room, count);
    case DT_UINT32: return read_run<uint32_t>(at, end, out, room, count);
    case DT_UINT8: return read_run<uint8_t>(at, end, out, room, count);
    case DT_BOOL: return read_run<bool>(at, end, out, room, count);
    default:
        *count = 0;
        return BODY_UNSUPPORTED_DTYPE;
    }
}
