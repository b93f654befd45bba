# Inference requests of the V2 protocol as C structs: where each member of a body lies, and the data of
# its inputs in memory. One pass, no recursion, no Python.
#
#     {"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]}], "outputs": [...]}
#
# Syntax comes before meaning, as in the original, which parses the whole before it looks: a value of
# the wrong kind is remembered, skipped as plain JSON, and judged when the body has been read.

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from infer_data cimport *
from json_column cimport Column, open_column, reserve, text_equals
from json_cursor cimport *


cdef enum:
    INPUT_DATA_DEPTH = 3             # containers around an input's data: body, inputs, input
    MAX_DEPTH = 103
    MAX_PARTS = 4096            # inputs, or outputs: a part takes fifty times the bytes of "{},", and 4 us later on
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
    const uint8_t* data_end     # behind the value
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
            fault = read_data(s, c, part)
        else:
            fault = skip_value(c, INPUT_DATA_DEPTH, MAX_DEPTH)
        part.data_end = c.at
        return fault
    elif text_equals(&key, b"shape", 5) and part.shape == NULL:
        part.shape = c.at
        part.items = shape_items(&value)
        if part.items >= 0:
            c.at = value.at
            return JSON_OK
    elif text_equals(&key, b"datatype", 8) and part.datatype == NULL:
        part.datatype = c.at
        part.dtype = dtype_at(&value)
    return skip_value(c, INPUT_DATA_DEPTH, MAX_DEPTH)


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
    return skip_value(c, INPUT_DATA_DEPTH, MAX_DEPTH)


cdef inline void close_parts(Parts* parts) noexcept:
    # The reader's memory; the parts are the caller's to forget.
    cdef int i
    for i in range(parts.count):
        free(parts.items[i].memory)
    free(parts.items)
