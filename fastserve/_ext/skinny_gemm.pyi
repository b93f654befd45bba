from typing_extensions import Buffer

MOST_ROWS: int

def is_supported(threads: int = 1, lanes: int = 0) -> bool: ...

class SkinnyGemm:
    def __init__(self, weight: Buffer, bias: Buffer | None = None, *, lanes: int = 0) -> None: ...
    def multiply(
        self,
        rows: Buffer,
        out: Buffer,
        base: Buffer | None = None,
        scale: float = 1.0,
        threads: int = 1,
    ) -> None: ...
