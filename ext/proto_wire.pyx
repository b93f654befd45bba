"""The protobuf messages of inference of the Triton dialects: requests read in place, replies written at once.

    message = read_infer_request(data)              # a ModelInferRequest
    message.inputs[0].name, message.inputs[0].shape
    offset, size = message.raw(0)                   # a span of `data`, not a copy
    message.copy_raw(0, memory)                     # or: one copy, to where the tensor goes
    message.copy_contents(0, dtype_code, memory)    # the same from typed contents
    write_infer_response("m", "1", "", {}, [("y", "FP32", (1, 4), None)], [memory])

Accepts and refuses what protobuf's own parser does: unknown fields pass, the last of a singular
field, a oneof or a map key wins, messages given in pieces are merged. Only the count of entries
(inputs, outputs, raw tensors, parameters, dims) is bounded, by MOST_ENTRIES, and that of all fields by
16 times as many: a megabyte of empty entries must not become a gigabyte of objects, nor take a second.
Values of typed contents are counted, not kept.
"""

from enum import IntEnum

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset
from libcpp.string cimport string
from libcpp.vector cimport vector

from proto_verbs cimport *
from proto_writing cimport *


MOST_ENTRIES = ENTRIES


cdef extern from "wire_contents.h" nogil:
    enum:
        KIND_NONE
        KIND_BYTES
        KIND_COUNT
    struct Contents:
        int64_t[9] counts
        int64_t text_bytes
        bint given
    struct Sink:
        uint8_t* at
        uint8_t* end
        uint8_t width
        bint truth
    uint32_t kind_of_dtype(uint8_t dtype)
    bint count_contents(Wire* wire, Contents* contents)
    bint copy_input(Span input, uint32_t kind, Sink* sink)

cdef extern from "tensor.h" nogil:
    enum:
        DT_BOOL
        DT_COUNT
    uint32_t dtype_bytes(uint8_t code)


