"""Inference responses of the V2 protocol as JSON (spec triton_v2, 3.2), straight from tensor memory.

    write_infer("m", "1", [("y", code, (1, 2), memory, None)])
    -> b'{"model_name":"m","model_version":"1","outputs":[{"name":"y",...,"data":[0.5,1.0]}]}'

No Python object is made per number: an upper bound of the text's size is computed first, and the text
is written without another look at its end; texts beyond 16 KiB without the GIL. What stands around
the data is made here, the data by infer_text.h. It reads no JSON (infer_json does).
"""

from enum import IntEnum

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memset

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject** bytes, Py_ssize_t size) except -1
    PyObject* new_bytes "PyBytes_FromStringAndSize"(const char* text, Py_ssize_t size) except NULL
    char* bytes_start "PyBytes_AS_STRING"(PyObject* bytes)
    void drop_reference "Py_DECREF"(PyObject* thing)

cdef extern from "scratch.h":
    char* take_scratch(size_t bytes)

cdef extern from "infer_text.h" nogil:
    enum: WIDE_STORE
    enum:
        DT_BOOL, DT_UINT8, DT_UINT16, DT_UINT32, DT_UINT64, DT_INT8, DT_INT16, DT_INT32, DT_INT64
        DT_FLOAT16, DT_BFLOAT16, DT_FLOAT32, DT_FLOAT64, DT_BYTES

    enum TextFault:
        TEXT_OK, TEXT_DTYPE, TEXT_SIZE, TEXT_PACKING, TEXT_TOO_LARGE

    struct InferText:
        const char* before
        int64_t before_bytes
        const uint8_t* data
        int64_t bytes
        int64_t items
        uint8_t dtype

    struct InferReply:
        const InferText* outputs
        int count
        const char* head
        int64_t head_bytes
        const char* before
        int64_t before_bytes
        int64_t bound

    TextFault size_infer_reply(InferReply* reply, int* which) noexcept
    char* put_infer_reply(char* at, const InferReply& reply) noexcept
    size_t size_string(const uint8_t* data, size_t count) noexcept
    char* put_string(char* at, const uint8_t* data, size_t count) noexcept


cdef enum:
    LONG_TEXT = 16384           # bytes; from here on the GIL is released
    LENGTH_LINE = 40            # "Content-Length: " + 20 digits + the blank line


cdef dict DATATYPES = {
    <int>DT_BOOL: "BOOL", <int>DT_UINT8: "UINT8", <int>DT_UINT16: "UINT16", <int>DT_UINT32: "UINT32",
    <int>DT_UINT64: "UINT64", <int>DT_INT8: "INT8", <int>DT_INT16: "INT16", <int>DT_INT32: "INT32",
    <int>DT_INT64: "INT64", <int>DT_FLOAT16: "FP16", <int>DT_BFLOAT16: "BF16", <int>DT_FLOAT32: "FP32",
    <int>DT_FLOAT64: "FP64", <int>DT_BYTES: "BYTES",
}


class UnwritableCode(IntEnum):
    """Why an output cannot be written."""

    UNSUPPORTED_DTYPE = 1       # FP16, BF16 and what has no datatype
    WRONG_SIZE = 2              # the memory is not what shape and datatype say
    BAD_PACKING = 3             # a string's length runs past the memory, or memory is left over
    TOO_LARGE = 4


cdef dict UNWRITABLE = {<int>TEXT_DTYPE: 1, <int>TEXT_SIZE: 2, <int>TEXT_PACKING: 3, <int>TEXT_TOO_LARGE: 4}


class UnwritableOutput(ValueError):
    """An output that JSON cannot carry. `code` (an UnwritableCode), `name`, `datatype` ("" if unknown)."""

    def __init__(self, code: int, name: str, datatype: str = "") -> None:
        super().__init__(f"{UnwritableCode(code).name}: {name!r} {datatype}")
        self.code = UnwritableCode(code)
        self.name = name
        self.datatype = datatype


