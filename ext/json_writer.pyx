"""Write tensors and replies as TF Serving's JSON, straight from the tensors' memory.

    (float32 memory of 2.5, 3.0; rows=2)  ->  b'{\n    "predictions": [2.5, 3.0\n    ]\n}'

No Python object is made per number: an upper bound of the text's size is computed first, and
the text is written without another look at its end. Texts beyond 16 KiB are written without the
GIL. The layouts live in reply_text.h and tensor_text.h, the
numbers in float32_text.h and float64_text.h; this file is the way in. It reads no JSON (json_reader does).
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t

from owning cimport owned

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject** bytes, Py_ssize_t size) except -1
    PyObject* new_bytes "PyBytes_FromStringAndSize"(const char* text, Py_ssize_t size) except NULL
    char* bytes_start "PyBytes_AS_STRING"(PyObject* bytes)
    void drop_reference "Py_DECREF"(PyObject* thing)

cdef extern from "scratch.h":
    char* take_scratch(size_t bytes)

cdef extern from "reply_text.h" nogil:
    enum: MAX_RANK, FLAT, WIDE_STORE, FLOAT_TFS, FLOAT_SHORTEST
    enum: DT_NONE, DT_FLOAT32, DT_BYTES, DT_COUNT

    enum TextFault:
        TEXT_OK, TEXT_DTYPE, TEXT_SIZE, TEXT_PACKING, TEXT_TOO_LARGE

    struct TensorText:
        const uint8_t* data
        int64_t bytes
        const int64_t* shape
        int rank
        uint8_t dtype, mode
        bint b64

    struct NamedText:
        TensorText tensor
        const char* key
        int64_t key_bytes

    struct Reply:
        const NamedText* outputs
        int count
        int64_t rows
        const NamedText* keys
        int key_count

    struct Framed:
        Reply reply
        const char* head
        int64_t head_bytes
        int64_t bound

    ctypedef char* (*PutReply)(char* at, const Reply& reply) noexcept nogil
    ctypedef TextFault (*SizeReply)(const Reply& reply, int* which, int64_t* bound) noexcept nogil

    char* put_predictions(char* at, const Reply& reply) noexcept
    char* put_outputs(char* at, const Reply& reply) noexcept
    char* put_classifications(char* at, const Reply& reply) noexcept
    char* put_regressions(char* at, const Reply& reply) noexcept
    char* put_values(char* at, const Reply& reply) noexcept
    char* put_framed(char* at, const Reply& reply) noexcept
    char* put_framed_values(char* at, const Reply& reply) noexcept
    TextFault size_predictions(const Reply& reply, int* which, int64_t* bound) noexcept
    TextFault size_outputs(const Reply& reply, int* which, int64_t* bound) noexcept
    TextFault size_results(const Reply& reply, int* which, int64_t* bound) noexcept
    TextFault size_values(const Reply& reply, int* which, int64_t* bound) noexcept
    size_t size_string(const uint8_t* data, size_t count) noexcept
    char* put_string(char* at, const uint8_t* data, size_t count) noexcept


MODE_TFS = FLOAT_TFS
MODE_SHORTEST = FLOAT_SHORTEST

cdef enum:
    LONG_TEXT = 16384           # from here on the GIL is released
    LENGTH_LINE = 40            # "Content-Length: " + 20 digits + the blank line


cpdef enum WriterCode:
    NO_OUTPUTS = 1              # the map of outputs is empty
    NO_LEADING_DIMENSION        # a rank-0 output in a row reply
    UNEQUAL_ROWS                # .got rows where the outputs before it have .expected
    UNSUPPORTED_DTYPE           # .got is the dtype code
    WRONG_SIZE                  # the memory is not what shape and dtype say
    BAD_PACKING                 # a string's length runs past the memory, or memory is left over
    TOO_LARGE                   # rank beyond 64, or a text beyond 2**62 bytes
    NO_RESULTS                  # classify or regress without a row


cdef dict FAULTS = {
    TEXT_DTYPE: UNSUPPORTED_DTYPE,
    TEXT_SIZE: WRONG_SIZE,
    TEXT_PACKING: BAD_PACKING,
    TEXT_TOO_LARGE: TOO_LARGE,
}


class WriterFault(ValueError):
    """Outputs that cannot be written. `code` says why, `name` which output, `got`/`expected` the numbers."""

    def __init__(self, code, name="", got=0, expected=0):
        super().__init__(f"{WriterCode(code).name}: {name!r} ({got}, {expected})")
        self.code = WriterCode(code)
        self.name = name
        self.got = got
        self.expected = expected


cdef class _Sheet:
    """The parts that one reply is written from. Holds every buffer and key text until it goes."""

    cdef int room, held
    cdef NamedText* outputs
    cdef int64_t* shapes        # MAX_RANK of each output
    cdef Py_buffer* views
    cdef list names, texts      # as given; as JSON strings, which the NamedTexts point into
    cdef Reply reply

    def __cinit__(self, int room):
        self.room = room
        self.outputs = <NamedText*>PyMem_Calloc(room + 1, sizeof(NamedText))
        self.shapes = <int64_t*>PyMem_Calloc(room + 1, MAX_RANK * sizeof(int64_t))
        self.views = <Py_buffer*>PyMem_Calloc(room + 1, sizeof(Py_buffer))
        if not (self.outputs and self.shapes and self.views):
            raise MemoryError
        self.names = []
        self.texts = []
        self.reply.outputs = self.outputs

    def __dealloc__(self):
        cdef int k
        for k in range(self.held):
            PyBuffer_Release(&self.views[k])
        PyMem_Free(self.views)
        PyMem_Free(self.shapes)
        PyMem_Free(self.outputs)

    cdef int add(self, str name, int dtype_code, tuple shape, object data, int mode) except -1:
        """One more tensor; `data` None stands for one that the model does not have."""
        cdef int k = self.reply.count
        cdef NamedText* output = &self.outputs[k]
        self.names.append(name)
        set_key(output, self.texts, name)
        output.tensor.mode = mode
        output.tensor.b64 = dtype_code == DT_BYTES and name.endswith("_bytes")
        output.tensor.dtype = dtype_code if 0 < dtype_code < DT_COUNT else DT_NONE
        output.tensor.shape = &self.shapes[k * MAX_RANK]
        output.tensor.rank = set_shape(&self.shapes[k * MAX_RANK], shape, name)
        if data is not None:
            PyObject_GetBuffer(owned(data, dtype_code == DT_BYTES), &self.views[self.held], PyBUF_SIMPLE)
            self.held += 1
            output.tensor.data = <const uint8_t*>self.views[self.held - 1].buf
            output.tensor.bytes = self.views[self.held - 1].len
            if output.tensor.data == NULL:
                output.tensor.data = <const uint8_t*>b""
        self.reply.count += 1
        return 0

    cdef int split_rows(self) except -1:
        """Turn the leading axis of every output into the reply's rows."""
        cdef int k
        cdef TensorText* tensor
        for k in range(self.reply.count):
            tensor = &self.outputs[k].tensor
            if tensor.rank == 0:
                raise WriterFault(NO_LEADING_DIMENSION, self.names[k])
            if k == 0:
                self.reply.rows = tensor.shape[0]
            if tensor.shape[0] != self.reply.rows:
                raise WriterFault(UNEQUAL_ROWS, self.names[k], tensor.shape[0], self.reply.rows)
            tensor.shape += 1
            tensor.rank -= 1
        return 0

    cdef bytes write(self, SizeReply size, PutReply put):
        cdef int which = 0
        cdef int64_t bound = 0
        cdef TextFault fault
        with nogil:
            fault = size(self.reply, &which, &bound)
        if fault != TEXT_OK:
            raise WriterFault(FAULTS[fault], self.names[which], self.outputs[which].tensor.dtype)
        return write_text(self.reply, put, bound)


