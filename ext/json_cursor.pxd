# A read position in borrowed JSON bytes, and the verbs every reader of JSON in ext/ moves it with.
#
# A Cursor owns nothing: its maker keeps the bytes alive. Everything here is inline and
# GIL-free, so this file has no .pyx and is no module at run time. Numbers and strings are read by
# the headers; the words for faults are in include/json_reason.h.

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libcpp cimport bool as cbool


cdef extern from "json_fault.h" nogil:
    enum JsonFault:
        JSON_OK
        JSON_EMPTY
        JSON_INVALID_VALUE
        JSON_MISSING_NAME
        JSON_MISSING_COLON
        JSON_MISSING_COMMA_OR_BRACE
        JSON_MISSING_COMMA_OR_BRACKET
        JSON_BAD_HEX
        JSON_BAD_SURROGATE
        JSON_BAD_ESCAPE
        JSON_MISSING_QUOTE
        JSON_NUMBER_TOO_BIG
        JSON_MISSING_FRACTION
        JSON_MISSING_EXPONENT
        JSON_TOO_DEEP
        JSON_NO_MEMORY
        JSON_TOO_MANY
        BODY_NOT_OBJECT
        BODY_SIGNATURE_NOT_STRING
        BODY_OTHER_SIGNATURE
        BODY_NO_INPUTS
        BODY_BOTH_FORMATS
        BODY_NO_FORMAT
        BODY_ROWS_NOT_LIST
        BODY_NO_ROWS
        BODY_NOT_NAMED
        BODY_MIXED_ROWS
        BODY_UNKNOWN_INPUT
        BODY_MISSING_INPUT
        BODY_RAGGED
        BODY_WRONG_TYPE
        BODY_UNSUPPORTED_DTYPE
        BODY_BAD_BASE64
        BODY_OTHER_FORM

cdef extern from "json_number.h" nogil:
    enum NumberKind:
        NUMBER_INT64
        NUMBER_UINT64
        NUMBER_DOUBLE
    struct Number:
        NumberKind kind
        int64_t integer
        double real
    JsonFault read_number(const uint8_t** at, const uint8_t* end, Number* number)
    double read_in_normal_precision(const uint8_t* text, const uint8_t* end, double nearest)
    bint take_word(const uint8_t** at, const uint8_t* end, const char* word)

cdef extern from "json_string.h" nogil:
    JsonFault scan_string(const uint8_t** at, const uint8_t* end, cbool* escaped)
    int64_t unescape_string(const uint8_t* text, const uint8_t* end, uint8_t* out)
    int64_t decode_base64(uint8_t* text, int64_t length)


cdef enum:
    DEEPEST = 1023              # what max_depth may be set to at most
    DEEPEST_WORDS = 16          # 64 bits each, for depths 0..DEEPEST


cdef struct Cursor:
    const uint8_t* at
    const uint8_t* end


cdef struct Text:
    # The inside of a JSON string, still escaped.
    const uint8_t* start
    const uint8_t* end
    cbool escaped


cdef inline uint8_t peek(Cursor* c) noexcept nogil:
    # 0 stands for "nothing left"; no JSON token starts with NUL.
    return c.at[0] if c.at < c.end else 0


cdef inline void skip_space(Cursor* c) noexcept nogil:
    while c.at < c.end and (c.at[0] == c' ' or c.at[0] == c'\n' or c.at[0] == c'\r' or c.at[0] == c'\t'):
        c.at += 1


cdef inline void skip_mark(Cursor* c) noexcept nogil:
    # The UTF-8 byte order mark, which some clients put first.
    if c.end - c.at >= 3 and c.at[0] == 0xEF and c.at[1] == 0xBB and c.at[2] == 0xBF:
        c.at += 3


cdef inline bint take(Cursor* c, uint8_t wanted) noexcept nogil:
    if peek(c) != wanted:
        return False
    c.at += 1
    return True


cdef inline JsonFault take_text(Cursor* c, Text* text) noexcept nogil:
    # The cursor is on the opening quote.
    c.at += 1
    text.start = c.at
    cdef JsonFault fault = scan_string(&c.at, c.end, &text.escaped)
    text.end = c.at - 1
    return fault


cdef inline JsonFault take_key(Cursor* c, Text* key) noexcept nogil:
    # A member's name and its colon; leaves the cursor on the member's value.
    cdef JsonFault fault
    skip_space(c)
    if peek(c) != c'"':
        return JSON_MISSING_NAME
    fault = take_text(c, key)
    if fault != JSON_OK:
        return fault
    skip_space(c)
    if not take(c, c':'):
        return JSON_MISSING_COLON
    skip_space(c)
    return JSON_OK


cdef inline JsonFault skip_scalar(Cursor* c) noexcept nogil:
    cdef Text text
    cdef Number number
    cdef uint8_t first = peek(c)
    if first == c'"':
        return take_text(c, &text)
    if first == c't' or first == c'f' or first == c'n':
        return skip_name(c)
    return read_number(&c.at, c.end, &number)


cdef inline JsonFault skip_name(Cursor* c) noexcept nogil:
    cdef const char* word = b"null"
    if c.at[0] == c't':
        word = b"true"
    elif c.at[0] == c'f':
        word = b"false"
    return JSON_OK if take_word(&c.at, c.end, word) else JSON_INVALID_VALUE


cdef inline JsonFault skip_value(Cursor* c, int depth, int max_depth) noexcept nogil:
    # Check one value of any kind and move behind it. `depth` containers are open around it. One bit
    # for each container inside says whether it is an object: no recursion, 128 bytes of stack.
    cdef uint64_t[DEEPEST_WORDS] objects
    cdef int base = depth
    cdef JsonFault fault
    cdef uint8_t first
    cdef Text key
    while True:
        skip_space(c)
        first = peek(c)
        if first == c'{' or first == c'[':
            if depth >= max_depth:
                return JSON_TOO_DEEP
            c.at += 1
            depth += 1
            set_bit(objects, depth, first == c'{')
            skip_space(c)
            if not take(c, c'}' if first == c'{' else c']'):
                if first == c'{':
                    fault = take_key(c, &key)
                    if fault != JSON_OK:
                        return fault
                continue
            depth -= 1
        else:
            fault = skip_scalar(c)
            if fault != JSON_OK:
                return fault
        fault = close_containers(c, objects, &depth, base)
        if fault != JSON_OK or depth == base:
            return fault


cdef inline JsonFault close_containers(Cursor* c, uint64_t* objects, int* depth, int base) noexcept nogil:
    # Behind a value: close what closes here, then stand before the next value (or be at the base).
    cdef Text key
    cdef bint inside_object
    while depth[0] > base:
        inside_object = get_bit(objects, depth[0])
        skip_space(c)
        if take(c, c','):
            return take_key(c, &key) if inside_object else JSON_OK
        if not take(c, c'}' if inside_object else c']'):
            return JSON_MISSING_COMMA_OR_BRACE if inside_object else JSON_MISSING_COMMA_OR_BRACKET
        depth[0] -= 1
    return JSON_OK


cdef inline bint get_bit(const uint64_t* bits, int index) noexcept nogil:
    return bits[index >> 6] >> (index & 63) & 1


cdef inline void set_bit(uint64_t* bits, int index, bint value) noexcept nogil:
    cdef uint64_t bit = <uint64_t>1 << (index & 63)
    if value:
        bits[index >> 6] |= bit
    else:
        bits[index >> 6] &= ~bit
