"""The hot protobuf messages of the Triton dialects: requests read in place, replies written at once.

    message = read_infer_request(data)              # a ModelInferRequest
    message.inputs[0].name, message.inputs[0].shape
    offset, size = message.raw(0)                   # a span of `data`, not a copy
    message.copy_raw(0, memory)                     # or: one copy, to where the tensor goes
    message.copy_contents(0, dtype_code, memory)    # the same from typed contents

Accepts and refuses what protobuf's own parser does: unknown fields pass, the last of a singular
field, a oneof or a map key wins, messages given in pieces are merged. Only the count of entries
(inputs, outputs, raw tensors, parameters, dims) is bounded, by MOST_ENTRIES: a megabyte of empty
entries must not become a gigabyte of objects. Values of typed contents are counted, not kept.
"""

from enum import IntEnum

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcpy, memset
from libcpp.vector cimport vector

from proto_verbs cimport *


MOST_ENTRIES = 65536

cdef enum:
    ENTRIES = 65536
    GIL_BYTES = 16384           # spans up to this keep the GIL: giving it away costs more

# Tags: field number * 8 + wire type.
cdef enum:
    VARINT_1 = 8
    BYTES_1 = 10
    VARINT_2 = 16
    BYTES_2 = 18
    VARINT_3 = 24
    BYTES_3 = 26
    VARINT_4 = 32
    FIXED_4 = 33
    BYTES_4 = 34
    VARINT_5 = 40
    BYTES_5 = 42
    VARINT_6 = 48
    BYTES_6 = 50
    VARINT_7 = 56
    BYTES_7 = 58
    VARINT_8 = 64


class Fault(IntEnum):
    """What `WireFault.code` holds."""

    TRUNCATED = WIRE_TRUNCATED
    OVERLONG = WIRE_OVERLONG
    BAD_TAG = WIRE_BAD_TAG
    BAD_TYPE = WIRE_BAD_TYPE
    BAD_LENGTH = WIRE_BAD_LENGTH
    BAD_PACKED = WIRE_BAD_PACKED
    BAD_GROUP = WIRE_BAD_GROUP
    TOO_DEEP = WIRE_TOO_DEEP
    BAD_TEXT = WIRE_BAD_TEXT
    TOO_MANY = WIRE_TOO_MANY
    TOO_LARGE = WIRE_TOO_LARGE
    OTHER_KIND = WIRE_OTHER_KIND
    WRONG_SIZE = WIRE_WRONG_SIZE


class WireFault(ValueError):
    """Bytes that are no such message: `code` (a Fault), and `offset`, the byte that showed it.

    From the doors that copy (OTHER_KIND, WRONG_SIZE) the offset is that of the values.
    """

    def __init__(self, code: int, offset: int) -> None:
        super().__init__(f"{Fault(code).name} at byte {offset}")
        self.code = Fault(code)
        self.offset = offset


# -- verbs that make objects ---------------------------------------------------------------------

cdef struct Reading:
    const uint8_t* base
    int64_t left                # entries


cdef int fail(Reading* r, Wire* wire) except -1:
    raise WireFault(wire.fault, wire.fault_at - r.base)


cdef inline bint next_tag(Reading* r, Wire* wire, uint32_t* tag) except -1:
    # False at the end of the message.
    tag[0] = 0
    if wire.at == wire.end:
        return False
    if not read_tag(wire, tag):
        fail(r, wire)
    return True


cdef inline int pass_unknown(Reading* r, Wire* wire, uint32_t tag) except -1:
    return 0 if skip_value(wire, tag) else fail(r, wire)


cdef inline int take_entry(Reading* r, Wire* wire) except -1:
    r.left -= 1
    if r.left < 0:
        refuse(wire, WIRE_TOO_MANY, wire.at)
        fail(r, wire)
    return 0


cdef inline int take_span(Reading* r, Wire* wire, Span* span) except -1:
    return 0 if read_span(wire, span) else fail(r, wire)