cdef int set_key(NamedText* output, list texts, str name) except -1:
    cdef bytes text = write_string(name.encode("utf-8", "surrogateescape"))
    texts.append(text)
    output.key = PyBytes_AS_STRING(text)
    output.key_bytes = PyBytes_GET_SIZE(text)
    return 0


cdef int set_shape(int64_t* into, tuple shape, str name) except -1:
    cdef int axis
    cdef int rank = <int>min(len(shape), MAX_RANK + 1)
    if rank > MAX_RANK:
        raise WriterFault(TOO_LARGE, name, len(shape), MAX_RANK)
    for axis in range(rank):
        into[axis] = shape[axis]
        if into[axis] < 0:
            raise WriterFault(WRONG_SIZE, name, into[axis])
    return rank


cdef bytes write_text(const Reply& reply, PutReply put, int64_t bound):
    cdef char* start = take_scratch(bound + WIDE_STORE)
    cdef PyObject* made = NULL
    cdef char* end
    if start == NULL:
        made = new_bytes(NULL, bound + WIDE_STORE)
        start = bytes_start(made)
    if bound < LONG_TEXT:
        end = put(start, reply)
    else:
        with nogil:
            end = put(start, reply)
    return PyBytes_FromStringAndSize(start, end - start) if made == NULL else cut_bytes(made, end - start)


