# One element of tensor memory as a Python object: int, float, bool or complex. Strings are not
# here; they have no fixed size.

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "tensor.h" nogil:
    enum:
        DT_BOOL, DT_UINT8, DT_UINT16, DT_UINT32, DT_UINT64, DT_INT8, DT_INT16, DT_INT32, DT_INT64
        DT_FLOAT16, DT_BFLOAT16, DT_FLOAT32, DT_FLOAT64, DT_COMPLEX64, DT_COMPLEX128
    uint32_t dtype_bytes(uint8_t code)

cdef extern from "half.h" nogil:
    uint16_t half_of_double(double value)
    double double_of_half(uint16_t bits)
    uint16_t bfloat_of_float(float value)
    double double_of_bfloat(uint16_t bits)


cdef union Item:
    uint8_t u8
    uint16_t u16
    uint32_t u32
    uint64_t u64
    int8_t i8
    int16_t i16
    int32_t i32
    int64_t i64
    float[2] f32
    double[2] f64


cdef inline object read_item(const uint8_t* at, int dtype):
    cdef Item item
    memcpy(&item, at, dtype_bytes(dtype))
    if dtype == DT_FLOAT32:
        return item.f32[0]
    if dtype == DT_FLOAT64:
        return item.f64[0]
    if dtype == DT_BOOL:
        return item.u8 != 0
    if DT_UINT8 <= dtype <= DT_INT64:
        return read_integer(&item, dtype)
    if dtype == DT_FLOAT16:
        return double_of_half(item.u16)
    if dtype == DT_BFLOAT16:
        return double_of_bfloat(item.u16)
    return complex(item.f32[0], item.f32[1]) if dtype == DT_COMPLEX64 else complex(item.f64[0], item.f64[1])


cdef inline object read_integer(const Item* item, int dtype):
    if dtype == DT_INT64:
        return item.i64
    if dtype == DT_INT32:
        return item.i32
    if dtype == DT_INT16:
        return item.i16
    if dtype == DT_INT8:
        return item.i8
    if dtype == DT_UINT64:
        return item.u64
    if dtype == DT_UINT32:
        return item.u32
    return item.u16 if dtype == DT_UINT16 else item.u8
