# Small values of a V2 request as Python objects: names, shapes, parameters. Their JSON is known to be good.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint64_t

from infer_body cimport close_object, open_object
from json_cursor cimport *


cdef enum:
    ENTRIES = 16384             # parameters and axes of one request, each a Python object, and pieces of its texts
    PIECE_BYTES = 64            # so much of a text is a piece


cdef inline str string_of(const Text* text, int64_t* left):
    # Nothing, and `left` below 0, when there are too many or they are too long.
    cdef bytes plain
    cdef Py_ssize_t length
    left[0] -= (text.end - text.start) // PIECE_BYTES
    if left[0] < 0:
        return ""
    if not text.escaped:
        return PyUnicode_DecodeUTF8(<const char*>text.start, text.end - text.start, "surrogateescape")
    plain = PyBytes_FromStringAndSize(NULL, text.end - text.start)
    length = unescape_string(text.start, text.end, <uint8_t*>PyBytes_AS_STRING(plain))
    return PyUnicode_DecodeUTF8(PyBytes_AS_STRING(plain), length, "surrogateescape")


cdef inline str string_at(const uint8_t* at, const uint8_t* end, int64_t* left):
    # The value that starts here, or None when it is no string.
    cdef Cursor c = Cursor(at, end)
    cdef Text text
    if peek(&c) != c'"':
        return None
    take_text(&c, &text)
    return string_of(&text, left)


cdef inline tuple shape_at(const uint8_t* at, const uint8_t* end, int64_t* left):
    # None when an element is no unsigned integer; those beyond int64 turn negative, as in the original.
    # `left` counts down with each; below 0 there were too many, and what is returned means nothing.
    cdef Cursor c = Cursor(at + 1, end)
    cdef Number number
    cdef list shape = []
    skip_space(&c)
    if take(&c, c']'):
        return ()
    while True:
        skip_space(&c)
        if not (peek(&c) == c'-' or c'0' <= peek(&c) <= c'9'):
            return None
        read_number(&c.at, c.end, &number)
        if number.kind == NUMBER_DOUBLE or (number.kind == NUMBER_INT64 and number.integer < 0):
            return None
        left[0] -= 1
        if left[0] < 0:
            return ()
        shape.append(number.integer)
        skip_space(&c)
        if not take(&c, c','):
            return tuple(shape)


cdef inline dict members_at(const uint8_t* at, const uint8_t* end, int64_t* left):
    # The object that starts here, or None when it is none. `left` as above.
    cdef Cursor c = Cursor(at, end)
    cdef JsonFault fault = JSON_OK
    cdef Text key
    cdef dict found = {}
    if peek(&c) != c'{':
        return None
    if not open_object(&c):
        return found
    while True:
        left[0] -= 1
        if left[0] < 0:
            return found
        if take_key(&c, &key) != JSON_OK:
            return found
        found.setdefault(string_of(&key, left), take_scalar(&c, left))
        if close_object(&c, &fault):
            return found


cdef inline object take_scalar(Cursor* c, int64_t* left):
    # str, int, float, bool; None for every other value. Moves behind it.
    cdef Text text
    cdef Number number
    cdef uint8_t first = peek(c)
    if first == c'"':
        take_text(c, &text)
        return string_of(&text, left)
    if first == c'{' or first == c'[' or first == c'n' or first == c't' or first == c'f':
        skip_value(c, 0, DEEPEST)
        return first == c't' if first == c't' or first == c'f' else None
    read_number(&c.at, c.end, &number)
    if number.kind == NUMBER_INT64:
        return number.integer
    return <uint64_t>number.integer if number.kind == NUMBER_UINT64 else number.real
