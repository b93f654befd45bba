from collections.abc import Iterable

from typing_extensions import Buffer

MOST_HEAD_BYTES: int
MOST_RAWS: int

class Outline:
    head: bytes
    id: str
    @property
    def sizes(self) -> tuple[int, ...]: ...
    def copy_raw(self, index: int, out: Buffer) -> None: ...

def read_outline(message: bytes) -> Outline | None: ...
def write_known(before: bytes, id: str, after: bytes, raw: Iterable[Buffer]) -> bytes: ...
