from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from typing_extensions import Buffer

class FlattenCode(IntEnum):
    RAGGED = 1
    TYPE = 2
    OVERFLOW = 3
    TOO_DEEP = 4
    SIZE = 5

class FlattenFault(ValueError):
    code: FlattenCode
    path: str
    def __init__(self, code: int, message: str, path: str = "") -> None: ...

def flatten(value: object, dtype_code: int) -> tuple[tuple[int, ...], bytearray]: ...
def unflatten(data: Buffer, dtype_code: int, shape: tuple[int, ...]) -> Any: ...
def pack_bytes(items: Iterable[bytes | str]) -> bytearray: ...
def unpack_bytes(data: Buffer, count: int) -> list[bytes]: ...
def walk_bytes(data: Buffer, most: int) -> tuple[int, int, int]: ...
