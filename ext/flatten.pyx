"""Nested Python lists to flat tensor memory and back, the BYTES packing of strings, and numbers of other types.

    flatten([[1, 2], [3, 4]], code_of_float32)   ->  (2, 2), bytearray of four floats
    unflatten(data, code_of_float32, (2, 2))     ->  [[1.0, 2.0], [3.0, 4.0]]
    pack_bytes([b"ab", "c"])                     ->  02 00 00 00 'a' 'b' 01 00 00 00 'c'
    join_columns([(data, code_of_uint8)], code_of_float32)   ->  bytearray of the numbers as floats

For values that are Python objects already; JSON text goes through json_reader. Integers are
checked against the dtype's range and floats must not overflow it: nothing wraps here. bool is not
a number, and numbers are not bools.
"""

from enum import IntEnum
from operator import index

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.sequence cimport PySequence_Fast_GET_ITEM, PySequence_Fast_GET_SIZE
from libc.math cimport isinf
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from libcpp.vector cimport vector

from json_column cimport DT_BYTES, DT_COUNT, NOT_YET, Column, open_column, reserve
from json_rows cimport MAX_RANK
from tensor_item cimport *

cdef extern from "convert_numbers.h" nogil:
    void convert_piece(
        int dtype, const uint8_t* at, Py_ssize_t step, int wanted, uint8_t* target, Py_ssize_t stride, Py_ssize_t count
    )

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1


cdef enum:
    ROWS = 256                          # that are converted at a time: what is written of them stays in the cache

cdef int64_t MOST_LISTS = 1 << 24      # what a shape with a zero in it may ask of unflatten


class FlattenCode(IntEnum):
    RAGGED = 1
    TYPE = 2
    OVERFLOW = 3
    TOO_DEEP = 4
    SIZE = 5


cdef object END = object()


class FlattenFault(ValueError):
    """Values that make no tensor: `code` (a FlattenCode) and `path` to the culprit, like "[1][3]"."""

    def __init__(self, code: int, message: str, path: str = "") -> None:
        super().__init__(f"{message} at {path}" if path else message)
        self.code = FlattenCode(code)
        self.path = path


cdef class Walk:
    # The lists around the item at hand, and the tensor it goes to.
    cdef list opened
    cdef Py_ssize_t[MAX_RANK + 1] index
    cdef Column column

    def __cinit__(self, uint8_t dtype):
        self.opened = []
        open_column(&self.column, dtype)

    def __dealloc__(self):
        free(self.column.data)

    cdef fault(self, code, str message):
        steps = [f"[{self.index[level]}]" for level in range(len(self.opened))]
        return FlattenFault(code, message, "".join(steps))


def flatten(value, int dtype_code):
    """`value` (lists or tuples of equal lengths at each level, to any depth) as (shape, memory).

    Rank and lengths come from the first path down. Strings and bytes are packed as BYTES. Raises
    FlattenFault.
    """
    if not 0 < dtype_code < DT_COUNT:
        raise ValueError(f"unknown dtype code {dtype_code}")
    cdef Walk walk = Walk(dtype_code)
    cdef Column* t = &walk.column
    fill_tensor(walk, value)
    cdef tuple shape = tuple([t.shape[axis] for axis in range(t.rank)])
    return shape, PyByteArray_FromStringAndSize(<const char*>t.data, t.filled)


cdef int fill_tensor(Walk walk, object value) except -1:
    cdef Column* t = &walk.column
    while value is not END:
        if isinstance(value, (list, tuple)):
            open_list(walk, value)
        else:
            if t.rank == NOT_YET:
                t.rank = <int>len(walk.opened)
            if t.rank != len(walk.opened):
                raise walk.fault(FlattenCode.RAGGED, "a value where a list is expected")
            put_item(walk, value)
        value = next_item(walk)
    return 0


cdef int open_list(Walk walk, object value) except -1:
    cdef Column* t = &walk.column
    cdef int level = <int>len(walk.opened)
    cdef Py_ssize_t length = len(value)
    if level == MAX_RANK:
        raise walk.fault(FlattenCode.TOO_DEEP, f"more than {MAX_RANK} levels")
    if t.rank != NOT_YET and level >= t.rank:
        raise walk.fault(FlattenCode.RAGGED, "a list where a value is expected")
    if t.shape[level] == NOT_YET:
        t.shape[level] = length
    if t.shape[level] != length:
        raise walk.fault(FlattenCode.RAGGED, f"{length} items where {t.shape[level]} are expected")
    if length == 0 and t.rank == NOT_YET:
        t.rank = level + 1
    walk.opened.append(value)
    walk.index[level] = -1
    return 0


