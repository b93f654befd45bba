"""The protobuf messages of inference of the V1 Triton dialect: InferRequest read in place, InferResponse at once.

    message = read_v1_request(data)
    message.batch_size, message.inputs[0].dims
    offset, size = message.raw(0)                   # a span of `data`, not a copy
    header = write_v1_header("m", 1, 1, 0, [("y", (4,), 16, None)])
    write_v1_response((1, "", "inference:0", 7), header, [memory])

The rules, bounds and faults are those of proto_wire; the fields those of spec triton_v1 11.
"""

cimport cython
from cpython.buffer cimport PyBuffer_Release
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from proto_verbs cimport *
from proto_writing cimport *


@cython.final
cdef class SharedMemoryPlace:
    """Where in a registered region a tensor lies (InferSharedMemory)."""

    cdef readonly str name
    cdef readonly uint64_t offset
    cdef readonly uint64_t byte_size


@cython.final
@cython.no_gc                   # names, numbers: no cycle can be made of them
@cython.freelist(16)
cdef class V1Input:
    """One InferRequestHeader.Input. `dims` are without the batch axis; `shared_memory` may be None."""

    cdef readonly str name
    cdef readonly tuple dims
    cdef readonly uint64_t batch_byte_size
    cdef readonly SharedMemoryPlace shared_memory


@cython.final
@cython.no_gc                   # names, numbers: no cycle can be made of them
@cython.freelist(16)
cdef class V1Output:
    """One InferRequestHeader.Output. `class_count` is None unless a classification is asked for."""

    cdef readonly str name
    cdef readonly object class_count
    cdef readonly SharedMemoryPlace shared_memory


@cython.final
@cython.no_gc                   # names, numbers: no cycle can be made of them
@cython.freelist(16)
cdef class V1InferMessage:
    """An InferRequest with its header's fields. Its tensors' bytes stay in the buffer it was read from
    and holds on to, which must not change."""

    cdef Py_buffer view
    cdef vector[Span] raws
    cdef readonly str model_name
    cdef readonly int64_t model_version
    cdef readonly uint32_t batch_size
    cdef readonly uint64_t correlation_id
    cdef readonly uint64_t id
    cdef readonly uint32_t flags
    cdef readonly uint32_t priority
    cdef readonly uint64_t timeout_us
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


# -- the request ---------------------------------------------------------------------------------

cdef SharedMemoryPlace read_place(Reading* r, Wire* outer, SharedMemoryPlace place):
    # Over what was there before it.
    cdef Wire wire
    cdef uint32_t tag
    if place is None:
        place = SharedMemoryPlace.__new__(SharedMemoryPlace)
        place.name = ""
    open_inner(r, outer, &wire)
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            place.name = take_name(r, &wire)
        elif tag == VARINT_2:
            place.offset = take_number(r, &wire)
        elif tag == VARINT_3:
            place.byte_size = take_number(r, &wire)
        else:
            pass_unknown(r, &wire, tag)
    return place


cdef V1Input read_input(Reading* r, Wire* outer):
    cdef Wire wire
    cdef uint32_t tag
    cdef V1Input tensor = V1Input.__new__(V1Input)
    cdef list dims = []
    take_entry(r, outer)
    open_inner(r, outer, &wire)
    tensor.name = ""
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            tensor.name = take_name(r, &wire)
        elif tag == BYTES_2 or tag == VARINT_2:
            take_int64s(r, &wire, tag, dims)
        elif tag == VARINT_3:
            tensor.batch_byte_size = take_number(r, &wire)
        elif tag == BYTES_4:
            tensor.shared_memory = read_place(r, &wire, tensor.shared_memory)
        else:
            pass_unknown(r, &wire, tag)
    tensor.dims = tuple(dims)
    return tensor


cdef object read_class(Reading* r, Wire* outer, object count):
    cdef Wire wire
    cdef uint32_t tag
    open_inner(r, outer, &wire)
    count = count or 0
    while next_tag(r, &wire, &tag):
        if tag == VARINT_1:
            count = <uint32_t>take_number(r, &wire)
        else:
            pass_unknown(r, &wire, tag)
    return count


cdef V1Output read_output(Reading* r, Wire* outer):
    cdef Wire wire
    cdef uint32_t tag
    cdef V1Output output = V1Output.__new__(V1Output)
    take_entry(r, outer)
    open_inner(r, outer, &wire)
    output.name = ""
    while next_tag(r, &wire, &tag):
        if tag == BYTES_1:
            output.name = take_name(r, &wire)
        elif tag == BYTES_3:
            output.class_count = read_class(r, &wire, output.class_count)
        elif tag == BYTES_4:
            output.shared_memory = read_place(r, &wire, output.shared_memory)
        else:
            pass_unknown(r, &wire, tag)
    return output


