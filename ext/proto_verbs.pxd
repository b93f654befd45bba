# Protobuf bytes as headers in ext/include read and write them: declarations only, no module.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "wire_read.h" nogil:
    enum:
        WIRE_OK
        WIRE_TRUNCATED
        WIRE_OVERLONG
        WIRE_BAD_TAG
        WIRE_BAD_TYPE
        WIRE_BAD_LENGTH
        WIRE_BAD_PACKED
        WIRE_BAD_GROUP
        WIRE_TOO_DEEP
        WIRE_BAD_TEXT
        WIRE_TOO_MANY
        WIRE_TOO_LARGE
        WIRE_OTHER_KIND
        WIRE_WRONG_SIZE
    struct Wire:
        const uint8_t* at
        const uint8_t* end
        const uint8_t* fault_at
        int fault
    struct Span:
        const uint8_t* at
        int64_t size
    Wire open_wire(const uint8_t* at, int64_t size)
    Wire enter(const Wire* outer, Span span)
    bint refuse(Wire* wire, int fault, const uint8_t* where)
    bint read_varint(Wire* wire, uint64_t* value)
    bint read_tag(Wire* wire, uint32_t* tag)
    bint read_span(Wire* wire, Span* span)
    bint skip_value(Wire* wire, uint32_t tag)

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