cdef inline uint64_t take_number(Reading* r, Wire* wire) except? 7:
    cdef uint64_t value = 0
    if not read_varint(wire, &value):
        fail(r, wire)
    return value


cdef inline int open_inner(Reading* r, Wire* wire, Wire* inner) except -1:
    cdef Span span
    take_span(r, wire, &span)
    inner[0] = enter(wire, span)
    return 0


cdef str take_text(Reading* r, Wire* wire):
    cdef Span span
    take_span(r, wire, &span)
    try:
        return PyUnicode_DecodeUTF8(<const char*>span.at, span.size, NULL)
    except UnicodeDecodeError as error:
        refuse(wire, WIRE_BAD_TEXT, span.at + <int64_t>error.start)
    fail(r, wire)


cdef double take_double(Reading* r, Wire* wire, uint32_t tag) except? -1.0:
    cdef double value
    pass_unknown(r, wire, tag)
    memcpy(&value, wire.at - 8, 8)
    return value


cdef int take_shape(Reading* r, Wire* wire, uint32_t tag, list shape) except -1:
    cdef Wire packed
    if tag & 7 == 0:
        take_entry(r, wire)
        shape.append(<int64_t>take_number(r, wire))
        return 0
    open_inner(r, wire, &packed)
    while packed.at < packed.end:
        take_entry(r, &packed)
        shape.append(<int64_t>take_number(r, &packed))
    return 0


# -- parameters ----------------------------------------------------------------------------------

cdef object read_parameter(Reading* r, Wire* outer, object value):
    # An InferParameter over what was there before it: the last choice wins, None is no choice.
    cdef Wire wire
    cdef uint32_t tag
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == BYTES_3:
            value = take_text(r, &wire)
        elif tag == VARINT_2:
            value = <int64_t>take_number(r, &wire)
        elif tag == VARINT_1:
            value = take_number(r, &wire) != 0
        elif tag == VARINT_5:
            value = take_number(r, &wire)
        elif tag == FIXED_4:
            value = take_double(r, &wire, tag)
        else:
            pass_unknown(r, &wire, tag)
    return value


cdef int read_entry(Reading* r, Wire* outer, dict parameters) except -1:
    cdef Wire wire
    cdef uint32_t tag
    cdef str key = ""
    cdef object value = None
    take_entry(r, outer)
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            key = take_text(r, &wire)
        elif tag == BYTES_2:
            value = read_parameter(r, &wire, value)
        else:
            pass_unknown(r, &wire, tag)
    parameters[key] = value
    return 0


# -- the V2 request ------------------------------------------------------------------------------

@cython.final
@cython.freelist(16)
cdef class WireInput:
    """One InferInputTensor. `contents` tells whether the message was there, empty or not."""

    cdef readonly str name
    cdef readonly str datatype
    cdef readonly tuple shape
    cdef readonly dict parameters
    cdef Contents typed
    cdef Span span              # the whole tensor; valid while its InferMessage is

    @property
    def contents(self) -> bool:
        return self.typed.given

    @property
    def kinds(self) -> tuple[int, ...]:
        """Field numbers of the contents (1 bool ... 8 bytes) that have values."""
        return tuple([kind for kind in range(1, KIND_COUNT) if self.typed.counts[kind]])

    def count(self, kind: int) -> int:
        """Values in one field of the contents, by its number."""
        if not 0 < kind < KIND_COUNT:
            raise ValueError(f"no contents field has the number {kind}")
        return self.typed.counts[<int>kind]


@cython.final
@cython.freelist(16)
cdef class WireOutput:
    """One InferRequestedOutputTensor."""

    cdef readonly str name
    cdef readonly dict parameters


