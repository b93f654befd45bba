# Inference requests of the V2 protocol as C structs: where each member of a body lies, and the data of
# its inputs in memory. One pass, no recursion, no Python.
#
#     {"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]}], "outputs": [...]}
#
# Syntax comes before meaning, as in the original, which parses the whole before it looks: a value of
# the wrong kind is remembered, skipped as plain JSON, and judged when the body has been read.

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport realloc
from libc.string cimport memset
from libcpp cimport bool as cbool

from json_column cimport Column, open_column, read_text, reserve, text_equals
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
    DATA_DEPTH = 100            # lists of data inside each other (spec triton_v2, 3)
    FRAME_DEPTH = 3             # containers around an input's data: body, inputs, input
    MAX_DEPTH = 103
    MAX_PARTS = 65536           # inputs, or outputs: a part takes fifty times the bytes of "{},"
    TOO_MANY_PARTS = 29         # JsonFaults of our own
    NOT_SINGULAR = 30           # something follows the body


cdef struct Part:
    # An input or a requested output. Pointers are to the first byte of a member's value, NULL: absent.
    const uint8_t* start
    const uint8_t* name
    const uint8_t* datatype
    const uint8_t* shape
    const uint8_t* parameters
    const uint8_t* data
    int64_t items               # that the shape says; -1 while there is no shape that can be used
    int64_t leaves              # in data; with a fault: before it
    uint8_t* memory             # malloc'ed; the Scan frees it
    int64_t bytes
    uint8_t dtype
    bint is_object
    bint is_read
    bint data_is_list
    const uint8_t* wrong        # the first leaf that is none of the datatype, or NULL


cdef struct Parts:
    const uint8_t* start        # NULL: the body has no such member
    bint is_list
    Part* items
    int count
    int room


cdef struct Scan:
    Cursor cursor
    const uint8_t* id
    const uint8_t* parameters
    Parts inputs
    Parts outputs
    Column column               # of the data being read


cdef inline JsonFault read_infer_body(Scan* s) noexcept nogil:
    cdef Cursor* c = &s.cursor
    cdef JsonFault fault
    skip_mark(c)
    skip_space(c)
    if peek(c) == 0:
        return JSON_EMPTY
    if peek(c) != c'{':
        fault = skip_value(c, 0, MAX_DEPTH)
    else:
        fault = read_body_members(s)
    if fault != JSON_OK:
        return fault
    skip_space(c)               # a NUL ends the text: the blobs of a request that forgot their header
    return JSON_OK if peek(c) == 0 else <JsonFault>NOT_SINGULAR


cdef inline bint close_object(Cursor* c, JsonFault* fault) noexcept nogil:
    # Behind a member: False to read another.
    skip_space(c)
    if take(c, c','):
        return False
    if not take(c, c'}'):
        fault[0] = JSON_MISSING_COMMA_OR_BRACE
    return True


cdef inline bint open_object(Cursor* c) noexcept nogil:
    # Behind the brace: False when it is empty.
    c.at += 1
    skip_space(c)
    return not take(c, c'}')


cdef inline JsonFault read_body_members(Scan* s) noexcept nogil:
    cdef Cursor* c = &s.cursor
    cdef JsonFault fault = JSON_OK
    cdef Text key
    if not open_object(c):
        return fault
    while True:
        fault = take_key(c, &key)
        if fault != JSON_OK:
            return fault
        if text_equals(&key, b"inputs", 6) and s.inputs.start == NULL:
            fault = read_parts(s, &s.inputs, True)
        elif text_equals(&key, b"outputs", 7) and s.outputs.start == NULL:
            fault = read_parts(s, &s.outputs, False)
        else:
            if text_equals(&key, b"id", 2) and s.id == NULL:
                s.id = c.at
            elif text_equals(&key, b"parameters", 10) and s.parameters == NULL:
                s.parameters = c.at
            fault = skip_value(c, 1, MAX_DEPTH)
        if fault != JSON_OK or close_object(c, &fault):
            return fault


cdef inline JsonFault read_parts(Scan* s, Parts* parts, bint inputs) noexcept nogil:
    cdef Cursor* c = &s.cursor
    cdef JsonFault fault
    cdef Part* part
    parts.start = c.at
    parts.is_list = peek(c) == c'['
    if not parts.is_list:
        return skip_value(c, 1, MAX_DEPTH)
    c.at += 1
    skip_space(c)
    if take(c, c']'):
        return JSON_OK
    while True:
        skip_space(c)
        part = add_part(parts)
        if part == NULL:
            return <JsonFault>TOO_MANY_PARTS if parts.count == MAX_PARTS else JSON_NO_MEMORY
        part.start = c.at
        part.is_object = peek(c) == c'{'
        fault = read_part(s, part, inputs) if part.is_object else skip_value(c, 2, MAX_DEPTH)
        if fault != JSON_OK:
            return fault
        skip_space(c)
        if take(c, c']'):
            return JSON_OK
        if not take(c, c','):
            return JSON_MISSING_COMMA_OR_BRACKET


