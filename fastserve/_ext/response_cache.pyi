from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import Buffer

ENTRY_BYTES: int
WHOLE_BYTES: int

class Entry:
    form: Any
    memory: tuple[bytes, ...]
    parameters: tuple[tuple[str, object], ...]

class Counts:
    hits: int
    misses: int
    insertion_ns: int
    last_ns: int
    def __init__(self, looked: Callable[..., None]) -> None: ...

class Miss:
    key: bytes
    def keep(
        self, form: Any, outputs: Iterable[Buffer], parameters: tuple[tuple[str, object], ...] = ()
    ) -> None: ...
    def close(self) -> None: ...

class ResponseCache:
    capacity: int
    used: int
    evictions: int
    hits: int
    misses: int
    lookup_ns: int
    insertion_ns: int
    def __init__(self, capacity: int) -> None: ...
    def __len__(self) -> int: ...
    def find(self, head: bytes, inputs: Sequence[Buffer], counts: Counts) -> Entry | Miss | None: ...
    def get(self, key: bytes, counts: Counts) -> Entry | None: ...
    def key(self, head: bytes, inputs: Sequence[Buffer]) -> bytes: ...
    def count_miss(self, counts: Counts) -> None: ...
    def wait(self, key: bytes, listener: Callable[[], None]) -> None: ...
    def waiting(self) -> dict[bytes, list[Callable[[], None]]]: ...
    def forget(self, prefix: bytes) -> None: ...
