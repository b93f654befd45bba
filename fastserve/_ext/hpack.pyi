from collections.abc import Iterable
from enum import IntEnum

from typing_extensions import Buffer

ENTRY_BYTES: int

class Fault(IntEnum):
    MALFORMED = 1
    TABLE_SIZE = 2
    LIST_TOO_LARGE = 3

class HpackFault(ValueError):
    code: Fault
    offset: int
    fields: list[tuple[bytes, bytes]]
    def __init__(self, code: int, offset: int, fields: Iterable[tuple[bytes, bytes]] = ()) -> None: ...

class HpackDecoder:
    generation: int
    def __init__(self, table_bytes: int = 4096, list_bytes: int = 65536) -> None: ...
    def __len__(self) -> int: ...
    @property
    def table_bytes(self) -> int: ...
    def decode(self, block: Buffer) -> list[tuple[bytes, bytes]]: ...

def static_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes: ...
