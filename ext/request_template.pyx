"""Requests of the V2 protocol that differ from an earlier one in their values alone, straight into memory.

Clients send the same text again and again. A template is that text with placeholders where it may differ: the id,
the number of rows, the data. What the rest means was found out once, by `infer_json` and the dialect;
a request that fits is compared, and its values go where the caller says.

    templates = RequestTemplates(32)
    templates.add(RequestTemplate(header, [("data", start, end, 4, 0, FLOAT32)], [], [16], 1))
    template = templates.find(body, len(body))            # or None; template.rows, template.id
    template.read_into(body, len(body), [memory])      # False: it is another request, take the general path

`find_placeholders` looks for the placeholders in a header. Nothing here knows HTTP, a model or a tensor's name.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memset

from infer_body cimport *
from infer_match cimport *
from infer_members cimport ENTRIES, string_of
from json_column cimport text_equals


cdef enum:
    GIL_BYTES = 16384           # requests up to this keep the GIL: giving it away costs more
    MOST_TARGETS = 64
    MOST_UNIT = 1 << 30         # bytes or values of a row

KINDS = {"id": <int>PLACEHOLDER_ID, "rows": <int>PLACEHOLDER_ROWS, "data": <int>PLACEHOLDER_DATA}


# -- where a header may differ -------------------------------------------------------------------------

def find_placeholders(header):
    """(kind, start, end, input) of every value that may differ, in the order of the text.

    kind: "id", "rows" (the first axis of a shape), "size" (of a tensor that lies elsewhere) and "data".
    Empty for a header that `read_infer` would refuse as no JSON.
    """
    cdef Py_buffer view
    cdef Scan scan
    cdef int k
    found = []
    PyObject_GetBuffer(header, &view, PyBUF_SIMPLE)
    memset(&scan, 0, sizeof(scan))
    scan.cursor.at = <const uint8_t*>view.buf
    scan.cursor.end = scan.cursor.at + view.len
    try:
        if read_infer_body(&scan) == JSON_OK:
            if scan.id != NULL and scan.id[0] == c'"':
                found.append(placeholder_of("id", scan.id, text_end(scan.id, scan.cursor.end), -1, &view))
            for k in range(scan.inputs.count):
                add_placeholders(found, &scan.inputs.items[k], k, &scan, &view)
        return sorted(found, key=_begin_of)
    finally:
        close_parts(&scan.inputs)
        close_parts(&scan.outputs)
        PyBuffer_Release(&view)


def _begin_of(placeholder):
    return placeholder[1]


cdef tuple placeholder_of(str kind, const uint8_t* start, const uint8_t* end, int input, const Py_buffer* view):
    cdef const uint8_t* first = <const uint8_t*>view.buf
    return kind, start - first, end - first, input


cdef const uint8_t* text_end(const uint8_t* at, const uint8_t* end) noexcept:
    cdef Cursor c = Cursor(at, end)
    cdef Text text
    take_text(&c, &text)
    return c.at


cdef void add_placeholders(list found, const Part* part, int input, const Scan* scan, const Py_buffer* view):
    cdef Cursor c
    cdef const uint8_t* start
    if part.shape != NULL and part.shape[0] == c'[':
        c = Cursor(part.shape + 1, scan.cursor.end)
        skip_space(&c)
        start = c.at
        if take_digits(&c):
            found.append(placeholder_of("rows", start, c.at, input, view))
    if part.data != NULL:
        found.append(placeholder_of("data", part.data, part.data_end, input, view))
    elif part.parameters != NULL and part.parameters[0] == c'{':
        c = Cursor(part.parameters, scan.cursor.end)
        start = find_size(&c)
        if start != NULL:
            found.append(placeholder_of("size", start, c.at, input, view))


cdef const uint8_t* find_size(Cursor* c) noexcept:
    # The number that says how many bytes lie elsewhere, and the cursor behind it; or NULL.
    cdef JsonFault fault = JSON_OK
    cdef Text key
    cdef const uint8_t* start
    if not open_object(c):
        return NULL
    while take_key(c, &key) == JSON_OK:
        start = c.at
        if text_equals(&key, b"binary_data_size", 16) or text_equals(&key, b"shared_memory_byte_size", 23):
            return start if take_digits(c) else NULL
        if skip_value(c, 0, DEEPEST) != JSON_OK or close_object(c, &fault):
            return NULL
    return NULL


# -- templates -----------------------------------------------------------------------------------------

cdef class RequestTemplate:
    """One text with placeholders. `rows`, `id`: of the request that was found last; `used`: whether one ever was.

    header: the JSON of a good request. placeholders: (kind, start, end, unit, target, dtype code) in its order;
    `unit` is what one row counts for: the number itself ("rows"), or values ("data"); "id" has none.
    blobs: (target, bytes of a row) of what lies behind the JSON. targets: bytes of a row of each of the
    outs. rows: the rows of every request, 0 where a "rows" placeholder stands before the first data. id: of every
    request, "" where an "id" placeholder stands before the first data. rounded: targets of float64 whose numbers
    are rounded to float32 first. For one thread at a time.
    """

    cdef TemplateText text
    cdef bytes kept             # the text between the placeholders
    cdef int targets
    cdef int64_t[MOST_TARGETS] units
    cdef bint ids               # there is a placeholder for them
    cdef readonly str id
    cdef readonly int64_t rows
    cdef readonly bint used

    def __init__(self, bytes header not None, list placeholders not None, list blobs not None, list targets not None,
                 int64_t rows, str id not None="", rounded=()):
        cdef int k
        if len(targets) > MOST_TARGETS:
            raise ValueError(f"a template has at most {MOST_TARGETS} tensors, not {len(targets)}")
        if self.text.placeholders != NULL:
            raise ValueError("a template is made once")
        self.id = id
        self.targets = <int>len(targets)
        for k in range(self.targets):
            self.units[k] = checked_unit(targets[k])
        self.text.placeholders = <Placeholder*>PyMem_Calloc(len(placeholders) + 1, sizeof(Placeholder))
        self.text.blobs = <Blob*>PyMem_Calloc(len(blobs) + 1, sizeof(Blob))
        if self.text.placeholders == NULL or self.text.blobs == NULL:
            raise MemoryError
        self.text.rows = rows
        self.set_placeholders(header, placeholders)
        self.set_rounded(rounded)
        for target, unit in blobs:
            self.text.blobs[self.text.blob_count] = Blob(self.checked_target(target, unit, 1), unit)
            self.text.blob_unit += unit
            self.text.blob_count += 1

    def __dealloc__(self):
        PyMem_Free(self.text.placeholders)
        PyMem_Free(self.text.blobs)

    cdef int set_placeholders(self, bytes header, list placeholders) except -1:
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t first, last
        cdef bint rows_known = self.text.rows > 0
        cdef Placeholder* placeholder
        cdef list texts = []
        for kind, first, last, unit, target, dtype_code in placeholders:
            if not at <= first < last <= len(header):
                raise ValueError("placeholders stand in the order of the text")
            texts.append(header[at:first])
            at = last
            placeholder = &self.text.placeholders[len(texts) - 1]
            placeholder.kind = KINDS[kind]
            if placeholder.kind == PLACEHOLDER_ID:
                if self.text.item_unit:
                    raise ValueError("the id must be known where the data begins")
                self.ids = True
                continue
            placeholder.unit = checked_unit(unit)
            rows_known |= placeholder.kind == PLACEHOLDER_ROWS
            if placeholder.kind == PLACEHOLDER_DATA:
                if not rows_known:
                    raise ValueError("the rows must be known where the data begins")
                self.set_data(placeholder, target, dtype_code)
        if not rows_known:
            raise ValueError("nothing says how many rows there are")
        texts.append(header[at:])
        self.set_texts(texts)
        return 0

    cdef int set_rounded(self, rounded) except -1:
        cdef int k
        cdef Placeholder* placeholder
        for k in range(self.text.placeholder_count):
            placeholder = &self.text.placeholders[k]
            if placeholder.kind != PLACEHOLDER_DATA or placeholder.target not in rounded:
                continue
            if placeholder.dtype != DT_FLOAT64:
                raise ValueError("float64 alone is rounded to float32")
            placeholder.rounded = True
        return 0

    cdef void set_texts(self, list texts):
        # The data of the request that it was made of is not kept.
        cdef const uint8_t* at
        cdef Py_ssize_t k
        self.kept = b"".join(texts)
        self.text.placeholder_count = <int>len(texts) - 1
        at = <const uint8_t*>PyBytes_AS_STRING(self.kept)
        self.text.before, self.text.before_bytes = at, PyBytes_GET_SIZE(texts[0])
        for k in range(1, len(texts)):
            at += PyBytes_GET_SIZE(texts[k - 1])
            self.text.placeholders[k - 1].after, self.text.placeholders[k - 1].after_bytes = at, PyBytes_GET_SIZE(texts[k])

    cdef int set_data(self, Placeholder* placeholder, int target, int dtype_code) except -1:
        placeholder.dtype = dtype_code
        placeholder.item_bytes = dtype_bytes(placeholder.dtype) if 0 < dtype_code < DT_COUNT else 0
        if placeholder.item_bytes == 0 or dtype_code == DT_FLOAT16 or dtype_code == DT_BFLOAT16:
            raise ValueError(f"values of dtype code {dtype_code} are not for a template")
        placeholder.target = self.checked_target(target, placeholder.unit, placeholder.item_bytes)
        self.text.item_unit += placeholder.unit
        return 0

    cdef int checked_target(self, int target, int64_t unit, int item_bytes) except -1:
        if not 0 <= target < self.targets or self.units[target] != checked_unit(unit) * item_bytes:
            raise ValueError(f"there is no tensor {target} of {unit} x {item_bytes} bytes a row")
        return target

    def read_into(self, body, Py_ssize_t header_bytes, outs):
        """Fill `outs` with a request that `find` took, for as many rows. False: it is another request, `outs`
        are undefined then, take the general path.

        outs: writable memory for every target; those without a placeholder or a blob are left alone. Raises
        ValueError for memory of another size. The GIL is released for requests above 16 KiB.
        """
        cdef Py_buffer view
        cdef Py_buffer[MOST_TARGETS] memory
        cdef uint8_t* at[MOST_TARGETS]
        cdef int held = 0
        cdef int64_t rows = self.rows
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        try:
            if len(outs) != self.targets or not 0 <= header_bytes <= view.len or rows < 1:
                raise ValueError(f"{self.targets} tensors and a request that was found, not {len(outs)}")
            for out in outs:
                PyObject_GetBuffer(out, &memory[held], PyBUF_WRITABLE)
                at[held] = <uint8_t*>memory[held].buf
                held += 1
                if memory[held - 1].len != rows * self.units[held - 1]:
                    raise ValueError(f"{rows} rows do not fill the buffer's {memory[held - 1].len} bytes")
            return self.fill(&view, header_bytes, rows, at)
        finally:
            for k in range(held):
                PyBuffer_Release(&memory[k])
            PyBuffer_Release(&view)

    cdef bint fill(self, const Py_buffer* view, Py_ssize_t header_bytes, int64_t rows, uint8_t** outs):
        cdef const uint8_t* start = <const uint8_t*>view.buf
        cdef Cursor c = Cursor(start, start + header_bytes)
        cdef bint filled
        if view.len - header_bytes != rows * self.text.blob_unit:
            return False
        if view.len < GIL_BYTES:
            return fill_template(&self.text, c, c.end, rows, outs)
        with nogil:
            filled = fill_template(&self.text, c, c.end, rows, outs)
        return filled


cdef int64_t checked_unit(unit) except -1:
    if not 0 < unit <= MOST_UNIT:
        raise ValueError(f"a row has 1..{MOST_UNIT} of everything, not {unit}")
    return unit


cdef class RequestTemplates:
    """The templates last used, at most `capacity`."""

    cdef list templates
    cdef readonly int capacity

    def __init__(self, int capacity):
        self.templates = []
        self.capacity = capacity

    def __len__(self):
        return len(self.templates)

    def add(self, RequestTemplate template not None):
        """Make it the first to be looked at; the one not used for longest goes."""
        self.templates.insert(0, template)
        del self.templates[self.capacity:]

    def unused(self) -> int:
        """How many have never been found."""
        return sum([not (<RequestTemplate>template).used for template in self.templates])

    def forget_unused(self) -> None:
        self.templates = [template for template in self.templates if (<RequestTemplate>template).used]

    def find(self, body, Py_ssize_t header_bytes, Py_ssize_t nbytes=-1):
        """The template of a request whose JSON is the first `header_bytes` of it; None when there is none. `nbytes`: of
        the whole request, when `body` is its beginning."""
        cdef Py_buffer view
        cdef RequestTemplate template
        cdef Cursor c
        cdef Text identity = Text(NULL, NULL, False)
        cdef int64_t rows
        cdef int64_t left = ENTRIES
        cdef Py_ssize_t k
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        try:
            if not 0 <= header_bytes <= view.len:
                return None
            if nbytes < 0:
                nbytes = view.len
            c = Cursor(<const uint8_t*>view.buf, <const uint8_t*>view.buf + header_bytes)
            for k in range(len(self.templates)):
                template = <RequestTemplate>self.templates[k]
                rows = match_rows(&template.text, c, nbytes - header_bytes, &identity)
                if rows:
                    template.rows, template.used = rows, True
                    if template.ids:
                        template.id = string_of(&identity, &left)
                        if left < 0:
                            return None     # too long an id: read_infer says so
                    if k:
                        self.templates.insert(0, self.templates.pop(k))
                    return template
            return None
        finally:
            PyBuffer_Release(&view)