cdef object next_item(Walk walk):
    cdef Py_ssize_t level
    cdef object row
    while walk.opened:
        level = len(walk.opened) - 1
        row = walk.opened[level]
        walk.index[level] += 1
        if walk.index[level] < PySequence_Fast_GET_SIZE(row):
            return <object>PySequence_Fast_GET_ITEM(row, walk.index[level])
        walk.opened.pop()
    return END


# -- one item in ---------------------------------------------------------------------------------

cdef int put_item(Walk walk, object value) except -1:
    cdef Column* t = &walk.column
    cdef uint8_t[16] item
    cdef int size = dtype_bytes(t.dtype)
    if t.dtype == DT_BYTES:
        return put_text(walk, value)
    if t.dtype == DT_BOOL:
        put_bool(walk, value, item)
    elif DT_UINT8 <= t.dtype <= DT_INT64:
        put_integer(walk, value, item)
    elif t.dtype >= DT_COMPLEX64:
        put_complex(walk, value, item)
    else:
        put_real(walk, value, item)
    return put_memory(t, item, size)


cdef int put_memory(Column* t, const void* item, Py_ssize_t size) except -1:
    if not reserve(t, size):
        raise MemoryError
    memcpy(t.data + t.filled, item, size)
    t.filled += size
    return 0


cdef int put_text(Walk walk, object value) except -1:
    cdef bytes text
    if isinstance(value, str):
        text = (<str>value).encode()
    elif isinstance(value, (bytes, bytearray, memoryview)):
        text = bytes(value)
    else:
        raise walk.fault(FlattenCode.TYPE, f"{type(value).__name__} where bytes or str are expected")
    if len(text) >> 32:
        raise walk.fault(FlattenCode.OVERFLOW, "4 GiB or more in one element")
    cdef uint32_t length = <uint32_t>len(text)
    put_memory(&walk.column, &length, 4)
    return put_memory(&walk.column, <const char*>text, length)


cdef bint is_bool(object value):
    # numpy's scalar is one too; it is not imported to be asked.
    if PyLong_CheckExact(value):
        return False
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


cdef int put_bool(Walk walk, object value, uint8_t* item) except -1:
    if not is_bool(value):
        raise walk.fault(FlattenCode.TYPE, f"{type(value).__name__} where a bool is expected")
    item[0] = bool(value)
    return 0


cdef int put_integer(Walk walk, object value, uint8_t* item) except -1:
    cdef uint8_t dtype = walk.column.dtype
    cdef int spare = 64 - 8 * <int>dtype_bytes(dtype)
    cdef int overflow = 0
    cdef int64_t low
    cdef bint fits
    if not PyLong_CheckExact(value):
        if is_bool(value) or not hasattr(value, "__index__"):
            raise walk.fault(FlattenCode.TYPE, f"{type(value).__name__} where an integer is expected")
        value = index(value)
    low = PyLong_AsLongLongAndOverflow(value, &overflow)
    if dtype >= DT_INT8:
        fits = not overflow and (<int64_t>(<uint64_t>low << spare) >> spare) == low
    elif overflow > 0 and spare == 0 and value >> 64 == 0:
        low = <int64_t><uint64_t>value
        fits = True
    else:
        fits = not overflow and low >= 0 and (<uint64_t>low << spare) >> spare == <uint64_t>low
    if not fits:
        raise walk.fault(FlattenCode.OVERFLOW, f"an integer outside the range of {64 - spare} bits")
    memcpy(item, &low, 8)       # little-endian: the low bytes come first
    return 0


cdef double real_of(Walk walk, object value) except? -1.0:
    if PyFloat_CheckExact(value):
        return PyFloat_AS_DOUBLE(value)
    if is_bool(value) or isinstance(value, (str, bytes, bytearray)):
        raise walk.fault(FlattenCode.TYPE, f"{type(value).__name__} where a number is expected")
    try:
        return float(value)
    except TypeError:
        raise walk.fault(FlattenCode.TYPE, f"{type(value).__name__} where a number is expected") from None
    except OverflowError:
        raise walk.fault(FlattenCode.OVERFLOW, "a number outside float64") from None


