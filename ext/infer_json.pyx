"""Inference requests of the V2 protocol as JSON (spec triton_v2, section 3), straight into memory.

    body = read_infer(b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[0.5,1]}]}')
    body.inputs[0].data                             # 8 bytes of float32

It makes no Python object per value and does not recurse; of what becomes objects, inputs, outputs, parameters and
axes, it reads so many and no more. Binary tensors, shared memory and what only a
model knows are not here: the dialect finds sizes and names in `parameters`. request_template reads requests
that are as one before, infer_reply writes the responses.
"""

from enum import IntEnum

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memset

from copying cimport copy_one

from infer_body cimport *
from infer_data cimport *
from infer_members cimport *
from json_cursor cimport *

cdef extern from "json_reason.h":
    const char* json_reason(int fault)


cdef enum:
    GIL_BYTES = 16384           # bodies up to this keep the GIL: giving it away costs more


class InferCode(IntEnum):
    """Why a request was refused. The last five are the caller's fault (400), the others 500 (spec 1.2)."""

    SYNTAX = 1                  # the text is no JSON
    NO_MEMBER = 2
    NOT_STRING = 3
    NOT_ARRAY = 4
    NOT_OBJECT = 5
    NOT_UNSIGNED = 6
    NOT_SIGNED = 7
    NOT_BOOLEAN = 8
    NOT_NUMBER = 9
    OTHER_SHAPE = 10            # data has more or fewer leaves than the shape says
    NO_CONTENT = 20
    TWO_CONTENTS = 21
    NOT_IN_JSON = 22            # FP16 and BF16
    UNKNOWN_DATATYPE = 23
    TOO_MANY = 24               # parameters and axes


cdef dict DETAILS = {
    3: "attempt to access JSON non-string as string",
    4: "attempt to access JSON non-array as array",
    5: "attempt to get members for non-object",
    6: "attempt to access JSON non-unsigned-integer as unsigned-integer",
    7: "attempt to access JSON non-signed-integer as signed-integer",
    8: "attempt to access JSON non-boolean as boolean",
    9: "attempt to access JSON non-number as double",
    10: "Shape does not match true shape of 'data' field",
}
cdef str ONE_CONTENT = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
cdef dict SYNTAX_REASONS = {
    <int>NOT_SINGULAR: "The document root must not be followed by other values.",
    <int>TOO_MANY_PARTS: "Too many inputs or outputs.",
}


class InferFault(ValueError):
    """A request that `read_infer` refuses.

    `code` (an InferCode), `text` as clients know it, `offset` the byte that showed it, `member` the
    member at fault, `input` the name of its input, "" where there is none. `before` is what stands before it,
    in the order in which the original looks: what is wrong with that is reported first. None where nothing is.
    """

    def __init__(self, code: int, text: str, offset: int, member: str = "", input: str = "") -> None:
        super().__init__(text)
        self.code = InferCode(code)
        self.text = text
        self.offset = offset
        self.member = member
        self.input = input
        self.before = None

    @property
    def is_callers(self) -> bool:
        """True for what is answered as an invalid argument (400), False for an internal error (500)."""
        return self.code >= InferCode.NO_CONTENT


cdef class InferInput:
    """An input of a request. data: its tensor row-major, BYTES packed; None: the request has no `data`.

    leaves: how many values `data` had, which for BYTES nobody has compared with the shape yet.
    parameters: of other values than strings, numbers and bools the value is None.
    """

    cdef readonly str name
    cdef readonly str datatype
    cdef readonly int dtype_code        # 0: a datatype that nobody knows
    cdef readonly tuple shape
    cdef readonly dict parameters
    cdef readonly bytes data
    cdef readonly int64_t leaves

    @property
    def data_present(self):
        return self.data is not None


cdef class InferOutput:
    """An output that a request asks for."""

    cdef readonly str name
    cdef readonly dict parameters


