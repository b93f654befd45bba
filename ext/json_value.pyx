"""General JSON as TF Serving's parser reads it, and its way of printing a value in an error.

    parse(b'{"a": [1, 1.0, "x"]} rest')  ->  Members([(b"a", [1, 1.0, b"x"])])

For what is small and must be exact: examples, and explaining why a predict body was refused. It
makes an object per value, so the caller bounds how many; tensors go through json_reader. In a thread it
lets others run as it goes.
Dialect of JSON, reasons and offsets: TF Serving spec 2.1.
"""

from itertools import chain

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t
from posix.time cimport nanosleep, timespec

from json_cursor cimport *

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void* container)

cdef extern from "json_reason.h":
    const char* json_reason(int fault)


cdef object END = object()
cdef str NOT_SINGULAR = "The document root must not be followed by other values."
cdef Py_ssize_t DEBUG_BYTES = 256

cdef enum:
    TURN = 1 << 14              # values after which others may run: 2 ms
    TURN_NS = 1000              # how long they may, at least: with the kernel's slack 60 us
    LARGE_TEXT = 1 << 18        # bytes with escapes, 1 ms: others run meanwhile
    CONTAINERS = 1 << 16        # lists and objects, which are freed in one go

MOST_CONTAINERS = CONTAINERS


