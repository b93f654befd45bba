from collections.abc import Iterable

from typing_extensions import Buffer

IDENTITY: int
SIGMOID: int
SOFTMAX: int
EXPONENTIAL: int
BOUNDED_SIGMOID: int

class Forest:
    width: int
    outputs: int
    narrow: bool
    narrow_sums: bool
    takes_missing: bool
    takes_infinite: bool
    def __init__(
        self,
        width: int,
        base: Iterable[float],
        *,
        narrow: bool = False,
        narrow_sums: bool = False,
        strict: bool = False,
        divisor: float = 0.0,
        base_last: bool = False,
        scale: float = 1.0,
        tiny: float = -1.0,
        tiny_is_missing: bool = False,
    ) -> None: ...
    @property
    def nodes(self) -> int: ...
    def add(
        self,
        feature: Buffer,
        threshold: Buffer,
        left: Buffer,
        right: Buffer,
        missing_left: Buffer,
        values: Buffer,
        *,
        output: int = 0,
    ) -> None: ...
    def predict(self, rows: Buffer, out: Buffer, link: int = 0) -> bool: ...
