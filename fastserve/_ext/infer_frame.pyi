from collections.abc import Sequence

from typing_extensions import Buffer

KINDS: dict[str, int]

def find_holes(header: Buffer) -> list[tuple[str, int, int, int]]: ...

class InferFrame:
    id: str
    rows: int
    used: bool
    def __init__(
        self,
        header: bytes,
        holes: list[tuple[str, int, int, int, int, int]],
        blobs: list[tuple[int, int]],
        targets: list[int],
        rows: int,
        id: str = "",
    ) -> None: ...
    def read_into(self, body: Buffer, header_bytes: int, outs: Sequence[Buffer]) -> bool: ...

class InferFrames:
    capacity: int
    def __init__(self, capacity: int) -> None: ...
    def __len__(self) -> int: ...
    def add(self, frame: InferFrame) -> None: ...
    def unused(self) -> int: ...
    def forget_unused(self) -> None: ...
    def find(self, body: Buffer, header_bytes: int, nbytes: int = -1) -> InferFrame | None: ...