class Fault(IntEnum):
    """The values of `WireFault.code`."""

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

    From the methods that copy (OTHER_KIND, WRONG_SIZE) the offset is that of the values.
    """

    def __init__(self, code: int, offset: int) -> None:
        super().__init__(f"{Fault(code).name} at byte {offset}")
        self.code = Fault(code)
        self.offset = offset


# -- parameters ----------------------------------------------------------------------------------

class Unsigned(int):
    """A uint64_param, which is an int like any other where nobody asks."""


cdef object read_parameter(Reading* r, Wire* outer, object value):
    # An InferParameter over what was there before it: the last choice wins, None is no choice.
    cdef Wire wire
    cdef uint32_t tag
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == BYTES_3:
            value = take_text(r, &wire)
            take_pieces(r, &wire, len(<str>value))
        elif tag == VARINT_2:
            value = <int64_t>take_number(r, &wire)
        elif tag == VARINT_1:
            value = take_number(r, &wire) != 0
        elif tag == VARINT_5:
            value = Unsigned(take_number(r, &wire))
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
            key = take_name(r, &wire)
        elif tag == BYTES_2:
            value = read_parameter(r, &wire, value)
        else:
            pass_unknown(r, &wire, tag)
    parameters[key] = value
    return 0


# -- the V2 request ------------------------------------------------------------------------------

@cython.final
@cython.no_gc                   # names, numbers: no cycle can be made of them
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
@cython.no_gc                   # names, numbers: no cycle can be made of them
@cython.freelist(16)
cdef class WireOutput:
    """One InferRequestedOutputTensor."""

    cdef readonly str name
    cdef readonly dict parameters


@cython.final
@cython.no_gc                   # names, numbers: no cycle can be made of them
@cython.freelist(16)
cdef class InferMessage:
    """A ModelInferRequest. Its tensors' bytes stay in the buffer it was read from and holds on to,
    which must not change; the `copy_` methods bring them out."""

    cdef Py_buffer view
    cdef vector[Span] raws
    cdef readonly str model_name
    cdef readonly str model_version
    cdef readonly str id
    cdef readonly dict parameters       # str -> str | int | float | bool | None (no choice was made)
    cdef readonly tuple inputs
    cdef readonly tuple outputs

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    @property
    def raw_count(self) -> int:
        return self.raws.size()

    def raw(self, index: int) -> tuple[int, int]:
        """(offset, bytes) of a raw tensor in the message. Raises IndexError."""
        cdef Span span = find_raw(&self.raws, index)
        return span.at - <const uint8_t*>self.view.buf, span.size

    def copy_raw(self, index: int, out) -> None:
        """A raw tensor into `out`, which must have its size. Raises WireFault (WRONG_SIZE), IndexError."""
        copy_span(find_raw(&self.raws, index), self.view.buf, out)

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
            tensor.name = take_name(r, &wire)
        elif tag == BYTES_2:
            tensor.datatype = take_name(r, &wire)
        elif tag == BYTES_3 or tag == VARINT_3:
            take_int64s(r, &wire, tag, shape)
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
            output.name = take_name(r, &wire)
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
    borrow(message, &request.view, &reading, &wire)
    request.model_name = request.model_version = request.id = ""
    request.parameters = {}
    while next_tag(&reading, &wire, &tag):
        if tag == BYTES_1:
            request.model_name = take_name(&reading, &wire)
        elif tag == BYTES_2:
            request.model_version = take_name(&reading, &wire)
        elif tag == BYTES_3:
            request.id = take_text(&reading, &wire)
        elif tag == BYTES_4:
            read_entry(&reading, &wire, request.parameters)
        elif tag == BYTES_5:
            inputs.append(read_input(&reading, &wire))
        elif tag == BYTES_6:
            outputs.append(read_output(&reading, &wire))
        elif tag == BYTES_7:
            take_raw(&reading, &wire, &request.raws)
        else:
            pass_unknown(&reading, &wire, tag)
    request.inputs, request.outputs = tuple(inputs), tuple(outputs)
    return request


# -- replies -------------------------------------------------------------------------------------

cdef int write_parameter(string* head, object value) except -1:
    # bool before int, which it is too. None is a parameter without a choice.
    cdef double real
    cdef Py_ssize_t size
    cdef const char* text
    if isinstance(value, bool):
        add_number(head, VARINT_1, <bint>value)
    elif isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            add_number(head, VARINT_2, <uint64_t><int64_t>value)
        else:
            add_number(head, VARINT_5, value)
    elif isinstance(value, float):
        real = value
        add_fixed(head, FIXED_4, &real, 8)
    elif isinstance(value, str):
        text = PyUnicode_AsUTF8AndSize(value, &size)
        add_text(head, BYTES_3, text, size)
    elif value is not None:
        raise TypeError(f"a parameter cannot be {type(value).__name__}")
    return 0


cdef int write_parameters(string* head, uint32_t tag, dict parameters) except -1:
    cdef size_t entry, inner
    cdef Py_ssize_t size
    cdef const char* text
    if parameters is None:
        return 0
    for key, value in parameters.items():
        entry = open_field(head, tag)
        text = PyUnicode_AsUTF8AndSize(key, &size)
        add_text(head, BYTES_1, text, size)
        inner = open_field(head, BYTES_2)
        write_parameter(head, value)
        close_field(head, inner)
        close_field(head, entry)
    return 0


cdef int write_head(
    string* head, str model_name, str model_version, str id, dict parameters, outputs
) except -1:
    cdef size_t start
    head.reserve(256)
    write_text(head, BYTES_1, model_name)
    write_text(head, BYTES_2, model_version)
    write_text(head, BYTES_3, id)
    write_parameters(head, BYTES_4, parameters)
    for name, datatype, shape, own_parameters in outputs:
        start = open_field(head, BYTES_5)
        write_text(head, BYTES_1, name)
        write_text(head, BYTES_2, datatype)
        write_int64s(head, BYTES_3, shape)
        write_parameters(head, BYTES_4, own_parameters)
        close_field(head, start)
    return 0


def write_infer_response(
    str model_name not None,
    str model_version not None,
    str id not None,
    dict parameters,
    outputs,
    raw,
) -> bytes:
    """A ModelInferResponse with its tensors as raw_output_contents, copied once.

    outputs: (name, datatype, shape, parameters or None) of each; raw: the memory of each, in C order.
    An int outside int64 becomes a uint64_param. Raises WireFault (TOO_LARGE) at 2 GiB, OverflowError.
    """
    cdef string head
    write_head(&head, model_name, model_version, id, parameters, outputs)
    return join_raw(NULL, &head, BYTES_6, raw)


def write_stream_response(
    str error_message not None,
    str model_name not None = "",
    str model_version not None = "",
    str id not None = "",
    dict parameters=None,
    outputs=(),
    raw=(),
) -> bytes:
    """A ModelStreamInferResponse: `error_message` ("" for none), and a response as above within."""
    cdef string before, head
    write_text(&before, BYTES_1, error_message)
    add_varint(&before, BYTES_2)
    write_head(&head, model_name, model_version, id, parameters, outputs)
    return join_raw(&before, &head, BYTES_6, raw)
