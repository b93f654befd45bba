# The general path's verbs: one whole predict body, of any form section 2 of the spec allows, into
# the columns of one signature's inputs.
#
#     {"signature_name": "s", "instances": [...]}     row format: values, or objects of inputs by name
#     {"inputs": {...}}                               columnar format
#
# A fault of syntax anywhere in the body comes before any fault of meaning, as in the original. So
# when a value turns out to be no tensor, the fault is kept, the value is skipped as plain JSON, and
# the rest of the body is read; judge_body says at the end what it all means.

from libc.stdint cimport int64_t, uint8_t

from json_column cimport *
from json_cursor cimport *
from json_rows cimport Rows


cdef struct Input:
    const char* name
    Py_ssize_t name_bytes
    uint8_t dtype


cdef struct Scan:
    # One body being read by the general path.
    Cursor cursor
    const Input* inputs
    Column* columns             # as many as inputs
    int width                   # how many
    int max_depth
    bint row_format
    bint columnar
    bint exact                  # columnar, and every member is an input that is named once
    bint named                  # it has a signature_name ...
    bint name_is_string
    Text signature              # ... and this is it
    JsonFault meaning           # the first fault that is none of syntax
    const uint8_t* meaning_at


cdef inline JsonFault read_body(Scan* s, const Rows* r) noexcept nogil:
    cdef Cursor* c = &s.cursor
    cdef JsonFault fault
    skip_mark(c)
    skip_space(c)
    if c.at == c.end:
        return JSON_EMPTY
    if peek(c) != c'{':
        fault = skip_value(c, 0, s.max_depth)
        return fault if fault != JSON_OK else BODY_NOT_OBJECT
    c.at += 1
    skip_space(c)
    if not take(c, c'}'):
        while True:
            fault = read_member(s)
            if fault != JSON_OK:
                return fault
            skip_space(c)
            if take(c, c','):
                continue
            if take(c, c'}'):
                break
            return JSON_MISSING_COMMA_OR_BRACE
    return judge_body(s, r)


cdef inline JsonFault read_inputs(Scan* s) noexcept nogil:
    # A body that is nothing but the object of all inputs by name.
    cdef Cursor* c = &s.cursor
    cdef JsonFault fault
    s.columnar = s.exact = True
    skip_mark(c)
    skip_space(c)
    if c.at == c.end:
        return JSON_EMPTY
    if peek(c) != c'{':
        return BODY_NOT_OBJECT
    fault = read_named(s, 0)
    if fault != JSON_OK:
        return fault
    skip_space(c)
    return JSON_OK if c.at == c.end else BODY_OTHER_FORM


cdef inline JsonFault read_member(Scan* s) noexcept nogil:
    cdef Text key
    cdef JsonFault fault = take_key(&s.cursor, &key)
    if fault != JSON_OK:
        return fault
    if text_equals(&key, b"instances", 9) and not s.row_format:
        s.row_format = True
        if not s.columnar and s.width:
            return read_format(s)
    elif text_equals(&key, b"inputs", 6) and not s.columnar:
        s.columnar = True
        if not s.row_format and s.width:
            return read_format(s)
    elif text_equals(&key, b"signature_name", 14) and not s.named:
        s.named = True
        if peek(&s.cursor) == c'"':
            fault = take_text(&s.cursor, &s.signature)
            s.name_is_string = fault == JSON_OK
            return fault
    return skip_value(&s.cursor, 1, s.max_depth)


cdef inline JsonFault read_format(Scan* s) noexcept nogil:
    # Any fault is remembered only if the value turns out to be good JSON: syntax comes first.
    cdef const uint8_t* start = s.cursor.at
    cdef JsonFault fault = read_columns(s) if s.columnar else read_instances(s)
    cdef JsonFault syntax
    if fault == JSON_OK or fault == JSON_NO_MEMORY:
        return fault
    s.meaning_at = s.cursor.at
    s.cursor.at = start
    syntax = skip_value(&s.cursor, 1, s.max_depth)
    s.meaning = fault if fault >= BODY_NOT_OBJECT else BODY_WRONG_TYPE
    return syntax