cdef inline Part* add_part(Parts* parts) noexcept nogil:
    cdef Part* items
    cdef int room = max(4, 2 * parts.room)
    if parts.count == parts.room:
        items = <Part*>realloc(parts.items, room * sizeof(Part)) if parts.count < MAX_PARTS else NULL
        if items == NULL:
            return NULL
        parts.items = items
        parts.room = room
    items = &parts.items[parts.count]
    memset(items, 0, sizeof(Part))
    items.items = -1
    parts.count += 1
    return items


cdef inline JsonFault read_part(Scan* s, Part* part, bint is_input) noexcept nogil:
    cdef Cursor* c = &s.cursor
    cdef Cursor data
    cdef JsonFault fault = JSON_OK
    if not open_object(c):
        return fault
    while True:
        fault = read_part_member(s, part, is_input)
        if fault != JSON_OK:
            return fault
        if close_object(c, &fault):
            break
    if fault == JSON_OK and part.data != NULL and not part.is_read and part.data_is_list:
        data = Cursor(part.data, c.at)
        fault = read_data(s, &data, part)
    return fault


cdef inline JsonFault read_part_member(Scan* s, Part* part, bint is_input) noexcept nogil:
    cdef Cursor* c = &s.cursor
    cdef Text key
    cdef Cursor value
    cdef JsonFault fault = take_key(c, &key)
    if fault != JSON_OK:
        return fault
    value = c[0]
    if text_equals(&key, b"name", 4) and part.name == NULL:
        part.name = c.at
    elif text_equals(&key, b"parameters", 10) and part.parameters == NULL:
        part.parameters = c.at
    elif not is_input:
        pass
    elif text_equals(&key, b"data", 4) and part.data == NULL:
        part.data = c.at
        part.data_is_list = peek(c) == c'['
        if part.data_is_list and part.datatype != NULL:
            return read_data(s, c, part)
    elif text_equals(&key, b"shape", 5) and part.shape == NULL:
        part.shape = c.at
        part.items = shape_items(&value)
        if part.items >= 0:
            c.at = value.at
            return JSON_OK
    elif text_equals(&key, b"datatype", 8) and part.datatype == NULL:
        part.datatype = c.at
        part.dtype = dtype_at(&value)
    return skip_value(c, FRAME_DEPTH, MAX_DEPTH)


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


# -- data ----------------------------------------------------------------------------------------

cdef inline JsonFault read_data(Scan* s, Cursor* c, Part* part) noexcept nogil:
    # The cursor is on the outermost bracket. What cannot be read as the datatype is skipped.
    cdef Column* column = &s.column
    cdef Cursor again = c[0]
    cdef JsonFault fault = BODY_UNSUPPORTED_DTYPE
    cdef int item_bytes = dtype_bytes(part.dtype)
    part.is_read = True
    if part.dtype == DT_BYTES or (item_bytes and part.dtype != DT_FLOAT16 and part.dtype != DT_BFLOAT16):
        open_column(column, part.dtype)
        # A leaf is two bytes of text or more.
        if 0 < part.items <= (c.end - c.at) >> 1 and not reserve(column, part.items * max(item_bytes, 8)):
            return JSON_NO_MEMORY
        fault = fill_leaves(c, column, item_bytes)
        part.memory = column.data
        part.bytes = column.filled
        part.leaves = column.count
    if fault == JSON_OK or fault == JSON_NO_MEMORY:
        return fault
    if fault != BODY_UNSUPPORTED_DTYPE:
        part.wrong = c.at
    c.at = again.at
    return skip_value(c, FRAME_DEPTH, MAX_DEPTH)


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


# -- the hot door --------------------------------------------------------------------------------

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


cdef inline bint open_data(Cursor* c, const Door* d, int64_t* rows) noexcept nogil:
    # From the start of the body to the outermost bracket of the data. Numbers take two bytes or more.
    cdef Text key
    cdef int seen = 0
    skip_space(c)
    if not take(c, c'{') or take_key(c, &key) != JSON_OK or not text_equals(&key, b"inputs", 6):
        return False
    if not take(c, c'['):
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
