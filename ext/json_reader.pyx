"""Predict bodies of TF Serving's REST API straight into tensor memory (spec, section 2).

    reader = PredictReader([("x", code)], b"serving_default", is_default=True)
    rows = reader.count_rows(body, 784)             # 0: not for the fast path
    fault = reader.read_into(body, memory, (784,), rows)
    ...or...
    reader.read(body).tensors["x"]                  # (dtype code, shape, memory)

Two ways in: `read_into` for dense rows of one numeric input, into memory the caller reserved, and
`read` for everything section 2 allows. Neither makes a Python object per value or recurses, and
both look at each byte about once. The words of an error are not made here: the dialect reads a
refused body again with json_value and explains.
"""

from enum import IntEnum

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from copying cimport copy_one

from json_body cimport *
from json_column cimport *
from json_cursor cimport *
from json_rows cimport *


cdef enum:
    GIL_BYTES = 16384           # bodies up to this keep the GIL: giving it away costs more


class Fault(IntEnum):
    """The values that `read_into` returns and `JSONFault.code` holds. Below 32: the text is no JSON."""

    OK = JSON_OK
    EMPTY = JSON_EMPTY
    INVALID_VALUE = JSON_INVALID_VALUE
    MISSING_NAME = JSON_MISSING_NAME
    MISSING_COLON = JSON_MISSING_COLON
    MISSING_COMMA_OR_BRACE = JSON_MISSING_COMMA_OR_BRACE
    MISSING_COMMA_OR_BRACKET = JSON_MISSING_COMMA_OR_BRACKET
    BAD_HEX = JSON_BAD_HEX
    BAD_SURROGATE = JSON_BAD_SURROGATE
    BAD_ESCAPE = JSON_BAD_ESCAPE
    MISSING_QUOTE = JSON_MISSING_QUOTE
    NUMBER_TOO_BIG = JSON_NUMBER_TOO_BIG
    MISSING_FRACTION = JSON_MISSING_FRACTION
    MISSING_EXPONENT = JSON_MISSING_EXPONENT
    TOO_DEEP = JSON_TOO_DEEP
    NOT_OBJECT = BODY_NOT_OBJECT
    SIGNATURE_NOT_STRING = BODY_SIGNATURE_NOT_STRING
    OTHER_SIGNATURE = BODY_OTHER_SIGNATURE
    NO_INPUTS = BODY_NO_INPUTS
    BOTH_FORMATS = BODY_BOTH_FORMATS
    NO_FORMAT = BODY_NO_FORMAT
    ROWS_NOT_LIST = BODY_ROWS_NOT_LIST
    NO_ROWS = BODY_NO_ROWS
    NOT_NAMED = BODY_NOT_NAMED
    MIXED_ROWS = BODY_MIXED_ROWS
    UNKNOWN_INPUT = BODY_UNKNOWN_INPUT
    MISSING_INPUT = BODY_MISSING_INPUT
    RAGGED = BODY_RAGGED
    WRONG_TYPE = BODY_WRONG_TYPE
    UNSUPPORTED_DTYPE = BODY_UNSUPPORTED_DTYPE
    BAD_BASE64 = BODY_BAD_BASE64
    OTHER_FORM = BODY_OTHER_FORM


class JSONFault(ValueError):
    """A body that `read` refuses: `code` (a Fault), and `offset`, the byte that showed it.

    With OTHER_SIGNATURE, `signature` is the name the body asked for (None: it named none).
    """

    def __init__(self, code: int, offset: int, signature: bytes | None = None) -> None:
        super().__init__(f"{Fault(code).name} at byte {offset}")
        self.code = Fault(code)
        self.offset = offset
        self.signature = signature


cdef class PredictBody:
    """A predict body as read. `tensors` maps every input's name to (dtype code, shape, memory)."""

    cdef readonly bint columnar
    cdef readonly bytes signature
    cdef readonly dict tensors

    @property
    def format(self):
        return "columnar" if self.columnar else "row"