class JSONSyntaxError(ValueError):
    """Text that is no JSON: `reason` in the words clients know, `offset` the byte that showed it."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at offset: {offset}")
        self.reason = reason
        self.offset = offset


@cython.no_gc
cdef class Members:
    """A JSON object: its (name, value) pairs in document order, duplicates included."""

    cdef readonly list pairs
    cdef bytes pending          # the name whose value is being read

    def __init__(self, pairs=()):
        self.pairs = list(pairs)

    def get(self, bytes name not None, default=None):
        """The value of the first member called `name`."""
        for key, value in self.pairs:
            if key == name:
                return value
        return default

    def __contains__(self, name):
        return self.get(name, END) is not END

    def __iter__(self):
        return iter(self.pairs)

    def __len__(self):
        return len(self.pairs)

    def __eq__(self, other):
        return isinstance(other, Members) and self.pairs == (<Members>other).pairs

    def __repr__(self):
        return f"Members({self.pairs!r})"


def parse(body, *, int max_depth=100, int64_t max_values=1 << 62, bint alone=False,
          bint as_shown=False):
    """The first JSON value of `body`. What follows is ignored, as TensorFlow Serving does, or `alone` refused, as
    Triton does: there a NUL behind it ends the text.

    Objects become Members, arrays lists, strings bytes (raw UTF-8), integer literals int, other
    numbers float. `max_values` counts all of these; of objects and lists there may be MOST_CONTAINERS.
    With `as_shown` a float that TF Serving reads a few bits off is a ShownFloat. Raises JSONSyntaxError.
    """
    cdef Cursor cursor
    cdef Py_buffer view
    cdef JsonFault fault = JSON_OK
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        cursor.at = <const uint8_t*>view.buf
        cursor.end = cursor.at + view.len
        value = build_value(&cursor, max_depth, max_values, as_shown, &fault)
        if fault != JSON_OK:
            raise JSONSyntaxError(json_reason(fault).decode(), cursor.at - <const uint8_t*>view.buf)
        skip_space(&cursor)
        if alone and peek(&cursor) != 0:
            raise JSONSyntaxError(NOT_SINGULAR, cursor.at - <const uint8_t*>view.buf)
        return value
    finally:
        PyBuffer_Release(&view)


cdef object build_value(Cursor* c, int max_depth, int64_t left, bint as_shown, JsonFault* fault):
    cdef list opened = []       # the containers around the cursor, outermost first
    cdef uint8_t first
    cdef object root = END, value
    cdef int64_t containers = 0

    skip_mark(c)
    skip_space(c)
    if peek(c) in b"\0,:]}":    # none of these can start a document, and the original says so like this
        fault[0] = JSON_EMPTY
        return None
    while True:
        left -= 1
        if left < 0:
            fault[0] = JSON_TOO_MANY
            return None
        if left % TURN == 0:
            give_turn()
        skip_space(c)
        first = peek(c)
        value = new_members() if first == c'{' else untracked([]) if first == c'[' else build_scalar(c, as_shown, fault)
        if fault[0] != JSON_OK:
            return None
        if root is END:
            root = value
        else:
            attach(opened[len(opened) - 1], value)
        if first == c'{' or first == c'[':
            containers += 1
            if containers > CONTAINERS:
                fault[0] = JSON_TOO_MANY
                return None
            if len(opened) >= max_depth:
                fault[0] = JSON_TOO_DEEP
                return None
            c.at += 1
            skip_space(c)
            if not take(c, c'}' if first == c'{' else c']'):
                opened.append(value)
                if first == c'{':
                    fault[0] = take_name(c, <Members>value)
                if fault[0] != JSON_OK:
                    return None
                continue
        if not find_next_value(c, opened, fault):
            return root


cdef inline object untracked(object container):
    # Nothing of a document leads back to what contains it, so the collector need not look at it: for MOST_CONTAINERS
    # objects of two members it took 40 ms, in which nobody else ran.
    PyObject_GC_UnTrack(<void*>container)
    return container


cdef inline Members new_members():
    cdef Members made = Members.__new__(Members)
    made.pairs = untracked([])
    return made


cdef void give_turn() noexcept:
    # A thread that waits for the GIL is woken when it is released, and needs longer than it takes to have it back:
    # without a pause it would wait on, and would not ask for the GIL either, as it does after 5 ms without a release.
    cdef timespec pause = timespec(0, TURN_NS)
    with nogil:
        nanosleep(&pause, NULL)


cdef bint find_next_value(Cursor* c, list opened, JsonFault* fault):
    # Behind a value: close what closes here. False when the root is complete, or at a fault.
    cdef bint inside_object
    while opened:
        inside_object = isinstance(opened[len(opened) - 1], Members)
        skip_space(c)
        if take(c, c','):
            if inside_object:
                fault[0] = take_name(c, <Members>opened[len(opened) - 1])
            return fault[0] == JSON_OK
        if not take(c, c'}' if inside_object else c']'):
            fault[0] = JSON_MISSING_COMMA_OR_BRACE if inside_object else JSON_MISSING_COMMA_OR_BRACKET
            return False
        opened.pop()
    return False


cdef void attach(object container, object value):
    if isinstance(container, Members):
        (<Members>container).pairs.append(untracked(((<Members>container).pending, value)))
    else:
        (<list>container).append(value)


cdef JsonFault take_name(Cursor* c, Members members):
    cdef Text key
    cdef JsonFault fault = take_key(c, &key)
    if fault == JSON_OK:
        members.pending = bytes_of(&key)
    return fault


cdef object build_scalar(Cursor* c, bint as_shown, JsonFault* fault):
    cdef Text text
    cdef Number number
    cdef double shown
    cdef const uint8_t* start = c.at
    cdef uint8_t first = peek(c)
    if first == c'"':
        fault[0] = take_text(c, &text)
        return bytes_of(&text) if fault[0] == JSON_OK else None
    if first == c't' or first == c'f' or first == c'n':
        fault[0] = skip_name(c)
        return None if first == c'n' else first == c't'
    fault[0] = read_number(&c.at, c.end, &number)
    if number.kind == NUMBER_INT64:
        return number.integer
    if number.kind == NUMBER_UINT64:
        return <uint64_t>number.integer
    if not as_shown or fault[0] != JSON_OK:
        return number.real
    shown = read_in_normal_precision(start, c.at, number.real)
    return number.real if shown == number.real or shown != shown else make_shown(number.real, shown)


cdef object make_shown(double value, double shown):
    cdef ShownFloat made = ShownFloat(value)
    made.shown = shown
    return made


cdef class ShownFloat(float):
    """A number that TF Serving reads a few bits off; `shown` is what its messages print."""

    cdef readonly double shown


cdef bytes bytes_of(Text* text):
    cdef bytes room
    cdef uint8_t* out
    cdef Py_ssize_t size
    if not text.escaped:
        return PyBytes_FromStringAndSize(<const char*>text.start, text.end - text.start)
    room = PyBytes_FromStringAndSize(NULL, text.end - text.start)
    out = <uint8_t*>PyBytes_AS_STRING(room)
    if text.end - text.start < LARGE_TEXT:
        size = unescape_string(text.start, text.end, out)
    else:
        with nogil:
            size = unescape_string(text.start, text.end, out)
    return room[:size]


# -- the way back, for error texts ---------------------------------------------------------------

cdef class Level:
    # One open container of the debug text.
    cdef bint is_array
    cdef Py_ssize_t written
    cdef object rest            # an iterator; names and values of an object alternate

    def __cinit__(self, value):
        self.is_array = not isinstance(value, Members)
        self.rest = iter(value) if self.is_array else chain.from_iterable(value)


def debug_text(value):
    """`value` (as `parse` gives it) as TF Serving prints it in its messages, up to 256 bytes.

    Four spaces a level, arrays on one line; it stops at the first token boundary at or after 256
    bytes (spec 2.1). Bytes that are no UTF-8 come out as U+FFFD.
    """
    cdef bytearray out = bytearray()
    cdef list levels = []
    while len(out) < DEBUG_BYTES:
        if levels:
            write_prefix(out, <Level>levels[len(levels) - 1], len(levels))
        if isinstance(value, (Members, list)):
            out += b"{" if isinstance(value, Members) else b"["
            levels.append(Level(value))
        else:
            out += scalar_text(value)
        value = close_levels(out, levels)
        if value is END:
            break
    return out.decode("utf-8", "replace")


cdef object close_levels(bytearray out, list levels):
    # The next value to write, or END.
    cdef Level level
    while levels and len(out) < DEBUG_BYTES:
        level = <Level>levels[len(levels) - 1]
        value = next(level.rest, END)
        if value is not END:
            return value
        levels.pop()
        if not level.is_array and level.written:
            out += b"\n" + b"    " * len(levels)
        out += b"]" if level.is_array else b"}"
    return END


cdef void write_prefix(bytearray out, Level level, Py_ssize_t depth):
    # Indents count arrays too, though arrays break no lines.
    cdef Py_ssize_t nth = level.written
    level.written += 1
    if level.is_array:
        out += b", " if nth else b""
    elif nth & 1:
        out += b": "
    else:
        out += (b",\n" if nth else b"\n") + b"    " * depth


cdef bytes scalar_text(object value):
    if value is None:
        return b"null"
    if value is True or value is False:
        return b"true" if value else b"false"
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, float):
        return double_text((<ShownFloat>value).shown if isinstance(value, ShownFloat) else value)
    return b'"' + escape(value) + b'"'


cdef dict ESCAPES = {code: b"\\u%04X" % code for code in range(32)}
ESCAPES.update({8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"})


cdef bytes escape(bytes text):
    if not any(code in ESCAPES for code in text):
        return text
    return b"".join([ESCAPES.get(code) or b"%c" % code for code in text])


cdef bytes double_text(double value):
    # The shortest digits that read back, laid out as RapidJSON does; non-finite prints nothing.
    cdef bytes text, sign, digits
    cdef int point
    if value != value or value - value != 0:
        return b""
    text = b"%r" % value
    sign = b"-" if text.startswith(b"-") else b""
    mantissa, _, exponent = text.lstrip(b"-").partition(b"e")
    whole, _, fraction = mantissa.partition(b".")
    digits = (whole + fraction).lstrip(b"0")
    if not digits:
        return sign + b"0.0"
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip(b"0")
    return sign + lay_out(digits, point)


cdef bytes lay_out(bytes digits, int point):
    # `point` is where the decimal point falls, counted from the first digit.
    cdef int length = len(digits)
    if length <= point <= 21:
        return digits + b"0" * (point - length) + b".0"
    if 0 < point <= 21:
        return digits[:point] + b"." + digits[point:]
    if -6 < point <= 0:
        return b"0." + b"0" * -point + digits
    return digits[:1] + (b"." + digits[1:] if length > 1 else b"") + b"e%d" % (point - 1)