def write_infer(str model_name not None, str model_version not None, outputs, *, str id="",
                dict parameters=None, bytes head=None):
    """The body of a response; with `head` (an HTTP head up to its Content-Length), all of the reply.

    outputs: (name, dtype code, shape, memory, parameters) each, BYTES in BYTES packing; memory None
    leaves `data` out, as for binary and shared memory outputs. Parameters that are None or empty
    are left out. Raises UnwritableOutput; TypeError for a parameter of another type than str, int,
    float and bool.
    """
    cdef int count = <int>len(outputs)
    cdef int k
    cdef int held = 0
    cdef list kept = []
    cdef InferText* texts = <InferText*>PyMem_Calloc(count + 1, sizeof(InferText))
    cdef Py_buffer* views = <Py_buffer*>PyMem_Calloc(count + 1, sizeof(Py_buffer))
    cdef InferReply reply
    before = opening(id) + rest_of_opening(model_name, model_version, parameters)
    memset(&reply, 0, sizeof(reply))
    reply.outputs = texts
    set_frame(&reply, before, head)
    try:
        if texts == NULL or views == NULL:
            raise MemoryError
        for k in range(count):
            name, dtype_code, shape, memory, its_parameters = outputs[k]
            kept.append(output_text(name, dtype_code, shape, its_parameters))
            fill_text(&texts[k], kept[k], dtype_code, count_items(shape))
            if memory is not None:
                PyObject_GetBuffer(memory, &views[held], PyBUF_SIMPLE)
                held += 1
                point_at(&texts[k], &views[held - 1])
            reply.count += 1
        return write_reply(&reply, [output[0] for output in outputs])
    finally:
        for k in range(held):
            PyBuffer_Release(&views[k])
        PyMem_Free(views)
        PyMem_Free(texts)


cdef void set_frame(InferReply* reply, bytes before, bytes head) noexcept:
    reply.before = PyBytes_AS_STRING(before)
    reply.before_bytes = PyBytes_GET_SIZE(before)
    if head is not None and PyBytes_GET_SIZE(head):
        reply.head = PyBytes_AS_STRING(head)
        reply.head_bytes = PyBytes_GET_SIZE(head)


cdef void fill_text(InferText* text, bytes before, int dtype_code, int64_t items) noexcept:
    text.before = PyBytes_AS_STRING(before)
    text.before_bytes = PyBytes_GET_SIZE(before)
    text.dtype = dtype_code
    text.items = items


cdef void point_at(InferText* text, const Py_buffer* view) noexcept:
    text.data = <const uint8_t*>view.buf
    text.bytes = view.len
    if text.data == NULL:
        text.data = <const uint8_t*>b""


cdef int64_t count_items(shape) except? -1:
    cdef object items = 1       # any size; size_tensor would find a product that overflows too late
    for length in shape:
        items *= length
    return items if 0 <= items < 1 << 62 else 1 << 62


cdef bytes string_text(str text):
    cdef bytes raw = text.encode("utf-8", "surrogateescape")
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(raw)
    cdef size_t count = PyBytes_GET_SIZE(raw)
    cdef bytes made = PyBytes_FromStringAndSize(NULL, size_string(start, count))
    put_string(PyBytes_AS_STRING(made), start, count)
    return made


cdef bytes opening(str id):
    return b'{"id":' + string_text(id) + b"," if id else b"{"


cdef bytes rest_of_opening(str model_name, str model_version, dict parameters):
    text = b'"model_name":' + string_text(model_name) + b',"model_version":' + string_text(model_version)
    return text + parameters_text(parameters) + b',"outputs":['


cdef bytes parameters_text(dict parameters):
    if not parameters:
        return b""
    return b',"parameters":{' + b",".join(
        [string_text(name) + b":" + scalar_text(value) for name, value in parameters.items()]) + b"}"


cdef bytes scalar_text(value):
    cdef double[1] real
    cdef InferText text
    cdef InferReply reply
    if isinstance(value, str):
        return string_text(value)
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int):
        return b"%d" % value
    if not isinstance(value, float):
        raise TypeError(f"a parameter may not be {value!r}")
    real[0] = value
    memset(&reply, 0, sizeof(reply))
    memset(&text, 0, sizeof(text))
    text.before = reply.before = b""
    text.data = <const uint8_t*>real
    text.bytes = 8
    text.items = 1
    text.dtype = DT_FLOAT64
    reply.outputs = &text
    reply.count = 1
    body = write_reply(&reply, [""])
    return body[9:len(body) - 4]       # between ,"data":[ and ]}]}