cdef class RawMessage:
    """A message with raw tensors. It holds on to the buffer it was read from, which must not change."""

    cdef Py_buffer view
    cdef vector[Span] raws

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    @property
    def raw_count(self) -> int:
        return self.raws.size()

    def raw(self, index: int) -> tuple[int, int]:
        """(offset, bytes) of a raw tensor in the message. Raises IndexError."""
        cdef Span* span = self.find_raw(index)
        return span.at - <const uint8_t*>self.view.buf, span.size

    def copy_raw(self, index: int, out) -> None:
        """A raw tensor into `out`, which must have its size. Raises WireFault (WRONG_SIZE), IndexError."""
        cdef Span* span = self.find_raw(index)
        cdef Py_buffer memory
        PyObject_GetBuffer(out, &memory, PyBUF_WRITABLE)
        try:
            if memory.len != span.size:
                raise WireFault(WIRE_WRONG_SIZE, span.at - <const uint8_t*>self.view.buf)
            copy_span(memory.buf, span[0])
        finally:
            PyBuffer_Release(&memory)

    cdef Span* find_raw(self, Py_ssize_t index) except NULL:
        if not 0 <= index < <Py_ssize_t>self.raws.size():
            raise IndexError(f"no raw tensor {index}: there are {self.raws.size()}")
        return &self.raws[index]

    cdef int take_raw(self, Reading* r, Wire* wire) except -1:
        cdef Span span
        take_entry(r, wire)
        take_span(r, wire, &span)
        self.raws.push_back(span)
        return 0

    cdef int borrow(self, object message, Reading* r, Wire* wire) except -1:
        PyObject_GetBuffer(message, &self.view, PyBUF_SIMPLE)
        r.base = <const uint8_t*>self.view.buf
        r.left = ENTRIES
        wire[0] = open_wire(r.base, self.view.len)
        return 0


cdef int copy_span(void* to, Span span) except -1:
    if span.size <= GIL_BYTES:
        memcpy(to, span.at, span.size)
        return 0
    with nogil:
        memcpy(to, span.at, span.size)
    return 0


@cython.final
cdef class InferMessage(RawMessage):
    """A ModelInferRequest. Its tensors' bytes stay in the message; the `copy_` doors bring them out."""

    cdef readonly str model_name
    cdef readonly str model_version
    cdef readonly str id
    cdef readonly dict parameters       # str -> str | int | float | bool | None (no choice was made)
    cdef readonly tuple inputs
    cdef readonly tuple outputs

    def contents_bytes(self, index: int, dtype_code: int) -> int:
        """Bytes of input `index` as a tensor of the dtype (strings packed), from its typed contents.

        0 when the field of that dtype has no values. Raises WireFault (OTHER_KIND) when the input has
        values in another field, or no field can hold the dtype (float16, bfloat16); IndexError.
        """
        return self.measure(self.find_input(index), dtype_code)

    def copy_contents(self, index: int, dtype_code: int, out) -> None:
        """The typed contents of input `index` into `out`, which must have `contents_bytes` bytes.

        Narrow integers are cut from the 32 bits they came in (spec triton_v2 11). Raises WireFault.
        """
        cdef WireInput tensor = self.find_input(index)
        cdef int64_t size = self.measure(tensor, dtype_code)
        cdef Py_buffer memory
        PyObject_GetBuffer(out, &memory, PyBUF_WRITABLE)
        try:
            if memory.len != size or not copy_values(tensor, dtype_code, <uint8_t*>memory.buf, size):
                raise self.fault(tensor, WIRE_WRONG_SIZE)
        finally:
            PyBuffer_Release(&memory)

    cdef WireInput find_input(self, Py_ssize_t index):
        if not 0 <= index < len(self.inputs):
            raise IndexError(f"no input {index}: there are {len(self.inputs)}")
        return self.inputs[index]

    cdef int64_t measure(self, WireInput tensor, int dtype) except -1:
        cdef uint32_t kind = kind_of_dtype(dtype) if 0 < dtype < DT_COUNT else KIND_NONE
        cdef int other
        for other in range(1, KIND_COUNT):
            if kind == KIND_NONE or (other != <int>kind and tensor.typed.counts[other]):
                raise self.fault(tensor, WIRE_OTHER_KIND)
        if kind == KIND_BYTES:
            return tensor.typed.text_bytes + 4 * tensor.typed.counts[kind]
        return tensor.typed.counts[kind] * dtype_bytes(dtype)

    cdef fault(self, WireInput tensor, int code):
        return WireFault(code, tensor.span.at - <const uint8_t*>self.view.buf)


