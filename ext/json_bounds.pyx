"""Check that a document of JSON is well formed and within bounds, before anybody makes objects of it.

    check_json(body, Bounds(values=16384, numbers=16384, ...))   ->  the values, numbers and keys it has

One pass without the GIL, and nothing is made. Raises JSONSyntaxError for text that is no JSON (RFC 8259: one value,
nothing behind it), and JSONBoundError, which names the bound, for what is more than allowed. UTF-8 is not checked.

    find_not_utf8(body)                                  ->  the offset of the first byte that is no UTF-8, -1 for none

A decoder checks the strings that it makes, and none that it skips or leaves as they are.

    write_plain(body, bounds)                            ->  the same document with \\u00e9 as UTF-8

A decoder that holds the GIL takes ten times longer for escapes than for UTF-8.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy

from fastserve._ext.json_value import JSONSyntaxError

from json_cursor cimport *

cdef extern from "json_reason.h":
    const char* json_reason(int fault)

cdef extern from "json_skip.h" nogil:
    JsonFault skip_number(const uint8_t** at, const uint8_t* end)

cdef extern from "json_string.h" nogil:
    int32_t read_hex4(const uint8_t* at, const uint8_t* end)
    uint8_t* write_utf8(uint8_t* out, uint32_t point)

cdef extern from "utf8.h" nogil:
    const uint8_t* c_find_not_utf8 "find_not_utf8"(const uint8_t* at, const uint8_t* end)

cdef str NOT_SINGULAR = "The document root must not be followed by other values."

cdef enum:
    SHOWN_KEY = 64              # bytes of a key that an error quotes

cdef enum Bound:
    BOUND_NONE
    BOUND_DEPTH
    BOUND_VALUES
    BOUND_NUMBERS
    BOUND_OBJECT_KEYS
    BOUND_KEY_TOTAL
    BOUND_KEY_LENGTH
    BOUND_NUMBER_LENGTH

cdef tuple NAMES = (
    "", "depth", "values", "numbers", "object_keys", "key_bytes", "longest_key", "longest_number",
)
cdef str ESCAPES = "escapes"


class JSONBoundError(ValueError):
    """A document beyond a bound: `bound` is the name of the field of Bounds, `limit` its value, `offset` the byte
    where the document goes beyond it, `key` the key of the root object that it stands under, "" for none."""

    def __init__(self, bound: str, limit: int, offset: int, key: str) -> None:
        super().__init__(f"{bound}: more than {limit} at byte {offset}")
        self.bound = bound
        self.limit = limit
        self.offset = offset
        self.key = key


cdef class Bounds:
    """Limits of a document. Numbers are not counted among other values (objects, lists, strings, true, false,
    null), which take more memory; keys are in bytes as they are sent. `escapes` bounds those that write_plain leaves."""

    cdef readonly int depth
    cdef readonly int64_t values, numbers, object_keys, key_bytes, longest_key, longest_number, escapes

    def __init__(
        self,
        *,
        int depth=100,
        int64_t values=16384,
        int64_t numbers=16384,
        int64_t object_keys=4096,
        int64_t key_bytes=1 << 20,
        int64_t longest_key=1024,
        int64_t longest_number=1024,
        int64_t escapes=1 << 20,
    ):
        if not 0 <= depth <= DEEPEST:
            raise ValueError(f"depth: given {depth}, allowed: 0 to {DEEPEST}")
        self.depth = depth
        self.values, self.numbers = values, numbers
        self.object_keys, self.key_bytes = object_keys, key_bytes
        self.longest_key, self.longest_number = longest_key, longest_number
        self.escapes = escapes


cdef struct Limits:
    int depth
    int64_t values
    int64_t numbers
    int64_t object_keys
    int64_t key_bytes
    int64_t longest_key
    int64_t longest_number


cdef struct Walk:
    Cursor cursor
    int depth
    int64_t values
    int64_t numbers
    int64_t keys
    int64_t key_bytes
    JsonFault fault
    Bound bound
    const uint8_t* root_key     # the key of the root object that the cursor stands under
    const uint8_t* root_key_end
    uint64_t[DEEPEST_WORDS] objects
    int64_t[DEEPEST + 2] object_keys


def check_json(body not None, Bounds bounds not None):
    """The numbers of (values, numbers, keys) that a document has. Raises JSONSyntaxError and JSONBoundError."""
    cdef Py_buffer view
    cdef Walk walk
    cdef Limits limits = Limits(
        bounds.depth, bounds.values, bounds.numbers, bounds.object_keys, bounds.key_bytes, bounds.longest_key,
        bounds.longest_number,
    )
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        walk.cursor.at = <const uint8_t*>view.buf
        walk.cursor.end = walk.cursor.at + view.len
        with nogil:
            walk_document(&walk, &limits)
        offset = walk.cursor.at - <const uint8_t*>view.buf
        if walk.bound != BOUND_NONE:
            name = NAMES[<int>walk.bound]
            raise JSONBoundError(name, getattr(bounds, name), offset, key_of(&walk))
        if walk.fault != JSON_OK:
            raise JSONSyntaxError(json_reason(walk.fault).decode(), offset)
        if walk.cursor.at != walk.cursor.end:
            raise JSONSyntaxError(NOT_SINGULAR, offset)
        return walk.values, walk.numbers, walk.keys
    finally:
        PyBuffer_Release(&view)


def find_not_utf8(body not None):
    """The offset of the first byte of `body` that is no UTF-8 (RFC 3629), -1 if all is."""
    cdef Py_buffer view
    cdef const uint8_t* start
    cdef const uint8_t* found
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        start = <const uint8_t*>view.buf
        with nogil:
            found = c_find_not_utf8(start, start + view.len)
        return -1 if found == start + view.len else found - start
    finally:
        PyBuffer_Release(&view)


def write_plain(body not None, Bounds bounds not None):
    """Return `body`, a document that check_json has passed, as bytes with its \\uXXXX escapes written as UTF-8. Quotes,
    backslashes, control characters and halves of surrogate pairs stay escaped: raises JSONBoundError for more of these
    than `bounds.escapes`."""
    cdef Py_buffer view
    cdef bytes out
    cdef uint8_t* begin
    cdef int64_t written, escapes = 0
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        out = PyBytes_FromStringAndSize(NULL, view.len)
        begin = <uint8_t*>PyBytes_AS_STRING(out)
        with nogil:
            written = copy_plain(<const uint8_t*>view.buf, view.len, begin, &escapes, bounds.escapes)
        if written < 0:
            raise JSONBoundError(ESCAPES, bounds.escapes, -written - 1, "")
        return out[:written]
    finally:
        PyBuffer_Release(&view)


cdef int64_t copy_plain(
    const uint8_t* start, Py_ssize_t length, uint8_t* out, int64_t* escapes, int64_t most
) noexcept nogil:
    # How many bytes were written; -1 - offset where there are too many escapes.
    cdef const uint8_t* at = start
    cdef const uint8_t* end = start + length
    cdef const uint8_t* slash
    cdef uint8_t* begin = out
    cdef Py_ssize_t size
    while True:
        slash = <const uint8_t*>memchr(at, c'\\', end - at)
        size = (end if slash == NULL else slash) - at
        memcpy(out, at, size)
        out += size
        at += size
        if slash == NULL:
            return out - begin
        if take_point(&at, end, &out):
            continue
        escapes[0] += 1
        if escapes[0] > most:
            return -1 - (at - start)
        size = 6 if at[1] == c'u' else 2
        memcpy(out, at, size)
        out += size
        at += size


cdef inline bint take_point(const uint8_t** at, const uint8_t* end, uint8_t** out) noexcept nogil:
    # Write the character of a \\uXXXX escape, or of a surrogate pair; False for one that stays as it is.
    cdef uint32_t point
    if at[0][1] != c'u':
        return False
    point = <uint32_t>read_hex4(at[0] + 2, end)
    if 0xd800 <= point <= 0xdbff:
        point = 0x10000 + ((point - 0xd800) << 10) + (<uint32_t>read_hex4(at[0] + 8, end) - 0xdc00)
        at[0] += 6
    elif point < 0x20 or point == c'"' or point == c'\\' or 0xdc00 <= point <= 0xdfff:
        return False
    at[0] += 6
    out[0] = write_utf8(out[0], point)
    return True


cdef str key_of(Walk* walk):
    # Still escaped, and cut.
    length = min(<Py_ssize_t>(walk.root_key_end - walk.root_key), <Py_ssize_t>SHOWN_KEY)
    return (<const char*>walk.root_key)[:length].decode("utf-8", "replace") if length > 0 else ""


cdef void walk_document(Walk* w, const Limits* limits) noexcept nogil:
    cdef Cursor* c = &w.cursor
    cdef uint8_t first
    w.depth = 0
    w.values = w.numbers = w.keys = w.key_bytes = 0
    w.fault, w.bound = JSON_OK, BOUND_NONE
    w.root_key = w.root_key_end = NULL
    skip_space(c)
    if c.at == c.end:
        w.fault = JSON_EMPTY
        return
    while True:
        first = peek(c)
        if first == c'{' or first == c'[':
            if not enter(w, limits, first == c'{'):
                return
            if not leave_empty(c, first):
                if first == c'{' and not next_key(w, limits):
                    return
                continue
            w.depth -= 1
        elif not take_scalar(w, limits, first):
            return
        if not next_value(w, limits):
            return


cdef inline bint enter(Walk* w, const Limits* limits, bint is_object) noexcept nogil:
    # The cursor stands on a bracket; leaves it before what is inside.
    if not count_value(w, limits):
        return False
    if w.depth >= limits.depth:
        w.bound = BOUND_DEPTH
        return False
    w.depth += 1
    w.object_keys[w.depth] = 0
    set_bit(w.objects, w.depth, is_object)
    w.cursor.at += 1
    skip_space(&w.cursor)
    return True


cdef inline bint leave_empty(Cursor* c, uint8_t opened) noexcept nogil:
    return take(c, c'}' if opened == c'{' else c']')


cdef inline bint count_value(Walk* w, const Limits* limits) noexcept nogil:
    w.values += 1
    if w.values > limits.values:
        w.bound = BOUND_VALUES
        return False
    return True


cdef inline bint take_scalar(Walk* w, const Limits* limits, uint8_t first) noexcept nogil:
    cdef Text text
    cdef const uint8_t* start
    if first == c'"':
        if not count_value(w, limits):
            return False
        w.fault = take_text(&w.cursor, &text)
        return w.fault == JSON_OK
    if first == c't' or first == c'f' or first == c'n':
        if not count_value(w, limits):
            return False
        w.fault = skip_name(&w.cursor)
        return w.fault == JSON_OK
    start = w.cursor.at
    w.fault = skip_number(&w.cursor.at, w.cursor.end)
    if w.fault != JSON_OK:
        return False
    w.numbers += 1
    if w.numbers > limits.numbers:
        w.bound = BOUND_NUMBERS
    elif w.cursor.at - start > limits.longest_number:
        w.bound = BOUND_NUMBER_LENGTH
    else:
        return True
    w.cursor.at = start
    return False


cdef inline bint next_key(Walk* w, const Limits* limits) noexcept nogil:
    # The cursor stands before a key; leaves it before its value.
    cdef Text key
    cdef const uint8_t* start = w.cursor.at
    w.fault = take_key(&w.cursor, &key)
    if w.fault != JSON_OK:
        return False
    if w.depth == 1:
        w.root_key, w.root_key_end = key.start, key.end
    w.keys += 1
    w.key_bytes += key.end - key.start
    w.object_keys[w.depth] += 1
    if key.end - key.start > limits.longest_key:
        w.bound = BOUND_KEY_LENGTH
    elif w.key_bytes > limits.key_bytes:
        w.bound = BOUND_KEY_TOTAL
    elif w.object_keys[w.depth] > limits.object_keys:
        w.bound = BOUND_OBJECT_KEYS
    else:
        return True
    w.cursor.at = start
    return False


cdef inline bint next_value(Walk* w, const Limits* limits) noexcept nogil:
    # Behind a value: close what closes here, and stand before the next value. False at the document's end, or at
    # what is wrong.
    cdef Cursor* c = &w.cursor
    cdef bint inside_object
    while True:
        skip_space(c)
        if w.depth == 0:
            return False
        inside_object = get_bit(w.objects, w.depth)
        if take(c, c','):
            skip_space(c)
            return next_key(w, limits) if inside_object else True
        if not take(c, c'}' if inside_object else c']'):
            w.fault = JSON_MISSING_COMMA_OR_BRACE if inside_object else JSON_MISSING_COMMA_OR_BRACKET
            return False
        w.depth -= 1
