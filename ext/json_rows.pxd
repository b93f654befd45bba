# The fast path's verbs: a body of the common form, rows of one dense numeric input, straight into
# the memory reserved for them.
#
#     {"instances": [[0.1, 0.2], [0.3, 0.4]]}
#     {"signature_name": "serving_default", "instances": [...]}     (the name may follow, too)
#
# Rows and row shape are known before the scan, so nothing is measured and nothing is kept. Any
# other form, good or bad, is a fault number, and the caller takes the general path.

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp

from json_cursor cimport *

cdef extern from "number_run.h" nogil:
    JsonFault read_numbers(uint8_t dtype, const uint8_t** at, const uint8_t* end, void* out,
                           int64_t room, int64_t* count)

cdef extern from "count_byte.h" nogil:
    int64_t count_byte(const uint8_t* at, const uint8_t* end, uint8_t wanted)


cdef enum:
    MAX_RANK = 254              # TensorFlow's limit


cdef struct Rows:
    uint8_t dtype
    int item_bytes
    int rank                    # of the whole batch: rows and row shape
    int64_t[MAX_RANK] shape
    const char* signature       # a body that names another one is not for this reader
    Py_ssize_t signature_bytes
    bint is_default             # a body that names none is


cdef inline bint take_exact(Cursor* c, const char* word, Py_ssize_t length) noexcept nogil:
    if c.end - c.at < length or memcmp(c.at, word, length) != 0:
        return False
    c.at += length
    return True


cdef inline bint take_spaced(Cursor* c, uint8_t wanted) noexcept nogil:
    skip_space(c)
    return take(c, wanted)


cdef inline bint take_signature(Cursor* c, const Rows* r) noexcept nogil:
    # "signature_name": "NAME", and NAME is ours.
    if not take_exact(c, b'"signature_name"', 16) or not take_spaced(c, c':'):
        return False
    return take_spaced(c, c'"') and take_exact(c, r.signature, r.signature_bytes) and take(c, c'"')


cdef inline bint open_rows(Cursor* c, const Rows* r, bint* named) noexcept nogil:
    # From the start of the body to behind the bracket that opens the rows.
    skip_mark(c)
    if not take_spaced(c, c'{'):
        return False
    skip_space(c)
    named[0] = c.end - c.at > 2 and c.at[1] == c's'
    if named[0]:
        if not take_signature(c, r) or not take_spaced(c, c','):
            return False
        skip_space(c)
    return take_exact(c, b'"instances"', 11) and take_spaced(c, c':') and take_spaced(c, c'[')


cdef inline bint open_member(Cursor* c, const char* name, Py_ssize_t length) noexcept nogil:
    # From the start of a body {"NAME": [...]} to its member's first bracket.
    skip_mark(c)
    if not take_spaced(c, c'{') or not take_spaced(c, c'"'):
        return False
    if not take_exact(c, name, length) or not take(c, c'"') or not take_spaced(c, c':'):
        return False
    skip_space(c)
    return peek(c) == c'['


cdef inline bint close_member(Cursor* c) noexcept nogil:
    # Behind the member's rows: nothing but the brace may follow.
    if not take_spaced(c, c'}'):
        return False
    skip_space(c)
    return c.at == c.end


cdef inline bint close_body(Cursor* c, const Rows* r, bint named) noexcept nogil:
    # Behind the rows: at most the signature may follow. What comes after the last brace is ignored.
    if not named and take_spaced(c, c','):
        skip_space(c)
        named = take_signature(c, r)
        if not named:
            return False
    return take_spaced(c, c'}') and (named or r.is_default)


cdef inline JsonFault fill_rows(Cursor* c, const Rows* r, uint8_t* out) noexcept nogil:
    # Behind the outermost bracket; `left` holds how many items each open list still expects.
    cdef int64_t[MAX_RANK] left
    cdef int last = r.rank - 1
    cdef int level = 0
    cdef int64_t count
    cdef JsonFault fault
    left[0] = r.shape[0]
    while True:
        while level < last:
            if not take_spaced(c, c'['):
                return BODY_RAGGED
            level += 1
            left[level] = r.shape[level]
        skip_space(c)
        fault = read_numbers(r.dtype, &c.at, c.end, out, r.shape[last], &count)
        if fault != JSON_OK:
            return fault
        if count != r.shape[last]:
            return BODY_RAGGED
        out += count * r.item_bytes
        while True:
            if not take_spaced(c, c']'):
                return BODY_RAGGED
            level -= 1
            if level < 0:
                return JSON_OK
            left[level] -= 1
            if left[level]:
                break
        if not take_spaced(c, c','):
            return BODY_RAGGED


cdef inline JsonFault read_rows(Cursor* c, const Rows* r, uint8_t* out) noexcept nogil:
    cdef bint named = False
    cdef JsonFault fault
    if not open_rows(c, r, &named):
        return BODY_OTHER_FORM
    fault = fill_rows(c, r, out)
    if fault != JSON_OK:
        return fault
    return JSON_OK if close_body(c, r, named) else BODY_OTHER_FORM


cdef inline JsonFault read_member_rows(
    Cursor* c, const Rows* r, const char* name, Py_ssize_t length, uint8_t* out
) noexcept nogil:
    cdef JsonFault fault
    if not open_member(c, name, length):
        return BODY_OTHER_FORM
    c.at += 1
    fault = fill_rows(c, r, out)
    if fault != JSON_OK:
        return fault
    return JSON_OK if close_member(c) else BODY_OTHER_FORM


cdef inline int count_brackets(Cursor* c, int most) noexcept nogil:
    # Lists that open one in another from here, `most` of them at most.
    cdef Cursor ahead = c[0]
    cdef int opened = 0
    while opened < most and take_spaced(&ahead, c'['):
        opened += 1
    return opened


cdef inline int64_t count_items(Cursor* c, const Rows* r) noexcept nogil:
    cdef bint named = False
    return count_commas(c) if open_rows(c, r, &named) else 0


cdef inline int64_t count_commas(Cursor* c) noexcept nogil:
    # Commas up to the last bracket, and one: the items, exactly when the body is of the common form.
    cdef const uint8_t* last = c.end
    while last > c.at and (last - 1)[0] != c']':
        last -= 1
    return count_byte(c.at, last, c',') + 1
