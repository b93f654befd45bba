# Small values of a V2 request as Python objects: names, shapes, parameters. Their JSON is known to be good.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint8_t, uint64_t

from infer_body cimport close_object, open_object
from json_cursor cimport *


cdef inline str string_of(const Text* text):
    cdef bytes plain
    cdef Py_ssize_t length
    if not text.escaped:
        return PyUnicode_DecodeUTF8(<const char*>text.start, text.end - text.start, "surrogateescape")
    plain = PyBytes_FromStringAndSize(NULL, text.end - text.start)
    length = unescape_string(text.start, text.end, <uint8_t*>PyBytes_AS_STRING(plain))
    return PyUnicode_DecodeUTF8(PyBytes_AS_STRING(plain), length, "surrogateescape")


cdef inline str string_at(const uint8_t* at, const uint8_t* end):
    # The value that starts here, or None when it is no string.
    cdef Cursor c = Cursor(at, end)
    cdef Text text
    if peek(&c) != c'"':
        return None
    take_text(&c, &text)
    return string_of(&text)


cdef inline tuple shape_at(const uint8_t* at, const uint8_t* end):
    # None when an element is no unsigned integer; those beyond int64 turn negative, as in the original.
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
        shape.append(number.integer)
        skip_space(&c)
        if not take(&c, c','):
            return tuple(shape)


cdef inline dict members_at(const uint8_t* at, const uint8_t* end):
    # The object that starts here, or None when it is none.
    cdef Cursor c = Cursor(at, end)
    cdef JsonFault fault = JSON_OK
    cdef Text key
    cdef dict found = {}
    if peek(&c) != c'{':
        return None
    if not open_object(&c):
        return found
    while True:
        take_key(&c, &key)
        found.setdefault(string_of(&key), take_scalar(&c))
        if close_object(&c, &fault):
            return found


cdef inline object take_scalar(Cursor* c):
    # str, int, float, bool; None for every other value. Moves behind it.
    cdef Text text
    cdef Number number
    cdef uint8_t first = peek(c)
    if first == c'"':
        take_text(c, &text)
        return string_of(&text)
    if first == c'{' or first == c'[' or first == c'n' or first == c't' or first == c'f':
        skip_value(c, 0, DEEPEST)
        return first == c't' if first == c't' or first == c'f' else None
    read_number(&c.at, c.end, &number)
    if number.kind == NUMBER_INT64:
        return number.integer
    return <uint64_t>number.integer if number.kind == NUMBER_UINT64 else number.real
