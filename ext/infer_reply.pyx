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

from owning cimport owned

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
        DT_FLOAT16, DT_BFLOAT16, DT_FLOAT32, DT_FLOAT64, DT_BYTES, DT_COUNT
    int dtype_bytes(uint8_t code)

    enum TextFault:
        TEXT_OK, TEXT_DTYPE, TEXT_SIZE, TEXT_PACKING, TEXT_TOO_LARGE

    struct InferText:
        const char* before
        int64_t before_bytes
        const uint8_t* data
        int64_t bytes
        int64_t items
        uint8_t dtype

    struct InferBlob:
        const uint8_t* data
        int64_t bytes

    struct InferReply:
        const InferText* outputs
        int count
        const InferBlob* blobs
        int blob_count
        int64_t blob_bytes
        const char* head
        int64_t head_bytes
        const char* before
        int64_t before_bytes
        int64_t bound

    TextFault size_infer_reply(InferReply* reply, int* which) noexcept
    char* put_infer_reply(char* at, const InferReply& reply, int64_t* json_bytes) noexcept
    size_t size_string(const uint8_t* data, size_t count) noexcept
    char* put_string(char* at, const uint8_t* data, size_t count) noexcept


cdef enum:
    LONG_TEXT = 16384           # bytes; from here on the GIL is released
    LENGTH_LINES = 96           # "Inference-Header-Content-Length: ", "Content-Length: ", their digits, the blank line
    MOST_OUTPUTS = 64           # of a prepared reply


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
                PyObject_GetBuffer(owned(memory, dtype_code == DT_BYTES), &views[held], PyBUF_SIMPLE)
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
    cdef double real
    if isinstance(value, str):
        return string_text(value)
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int):
        return b"%d" % value
    if not isinstance(value, float):
        raise TypeError(f"a parameter may not be {value!r}")
    real = value
    return write_items(DT_FLOAT64, 1, (<char*>&real)[:8])


def write_items(int dtype_code, items, memory not None) -> bytes:
    """So many elements as they stand between the brackets of `data`. Raises UnwritableOutput."""
    cdef InferText text
    cdef InferReply reply
    cdef Py_buffer view
    if dtype_code not in DATATYPES:
        raise UnwritableOutput(1, "")
    memset(&reply, 0, sizeof(reply))
    memset(&text, 0, sizeof(text))
    fill_text(&text, b"", dtype_code, count_items((items,)))
    reply.before, reply.outputs, reply.count = b"", &text, 1
    PyObject_GetBuffer(owned(memory, dtype_code == DT_BYTES), &view, PyBUF_SIMPLE)
    try:
        point_at(&text, &view)
        body = write_reply(&reply, [""])
    finally:
        PyBuffer_Release(&view)
    return body[9:len(body) - 4]       # between ,"data":[ and ]}]}


cdef bytes output_text(str name, int dtype_code, shape, dict parameters):
    datatype = DATATYPES.get(dtype_code)
    if datatype is None:
        raise UnwritableOutput(1, name)
    dims = ",".join([str(length) for length in shape])
    return (b'{"name":' + string_text(name) + f',"datatype":"{datatype}","shape":[{dims}]'.encode()
            + parameters_text(parameters))


cdef bytes write_reply(InferReply* reply, list names):
    cdef int64_t json_bytes
    return write_counted(reply, names, &json_bytes)


cdef bytes write_counted(InferReply* reply, list names, int64_t* json_bytes):
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
    room = reply.bound + reply.head_bytes + reply.blob_bytes + LENGTH_LINES + WIDE_STORE
    start = take_scratch(room) if reply.blob_bytes < LONG_TEXT else NULL     # blobs are exact: no second copy
    if start == NULL:
        made = new_bytes(NULL, room)
        start = bytes_start(made)
    if reply.bound + reply.blob_bytes < LONG_TEXT:
        end = put_infer_reply(start, reply[0], json_bytes)
    else:
        with nogil:
            end = put_infer_reply(start, reply[0], json_bytes)
    return PyBytes_FromStringAndSize(start, end - start) if made == NULL else cut_bytes(made, end - start)


cdef bytes cut_bytes(PyObject* made, Py_ssize_t size):
    # Steals `made`, which nobody else has seen.
    _PyBytes_Resize(&made, size)
    text = <bytes>made
    drop_reference(made)
    return text


