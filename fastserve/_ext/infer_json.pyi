from enum import IntEnum

from typing_extensions import Buffer

class InferCode(IntEnum):
    SYNTAX = 1
    NO_MEMBER = 2
    NOT_STRING = 3
    NOT_ARRAY = 4
    NOT_OBJECT = 5
    NOT_UNSIGNED = 6
    NOT_SIGNED = 7
    NOT_BOOLEAN = 8
    NOT_NUMBER = 9
    OTHER_SHAPE = 10
    NO_CONTENT = 20
    TWO_CONTENTS = 21
    NOT_IN_JSON = 22
    UNKNOWN_DATATYPE = 23
    TOO_MANY = 24

class InferFault(ValueError):
    code: InferCode
    text: str
    offset: int
    member: str
    input: str
    before: InferBody | None
    def __init__(self, code: int, text: str, offset: int, member: str = "", input: str = "") -> None: ...
    @property
    def is_callers(self) -> bool: ...

class InferInput:
    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def dtype_code(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def parameters(self) -> dict[str, str | int | float | bool | None]: ...
    @property
    def data(self) -> bytes | None: ...
    @property
    def leaves(self) -> int: ...
    @property
    def data_present(self) -> bool: ...

class InferOutput:
    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> dict[str, str | int | float | bool | None]: ...

class InferBody:
    @property
    def id(self) -> str: ...
    @property
    def parameters(self) -> dict[str, str | int | float | bool | None]: ...
    @property
    def inputs(self) -> list[InferInput]: ...
    @property
    def outputs(self) -> list[InferOutput] | None: ...

def read_infer(body: Buffer) -> InferBody: ...