cdef bytes cut_bytes(PyObject* made, Py_ssize_t size):
    # Steals `made`, which nobody else has seen.
    _PyBytes_Resize(&made, size)
    text = <bytes>made
    drop_reference(made)
    return text


def write_values(data, int dtype_code, tuple shape, int mode=FLOAT_TFS, *, bint as_bytes=False):
    """A bare nested list (a bare value for rank 0) on one line, ", " between items.

    Writes float16, bfloat16 and uint16 too. Strings are JSON strings, or {"b64": "..."} on the
    same line with `as_bytes`. Raises WriterFault.
    """
    cdef _Sheet sheet = _Sheet.__new__(_Sheet, 1)
    sheet.add("", dtype_code, shape, data, mode)
    sheet.outputs[0].tensor.b64 = as_bytes and dtype_code == DT_BYTES
    sheet.reply.rows = 1
    return sheet.write(size_values, put_values)


def write_predictions(outputs, int mode=FLOAT_TFS):
    """The body of a row reply: {"predictions": [...]}, spec tfserving 3.1 and 3.3.

    outputs: (name, dtype code, shape with rows first, memory) each; BYTES elements in BYTES
    packing. A single output goes without its name. Raises WriterFault.
    """
    cdef _Sheet sheet = read_outputs(outputs, mode)
    sheet.split_rows()
    return sheet.write(size_predictions, put_predictions)


def write_outputs(outputs, int mode=FLOAT_TFS):
    """The body of a columnar reply: {"outputs": ...}; arguments as write_predictions, any shapes."""
    cdef _Sheet sheet = read_outputs(outputs, mode)
    sheet.reply.rows = 1
    return sheet.write(size_outputs, put_outputs)


cdef _Sheet read_outputs(object outputs, int mode):
    cdef _Sheet sheet = _Sheet.__new__(_Sheet, len(outputs))
    if len(outputs) == 0:
        raise WriterFault(NO_OUTPUTS)
    for name, dtype_code, shape, data in outputs:
        sheet.add(name, dtype_code, shape, data, mode)
    return sheet


def write_classifications(int64_t rows, int64_t classes, labels, scores, tuple result_keys=("results",)):
    """The body of a classify reply, spec tfserving 3.5.

    labels: BYTES packing, scores: float32, both of shape (rows, classes) or None when the model
    has no such output ("" and 0.0 are written). The same value is written under every key.
    """
    cdef _Sheet sheet = _Sheet.__new__(_Sheet, 2)
    sheet.add("classes", DT_BYTES, (classes,), labels, FLOAT_TFS)
    sheet.add("scores", DT_FLOAT32, (classes,), scores, FLOAT_TFS)
    return write_results(sheet, rows, result_keys, put_classifications)


