"""Files of records as TensorFlow writes them.

record   length, 8 bytes | masked CRC-32C of these | the record | masked CRC-32C of that
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from struct import Struct
from typing import BinaryIO

from fastserve._ext.crc32c import crc32c
from fastserve.errors import Kind, ServeError

_HEAD, _CHECK = Struct("<QI"), Struct("<I")


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """The records of a file, one at a time; none is taken memory for that the file has no room for. Raises
    ServeError DATA_LOSS."""
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
    """A checksum as the file has it: a checksum of checksums would say little."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _lost(what: str, offset: int) -> ServeError:
    return ServeError(Kind.DATA_LOSS, f"{what} record at {offset}")
