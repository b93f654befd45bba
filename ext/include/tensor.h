// Element types as shared memory and compiled modules number them.
// fastserve/tensor.py holds the same numbers; a test compares the two.
#pragma once
#include <stdint.h>

enum DTypeCode : uint8_t {
    DT_NONE = 0,
    DT_BOOL, DT_UINT8, DT_UINT16, DT_UINT32, DT_UINT64,
    DT_INT8, DT_INT16, DT_INT32, DT_INT64,
    DT_FLOAT16, DT_BFLOAT16, DT_FLOAT32, DT_FLOAT64,
    DT_COMPLEX64, DT_COMPLEX128,
    DT_BYTES,                       // each element: uint32 little-endian length, then bytes
    DT_COUNT,
};

static inline uint32_t dtype_bytes(uint8_t code)
{
    static const uint8_t SIZES[DT_COUNT] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 0};
    return code < DT_COUNT ? SIZES[code] : 0;
}
