from typing_extensions import Buffer

class JSONBoundError(ValueError):
    bound: str
    limit: int
    offset: int
    key: str
    def __init__(self, bound: str, limit: int, offset: int, key: str) -> None: ...

class Bounds:
    depth: int
    values: int
    numbers: int
    object_keys: int
    key_bytes: int
    longest_key: int
    longest_number: int
    escapes: int
    def __init__(
        self,
        *,
        depth: int = 100,
        values: int = 16384,
        numbers: int = 16384,
        object_keys: int = 4096,
        key_bytes: int = 1 << 20,
        longest_key: int = 1024,
        longest_number: int = 1024,
        escapes: int = 1 << 20,
    ) -> None: ...

def check_json(body: Buffer, bounds: Bounds) -> tuple[int, int, int]: ...
def find_not_utf8(body: Buffer) -> int: ...
def write_plain(body: Buffer, bounds: Bounds) -> bytes: ...