cdef class InferBody:
    """A request as read. `id` is "" and `outputs` empty where the request has none. Of one that was refused
    (InferFault.before) `outputs` is None where its inputs were not read to their end."""

    cdef readonly str id
    cdef readonly dict parameters
    cdef readonly list inputs
    cdef readonly list outputs


def read_infer(body):
    """Read a request's JSON. Raises InferFault, MemoryError.

    Names and strings that are no UTF-8 come with surrogate escapes. Unknown members are ignored; of
    two with one name the first counts. Data nests up to 100 lists.
    """
    cdef Py_buffer view
    cdef Scan scan
    cdef JsonFault fault
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    memset(&scan, 0, sizeof(scan))
    scan.cursor.at = <const uint8_t*>view.buf
    scan.cursor.end = scan.cursor.at + view.len
    try:
        if view.len > GIL_BYTES:
            with nogil:
                fault = read_infer_body(&scan)
        else:
            fault = read_infer_body(&scan)
        return close_body(&scan, <const uint8_t*>view.buf, fault)
    finally:
        close_parts(&scan.inputs)
        close_parts(&scan.outputs)
        PyBuffer_Release(&view)


# -- from structs to objects, in the order in which the original looks ---------------------------------

cdef object refuse(int code, str member, const uint8_t* at, const uint8_t* start, str name=""):
    detail = DETAILS[code] if code in DETAILS else f"attempt to access non-existing object member '{member}'"
    doing = "failed to get request params." if code == 5 else f"Unable to parse '{member}'"
    return InferFault(code, f"{doing}: {detail}", at - start if at != NULL else 0, member, name)


cdef int count_down(const int64_t* left) except -1:
    if left[0] < 0:
        raise InferFault(
            24,
            f"at most {<int>ENTRIES} parameters and axes of shapes are read of one request, and at most "
            f"{<int>ENTRIES * <int>PIECE_BYTES} bytes of names, ids and parameters",
            0,
        )
    return 0


cdef InferBody close_body(Scan* s, const uint8_t* start, JsonFault fault):
    cdef InferBody body = InferBody.__new__(InferBody)
    cdef int64_t left = ENTRIES
    cdef const uint8_t* end = s.cursor.end
    if fault == JSON_NO_MEMORY:
        raise MemoryError
    if fault != JSON_OK:
        at = s.cursor.at - start
        reason = SYNTAX_REASONS[<int>fault] if <int>fault in SYNTAX_REASONS else json_reason(fault).decode()
        raise InferFault(1, f"failed to parse the request JSON buffer: {reason} at {at}", at)
    body.id = "" if s.id == NULL else string_at(s.id, end, &left)
    count_down(&left)
    if body.id is None:
        raise refuse(3, "id", s.id, start)
    body.parameters = {} if s.parameters == NULL else members_at(s.parameters, end, &left)
    count_down(&left)
    if body.parameters is None:
        raise refuse(5, "parameters", s.parameters, start)
    body.inputs = []
    try:
        close_parts_of(s, body, start, end, &left)
    except InferFault as refused:
        refused.before = body
        raise
    return body


cdef int close_parts_of(Scan* s, InferBody body, const uint8_t* start, const uint8_t* end, int64_t* left) except -1:
    cdef int i
    if s.inputs.start == NULL:
        raise refuse(2, "inputs", NULL, start)
    if not s.inputs.is_list:
        raise refuse(4, "inputs", s.inputs.start, start)
    for i in range(s.inputs.count):
        body.inputs.append(close_input(&s.inputs.items[i], start, end, left))
    body.outputs = []
    if s.outputs.start != NULL and not s.outputs.is_list:
        raise refuse(4, "outputs", s.outputs.start, start)
    for i in range(s.outputs.count):
        add_output(body, &s.outputs.items[i], start, end, left)
    return 0


cdef int add_output(InferBody body, const Part* part, const uint8_t* start, const uint8_t* end,
                    int64_t* left) except -1:
    # Its parameters are looked at before its name, here and by who takes the body over.
    cdef InferOutput output = InferOutput.__new__(InferOutput)
    output.parameters = parameters_of(part, end, left)
    body.outputs.append(output)
    output.name = required_string(part.name, "name", part, start, end, "", left)
    return 0


