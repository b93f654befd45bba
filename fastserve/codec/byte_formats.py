"""Byte formats that are read and written in Python: TFRecord files, protobuf fields, packed tensor values.

TFRecord    length, 8 bytes | masked CRC-32C of these | the record | masked CRC-32C of that
write_field(1, b"ab")      0a 02 'a' 'b'
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, BinaryIO

from fastserve._ext.crc32c import crc32c
from fastserve.errors import Kind, ServeError
from fastserve.tensor import ARRAY_CODE, DType

_HEAD, _CHECK = Struct("<QI"), Struct("<I")


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a file.

    Raises ServeError DATA_LOSS, before memory is taken for a truncated one.
    """
    at, size = 0, os.fstat(file.fileno()).st_size
    while at < size:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise _lost("truncated", at)
        length, check = _HEAD.unpack(head)
        if masked(head[:8]) != check:
            raise _lost("corrupted", at)
        end = at + _HEAD.size + length + _CHECK.size
        if end > size:
            raise _lost("truncated", at)
        record, check = file.read(length), file.read(_CHECK.size)
        if len(check) < _CHECK.size:
            raise _lost("truncated", at)
        if masked(record) != _CHECK.unpack(check)[0]:
            raise _lost("corrupted", at)
        yield record
        at = end


def masked(data: bytes) -> int:
    """Return the masked CRC-32C of a record."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _lost(what: str, offset: int) -> ServeError:
    return ServeError(Kind.DATA_LOSS, f"{what} record at {offset}")


BYTES = 2  # the wire type of what has its length before it


def write_varint(number: int) -> bytes:
    """Return a varint; a negative number as the 64 bits of its two's complement."""
    number &= 2**64 - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def head_of(field: int, size: int) -> bytes:
    """Return the tag and length in front of a field's `size` bytes."""
    return write_varint(field << 3 | BYTES) + write_varint(size)


def write_field(field: int, data: bytes) -> bytes:
    """Return a field of bytes."""
    return head_of(field, len(data)) + data


def pack_values(values: Sequence[Any], dtype: DType) -> bytes:
    """Return values as little-endian tensor memory, strings in BYTES packing.

    Whole numbers are cut to the width of `dtype`; a value too large for float32 becomes infinite.
    """
    if dtype.name == "bytes":
        return pack_strings(values)
    code = ARRAY_CODE.get(dtype.name, "B")  # for bool
    if code in "fd":
        return array(code, values).tobytes()
    mask = (1 << 8 * dtype.item_bytes) - 1
    return array(code.upper(), [value & mask for value in values]).tobytes()


def pack_strings(values: Iterable[bytes]) -> bytes:
    """Return strings in BYTES packing: each with its length in front."""
    return b"".join([part for value in values for part in (len(value).to_bytes(4, "little"), value)])