cdef bytes output_text(str name, int dtype_code, shape, dict parameters):
    datatype = DATATYPES.get(dtype_code)
    if datatype is None:
        raise UnwritableOutput(1, name)
    dims = ",".join([str(length) for length in shape])
    return (b'{"name":' + string_text(name) + f',"datatype":"{datatype}","shape":[{dims}]'.encode()
            + parameters_text(parameters))


cdef bytes write_reply(InferReply* reply, list names):
    cdef int which = 0
    cdef TextFault fault
    cdef char* start
    cdef char* end
    cdef PyObject* made = NULL
    cdef int64_t room
    if reply.count == 1 and reply.outputs[0].bytes < LONG_TEXT:
        fault = size_infer_reply(reply, &which)
    else:                       # it looks at every byte of strings
        with nogil:
            fault = size_infer_reply(reply, &which)
    if fault != TEXT_OK:
        raise UnwritableOutput(UNWRITABLE[<int>fault], names[which], DATATYPES[reply.outputs[which].dtype])
    room = reply.bound + reply.head_bytes + LENGTH_LINE + WIDE_STORE
    start = take_scratch(room)
    if start == NULL:
        made = new_bytes(NULL, room)
        start = bytes_start(made)
    if reply.bound < LONG_TEXT:
        end = put_infer_reply(start, reply[0])
    else:
        with nogil:
            end = put_infer_reply(start, reply[0])
    return PyBytes_FromStringAndSize(start, end - start) if made == NULL else cut_bytes(made, end - start)


cdef bytes cut_bytes(PyObject* made, Py_ssize_t size):
    # Steals `made`, which nobody else has seen.
    _PyBytes_Resize(&made, size)
    text = <bytes>made
    drop_reference(made)
    return text


cdef class InferWriter:
    """Writes responses of one output with rows of one shape: write_infer, prepared.

    Keeps nothing of a call; threads may share it.
    """

    cdef list names             # the output's
    cdef bytes rest             # of the opening, behind an id
    cdef bytes before           # the opening without an id
    cdef bytes start            # of the output, up to its rows
    cdef bytes tail             # of its shape
    cdef int dtype_code
    cdef int64_t row_items
    cdef int64_t rows           # the last call's, and the start and tail that it made
    cdef bytes output

    def __init__(self, str model_name not None, str model_version not None, str name not None,
                 int dtype_code, tuple row_shape not None):
        self.names = [name]
        self.rest = rest_of_opening(model_name, model_version, None)
        self.before = b"{" + self.rest
        start = output_text(name, dtype_code, (), None)
        self.start = start[:len(start) - 1]
        self.tail = b"".join([b",%d" % length for length in row_shape]) + b"]"
        self.dtype_code = dtype_code
        self.row_items = count_items(row_shape)
        self.rows = -1
        if dtype_code == DT_FLOAT16 or dtype_code == DT_BFLOAT16:
            raise UnwritableOutput(1, name, DATATYPES[dtype_code])

    def write(self, data, int64_t rows, str id="", bytes head=None):
        """The body of `rows` rows, which `data` holds exactly; with `head`, all of the reply.

        With a head (a reply's head up to its Content-Length) the result is head + the Content-Length
        line + blank line + body, in one bytes object. Raises UnwritableOutput.
        """
        cdef Py_buffer view
        cdef InferText text
        cdef InferReply reply
        cdef bytes output = self.output if rows == self.rows else self.text_of(rows)
        cdef bytes before = opening(id) + self.rest if id else self.before
        if rows < 0 or (self.row_items and rows > (<int64_t>1 << 62) // self.row_items):
            raise UnwritableOutput(2, self.names[0], DATATYPES[self.dtype_code])
        memset(&reply, 0, sizeof(reply))
        set_frame(&reply, before, head)
        fill_text(&text, output, self.dtype_code, rows * self.row_items)
        reply.outputs = &text
        reply.count = 1
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            point_at(&text, &view)
            return write_reply(&reply, self.names)
        finally:
            PyBuffer_Release(&view)

    cdef bytes text_of(self, int64_t rows):
        # Most replies have as many rows as the one before.
        cdef bytes output = self.start + b"%d" % rows + self.tail
        self.output = output
        self.rows = rows
        return output
