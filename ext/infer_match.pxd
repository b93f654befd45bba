# The verbs of request_template: a request's text held against a template, and its values put where they belong.
#
#     {"id":"7","inputs":[{"name":"x","shape":[2,3],"datatype":"FP32","data":[1,2,3,4,5,6]}]}
#           ^ ID                             ^ ROWS                          ^ DATA
#
# Between the placeholders every byte is the template's own. Anything else is a fault number, and the caller takes
# the general path.

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp, memcpy

from infer_data cimport *
from json_column cimport Column
from json_cursor cimport *


cdef enum:
    PLACEHOLDER_ID                     # a string
    PLACEHOLDER_ROWS                   # a number: `unit` for each row
    PLACEHOLDER_DATA                   # lists of numbers: `unit` of them for each row

cdef enum:
    MOST_ROWS = 1 << 24
    NUMBER_DIGITS = 15


cdef struct Placeholder:
    int kind
    int target                  # DATA: which of the outs
    uint8_t dtype
    bint rounded                # doubles that are float32 first
    int item_bytes
    int64_t unit
    const uint8_t* after        # the text up to the next placeholder
    Py_ssize_t after_bytes


cdef struct Blob:
    # A tensor behind the JSON.
    int target
    int64_t unit                # bytes of a row


cdef struct TemplateText:
    const uint8_t* before       # the text up to the first placeholder
    Py_ssize_t before_bytes
    Placeholder* placeholders
    int placeholder_count
    Blob* blobs
    int blob_count
    int64_t rows                # 0: the first of the ROWS placeholders says
    int64_t blob_unit           # of all blobs together
    int64_t item_unit           # values in the data of all placeholders together, for a row


cdef inline bint take_exactly(Cursor* c, const uint8_t* text, Py_ssize_t count) noexcept nogil:
    if c.end - c.at < count or memcmp(c.at, text, count) != 0:
        return False
    c.at += count
    return True


cdef inline int64_t take_digits(Cursor* c) noexcept nogil:
    # A number as clients print it: digits, the first no zero. 0 for anything else.
    cdef int64_t number = 0
    cdef const uint8_t* start = c.at
    if peek(c) == c'0':
        return 0
    while c.at < c.end and c'0' <= c.at[0] <= c'9' and c.at - start < NUMBER_DIGITS:
        number = 10 * number + (c.at[0] - c'0')
        c.at += 1
    return number


cdef inline bint take_rows(Cursor* c, int64_t unit, int64_t* rows) noexcept nogil:
    # The first such placeholder says how many rows there are, the others must agree.
    cdef int64_t number = take_digits(c)
    if rows[0] == 0 and number % unit == 0 and number // unit < MOST_ROWS:
        rows[0] = number // unit
    return number > 0 and number == rows[0] * unit


cdef inline bint take_id(Cursor* c, Text* identity) noexcept nogil:
    return peek(c) == c'"' and take_text(c, identity) == JSON_OK


cdef inline bint take_placeholder(Cursor* c, const Placeholder* placeholder, int64_t* rows, Text* identity) noexcept nogil:
    # Any placeholder but data, and the text behind it.
    if placeholder.kind == PLACEHOLDER_ID:
        if not take_id(c, identity):
            return False
    elif not take_rows(c, placeholder.unit, rows):
        return False
    return take_exactly(c, placeholder.after, placeholder.after_bytes)


cdef inline int64_t match_rows(const TemplateText* f, Cursor c, int64_t blob_bytes, Text* identity) noexcept nogil:
    # The rows of a request that is as the template up to its data, and behind it; 0 for another.
    cdef int64_t rows = f.rows
    cdef const Placeholder* placeholder
    cdef int k
    cdef int64_t header_bytes = c.end - c.at
    if not take_exactly(&c, f.before, f.before_bytes):
        return 0
    for k in range(f.placeholder_count):
        placeholder = &f.placeholders[k]
        if placeholder.kind == PLACEHOLDER_DATA:
            placeholder = &f.placeholders[f.placeholder_count - 1]
            if c.end - c.at < placeholder.after_bytes or memcmp(c.end - placeholder.after_bytes, placeholder.after, placeholder.after_bytes) != 0:
                return 0
            c.at = c.end
            break
        if not take_placeholder(&c, placeholder, &rows, identity):
            return 0
    # A value takes two bytes of text or more.
    if c.at != c.end or blob_bytes != rows * f.blob_unit or header_bytes < 2 * rows * f.item_unit:
        return 0
    return rows


cdef inline void round_doubles(uint8_t* data, int64_t count) noexcept nogil:
    # Doubles that a client has sent as float32: what a parser of float32 makes of their text.
    cdef int64_t k
    cdef double value
    for k in range(count):
        memcpy(&value, data + 8 * k, 8)
        value = <double><float>value
        memcpy(data + 8 * k, &value, 8)


cdef inline bint fill_placeholder(Cursor* c, const Placeholder* placeholder, int64_t rows, uint8_t** outs) noexcept nogil:
    cdef Column column
    column.dtype = placeholder.dtype
    column.data = outs[placeholder.target]
    column.room = rows * placeholder.unit * placeholder.item_bytes
    column.filled = column.count = 0
    if (peek(c) != c'[' or fill_exactly(c, &column, placeholder.item_bytes) != JSON_OK
            or not take_exactly(c, placeholder.after, placeholder.after_bytes)):
        return False
    if placeholder.rounded:
        round_doubles(outs[placeholder.target], rows * placeholder.unit)
    return True


cdef inline bint fill_template(const TemplateText* f, Cursor c, const uint8_t* blobs, int64_t rows, uint8_t** outs) noexcept nogil:
    # All values into `outs`, each as large as its target's rows; the blobs are as many bytes as the template says.
    cdef int64_t given = f.rows
    cdef Text identity
    cdef int k
    if not take_exactly(&c, f.before, f.before_bytes):
        return False
    for k in range(f.placeholder_count):
        if f.placeholders[k].kind == PLACEHOLDER_DATA:
            if not fill_placeholder(&c, &f.placeholders[k], rows, outs):
                return False
        elif not take_placeholder(&c, &f.placeholders[k], &given, &identity):
            return False
    for k in range(f.blob_count):
        memcpy(outs[f.blobs[k].target], blobs, rows * f.blobs[k].unit)
        blobs += rows * f.blobs[k].unit
    return c.at == c.end and given == rows