cdef class PredictReader:
    """Reads predict bodies of one signature. Nothing of a call outlives it."""

    cdef list names             # keeps the memory of inputs[].name
    cdef bytes signature
    cdef Input* inputs
    cdef int max_depth
    cdef Rows rows              # all but the shape

    def __cinit__(self, inputs, bytes signature not None, *, bint is_default, int max_depth=100):
        if not 1 <= max_depth <= DEEPEST:
            raise ValueError(f"max_depth must be 1 to {DEEPEST}, not {max_depth}")
        self.names = [(name, name.encode(), code) for name, code in inputs]
        self.signature = signature
        self.max_depth = max_depth
        self.inputs = <Input*>calloc(len(self.names) + 1, sizeof(Input))
        if self.inputs == NULL:
            raise MemoryError
        for i, (_, raw, code) in enumerate(self.names):
            if not 0 < code < DT_COUNT:
                raise ValueError(f"unknown dtype code {code}")
            self.inputs[i] = Input(PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw), code)
        self.rows.dtype = self.inputs[0].dtype if len(self.names) == 1 else 0
        self.rows.item_bytes = dtype_bytes(self.rows.dtype)
        self.rows.rank = 1
        self.rows.signature = PyBytes_AS_STRING(self.signature)
        self.rows.signature_bytes = PyBytes_GET_SIZE(self.signature)
        self.rows.is_default = is_default

    def __dealloc__(self):
        free(self.inputs)

    def count_rows(self, body, Py_ssize_t row_items):
        """How many rows of `row_items` numbers `body` holds if it is for the fast path, else 0.

        A guess by counting commas; `read_into` checks everything again.
        """
        cdef Py_buffer view
        cdef Cursor cursor
        cdef int64_t items
        if self.rows.item_bytes == 0 or row_items <= 0:
            return 0
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        cursor.at = <const uint8_t*>view.buf
        cursor.end = cursor.at + view.len
        items = count_items(&cursor, &self.rows)
        PyBuffer_Release(&view)
        return items // row_items if items % row_items == 0 else 0

    def read_into(self, body, out, tuple row_shape not None, Py_ssize_t rows):
        """Fill `out`, exactly rows x row_shape items, from `body`; 0, or a Fault's number.

        After a fault the contents of `out` are undefined. Raises ValueError when `out` has another
        size. The GIL is released for bodies above 16 KiB: the caller keeps both buffers alive.
        """
        return self.fill(body, out, row_shape, rows, NULL, 0)

    def count_member(self, body, tuple row_shape not None):
        """How many rows a body {"NAME": [...]} of the one input holds, -1 where the member is a row without
        the axis of rows, else 0: it is not for the fast path.

        A guess as that of `count_rows`; `read_member` checks everything again.
        """
        cdef Py_buffer view
        cdef Cursor cursor
        cdef int64_t items = 0
        cdef int64_t row_items = 1
        cdef int opened = 0
        cdef bytes name
        for length in row_shape:
            row_items *= length
        if self.rows.item_bytes == 0 or row_items <= 0:
            return 0
        name = self.names[0][1]
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        cursor.at = <const uint8_t*>view.buf
        cursor.end = cursor.at + view.len
        if open_member(&cursor, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)):
            opened = count_brackets(&cursor, <int>len(row_shape) + 1)
            items = count_commas(&cursor)
        PyBuffer_Release(&view)
        if opened > len(row_shape):
            return items // row_items if items % row_items == 0 else 0
        return -1 if opened and opened == len(row_shape) and items == row_items else 0

    def read_member(self, body, out, tuple row_shape not None, Py_ssize_t rows):
        """As `read_into`, of what `count_member` has counted."""
        cdef bytes name = self.names[0][1]
        if rows < 0:
            row_shape, rows = row_shape[1:], row_shape[0]
        return self.fill(body, out, row_shape, rows, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))

    cdef int fill(
        self, body, out, tuple row_shape, Py_ssize_t rows, const char* name, Py_ssize_t name_bytes
    ) except -1:
        cdef Py_buffer view
        cdef Py_buffer memory
        cdef Cursor cursor
        cdef Rows form = self.rows
        cdef int64_t need = set_shape(&form, row_shape, rows)
        cdef JsonFault fault
        if need <= 0 or form.rank + 1 > self.max_depth:
            return <int>BODY_OTHER_FORM
        PyObject_GetBuffer(out, &memory, PyBUF_WRITABLE)
        try:
            if memory.len != need:
                raise ValueError(f"{rows} rows need {need} bytes, the buffer has {memory.len}")
            PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
            cursor.at = <const uint8_t*>view.buf
            cursor.end = cursor.at + view.len
            if view.len > GIL_BYTES:
                with nogil:
                    fault = read_form(&cursor, &form, name, name_bytes, <uint8_t*>memory.buf)
            else:
                fault = read_form(&cursor, &form, name, name_bytes, <uint8_t*>memory.buf)
            PyBuffer_Release(&view)
        finally:
            PyBuffer_Release(&memory)
        return <int>fault

    def read(self, body):
        """Read any body of this signature. Raises JSONFault, MemoryError."""
        return self.scan(body, False)

    def read_inputs(self, body):
        """Read a body that is nothing but the object of all inputs by name, {"x": [...]}: no other member, none
        twice, nothing behind it. Raises JSONFault, MemoryError."""
        return self.scan(body, True)

    cdef PredictBody scan(self, body, bint exact):
        cdef Py_buffer view
        cdef Scan scan
        cdef JsonFault fault
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        open_scan(&scan, self, &view)
        try:
            if scan.columns == NULL:
                raise MemoryError
            if view.len > GIL_BYTES:
                with nogil:
                    fault = read_inputs(&scan) if exact else read_body(&scan, &self.rows)
            else:
                fault = read_inputs(&scan) if exact else read_body(&scan, &self.rows)
            if fault == JSON_NO_MEMORY:
                raise MemoryError
            signature = signature_of(&scan)
            if fault != JSON_OK:
                at = scan.cursor.at - <const uint8_t*>view.buf
                raise JSONFault(<int>fault, at, signature if fault == BODY_OTHER_SIGNATURE else None)
            return self.close_body(&scan, signature)
        finally:
            close_scan(&scan)
            PyBuffer_Release(&view)

    cdef PredictBody close_body(self, Scan* s, bytes signature):
        cdef PredictBody body = PredictBody.__new__(PredictBody)
        cdef int i
        body.columnar = s.columnar
        body.signature = signature
        body.tensors = {}
        for i in range(s.width):
            body.tensors[self.names[i][0]] = close_column(&s.columns[i])
        return body


