# The hot door's verbs: a request of the common form, straight into the memory reserved for its rows.
#
#     {"inputs":[{"name":"x","shape":[2,4],"datatype":"FP32","data":[...]}]}
#
# Name, datatype and shape may stand in any order before the data, and an "id" before the inputs. Any other
# form, good or bad, is a fault number, and the caller takes the general door.

from libc.stdint cimport int64_t, uint8_t

from infer_data cimport *
from json_column cimport Column, text_equals
from json_cursor cimport *


cdef struct Door:
    # The one input of a model as text that a request must match.
    const char* name
    Py_ssize_t name_bytes
    uint8_t dtype
    int item_bytes
    int rank                    # of a row
    const int64_t* shape        # of a row
    int64_t row_items


cdef inline bint take_plain(Cursor* c, Text* text) noexcept nogil:
    return peek(c) == c'"' and take_text(c, text) == JSON_OK and not text.escaped


cdef inline bint take_batch_shape(Cursor* c, const Door* d, int64_t* rows) noexcept nogil:
    # [rows, ...] and the rest is the door's row shape.
    cdef int axis
    if not take(c, c'['):
        return False
    rows[0] = take_dim(c)
    for axis in range(d.rank):
        skip_space(c)
        if not take(c, c',') or take_dim(c) != d.shape[axis]:
            return False
    skip_space(c)
    return take(c, c']') and rows[0] > 0


cdef inline bint take_input_member(Cursor* c, const Door* d, int64_t* rows, int* seen) noexcept nogil:
    # One of name, datatype, shape: sets its bit. Data, which must come last: sets 8 and stays on it.
    cdef Text key
    cdef Text text
    cdef int bit
    if take_key(c, &key) != JSON_OK:
        return False
    if text_equals(&key, b"data", 4):
        seen[0] += 8
        return peek(c) == c'['
    if text_equals(&key, b"name", 4):
        bit = 1
        if not take_plain(c, &text) or not text_equals(&text, d.name, d.name_bytes):
            return False
    elif text_equals(&key, b"datatype", 8):
        bit = 2
        if dtype_at(c) != d.dtype:
            return False
    else:
        bit = 4
        if not text_equals(&key, b"shape", 5) or not take_batch_shape(c, d, rows):
            return False
    if seen[0] & bit:
        return False
    seen[0] |= bit
    skip_space(c)
    return take(c, c',')


cdef inline bint open_inputs(Cursor* c, Text* identity) noexcept nogil:
    # From the start of the body to the first byte of the inputs. An id that is absent is empty.
    cdef Text key
    identity.start = identity.end = c.at
    identity.escaped = False
    skip_space(c)
    if not take(c, c'{') or take_key(c, &key) != JSON_OK:
        return False
    if text_equals(&key, b"id", 2):
        if peek(c) != c'"' or take_text(c, identity) != JSON_OK:
            return False
        skip_space(c)
        if not take(c, c',') or take_key(c, &key) != JSON_OK:
            return False
    return text_equals(&key, b"inputs", 6)


cdef inline bint open_data(Cursor* c, const Door* d, int64_t* rows) noexcept nogil:
    # From the start of the body to the outermost bracket of the data. Numbers take two bytes or more.
    cdef Text identity
    cdef int seen = 0
    if not open_inputs(c, &identity) or not take(c, c'['):
        return False
    skip_space(c)
    if not take(c, c'{'):
        return False
    while seen < 8:
        if not take_input_member(c, d, rows, &seen):
            return False
    return seen == 15 and rows[0] <= ((c.end - c.at) >> 1) // d.row_items


cdef inline bint close_request(Cursor* c) noexcept nogil:
    # Behind the data: the request must hold nothing else.
    skip_space(c)
    if not take(c, c'}'):
        return False
    skip_space(c)
    if not take(c, c']'):
        return False
    skip_space(c)
    if not take(c, c'}'):
        return False
    skip_space(c)
    return c.at == c.end


cdef inline JsonFault read_request(Cursor* c, const Door* d, uint8_t* out, int64_t wanted_rows) noexcept nogil:
    cdef Column column
    cdef int64_t rows = 0
    cdef JsonFault fault
    if not open_data(c, d, &rows) or rows != wanted_rows:
        return BODY_OTHER_FORM
    column.dtype = d.dtype
    column.data = out
    column.room = rows * d.row_items * d.item_bytes
    column.filled = column.count = 0
    fault = fill_exactly(c, &column, d.item_bytes)
    if fault != JSON_OK:
        return fault
    return JSON_OK if close_request(c) else BODY_OTHER_FORM
