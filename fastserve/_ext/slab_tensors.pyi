from collections.abc import Sequence
from typing import Any, TypeAlias

from typing_extensions import Buffer

MAX_RANK: int
Entry: TypeAlias = tuple[int, int, tuple[int, ...] | None, Any]
Read: TypeAlias = tuple[int, int, tuple[int, ...], Any]

def measure(tensors: Sequence[Entry], note: bytes = b"") -> int: ...
def write(slab: Buffer, tensors: Sequence[Entry], note: bytes = b"") -> None: ...
def lay_out(
    described: Sequence[tuple[int, int, tuple[int, ...], int]], noted: bool = False
) -> tuple[bytes, list[int], int]: ...
def read(slab: Buffer) -> list[Read]: ...
def read_note(slab: Buffer) -> memoryview | bytes: ...

class SlabDesk:
    def __init__(
        self,
        memory: Buffer,
        *,
        front: int = -1,
        worker: int = -1,
        make_array: Any = None,
        types: tuple[Any, ...] = (),
    ) -> None: ...
    def put(self, tensors: Sequence[Entry], note: bytes = b"") -> tuple[int, int]: ...
    def read(self, offset: int, nbytes: int) -> tuple[list[Read], bytes]: ...
    def arrays(self, offset: int, nbytes: int) -> tuple[list[Read], bytes]: ...
