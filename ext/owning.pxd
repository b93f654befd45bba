# Memory that is measured first and then written (`twice`), as strings are, and protobuf's integers: a worker may
# change in between what it shares, so it is copied. Bytes nobody changes.

cdef inline object owned(object memory, bint twice):
    return memoryview(memory).tobytes() if twice and type(memory) is not bytes else memory