def write_regressions(values, tuple result_keys=("results",)):
    """The body of a regress reply, spec tfserving 3.5; values: float32, one a row."""
    cdef _Sheet sheet = _Sheet.__new__(_Sheet, 1)
    sheet.add("outputs", DT_FLOAT32, (), values, FLOAT_TFS)
    return write_results(sheet, sheet.outputs[0].tensor.bytes // 4, result_keys, put_regressions)


cdef bytes write_results(_Sheet sheet, int64_t rows, tuple result_keys, PutReply put):
    cdef _Sheet keys = _Sheet.__new__(_Sheet, len(result_keys))
    if rows <= 0:
        raise WriterFault(NO_RESULTS)
    for key in result_keys:
        keys.add(key, DT_NONE, (), None, FLOAT_TFS)
    sheet.reply.rows = rows
    sheet.reply.keys = keys.outputs
    sheet.reply.key_count = keys.reply.count
    return sheet.write(size_results, put)


def write_string(bytes data not None):
    """One JSON string, escapes as spec tfserving 3.1; bytes that are no UTF-8 pass through."""
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef size_t count = PyBytes_GET_SIZE(data)
    cdef bytes text = PyBytes_FromStringAndSize(NULL, size_string(start, count))
    put_string(PyBytes_AS_STRING(text), start, count)
    return text


def write_error(bytes message not None):
    """The body of an error reply, spec tfserving 1.5."""
    return b'{\n    "error": ' + write_string(message) + b"\n}"


cdef class RowWriter:
    """Writes row replies of one output with rows of one shape: write_predictions, prepared.

    Keeps nothing of a call; threads may share it.
    """

    cdef NamedText output
    cdef int64_t[MAX_RANK] shape
    cdef str name

    def __init__(self, str name not None, int dtype_code, tuple row_shape not None, int mode=FLOAT_TFS):
        self.name = name
        self.output.tensor.mode = mode
        self.output.tensor.b64 = dtype_code == DT_BYTES and name.endswith("_bytes")
        self.output.tensor.dtype = dtype_code if 0 < dtype_code < DT_COUNT else DT_NONE
        self.output.tensor.shape = self.shape
        self.output.tensor.rank = set_shape(self.shape, row_shape, name)

    def write(self, data, int64_t rows, bytes head not None=b""):
        """The body of `rows` rows; with `head` (a reply's head up to its Content-Length), all of the reply.

        data holds exactly rows rows. With a head the result is head + the Content-Length line +
        blank line + body, in one bytes object. Raises WriterFault.
        """
        cdef NamedText output = self.output
        cdef Py_buffer view
        cdef Reply reply
        cdef int which = 0
        cdef int64_t bound = 0
        cdef TextFault fault

        reply.outputs = &output
        reply.count = 1
        reply.rows = rows
        PyObject_GetBuffer(owned(data, output.tensor.dtype == DT_BYTES), &view, PyBUF_SIMPLE)
        try:
            output.tensor.data = <const uint8_t*>view.buf
            output.tensor.bytes = view.len
            fault = size_predictions(reply, &which, &bound) if rows >= 0 else TEXT_SIZE
            if fault != TEXT_OK:
                raise WriterFault(FAULTS[fault], self.name, output.tensor.dtype)
            if PyBytes_GET_SIZE(head) == 0:
                return write_text(reply, put_predictions, bound)
            return write_framed(reply, bound, head, put_framed)
        finally:
            PyBuffer_Release(&view)

    def write_bare(self, data, int64_t rows, bytes head not None=b""):
        """As `write`, of bare values: [[...], ...], or of one row without the axis of rows where `rows` is
        -1."""
        cdef NamedText output = self.output
        cdef int64_t[MAX_RANK + 1] shape
        cdef Py_buffer view
        cdef Reply reply
        cdef int which = 0
        cdef int64_t bound = 0
        cdef int axis
        cdef TextFault fault

        if rows >= 0:
            if output.tensor.rank == MAX_RANK:
                raise WriterFault(TOO_LARGE, self.name, MAX_RANK + 1, MAX_RANK)
            shape[0] = rows
            for axis in range(output.tensor.rank):
                shape[axis + 1] = self.shape[axis]
            output.tensor.shape = shape
            output.tensor.rank += 1
        reply.outputs = &output
        reply.count = 1
        reply.rows = 1
        PyObject_GetBuffer(owned(data, output.tensor.dtype == DT_BYTES), &view, PyBUF_SIMPLE)
        try:
            output.tensor.data = <const uint8_t*>view.buf
            output.tensor.bytes = view.len
            fault = size_values(reply, &which, &bound)
            if fault != TEXT_OK:
                raise WriterFault(FAULTS[fault], self.name, output.tensor.dtype)
            if PyBytes_GET_SIZE(head) == 0:
                return write_text(reply, put_values, bound)
            return write_framed(reply, bound, head, put_framed_values)
        finally:
            PyBuffer_Release(&view)


cdef bytes write_framed(const Reply& reply, int64_t bound, bytes head, PutReply put):
    cdef Framed framed
    framed.reply = reply
    framed.head = PyBytes_AS_STRING(head)
    framed.head_bytes = PyBytes_GET_SIZE(head)
    framed.bound = bound
    return write_text(framed.reply, put, bound + framed.head_bytes + LENGTH_LINE)