cdef inline JsonFault judge_body(Scan* s, const Rows* r) noexcept nogil:
    # Good JSON, and all of it seen: now what it means, in the order the original checks.
    if s.named and not s.name_is_string:
        return BODY_SIGNATURE_NOT_STRING
    if not s.named or s.signature.start == s.signature.end:
        if not r.is_default:
            return BODY_OTHER_SIGNATURE
    elif not text_equals(&s.signature, r.signature, r.signature_bytes):
        return BODY_OTHER_SIGNATURE
    if s.width == 0:
        return BODY_NO_INPUTS
    if s.row_format and s.columnar:
        return BODY_BOTH_FORMATS
    if not s.row_format and not s.columnar:
        return BODY_NO_FORMAT
    if s.meaning != JSON_OK:
        s.cursor.at = s.meaning_at
    return s.meaning


cdef inline Place place_of(Scan* s, int base, int depth) noexcept nogil:
    return Place(base, depth, s.max_depth)


cdef inline JsonFault read_instances(Scan* s) noexcept nogil:
    # The first element decides for all: objects with names, or values of the only input (2.3).
    cdef Cursor first = s.cursor
    if not take(&first, c'['):
        return BODY_ROWS_NOT_LIST
    skip_space(&first)
    if peek(&first) == c']':
        return BODY_NO_ROWS
    if peek(&first) == c'{' and not is_base64(&first):
        return read_object_rows(s)
    if s.width != 1:
        return BODY_NOT_NAMED
    return fill_column(&s.cursor, &s.columns[0], place_of(s, 0, 1))


cdef inline JsonFault read_object_rows(Scan* s) noexcept nogil:
    cdef Cursor* c = &s.cursor
    cdef int64_t rows = 0
    cdef int i
    cdef JsonFault fault
    c.at += 1
    while True:
        skip_space(c)
        if peek(c) != c'{' or is_base64(c):
            return BODY_MIXED_ROWS
        fault = read_named(s, rows)
        if fault != JSON_OK:
            return fault
        rows += 1
        skip_space(c)
        if take(c, c','):
            continue
        if take(c, c']'):
            break
        return JSON_MISSING_COMMA_OR_BRACKET
    for i in range(s.width):
        s.columns[i].shape[0] = rows
    return JSON_OK


cdef inline JsonFault read_columns(Scan* s) noexcept nogil:
    if peek(&s.cursor) == c'{' and not is_base64(&s.cursor):
        return read_named(s, 0)
    if s.width != 1:
        return BODY_NOT_NAMED
    return fill_column(&s.cursor, &s.columns[0], place_of(s, 0, 1))


cdef inline JsonFault read_named(Scan* s, int64_t row) noexcept nogil:
    # One object of inputs by name: a row of the row format, or the whole of the columnar one.
    cdef Cursor* c = &s.cursor
    cdef int found = 0
    cdef int next_input = 0
    cdef JsonFault fault
    c.at += 1
    skip_space(c)
    if not take(c, c'}'):
        while True:
            fault = read_input(s, row, &found, &next_input)
            if fault != JSON_OK:
                return fault
            skip_space(c)
            if take(c, c'}'):
                break
            if not take(c, c','):
                return JSON_MISSING_COMMA_OR_BRACE
    return JSON_OK if found == s.width else BODY_MISSING_INPUT


cdef inline JsonFault read_input(Scan* s, int64_t row, int* found, int* next_input) noexcept nogil:
    # Columnar: strange names are ignored and the first of two wins. Rows: a strange name is a fault
    # and both of two are read.
    cdef Text key
    cdef int i
    cdef bint again
    cdef JsonFault fault = take_key(&s.cursor, &key)
    if fault != JSON_OK:
        return fault
    i = find_input(s, &key, next_input[0])
    again = i >= 0 and s.columns[i].seen == row + 1
    if s.exact and (i < 0 or again):
        return BODY_UNKNOWN_INPUT
    if s.columnar and (i < 0 or again):
        return skip_value(&s.cursor, 2, s.max_depth)
    if i < 0:
        return BODY_UNKNOWN_INPUT
    s.columns[i].seen = row + 1
    found[0] += not again
    next_input[0] = i + 1
    return fill_column(&s.cursor, &s.columns[i], place_of(s, 0, 2) if s.columnar else place_of(s, 1, 3))


cdef inline int find_input(Scan* s, const Text* key, int start) noexcept nogil:
    # Clients write the names of every row in one order, so the next one is tried first.
    cdef int i
    cdef int turn
    for turn in range(s.width):
        i = (start + turn) % s.width
        if text_equals(key, s.inputs[i].name, s.inputs[i].name_bytes):
            return i
    return -1