cdef int put_real(Walk walk, object value, uint8_t* item) except -1:
    cdef double real = real_of(walk, value)
    cdef uint8_t dtype = walk.column.dtype
    cdef float narrow
    cdef uint16_t half
    cdef double back = real
    if dtype == DT_FLOAT64:
        memcpy(item, &real, 8)
    elif dtype == DT_FLOAT32:
        narrow = <float>real
        back = narrow
        memcpy(item, &narrow, 4)
    else:
        half = half_of_double(real) if dtype == DT_FLOAT16 else bfloat_of_float(<float>real)
        back = double_of_half(half) if dtype == DT_FLOAT16 else double_of_bfloat(half)
        memcpy(item, &half, 2)
    if isinf(back) and not isinf(real):
        raise walk.fault(FlattenCode.OVERFLOW, "a number outside the dtype's range")
    return 0


cdef int put_complex(Walk walk, object value, uint8_t* item) except -1:
    cdef double complex both
    cdef float[2] narrow
    if is_bool(value) or isinstance(value, (str, bytes, bytearray)):
        raise walk.fault(FlattenCode.TYPE, f"{type(value).__name__} where a number is expected")
    try:
        both = complex(value)
    except TypeError:
        raise walk.fault(FlattenCode.TYPE, f"{type(value).__name__} where a number is expected") from None
    if walk.column.dtype == DT_COMPLEX128:
        memcpy(item, &both, 16)
        return 0
    narrow[0], narrow[1] = <float>both.real, <float>both.imag
    if (isinf(narrow[0]) and not isinf(both.real)) or (isinf(narrow[1]) and not isinf(both.imag)):
        raise walk.fault(FlattenCode.OVERFLOW, "a number outside the dtype's range")
    memcpy(item, narrow, 8)
    return 0


# -- the way back --------------------------------------------------------------------------------

def unflatten(data, int dtype_code, tuple shape not None):
    """`data`, of `shape`, as nested lists of Python numbers, bools or bytes; shape () as one value.

    Raises FlattenFault (SIZE) when the memory is not exactly what the shape needs.
    """
    cdef Py_buffer view
    cdef int64_t count = 1
    for length in shape:
        if length < 0 or count * length >> 62:
            raise FlattenFault(FlattenCode.SIZE, f"no tensor has shape {shape}")
        count *= length
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        items = read_items(<const uint8_t*>view.buf, view.len, dtype_code, count)
    finally:
        PyBuffer_Release(&view)
    return nest_items(items, shape)


cdef object nest_items(list items, tuple shape):
    cdef Py_ssize_t axis, group
    cdef int64_t groups
    if not shape:
        return items[0]
    for axis in range(len(shape) - 1, 0, -1):
        length = shape[axis]
        groups = 1
        for group in shape[:axis]:
            groups *= group
            if groups > MOST_LISTS and groups > len(items):
                raise FlattenFault(FlattenCode.SIZE, f"shape {shape} has more lists than values")
        items = [items[group * length:(group + 1) * length] for group in range(groups)]
    return items


cdef list read_items(const uint8_t* data, Py_ssize_t size, int dtype, int64_t count):
    cdef Py_ssize_t item_bytes
    cdef int64_t i
    if not 0 < dtype < DT_COUNT:
        raise ValueError(f"unknown dtype code {dtype}")
    if dtype == DT_BYTES:
        return split_texts(data, size, count)
    item_bytes = dtype_bytes(dtype)
    if size != count * item_bytes:
        raise FlattenFault(FlattenCode.SIZE, f"{count} items need {count * item_bytes} bytes, not {size}")
    return [read_item(data + i * item_bytes, dtype) for i in range(count)]


# -- numbers of other types ----------------------------------------------------------------------

cdef struct Source:
    # A column that is read.
    const uint8_t* at
    Py_ssize_t step             # bytes from one number to the next
    int dtype


def join_columns(columns, int wanted):
    """The matrix of `columns`, row by row, as memory of the code `wanted`: float32, float64, or that of all
    columns. A column is its data and its code: bool, an integer's, float32 or float64; all have as many numbers.

    Numbers are rounded to the nearest, those beyond float32 to infinity. Other threads run meanwhile. Raises
    ValueError for other codes, and for data of another length than the first column's.
    """
    cdef Held held = Held(len(columns))
    cdef Py_ssize_t rows = -1, size
    for data, code in columns:
        size = held.add(data, code)
        if rows not in (-1, size):
            raise ValueError(f"columns of {rows} and of {size} numbers")
        rows = size
    return held.convert(max(rows, 0), wanted)


