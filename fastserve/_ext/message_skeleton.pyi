from collections.abc import Callable, Iterable, Mapping
from typing import Any

from typing_extensions import Buffer

MOST_HEAD_BYTES: int
MOST_PLACEHOLDERS: int
TEXT: int
DATA: int
LEAD: int
LEADS: int

class First(dict[int, Any]): ...

class Scheme:
    def __init__(self, fields: Mapping[int, Any]) -> None: ...
    def read(self, message: bytes) -> Skeleton | None: ...
    def read_arrived(self, body: Any) -> Skeleton | None: ...

class Skeleton:
    head: bytes
    id: str
    arrived: Any
    @property
    def leads(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def fields(self) -> tuple[tuple[int, int], ...]: ...
    def copy_data(self, index: int, out: Buffer, width: int = 0, truth: bool = False) -> bool: ...

class TemplateFields:
    find_version: Callable[[], Any]
    leads: tuple[int, ...]
    rows: int
    batching: bool
    @property
    def sources(self) -> list[tuple[int, int, bool]]: ...
    @sources.setter
    def sources(self, given: Iterable[tuple[int, int, bool]]) -> None: ...
    def is_met_by(self, skeleton: Skeleton, queue: Any) -> bool: ...
    def fill(self, source: Skeleton, memory: list[Any]) -> bool: ...

class TemplatesPath:
    find: Callable[[bytes], tuple[Any, Any] | None]
    drop: Callable[[bytes], None]
    def start(self, skeleton: Skeleton, exchange: Any, deadline_ns: int) -> bool: ...

def write_from_template(before: bytes, id: str, after: bytes, raw: Iterable[Buffer]) -> bytes: ...
