from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import Buffer

MOST_HEAD_BYTES: int
MOST_HOLES: int
TEXT: int
DATA: int
LEAD: int
LEADS: int

class First(dict[int, Any]): ...

class Scheme:
    def __init__(self, fields: Mapping[int, Any]) -> None: ...
    def read(self, message: bytes) -> Outline | None: ...

class Outline:
    head: bytes
    id: str
    @property
    def leads(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def fields(self) -> tuple[tuple[int, int], ...]: ...
    def copy_data(self, index: int, out: Buffer, width: int = 0, truth: bool = False) -> bool: ...

def write_known(before: bytes, id: str, after: bytes, raw: Iterable[Buffer]) -> bytes: ...