def take_column(data, int code, Py_ssize_t width, Py_ssize_t column, int wanted):
    """One column of a matrix of `width`, converted as by join_columns. Raises ValueError."""
    cdef Held held = Held(1)
    cdef Py_ssize_t size = held.add(data, code), unit = dtype_bytes(code)
    if not 0 <= column < width or size % width:
        raise ValueError(f"no column {column} in {size} numbers, {width} in a row")
    held.sources[0].at += column * unit
    held.sources[0].step = width * unit
    return held.convert(size // width, wanted)


cdef class Held:
    # The columns of one call, until it ends.
    cdef vector[Py_buffer] views
    cdef vector[Source] sources

    def __cinit__(self, Py_ssize_t count):
        self.views.reserve(count)
        self.sources.reserve(count)

    def __dealloc__(self):
        cdef size_t i
        for i in range(self.views.size()):
            PyBuffer_Release(&self.views[i])

    cdef Py_ssize_t add(self, data, int code) except -1:
        # How many numbers it has.
        cdef Py_buffer view
        cdef Source source
        if not (DT_BOOL <= code <= DT_INT64 or code == DT_FLOAT32 or code == DT_FLOAT64):
            raise ValueError(f"no numbers that can be converted: code {code}")
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        self.views.push_back(view)
        source.at, source.dtype, source.step = <const uint8_t*>view.buf, code, dtype_bytes(code)
        self.sources.push_back(source)
        if view.len % source.step:
            raise ValueError(f"{view.len} bytes are no numbers of {source.step} bytes")
        return view.len // source.step

    cdef convert(self, Py_ssize_t rows, int wanted):
        cdef size_t width = self.sources.size(), column
        cdef Py_ssize_t unit = dtype_bytes(wanted), row = 0, count
        cdef uint8_t* target
        for column in range(width):
            if self.sources[column].dtype != wanted and wanted != DT_FLOAT32 and wanted != DT_FLOAT64:
                raise ValueError(f"numbers become float32 or float64, not code {wanted}")
        found = PyByteArray_FromStringAndSize(NULL, rows * <Py_ssize_t>width * unit)
        target = <uint8_t*>PyByteArray_AS_STRING(found)
        with nogil:
            while row < rows:
                count = min(ROWS, rows - row)
                for column in range(width):
                    convert_piece(
                        self.sources[column].dtype,
                        self.sources[column].at + row * self.sources[column].step,
                        self.sources[column].step,
                        wanted,
                        target + (row * <Py_ssize_t>width + <Py_ssize_t>column) * unit,
                        <Py_ssize_t>width * unit,
                        count,
                    )
                row += ROWS
        return found


# -- BYTES packing -------------------------------------------------------------------------------

def pack_bytes(items):
    """`items` (bytes or str, which is encoded as UTF-8), each after its uint32 little-endian length."""
    cdef Walk walk = Walk(DT_BYTES)
    for item in items:
        put_text(walk, item)
    return PyByteArray_FromStringAndSize(<const char*>walk.column.data, walk.column.filled)


def unpack_bytes(data, Py_ssize_t count):
    """The `count` elements of BYTES-packed `data`, which must be used up exactly. Raises FlattenFault."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return split_texts(<const uint8_t*>view.buf, view.len, count)
    finally:
        PyBuffer_Release(&view)


cdef list split_texts(const uint8_t* data, Py_ssize_t size, int64_t count):
    cdef list items = []
    cdef Py_ssize_t at = 0
    cdef uint32_t length
    while len(items) < count:
        if size - at < 4:
            raise FlattenFault(FlattenCode.SIZE, f"element {len(items)}: no length at byte {at} of {size}")
        memcpy(&length, data + at, 4)
        if size - at - 4 < <Py_ssize_t>length:
            raise FlattenFault(FlattenCode.SIZE, f"element {len(items)}: {length} bytes at byte {at} of {size}")
        items.append(PyBytes_FromStringAndSize(<const char*>data + at + 4, length))
        at += 4 + length
    if at != size:
        raise FlattenFault(FlattenCode.SIZE, f"{size - at} bytes after the last element, from byte {at}")
    return items


def walk_bytes(data, int64_t most):
    """(count, last, end) of BYTES-packed `data`: how many elements begin in it, `most` at the most, and where
    the last of them begins and ends; it ends beyond the data when it is cut off."""
    cdef Py_buffer view
    cdef int64_t count = 0, last = 0, end = 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    with nogil:
        walk_texts(<const uint8_t*>view.buf, view.len, most, &count, &last, &end)
    PyBuffer_Release(&view)
    return count, last, end


cdef void walk_texts(
    const uint8_t* data, int64_t size, int64_t most, int64_t* count, int64_t* last, int64_t* end
) noexcept nogil:
    cdef uint32_t length
    while count[0] < most and end[0] <= size - 4:
        memcpy(&length, data + end[0], 4)
        last[0] = end[0]
        end[0] += 4 + <int64_t>length
        count[0] += 1