cdef inline JsonFault read_form(
    Cursor* c, const Rows* r, const char* name, Py_ssize_t name_bytes, uint8_t* out
) noexcept nogil:
    # TF Serving's body of rows, or a body of one member of that name.
    if name == NULL:
        return read_rows(c, r, out)
    return read_member_rows(c, r, name, name_bytes, out)


cdef int64_t set_shape(Rows* r, tuple row_shape, int64_t rows) except -1:
    # Bytes the whole needs; 0 when there is nothing to read or read_into cannot.
    cdef int64_t need = r.item_bytes * max(rows, 0)
    cdef int64_t length
    if len(row_shape) >= MAX_RANK:
        return 0
    r.shape[0] = rows
    for length in row_shape:
        if length <= 0 or need > (<int64_t>1 << 62) // length:
            return 0
        need *= length
        r.shape[r.rank] = length
        r.rank += 1
    return need


# -- the general path ----------------------------------------------------------------------------

cdef void open_scan(Scan* s, PredictReader reader, const Py_buffer* view) noexcept:
    cdef int i
    s.cursor.at = <const uint8_t*>view.buf
    s.cursor.end = s.cursor.at + view.len
    s.inputs = reader.inputs
    s.width = <int>len(reader.names)
    s.max_depth = reader.max_depth
    s.row_format = s.columnar = s.exact = s.named = s.name_is_string = False
    s.meaning = JSON_OK
    s.meaning_at = s.cursor.at
    s.columns = <Column*>calloc(s.width + 1, sizeof(Column))
    if s.columns != NULL:
        for i in range(s.width):
            open_column(&s.columns[i], s.inputs[i].dtype)


cdef void close_scan(Scan* s) noexcept:
    cdef int i
    if s.columns != NULL:
        for i in range(s.width):
            free(s.columns[i].data)
    free(s.columns)


cdef bytes signature_of(Scan* s):
    cdef bytes plain
    if not s.name_is_string:
        return None
    plain = PyBytes_FromStringAndSize(NULL, s.signature.end - s.signature.start)
    length = unescape_string(s.signature.start, s.signature.end, <uint8_t*>PyBytes_AS_STRING(plain))
    return plain[:length]


cdef tuple close_column(Column* t):
    # A name given twice in one row object has left more items than the shape says: the first ones
    # are the tensor (spec 2.1).
    cdef list shape = []
    cdef int64_t items = 1
    cdef int64_t size
    cdef int axis
    for axis in range(t.rank):
        shape.append(t.shape[axis])
        items *= t.shape[axis]
    size = t.filled
    if items < t.count:
        size = size_of_items(t, items)
    data = PyBytes_FromStringAndSize(NULL, size)
    copy_one(<uint8_t*>PyBytes_AS_STRING(data), t.data, size)
    free(t.data)                # now, so that of several inputs one at a time is there twice
    t.data = NULL
    return t.dtype, tuple(shape), data


cdef int64_t size_of_items(const Column* t, int64_t items) noexcept:
    cdef int64_t size = 0
    cdef uint32_t length
    if t.dtype != DT_BYTES:
        return items * dtype_bytes(t.dtype)
    for _ in range(items):
        memcpy(&length, t.data + size, 4)
        size += 4 + length
    return size
