from collections.abc import Collection, Sequence

from typing_extensions import Buffer

KINDS: dict[str, int]

def find_placeholders(header: Buffer) -> list[tuple[str, int, int, int]]: ...

class RequestTemplate:
    id: str
    rows: int
    used: bool
    def __init__(
        self,
        header: bytes,
        placeholders: list[tuple[str, int, int, int, int, int]],
        blobs: list[tuple[int, int]],
        targets: list[int],
        rows: int,
        id: str = "",
        rounded: Collection[int] = (),
    ) -> None: ...
    def read_into(self, body: Buffer, header_bytes: int, outs: Sequence[Buffer]) -> bool: ...

class RequestTemplates:
    capacity: int
    def __init__(self, capacity: int) -> None: ...
    def __len__(self) -> int: ...
    def add(self, template: RequestTemplate) -> None: ...
    def unused(self) -> int: ...
    def forget_unused(self) -> None: ...
    def find(self, body: Buffer, header_bytes: int, nbytes: int = -1) -> RequestTemplate | None: ...
