from collections.abc import Sequence
from enum import IntEnum

from typing_extensions import Buffer

MODE_TFS: int
MODE_SHORTEST: int

class WriterCode(IntEnum):
    NO_OUTPUTS = 1
    NO_LEADING_DIMENSION = 2
    UNEQUAL_ROWS = 3
    UNSUPPORTED_DTYPE = 4
    WRONG_SIZE = 5
    BAD_PACKING = 6
    TOO_LARGE = 7
    NO_RESULTS = 8

class WriterFault(ValueError):
    code: WriterCode
    name: str
    got: int
    expected: int
    def __init__(self, code: int, name: str = "", got: int = 0, expected: int = 0) -> None: ...

class RowWriter:
    def __init__(self, name: str, dtype_code: int, row_shape: tuple[int, ...], mode: int = 0) -> None: ...
    def write(self, data: Buffer, rows: int, head: bytes = b"") -> bytes: ...
    def write_bare(self, data: Buffer, rows: int, head: bytes = b"") -> bytes: ...

def write_values(
    data: Buffer, dtype_code: int, shape: tuple[int, ...], mode: int = 0, *, as_bytes: bool = False
) -> bytes: ...
def write_predictions(
    outputs: Sequence[tuple[str, int, tuple[int, ...], Buffer]], mode: int = 0
) -> bytes: ...
def write_outputs(outputs: Sequence[tuple[str, int, tuple[int, ...], Buffer]], mode: int = 0) -> bytes: ...
def write_classifications(
    rows: int,
    classes: int,
    labels: Buffer | None,
    scores: Buffer | None,
    result_keys: tuple[str, ...] = ("results",),
) -> bytes: ...
def write_regressions(values: Buffer, result_keys: tuple[str, ...] = ("results",)) -> bytes: ...
def write_string(data: bytes) -> bytes: ...
def write_error(message: bytes) -> bytes: ...