cdef InferInput close_input(Part* part, const uint8_t* start, const uint8_t* end, int64_t* left):
    cdef InferInput input = InferInput.__new__(InferInput)
    input.parameters = parameters_of(part, end, left)
    check_contents(part, input.parameters, start)
    input.name = required_string(part.name, "name", part, start, end, "", left)
    input.datatype = required_string(part.datatype, "datatype", part, start, end, input.name, left)
    input.dtype_code = part.dtype
    if part.shape == NULL:
        raise refuse(2, "shape", part.start, start, input.name)
    if part.shape[0] != c'[':
        raise refuse(4, "shape", part.shape, start, input.name)
    input.shape = shape_at(part.shape, end, left)
    count_down(left)
    if input.shape is None:
        raise refuse(6, "shape", part.shape, start, input.name)
    if part.data != NULL:
        input.data = data_of(part, start, input.name, len(input.shape))
        input.leaves = part.leaves
    return input


cdef int check_contents(const Part* part, dict parameters, const uint8_t* start) except -1:
    cdef list given = []
    if part.data != NULL:
        given.append("'data'")
    for name in ("binary_data_size", "shared_memory_region"):
        if name in parameters:
            given.append(f"'{name}'")
    at = part.start - start
    if not given:
        raise InferFault(20, ONE_CONTENT + "no field is set", at)
    if len(given) > 1:
        raise InferFault(21, ONE_CONTENT + "set " + " ".join(given), at)
    return 0


cdef bytes data_of(Part* part, const uint8_t* start, str name, Py_ssize_t rank):
    cdef int code
    at = part.data - start
    if part.items == 0:         # the original does not look at data then
        return b""
    if rank == 0 and (part.wrong != NULL or part.leaves != 1):
        return b""              # nor for [], which no model there has: what is wrong is the shape
    if not part.data_is_list:
        raise refuse(4, "data", part.data, start, name)
    if part.dtype == DT_NONE:
        raise InferFault(23, f"invalid datatype for input {name}", at, "datatype", name)
    if part.dtype == DT_FLOAT16 or part.dtype == DT_BFLOAT16:
        half = "FP16" if part.dtype == DT_FLOAT16 else "BF16"
        text = (f"receiving {half} data via JSON is not supported. "
                f"Please use the binary data format for input {name}")
        raise InferFault(22, text, at, "data", name)
    if part.dtype == DT_BYTES:
        if part.wrong != NULL:
            text = f"Unable to parse JSON bytes array: {DETAILS[3]}"
            raise InferFault(3, text, part.wrong - start, "data", name)
    elif part.wrong != NULL and part.leaves < part.items:
        code = 9 if part.dtype >= DT_FLOAT32 else 8 if part.dtype == DT_BOOL else 7 if part.dtype >= DT_INT8 else 6
        raise refuse(code, "data", part.wrong, start, name)
    elif part.wrong != NULL or part.leaves != part.items:
        raise refuse(10, "data", part.data, start, name)
    memory = PyBytes_FromStringAndSize(NULL, part.bytes)
    copy_one(<uint8_t*>PyBytes_AS_STRING(memory), part.memory, part.bytes)
    free(part.memory)           # now, so that of several inputs one at a time is there twice
    part.memory = NULL
    return memory


cdef str required_string(const uint8_t* at, str member, const Part* part, const uint8_t* start,
                         const uint8_t* end, str name, int64_t* left):
    if at == NULL:
        raise refuse(2, member, part.start, start, name)
    text = string_at(at, end, left)
    count_down(left)
    if text is None:
        raise refuse(3, member, at, start, name)
    return text


cdef dict parameters_of(const Part* part, const uint8_t* end, int64_t* left):
    # Other values than objects are taken for empty ones.
    if part.parameters == NULL:
        return {}
    found = members_at(part.parameters, end, left)
    count_down(left)
    return {} if found is None else found
