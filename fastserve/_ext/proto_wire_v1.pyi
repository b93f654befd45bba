from collections.abc import Iterable, Sequence
from typing import TypeAlias

from typing_extensions import Buffer

Class: TypeAlias = tuple[int, float, str]  # index, value, label
# name, dims, bytes of the batch, or the classes of each item of the batch
Output: TypeAlias = tuple[str, Sequence[int], int, Sequence[Sequence[Class]] | None]

class SharedMemoryPlace:
    name: str
    offset: int
    byte_size: int

class V1Input:
    name: str
    dims: tuple[int, ...]
    batch_byte_size: int
    shared_memory: SharedMemoryPlace | None

class V1Output:
    name: str
    class_count: int | None
    shared_memory: SharedMemoryPlace | None

class V1InferMessage:
    model_name: str
    model_version: int
    batch_size: int
    correlation_id: int
    id: int
    flags: int
    priority: int
    timeout_us: int
    inputs: tuple[V1Input, ...]
    outputs: tuple[V1Output, ...]
    @property
    def raw_count(self) -> int: ...
    def raw(self, index: int) -> tuple[int, int]: ...
    def copy_raw(self, index: int, out: Buffer) -> None: ...

def read_v1_request(message: Buffer) -> V1InferMessage: ...
def write_v1_header(
    model_name: str, model_version: int, batch_size: int, id: int, outputs: Iterable[Output]
) -> bytes: ...
def write_v1_response(status: tuple[int, str, str, int], header: bytes, raw: Iterable[Buffer]) -> bytes: ...