cdef class InferWriter:
    """Writes responses whose outputs have the same shapes: write_infer, prepared.

    outputs: (name, dtype code, shape, how) each. how "json": its data go into the text; "binary": behind
    it, as they are; "outside": nowhere, they are in the client's memory. Raises UnwritableOutput for
    what cannot be prepared: types without a JSON form, strings as binary. Keeps nothing of a call;
    threads may share it.
    """

    cdef list names
    cdef bytes rest             # of the opening, behind an id
    cdef bytes before           # the opening without an id
    cdef list texts             # of each output, up to its data
    cdef int count
    cdef InferText[MOST_OUTPUTS] outputs
    cdef int64_t[MOST_OUTPUTS] blob_bytes       # -1: not binary
    cdef bint[MOST_OUTPUTS] in_text
    cdef readonly bint binary   # whether replies have anything behind the JSON

    def __init__(self, str model_name not None, str model_version not None, outputs not None,
                 dict parameters=None):
        cdef int k
        if len(outputs) > MOST_OUTPUTS:
            raise ValueError(f"a prepared reply has at most {MOST_OUTPUTS} outputs, not {len(outputs)}")
        self.rest = rest_of_opening(model_name, model_version, parameters)
        self.before = b"{" + self.rest
        self.names, self.texts, self.count = [], [], <int>len(outputs)
        for k in range(self.count):
            self.prepare(k, outputs[k])

    cdef int prepare(self, int k, output) except -1:
        name, dtype_code, shape, how = output
        cdef int64_t items = count_items(shape)
        cdef int item_bytes = dtype_bytes(dtype_code) if 0 < dtype_code < DT_COUNT else 0
        self.names.append(name)
        self.blob_bytes[k] = -1
        self.in_text[k] = how == "json"
        size = None
        if how == "binary":
            if item_bytes == 0 or items > (<int64_t>1 << 40):
                raise UnwritableOutput(2, name, DATATYPES.get(dtype_code, ""))
            self.blob_bytes[k] = items * item_bytes
            size = {"binary_data_size": self.blob_bytes[k]}
            self.binary |= self.blob_bytes[k] > 0
        elif self.in_text[k] and (dtype_code == DT_FLOAT16 or dtype_code == DT_BFLOAT16):
            raise UnwritableOutput(1, name, DATATYPES[dtype_code])
        self.texts.append(output_text(name, dtype_code, shape, size))
        fill_text(&self.outputs[k], self.texts[k], dtype_code, items)
        return 0

    def write(self, memories, str id="", bytes head not None=b""):
        """The whole reply: `head` (up to its Content-Length), the lengths, the blank line, JSON and blobs.

        memories: each output's data, whatever for those outside. Raises UnwritableOutput.
        """
        cdef int64_t json_bytes
        return self.put(memories, id, head, &json_bytes)

    def write_body(self, memories, str id="") -> tuple:
        """(bytes of the JSON, the body alone). Raises UnwritableOutput."""
        cdef int64_t json_bytes
        body = self.put(memories, id, None, &json_bytes)
        return json_bytes, body

    cdef bytes put(self, memories, str id, bytes head, int64_t* json_bytes):
        cdef Py_buffer[MOST_OUTPUTS] views
        cdef InferText[MOST_OUTPUTS] texts
        cdef InferBlob[MOST_OUTPUTS] blobs
        cdef InferReply reply
        cdef int k
        cdef int held = 0
        cdef bytes before = opening(id) + self.rest if id else self.before
        if len(memories) != self.count:
            raise ValueError(f"{self.count} outputs, not {len(memories)}")
        memset(&reply, 0, sizeof(reply))
        set_frame(&reply, before, head)
        reply.outputs, reply.count, reply.blobs = texts, self.count, blobs
        try:
            for memory in memories:
                k = held
                PyObject_GetBuffer(owned(memory, self.outputs[k].dtype == DT_BYTES), &views[k], PyBUF_SIMPLE)
                held += 1
                texts[k] = self.outputs[k]
                if self.in_text[k]:
                    point_at(&texts[k], &views[k])
                elif self.blob_bytes[k] >= 0:
                    if views[k].len != self.blob_bytes[k]:
                        raise UnwritableOutput(2, self.names[k], DATATYPES[texts[k].dtype])
                    blobs[reply.blob_count] = InferBlob(<const uint8_t*>views[k].buf, views[k].len)
                    reply.blob_count += 1
                    reply.blob_bytes += views[k].len
            return write_counted(&reply, self.names, json_bytes)
        finally:
            for k in range(held):
                PyBuffer_Release(&views[k])
