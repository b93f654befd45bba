from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TypeAlias

from typing_extensions import Buffer

Parameter: TypeAlias = str | int | float | bool | None  # None: no choice was made
Output: TypeAlias = tuple[str, str, Sequence[int], dict[str, Parameter] | None]  # name, datatype, shape

MOST_ENTRIES: int

class Fault(IntEnum):
    TRUNCATED = 1
    OVERLONG = 2
    BAD_TAG = 3
    BAD_TYPE = 4
    BAD_LENGTH = 5
    BAD_PACKED = 6
    BAD_GROUP = 7
    TOO_DEEP = 8
    BAD_TEXT = 9
    TOO_MANY = 10
    TOO_LARGE = 11
    OTHER_KIND = 12
    WRONG_SIZE = 13

class WireFault(ValueError):
    code: Fault
    offset: int
    def __init__(self, code: int, offset: int) -> None: ...

class Unsigned(int): ...

class WireInput:
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Parameter]
    @property
    def contents(self) -> bool: ...
    @property
    def kinds(self) -> tuple[int, ...]: ...
    def count(self, kind: int) -> int: ...

class WireOutput:
    name: str
    parameters: dict[str, Parameter]

class InferMessage:
    @property
    def raw_count(self) -> int: ...
    def raw(self, index: int) -> tuple[int, int]: ...
    def copy_raw(self, index: int, out: Buffer) -> None: ...
    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Parameter]
    inputs: tuple[WireInput, ...]
    outputs: tuple[WireOutput, ...]
    def contents_bytes(self, index: int, dtype_code: int) -> int: ...
    def copy_contents(self, index: int, dtype_code: int, out: Buffer) -> None: ...

def read_infer_request(message: Buffer) -> InferMessage: ...
def write_infer_response(
    model_name: str,
    model_version: str,
    id: str,
    parameters: dict[str, Parameter] | None,
    outputs: Iterable[Output],
    raw: Iterable[Buffer],
) -> bytes: ...
def write_stream_response(
    error_message: str,
    model_name: str = "",
    model_version: str = "",
    id: str = "",
    parameters: dict[str, Parameter] | None = None,
    outputs: Iterable[Output] = (),
    raw: Iterable[Buffer] = (),
) -> bytes: ...
