# A Column: the tensor of one input while a body is read, and the verb that fills it from JSON of
# a shape nobody knows yet.
#
# The first path down fixes the rank, the first list to close at a level fixes that level's length,
# and everything after must agree; a tensor read row by row (base 1) keeps both from its first row.
# Strings are kept in BYTES packing: uint32 little-endian length, then the bytes.

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

from json_cursor cimport *
from json_rows cimport MAX_RANK, read_numbers

cdef extern from "tensor.h" nogil:
    enum:
        DT_BYTES
        DT_COUNT
    uint32_t dtype_bytes(uint8_t code)


cdef enum:
    NOT_YET = -1
    FIRST_ROOM = 4096           # bytes


cdef struct Column:
    uint8_t dtype
    int rank                    # NOT_YET until the first leaf or the first empty list
    int64_t seen                # 1 + the last row that named it; 0 for never
    int64_t count               # items stored
    uint8_t* data               # malloc'ed; the Column's maker frees it
    int64_t filled              # bytes
    int64_t room                # bytes
    int64_t[MAX_RANK + 1] shape # NOT_YET where no list has closed


cdef struct Place:
    # Where a tensor's value stands: `base` axes and `depth` containers are open around it.
    int base
    int depth
    int max_depth


cdef inline void open_column(Column* t, uint8_t dtype) noexcept nogil:
    cdef int axis
    t.dtype = dtype
    t.rank = NOT_YET
    t.seen = t.count = t.filled = t.room = 0
    t.data = NULL
    for axis in range(MAX_RANK + 1):
        t.shape[axis] = NOT_YET


cdef inline bint reserve(Column* t, int64_t more) noexcept nogil:
    cdef int64_t room = t.room
    cdef uint8_t* data
    if t.filled + more <= room:
        return True
    room = max(2 * room, t.filled + more, FIRST_ROOM)
    data = <uint8_t*>realloc(t.data, room)
    if data == NULL:
        return False
    t.data = data
    t.room = room
    return True


cdef inline JsonFault fill_column(Cursor* c, Column* t, Place place) noexcept nogil:
    # One value of any depth into `t`. Iterative; `lengths` counts each open list's items.
    cdef int64_t[MAX_RANK + 1] lengths
    cdef int level = place.base
    cdef int64_t count
    cdef JsonFault fault
    while True:
        skip_space(c)
        count = 1
        if peek(c) == c'[':
            if level == t.rank:
                return BODY_RAGGED
            if level == MAX_RANK or place.depth + level - place.base >= place.max_depth:
                return JSON_TOO_DEEP
            c.at += 1
            lengths[level] = 0
            level += 1
            skip_space(c)
            if peek(c) != c']':
                continue
            count = 0
            if t.rank == NOT_YET:
                t.rank = level
        else:
            if t.rank == NOT_YET:
                t.rank = level
            if level != t.rank:
                return BODY_RAGGED
            fault = read_leaves(c, t, level > place.base, &count)
            if fault != JSON_OK:
                return fault
        fault = close_lists(c, t, lengths, &level, place.base, count)
        if fault != JSON_OK or level == place.base:
            return fault


cdef inline JsonFault close_lists(
    Cursor* c, Column* t, int64_t* lengths, int* level, int base, int64_t count
) noexcept nogil:
    # `count` more items of the innermost list have been read: close what closes here.
    while level[0] > base:
        lengths[level[0] - 1] += count
        skip_space(c)
        if count and take(c, c','):
            return JSON_OK
        if not take(c, c']'):
            return JSON_MISSING_COMMA_OR_BRACKET
        level[0] -= 1
        if t.shape[level[0]] == NOT_YET:
            t.shape[level[0]] = lengths[level[0]]
        if t.shape[level[0]] != lengths[level[0]]:
            return BODY_RAGGED
        count = 1
    return JSON_OK


cdef inline JsonFault read_leaves(Cursor* c, Column* t, bint many, int64_t* count) noexcept nogil:
    cdef int64_t room
    cdef int item_bytes
    cdef JsonFault fault
    if t.dtype == DT_BYTES:
        count[0] = 1
        t.count += 1
        return read_text(c, t)
    item_bytes = dtype_bytes(t.dtype)
    if item_bytes == 0:
        return BODY_UNSUPPORTED_DTYPE
    if not reserve(t, item_bytes):
        return JSON_NO_MEMORY
    room = (t.room - t.filled) // item_bytes if many else 1
    fault = read_numbers(t.dtype, &c.at, c.end, t.data + t.filled, room, count)
    t.count += count[0]
    t.filled += count[0] * item_bytes
    return fault


cdef inline JsonFault read_text(Cursor* c, Column* t) noexcept nogil:
    cdef Text text
    cdef bint base64 = peek(c) == c'{'
    cdef JsonFault fault
    cdef int64_t length
    cdef uint32_t prefix
    cdef uint8_t* out
    if base64:
        if not take_base64(c, &text):
            return BODY_WRONG_TYPE
    elif peek(c) != c'"':
        return BODY_WRONG_TYPE
    else:
        fault = take_text(c, &text)
        if fault != JSON_OK:
            return fault
    if not reserve(t, 4 + (text.end - text.start)) or (text.end - text.start) >> 32:
        return JSON_NO_MEMORY
    out = t.data + t.filled + 4
    length = unescape_string(text.start, text.end, out)
    if base64:
        length = decode_base64(out, length)
        if length < 0:
            return BODY_BAD_BASE64
    prefix = <uint32_t>length
    memcpy(out - 4, &prefix, 4)
    t.filled += 4 + length
    return JSON_OK


cdef inline bint take_base64(Cursor* c, Text* text) noexcept nogil:
    # {"b64": "..."} and nothing else in it (spec 2.5); the cursor moves only if so.
    cdef Cursor ahead = c[0]
    cdef Text key
    ahead.at += 1
    if take_key(&ahead, &key) != JSON_OK or not text_equals(&key, b"b64", 3):
        return False
    if peek(&ahead) != c'"' or take_text(&ahead, text) != JSON_OK:
        return False
    skip_space(&ahead)
    if not take(&ahead, c'}'):
        return False
    c.at = ahead.at
    return True


cdef inline bint is_base64(Cursor* c) noexcept nogil:
    cdef Cursor ahead = c[0]
    cdef Text text
    return take_base64(&ahead, &text)


cdef inline bint text_equals(const Text* text, const char* word, Py_ssize_t length) noexcept nogil:
    cdef Py_ssize_t raw = text.end - text.start
    cdef uint8_t* plain
    cdef bint equal
    if not text.escaped:
        return raw == length and memcmp(text.start, word, length) == 0
    if raw > 6 * length:        # the longest escape of one byte
        return False
    plain = <uint8_t*>malloc(raw)
    equal = (plain != NULL and unescape_string(text.start, text.end, plain) == length
             and memcmp(plain, word, length) == 0)
    free(plain)
    return equal
