from collections.abc import Iterable, Iterator
from typing import TypeAlias

from typing_extensions import Buffer

Value: TypeAlias = Members | list[Value] | bytes | int | float | bool | None

MOST_CONTAINERS: int

class JSONSyntaxError(ValueError):
    reason: str
    offset: int
    def __init__(self, reason: str, offset: int) -> None: ...

class ShownFloat(float):
    @property
    def shown(self) -> float: ...

class Members:
    pairs: list[tuple[bytes, Value]]
    def __init__(self, pairs: Iterable[tuple[bytes, Value]] = ()) -> None: ...
    def get(self, name: bytes, default: Value = None) -> Value: ...
    def __contains__(self, name: bytes) -> bool: ...
    def __iter__(self) -> Iterator[tuple[bytes, Value]]: ...
    def __len__(self) -> int: ...

def parse(
    body: Buffer,
    *,
    max_depth: int = 100,
    max_values: int = 1 << 62,
    alone: bool = False,
    as_shown: bool = False,
) -> Value: ...
def debug_text(value: Value) -> str: ...
