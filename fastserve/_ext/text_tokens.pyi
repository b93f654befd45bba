from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

class Token:
    id: int
    text: str
    index: int
    us: int
    special: bool
    finish: Any
    logprob: float | None
    best: Sequence[tuple[int, float]]
    def __init__(
        self,
        id: int,
        text: str,
        index: int,
        us: int,
        special: bool = False,
        finish: int = 0,
        logprob: float | None = None,
        best: Sequence[tuple[int, float]] = (),
    ) -> None: ...
    @property
    def ms(self) -> float: ...
    @property
    def first(self) -> bool: ...

class ByteText:
    def __init__(self, table: dict[int, str | bytes], look: Callable[[int], str | bytes]) -> None: ...
    def add(self, token: int) -> str: ...
    def end(self) -> str: ...

def take_plain(
    records: list[tuple[int, int, int, bytes]],
    detokenizer: Any,
    specials: frozenset[int],
    none: Any,
    tokens: list[Token],
    ids: list[int],
    texts: list[str],
) -> int: ...

class Placeholder(IntEnum):
    ID = 0
    NUMBER = 1
    TEXT = 2
    PREFILL = 3
    DECODE = 4
    LOGPROB = 5
    SPECIAL = 6

class EventTemplate:
    def __init__(
        self,
        form: Sequence[bytes | Placeholder],
        *,
        bare: bool = False,
        skip_empty: bool = False,
        strip: bool = False,
    ) -> None: ...
    def write(self, tokens: list[Token]) -> bytes: ...

class Flow:
    open: bool
    @property
    def taken_ns(self) -> int: ...
    def __init__(
        self,
        detokenizer: Any,
        specials: frozenset[int],
        none: Any,
        ids: list[int],
        texts: list[str],
        frames: EventTemplate,
        reply: Any,
        failed: Callable[[Exception], object],
    ) -> None: ...
    def take(self, records: list[tuple[int, int, int, bytes]], now_ns: int) -> bool: ...

class Flowing:
    flow: Flow | None
    slot: int
    held: int
    begun: bool
    ended: bool

def pass_on(steps: list[Any], reader: Any, gaps: list[int], now_ns: int) -> list[Any]: ...
