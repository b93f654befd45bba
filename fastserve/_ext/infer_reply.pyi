from collections.abc import Sequence
from enum import IntEnum

from typing_extensions import Buffer

_Scalar = str | int | float | bool

class UnwritableCode(IntEnum):
    UNSUPPORTED_DTYPE = 1
    WRONG_SIZE = 2
    BAD_PACKING = 3
    TOO_LARGE = 4

class UnwritableOutput(ValueError):
    code: UnwritableCode
    name: str
    datatype: str
    def __init__(self, code: int, name: str, datatype: str = "") -> None: ...

class InferWriter:
    binary: bool
    def __init__(
        self,
        model_name: str,
        model_version: str,
        outputs: Sequence[tuple[str, int, Sequence[int], str]],
        parameters: dict[str, _Scalar] | None = None,
    ) -> None: ...
    def write(self, memories: Sequence[Buffer], id: str = "", head: bytes = b"") -> bytes: ...
    def write_body(self, memories: Sequence[Buffer], id: str = "") -> tuple[int, bytes]: ...

def write_infer(
    model_name: str,
    model_version: str,
    outputs: Sequence[tuple[str, int, Sequence[int], Buffer | None, dict[str, _Scalar] | None]],
    *,
    id: str = "",
    parameters: dict[str, _Scalar] | None = None,
    head: bytes | None = None,
) -> bytes: ...
def write_items(dtype_code: int, items: int, memory: Buffer) -> bytes: ...
