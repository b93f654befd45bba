from collections.abc import Iterable, Sequence
from typing import TypeAlias

from typing_extensions import Buffer

Output: TypeAlias = tuple[str, int, Sequence[int]]  # name, dtype code, shape

DTYPE_NUMBER: dict[int, int]
VALUE_FIELD: dict[int, int]
IS_VARINT: dict[int, bool]
CONTENT_FIELD: int

class WireTensor:
    number: int
    shape: tuple[int, ...]
    def measure(self, code: int, items: int) -> int: ...
    def fill(self, code: int, items: int, out: Buffer) -> None: ...

class PredictMessage:
    has_spec: bool
    model: str
    version: int | None
    label: str | None
    signature: str
    inputs: dict[str, WireTensor]
    sent: int
    output_filter: tuple[str, ...]

def read_predict_request(data: bytes) -> PredictMessage: ...
def write_model_spec(model: str, version: int, signature: str) -> bytes: ...
def write_predict_response(
    described: Iterable[Output], raw: Iterable[Buffer], spec: bytes, content: bool = False
) -> bytes: ...
