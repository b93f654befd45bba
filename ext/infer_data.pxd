# Parts of inputs of the V2 protocol: datatypes, shapes, and data of any nesting as flat memory.
#
# Only the number of leaves counts, "data" may nest as it likes (spec triton_v2, section 3).

from libc.stdint cimport int64_t, uint8_t
from libcpp cimport bool as cbool

from json_column cimport Column, read_text, reserve, text_equals
from json_cursor cimport *

cdef extern from "infer_run.h" nogil:
    JsonFault read_leaves(uint8_t dtype, const uint8_t** at, const uint8_t* end, void* out, int64_t room,
                          int64_t* count, cbool* more)

cdef extern from "tensor.h" nogil:
    enum:
        DT_NONE, DT_BOOL, DT_UINT8, DT_UINT16, DT_UINT32, DT_UINT64, DT_INT8, DT_INT16, DT_INT32, DT_INT64
        DT_FLOAT16, DT_BFLOAT16, DT_FLOAT32, DT_FLOAT64, DT_BYTES, DT_COUNT
    int dtype_bytes(uint8_t code)


cdef enum:
    DATA_DEPTH = 100            # lists of data inside each other


cdef inline uint8_t dtype_at(Cursor* c) noexcept nogil:
    # DT_NONE for what is no datatype.
    cdef Text text
    if peek(c) != c'"' or take_text(c, &text) != JSON_OK:
        return DT_NONE
    if text_equals(&text, b"FP32", 4):
        return DT_FLOAT32
    if text_equals(&text, b"INT64", 5):
        return DT_INT64
    if text_equals(&text, b"INT32", 5):
        return DT_INT32
    if text_equals(&text, b"BYTES", 5):
        return DT_BYTES
    if text_equals(&text, b"FP64", 4):
        return DT_FLOAT64
    if text_equals(&text, b"UINT8", 5):
        return DT_UINT8
    if text_equals(&text, b"BOOL", 4):
        return DT_BOOL
    if text_equals(&text, b"FP16", 4):
        return DT_FLOAT16
    if text_equals(&text, b"BF16", 4):
        return DT_BFLOAT16
    if text_equals(&text, b"INT8", 4):
        return DT_INT8
    if text_equals(&text, b"INT16", 5):
        return DT_INT16
    if text_equals(&text, b"UINT16", 6):
        return DT_UINT16
    if text_equals(&text, b"UINT32", 6):
        return DT_UINT32
    return DT_UINT64 if text_equals(&text, b"UINT64", 6) else DT_NONE


cdef inline int64_t take_dim(Cursor* c) noexcept nogil:
    # An unsigned integer, or -1.
    cdef Number number
    skip_space(c)
    if not c'0' <= peek(c) <= c'9' or read_number(&c.at, c.end, &number) != JSON_OK:
        return -1
    return number.integer if number.kind == NUMBER_INT64 else -1


cdef inline int64_t shape_items(Cursor* c) noexcept nogil:
    # Moves behind a list of unsigned integers and returns their product, 2**62 for all that is larger;
    # -1 for anything else.
    cdef int64_t items = 1
    cdef int64_t dim
    cdef bint empty = False
    if not take(c, c'['):
        return -1
    skip_space(c)
    if take(c, c']'):
        return 1
    while True:
        dim = take_dim(c)
        if dim < 0:
            return -1
        empty |= dim == 0
        items = items * dim if dim == 0 or items <= (<int64_t>1 << 62) // dim else <int64_t>1 << 62
        skip_space(c)
        if take(c, c']'):
            return 0 if empty else items
        if not take(c, c','):
            return -1


cdef inline JsonFault fill_leaves(Cursor* c, Column* column, int item_bytes) noexcept nogil:
    cdef int level = 0
    cdef JsonFault fault
    cdef cbool more
    while True:
        skip_space(c)
        more = False
        if peek(c) == c'[':
            if level == DATA_DEPTH:
                return JSON_TOO_DEEP
            c.at += 1
            level += 1
            skip_space(c)
            if peek(c) != c']':
                continue
        else:
            fault = fill_run(c, column, item_bytes, &more)
            if fault != JSON_OK:
                return fault
        while not more:
            skip_space(c)
            if take(c, c','):
                break
            if not take(c, c']'):
                return JSON_MISSING_COMMA_OR_BRACKET
            level -= 1
            if level == 0:
                return JSON_OK


cdef inline JsonFault fill_run(Cursor* c, Column* column, int item_bytes, cbool* more) noexcept nogil:
    cdef int64_t count
    cdef JsonFault fault
    if column.dtype == DT_BYTES:
        if peek(c) != c'"':
            return BODY_WRONG_TYPE
        fault = read_text(c, column)
        column.count += fault == JSON_OK
        return fault
    if not reserve(column, item_bytes):
        return JSON_NO_MEMORY
    fault = read_leaves(column.dtype, &c.at, c.end, column.data + column.filled,
                        (column.room - column.filled) // item_bytes, &count, more)
    column.count += count
    column.filled += count * item_bytes
    return fault


cdef inline JsonFault fill_exactly(Cursor* c, Column* column, int item_bytes) noexcept nogil:
    # As fill_leaves, into memory that neither grows nor may stay short.
    cdef int level = 0
    cdef int64_t count
    cdef JsonFault fault
    cdef cbool more
    while True:
        skip_space(c)
        more = False
        if peek(c) == c'[':
            if level == DATA_DEPTH:
                return JSON_TOO_DEEP
            c.at += 1
            level += 1
            continue
        if column.filled == column.room:
            return BODY_OTHER_FORM
        fault = read_leaves(column.dtype, &c.at, c.end, column.data + column.filled,
                            (column.room - column.filled) // item_bytes, &count, &more)
        if fault != JSON_OK:
            return fault
        column.filled += count * item_bytes
        while not more:
            skip_space(c)
            if take(c, c','):
                break
            if not take(c, c']'):
                return JSON_MISSING_COMMA_OR_BRACKET
            level -= 1
            if level == 0:
                return JSON_OK if column.filled == column.room else BODY_OTHER_FORM