cdef bint copy_values(WireInput tensor, int dtype, uint8_t* to, int64_t size) except -1:
    cdef Sink sink
    cdef bint whole
    sink.at, sink.end = to, to + size
    sink.width, sink.truth = dtype_bytes(dtype), dtype == DT_BOOL
    if size <= GIL_BYTES:
        return copy_input(tensor.span, kind_of_dtype(dtype), &sink)
    with nogil:
        whole = copy_input(tensor.span, kind_of_dtype(dtype), &sink)
    return whole


cdef int read_contents(Reading* r, Wire* outer, Contents* contents) except -1:
    cdef Wire wire
    cdef bint good
    open_inner(r, outer, &wire)
    if wire.end - wire.at <= GIL_BYTES:
        good = count_contents(&wire, contents)
    else:
        with nogil:
            good = count_contents(&wire, contents)
    return 0 if good else fail(r, &wire)


cdef WireInput read_input(Reading* r, Wire* outer):
    cdef Wire wire
    cdef uint32_t tag
    cdef WireInput tensor = WireInput.__new__(WireInput)
    cdef list shape = []
    take_entry(r, outer)
    open_inner(r, outer, &wire)
    tensor.span.at, tensor.span.size = wire.at, wire.end - wire.at
    tensor.name = tensor.datatype = ""
    tensor.parameters = {}
    memset(&tensor.typed, 0, sizeof(Contents))
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            tensor.name = take_text(r, &wire)
        elif tag == BYTES_2:
            tensor.datatype = take_text(r, &wire)
        elif tag == BYTES_3 or tag == VARINT_3:
            take_shape(r, &wire, tag, shape)
        elif tag == BYTES_4:
            read_entry(r, &wire, tensor.parameters)
        elif tag == BYTES_5:
            read_contents(r, &wire, &tensor.typed)
        else:
            pass_unknown(r, &wire, tag)
    tensor.shape = tuple(shape)
    return tensor


cdef WireOutput read_output(Reading* r, Wire* outer):
    cdef Wire wire
    cdef uint32_t tag
    cdef WireOutput output = WireOutput.__new__(WireOutput)
    take_entry(r, outer)
    open_inner(r, outer, &wire)
    output.name = ""
    output.parameters = {}
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            output.name = take_text(r, &wire)
        elif tag == BYTES_2:
            read_entry(r, &wire, output.parameters)
        else:
            pass_unknown(r, &wire, tag)
    return output


def read_infer_request(message) -> InferMessage:
    """A serialized ModelInferRequest (any buffer of bytes, held on to). Raises WireFault."""
    cdef InferMessage request = InferMessage.__new__(InferMessage)
    cdef Reading reading
    cdef Wire wire
    cdef uint32_t tag
    cdef list inputs = [], outputs = []
    request.borrow(message, &reading, &wire)
    request.model_name = request.model_version = request.id = ""
    request.parameters = {}
    while next_tag(&reading, &wire, &tag):
        if tag == BYTES_1:
            request.model_name = take_text(&reading, &wire)
        elif tag == BYTES_2:
            request.model_version = take_text(&reading, &wire)
        elif tag == BYTES_3:
            request.id = take_text(&reading, &wire)
        elif tag == BYTES_4:
            read_entry(&reading, &wire, request.parameters)
        elif tag == BYTES_5:
            inputs.append(read_input(&reading, &wire))
        elif tag == BYTES_6:
            outputs.append(read_output(&reading, &wire))
        elif tag == BYTES_7:
            request.take_raw(&reading, &wire)
        else:
            pass_unknown(&reading, &wire, tag)
    request.inputs, request.outputs = tuple(inputs), tuple(outputs)
    return request
