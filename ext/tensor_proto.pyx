"""TensorFlow Serving's messages of predict: a PredictRequest read in place, a PredictResponse at once.

    message = read_predict_request(data)
    tensor = message.inputs["x"]                    # name -> WireTensor
    tensor.number, tensor.shape                     # of DataType; as sent
    size = tensor.measure(code, items)              # bytes as a tensor of a dtype; -1: it cannot be decoded
    tensor.fill(code, items, memory)                # one copy, to where the tensor goes
    write_predict_response([("y", code, (1, 4))], [memory], spec)

Values follow the rules of include/wire_tensor.h (spec tfserving 4.2). The rules of reading, its bounds and
faults are those of proto_wire: unknown fields pass, the last of a singular field, a oneof or a map key wins,
messages given in pieces are merged, and entries (inputs, filters, axes) are at most MOST_ENTRIES.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from owning cimport owned

from proto_verbs cimport *
from proto_writing cimport *

cdef extern from "tensor.h" nogil:
    enum:
        DT_BYTES
        DT_COUNT
    uint32_t dtype_bytes(uint8_t code)

cdef extern from "wire_tensor.h" nogil:
    enum:
        TF_CONTENT
        TF_STRING
    struct TensorKind:
        uint8_t field
        uint8_t number
    struct Filler:
        uint8_t* start
        uint8_t* at
        uint8_t* end
        uint32_t field
        uint32_t width
    struct Strings:
        int64_t wanted
        int64_t bytes
        uint8_t* at
        Span last
        bint any
    TensorKind tensor_kind(uint8_t dtype)
    uint32_t value_type(uint32_t field)
    bint is_value(uint32_t tag)
    bint pass_values(Wire* wire, uint32_t tag)
    bint fill_values(Wire* wire, Filler* to)
    void fill_rest(Filler* to)
    bint take_strings(Wire* wire, Strings* to)
    void take_string(Strings* to, Span span)
    bint take_content(Span content, Strings* to)
    int64_t measure_items(const uint8_t* at, int64_t size, uint8_t dtype)
    uint8_t* put_items(uint8_t* to, const uint8_t* at, int64_t size, uint8_t dtype)
    int64_t measure_strings(const uint8_t* at, int64_t size)
    uint8_t* put_strings(uint8_t* to, const uint8_t* at, int64_t size)

DTYPE_NUMBER = {code: tensor_kind(code).number for code in range(1, DT_COUNT)}
VALUE_FIELD = {code: tensor_kind(code).field for code in range(1, DT_COUNT)}
IS_VARINT = {code: value_type(tensor_kind(code).field) == 0 for code in range(1, DT_COUNT)}
CONTENT_FIELD = TF_CONTENT


# -- the request ---------------------------------------------------------------------------------

@cython.final
@cython.no_gc                   # names, numbers, bytes: no cycle can be made of them
@cython.freelist(16)
cdef class WireTensor:
    """One TensorProto. Its values stay in the message, which it holds on to."""

    cdef object message
    cdef vector[Span] pieces    # most often one
    cdef Span content
    cdef readonly int number
    cdef readonly tuple shape

    def measure(self, code: int, items: int) -> int:
        """Bytes of a tensor of that dtype with so many elements (strings packed); -1 when tensor_content has
        another size."""
        cdef Strings strings
        cdef uint32_t width = dtype_bytes(<uint8_t>code)
        if items == 0:
            return 0
        if self.content.size and code != DT_BYTES:
            return self.content.size if self.content.size == items * width else -1
        if code != DT_BYTES:
            return items * width
        strings.wanted, strings.bytes, strings.at, strings.any = items, 0, <uint8_t*>NULL, False
        if not self.take(&strings):
            return -1
        return strings.bytes + strings.wanted * (4 + (strings.last.size if strings.any else 0))

    def fill(self, code: int, items: int, out) -> None:
        """The elements into `out`, which must have `measure` bytes. Raises ValueError when it has not."""
        cdef Py_buffer memory
        cdef bint good
        cdef int64_t size = self.measure(code, items), count = items
        cdef uint8_t dtype = code
        PyObject_GetBuffer(out, &memory, PyBUF_WRITABLE)
        try:
            if memory.len != size:
                raise ValueError(f"{memory.len} bytes for a tensor of {size}")
            if size <= GIL_BYTES:
                good = self.put(dtype, count, <uint8_t*>memory.buf, size)
            else:
                with nogil:
                    good = self.put(dtype, count, <uint8_t*>memory.buf, size)
        finally:
            PyBuffer_Release(&memory)
        if not good:
            raise ValueError("values that are not as they were read")

    cdef bint take(self, Strings* strings) noexcept nogil:
        cdef Wire wire
        cdef size_t i
        if self.content.size:
            return take_content(self.content, strings)
        for i in range(self.pieces.size()):
            wire = open_wire(self.pieces[i].at, self.pieces[i].size)
            if not take_strings(&wire, strings):
                return False
        return True

    cdef bint put(self, uint8_t code, int64_t items, uint8_t* memory, int64_t size) noexcept nogil:
        cdef Filler to
        cdef Strings strings
        cdef Wire wire
        cdef size_t i
        if items == 0:
            return True
        if code == DT_BYTES:
            strings.wanted, strings.bytes, strings.at, strings.any = items, 0, memory, False
            if not self.take(&strings):
                return False
            while strings.wanted:
                take_string(&strings, strings.last)
            return strings.bytes == size
        if self.content.size:
            memcpy(memory, self.content.at, size)
            return True
        to.start, to.at, to.end = memory, memory, memory + size
        to.field, to.width = tensor_kind(code).field, dtype_bytes(code)
        for i in range(self.pieces.size()):
            wire = open_wire(self.pieces[i].at, self.pieces[i].size)
            if not fill_values(&wire, &to):
                return False
        fill_rest(&to)
        return True


@cython.final
@cython.no_gc
@cython.freelist(16)
cdef class PredictMessage:
    """A PredictRequest. `version` and `label` are None where it has none of them; `sent` counts the entries of
    inputs, of which those of one name are one."""

    cdef readonly bint has_spec
    cdef readonly str model
    cdef readonly object version
    cdef readonly object label
    cdef readonly str signature
    cdef readonly dict inputs
    cdef readonly int sent
    cdef readonly tuple output_filter


cdef int read_dim(Reading* r, Wire* outer, list shape) except -1:
    cdef Wire wire
    cdef uint32_t tag
    cdef int64_t size = 0
    take_entry(r, outer)
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == VARINT_1:
            size = <int64_t>take_number(r, &wire)
        elif tag == BYTES_2:
            take_text(r, &wire)
        else:
            pass_unknown(r, &wire, tag)
    shape.append(size)
    return 0


cdef int read_shape(Reading* r, Wire* outer, list shape) except -1:
    cdef Wire wire
    cdef uint32_t tag
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == BYTES_2:
            read_dim(r, &wire, shape)
        else:
            pass_unknown(r, &wire, tag)
    return 0


cdef bint pass_all(Wire* wire, uint32_t tag) noexcept nogil:
    # Values of one field, one after the other as some clients send them: a call for each would be dear.
    cdef uint32_t next = 0
    cdef const uint8_t* start
    while pass_values(wire, tag):
        start = wire.at
        if start == wire.end or not read_tag(wire, &next) or next != tag:
            wire.at = start     # the reader of the message finds it, and what is wrong with it
            return True
    return False


cdef int read_values(Reading* r, Wire* wire, uint32_t tag) except -1:
    cdef bint good
    if wire.end - wire.at <= GIL_BYTES:
        good = pass_all(wire, tag)
    else:
        with nogil:
            good = pass_all(wire, tag)
    return 0 if good else fail(r, wire)


cdef int read_tensor(Reading* r, Wire* outer, WireTensor tensor, list shape) except -1:
    # A TensorProto, or a piece of one, over what was there before it.
    cdef Wire wire
    cdef Span span
    cdef uint32_t tag
    open_inner(r, outer, &wire)
    span.at, span.size = wire.at, wire.end - wire.at
    tensor.pieces.push_back(span)
    while next_tag(r, &wire, &tag):
        if is_value(tag):
            read_values(r, &wire, tag)
        elif tag == VARINT_1:
            tensor.number = <int>take_number(r, &wire)
        elif tag == BYTES_2:
            read_shape(r, &wire, shape)
        elif tag == TF_CONTENT << 3 | 2:
            take_span(r, &wire, &tensor.content)
        else:
            pass_unknown(r, &wire, tag)
    return 0


cdef int read_entry(Reading* r, Wire* outer, PredictMessage message, object data) except -1:
    cdef Wire wire
    cdef uint32_t tag
    cdef str name = ""
    cdef list shape = []
    cdef WireTensor tensor = WireTensor.__new__(WireTensor)
    take_entry(r, outer)
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            name = take_name(r, &wire)
        elif tag == BYTES_2:
            take_entry(r, &wire)
            read_tensor(r, &wire, tensor, shape)
        else:
            pass_unknown(r, &wire, tag)
    tensor.shape, tensor.message = tuple(shape), data
    message.inputs[name] = tensor
    message.sent += 1
    return 0


cdef object read_version(Reading* r, Wire* outer, object before):
    # An Int64Value.
    cdef Wire wire
    cdef uint32_t tag
    cdef object value = before or 0
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == VARINT_1:
            value = <int64_t>take_number(r, &wire)
        else:
            pass_unknown(r, &wire, tag)
    return value


cdef int read_spec(Reading* r, Wire* outer, PredictMessage message) except -1:
    cdef Wire wire
    cdef uint32_t tag
    message.has_spec = True
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            message.model = take_name(r, &wire)
        elif tag == BYTES_2:
            message.version, message.label = read_version(r, &wire, message.version), None
        elif tag == BYTES_3:
            message.signature = take_name(r, &wire)
        elif tag == BYTES_4:
            message.version, message.label = None, take_text(r, &wire)
        else:
            pass_unknown(r, &wire, tag)
    return 0


def read_predict_request(bytes data not None) -> PredictMessage:
    """A serialized PredictRequest. Raises WireFault."""
    cdef PredictMessage message = PredictMessage.__new__(PredictMessage)
    cdef Reading reading
    cdef Wire wire
    cdef uint32_t tag
    cdef list wanted = []
    reading.base = <const uint8_t*>PyBytes_AS_STRING(data)
    reading.left, reading.fields = ENTRIES, FIELDS
    wire = open_wire(reading.base, PyBytes_GET_SIZE(data))
    message.model = message.signature = ""
    message.inputs = {}
    while next_tag(&reading, &wire, &tag):
        if tag == BYTES_1:
            read_spec(&reading, &wire, message)
        elif tag == BYTES_2:
            read_entry(&reading, &wire, message, data)
        elif tag == BYTES_3:
            take_entry(&reading, &wire)
            wanted.append(take_text(&reading, &wire))
        else:
            pass_unknown(&reading, &wire, tag)
    message.output_filter = tuple(wanted)
    return message


# -- the response --------------------------------------------------------------------------------

cdef struct Written:
    # One output: what comes before its values, and these.
    string head
    Py_buffer view
    int64_t bytes               # of the values as written
    uint8_t code
    bint items                  # they are written one by one, and measured before


def write_model_spec(model: str, version: int, signature: str) -> bytes:
    """A ModelSpec with its version, which is always told."""
    cdef string head
    cdef size_t inner
    write_text(&head, BYTES_1, model)
    inner = open_field(&head, BYTES_2)
    write_number(&head, VARINT_1, <uint64_t><int64_t>version)
    close_field(&head, inner)
    write_text(&head, BYTES_3, signature)
    return <bytes>head


def write_predict_response(described, raw, bytes spec not None, content: bool = False) -> bytes:
    """A PredictResponse.

    described: (name, dtype code, shape) of each output; raw: the memory of each, in C order; spec: a ModelSpec.
    Values are in the field of their dtype, with `content` in tensor_content but for strings. Raises WireFault
    (TOO_LARGE) at 2 GiB, ValueError for strings that are not packed.
    """
    cdef vector[Written] outputs
    cdef Written one
    cdef string tail
    cdef uint64_t total = 0
    cdef size_t i
    add_text(&tail, BYTES_2, PyBytes_AS_STRING(spec), PyBytes_GET_SIZE(spec))
    try:
        for (name, code, shape), memory in zip(described, raw):
            one.code = code
            one.items = one.code == DT_BYTES or (not content and value_type(tensor_kind(one.code).field) == 0)
            PyObject_GetBuffer(owned(memory, one.items), &one.view, PyBUF_SIMPLE)
            outputs.push_back(one)
            write_output_head(&outputs.back(), name, shape, content)
            total += outputs.back().head.size() + outputs.back().bytes
        total += tail.size()
        if total > MOST_BYTES:
            raise_fault(WIRE_TOO_LARGE, 0)
        return join_outputs(&outputs, &tail, total)
    finally:
        for i in range(outputs.size()):
            PyBuffer_Release(&outputs[i].view)


cdef int write_output_head(Written* one, str name, shape, bint content) except -1:
    cdef string tensor, entry
    cdef size_t dims, dim
    cdef Py_ssize_t length
    cdef const char* text = PyUnicode_AsUTF8AndSize(name, &length)
    cdef uint32_t field = tensor_kind(one.code).field
    add_number(&tensor, VARINT_1, tensor_kind(one.code).number)
    dims = open_field(&tensor, BYTES_2)
    for size in shape:
        dim = open_field(&tensor, BYTES_2)
        write_number(&tensor, VARINT_1, <uint64_t><int64_t>size)
        close_field(&tensor, dim)
    close_field(&tensor, dims)
    measure_values(one)
    if content and one.code != DT_BYTES:
        field = TF_CONTENT
    if one.bytes and one.code != DT_BYTES:
        add_number(&tensor, field << 3 | 2, one.bytes)
    add_text(&entry, BYTES_1, text, length)     # a map's key is written, empty too
    add_varint(&entry, BYTES_2)
    add_varint(&entry, tensor.size() + one.bytes)
    entry.append(tensor)
    add_varint(&one.head, BYTES_1)
    add_varint(&one.head, entry.size() + one.bytes)
    one.head.append(entry)
    return 0


cdef int measure_values(Written* one) except -1:
    cdef const uint8_t* at = <const uint8_t*>one.view.buf
    if one.view.len <= GIL_BYTES:
        one.bytes = count_bytes(one, at)
    else:
        with nogil:
            one.bytes = count_bytes(one, at)
    if one.bytes < 0:
        raise ValueError("strings that are not packed")
    return 0


cdef int64_t count_bytes(Written* one, const uint8_t* at) noexcept nogil:
    # The bytes of the values as they are written; -1 for strings that are not packed.
    if one.code == DT_BYTES:
        return measure_strings(at, one.view.len)
    return measure_items(at, one.view.len, one.code) if one.items else one.view.len


cdef bytes join_outputs(vector[Written]* outputs, string* tail, uint64_t total):
    cdef bytes message = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t* at = <uint8_t*>PyBytes_AS_STRING(message)
    if total <= GIL_BYTES:
        put_outputs(at, outputs, tail)
    else:
        with nogil:
            put_outputs(at, outputs, tail)
    return message


cdef void put_outputs(uint8_t* at, vector[Written]* outputs, string* tail) noexcept nogil:
    cdef size_t i
    cdef Written* one
    for i in range(outputs.size()):
        one = &outputs.at(i)
        memcpy(at, one.head.data(), one.head.size())
        at += one.head.size()
        if not one.items:
            memcpy(at, one.view.buf, one.view.len)
            at += one.view.len
        elif one.code == DT_BYTES:
            at = put_strings(at, <const uint8_t*>one.view.buf, one.view.len)
        else:
            at = put_items(at, <const uint8_t*>one.view.buf, one.view.len, one.code)
    memcpy(at, tail.data(), tail.size())