cdef int read_header(
    Reading* r, Wire* wire, V1InferMessage request, list inputs, list outputs
) except -1:
    cdef uint32_t tag
    while next_tag(r, wire, &tag):
        if tag == VARINT_1:
            request.batch_size = <uint32_t>take_number(r, wire)
        elif tag == BYTES_2:
            inputs.append(read_input(r, wire))
        elif tag == BYTES_3:
            outputs.append(read_output(r, wire))
        elif tag == VARINT_4:
            request.correlation_id = take_number(r, wire)
        elif tag == VARINT_5:
            request.id = take_number(r, wire)
        elif tag == VARINT_6:
            request.flags = <uint32_t>take_number(r, wire)
        elif tag == VARINT_7:
            request.priority = <uint32_t>take_number(r, wire)
        elif tag == VARINT_8:
            request.timeout_us = take_number(r, wire)
        else:
            pass_unknown(r, wire, tag)
    return 0


def read_v1_request(message) -> V1InferMessage:
    """A serialized InferRequest (any buffer of bytes, held on to). Raises WireFault."""
    cdef V1InferMessage request = V1InferMessage.__new__(V1InferMessage)
    cdef Reading reading
    cdef Wire wire, header
    cdef uint32_t tag
    cdef list inputs = [], outputs = []
    borrow(message, &request.view, &reading, &wire)
    request.model_name = ""
    while next_tag(&reading, &wire, &tag):
        if tag == BYTES_1:
            request.model_name = take_name(&reading, &wire)
        elif tag == VARINT_2:
            request.model_version = <int64_t>take_number(&reading, &wire)
        elif tag == BYTES_3:
            open_inner(&reading, &wire, &header)
            read_header(&reading, &header, request, inputs, outputs)
        elif tag == BYTES_4:
            take_raw(&reading, &wire, &request.raws)
        else:
            pass_unknown(&reading, &wire, tag)
    request.inputs, request.outputs = tuple(inputs), tuple(outputs)
    return request


# -- the reply -----------------------------------------------------------------------------------

cdef int write_class(string* head, int32_t index, float value, str label) except -1:
    cdef size_t start = open_field(head, BYTES_1)
    cdef uint32_t bits
    memcpy(&bits, &value, 4)
    write_number(head, VARINT_1, <uint64_t><int64_t>index)
    if bits:                    # -0.0 is written, 0.0 is the default
        add_fixed(head, FIXED32_2, &value, 4)
    write_text(head, BYTES_3, label)
    close_field(head, start)
    return 0


cdef int write_classes(string* head, classes) except -1:
    cdef size_t start
    start = open_field(head, BYTES_3)
    for index, value, label in classes:
        write_class(head, index, value, label)
    close_field(head, start)
    return 0


cdef int write_output(string* head, str name, dims, uint64_t byte_size, batch_classes) except -1:
    cdef size_t start = open_field(head, BYTES_4)
    cdef size_t raw
    write_text(head, BYTES_1, name)
    if batch_classes is None:
        raw = open_field(head, BYTES_2)
        write_int64s(head, BYTES_1, dims)
        write_number(head, VARINT_2, byte_size)
        close_field(head, raw)
    else:
        for classes in batch_classes:
            write_classes(head, classes)
    close_field(head, start)
    return 0


def write_v1_header(
    str model_name not None, int64_t model_version, uint32_t batch_size, uint64_t id, outputs
) -> bytes:
    """An InferResponseHeader.

    outputs: (name, dims without the batch axis, bytes of the whole batch, None) of each raw one, or
    (name, (), 0, classes) of a classification: for each item of the batch a list of (index, value, label).
    """
    cdef string head
    write_text(&head, BYTES_1, model_name)
    write_number(&head, VARINT_2, <uint64_t>model_version)
    write_number(&head, VARINT_3, batch_size)
    for name, dims, byte_size, classes in outputs:
        write_output(&head, name, dims, byte_size, classes)
    write_number(&head, VARINT_5, id)
    return <bytes>head


def write_v1_response(tuple status not None, bytes header not None, raw) -> bytes:
    """An InferResponse: status (code, msg, server_id, request_id), a header as above, and the memory of
    each tensor in C order, copied once. Raises WireFault (TOO_LARGE) at 2 GiB."""
    cdef string head
    cdef size_t start = open_field(&head, BYTES_1)
    code, msg, server_id, request_id = status
    write_number(&head, VARINT_1, code)
    write_text(&head, BYTES_2, msg)
    write_text(&head, BYTES_3, server_id)
    write_number(&head, VARINT_4, request_id)
    close_field(&head, start)
    add_text(&head, BYTES_2, header, len(header))
    return join_raw(NULL, &head, BYTES_3, raw)
